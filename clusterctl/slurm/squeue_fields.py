"""The columns of squeue: letters of ``-o`` and names of ``-O``."""

from __future__ import annotations

from clusterctl.slurm.jobview import STATE_ORDER, JobView, stamp
from scheduler.api.times import format_elapsed, format_limit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from clusterctl.slurm.tableformat import Field


def _null(text: str | None) -> str:
    return text or "(null)"


def _const(text: str) -> Callable[[Any], str]:
    return lambda _: text


def _fold(names: list[str]) -> str:
    if not names:
        return ""
    from scheduler.api.hostlist import fold

    return fold(names)


def _pending_s(j: JobView) -> str:
    until_s = j.get("start_s") if not j.pending else j.now_s
    if until_s is None:
        until_s = j.get("end_s") or j.now_s
    return str(int(max(0.0, until_s - j.get("submit_s", 0.0))))


def _accrue(j: JobView) -> str:
    at_s = j.get("eligible_s")
    if at_s is None and j.get("begin_s") is not None:
        at_s = j.get("begin_s")
    return stamp(at_s, "N/A")


def _eligible(j: JobView) -> str:
    return "N/A" if j.is_head else _accrue(j)


def _priority_share(j: JobView) -> str:
    return f"{j.get('priority', 0) / 2**32:16.14f}"


#: Letters of ``-o``, in the order of ``%all``.
LETTERS: dict[str, Field] = {
    "a": ("ACCOUNT", lambda j: _null(j.get("account"))),
    "b": ("TRES_PER_NODE", lambda j: j.gres()),
    "c": ("MIN_CPUS", lambda j: str(j.min_cpus())),
    "d": ("MIN_TMP_DISK", _const("0")),
    "e": ("END_TIME", lambda j: j.end()),
    "f": ("FEATURES", lambda j: _null(j.res.get("constraint"))),
    "g": ("GROUP", lambda j: str(j.get("group", ""))),
    "h": ("OVER_SUBSCRIBE", lambda j: "NO" if j.res.get("exclusive") else "OK"),
    "i": ("JOBID", lambda j: j.shown_id()),
    "j": ("NAME", lambda j: j.text("name")),
    "k": ("COMMENT", lambda j: _null(j.text("comment"))),
    "l": ("TIME_LIMIT", lambda j: j.limit()),
    "m": ("MIN_MEMORY", lambda j: j.min_memory()),
    "n": ("REQ_NODES", lambda j: _fold(j.res.get("nodelist") or [])),
    "o": ("COMMAND", lambda j: _null(j.text("command"))),
    "p": ("PRIORITY", _priority_share),
    "q": ("QOS", lambda j: str(j.get("qos", "normal"))),
    "r": ("REASON", lambda j: j.reason()),
    "s": ("", _const("")),
    "t": ("ST", lambda j: j.state_compact()),
    "u": ("USER", lambda j: str(j.get("user", ""))),
    "v": ("RESERVATION", _const("(null)")),
    "w": ("WCKEY", lambda j: _null(j.get("wckey"))),
    "x": ("EXC_NODES", lambda j: _fold(j.res.get("exclude") or [])),
    "y": ("NICE", lambda j: str(j.get("nice", 0))),
    "z": ("S:C:T", _const("*:*:*")),
    "A": ("JOBID", lambda j: str(j.id)),
    "B": ("EXEC_HOST", lambda j: j.batch_host()),
    "C": ("CPUS", lambda j: str(j.get("num_cpus", 1))),
    "D": ("NODES", lambda j: str(j.get("num_nodes", 1))),
    "E": ("DEPENDENCY", lambda j: _null(j.get("dependency"))),
    "F": ("ARRAY_JOB_ID", lambda j: str(j.array_id)),
    "G": ("GROUP", lambda j: str(j.get("gid", 0))),
    "H": ("SOCKETS_PER_NODE", _const("*")),
    "I": ("CORES_PER_SOCKET", _const("*")),
    "J": ("THREADS_PER_CORE", _const("*")),
    "K": ("ARRAY_TASK_ID", lambda j: j.task_text()),
    "L": ("TIME_LEFT", lambda j: j.left()),
    "M": ("TIME", lambda j: j.elapsed()),
    "N": ("NODELIST", lambda j: j.nodes()),
    "O": ("CONTIGUOUS", _const("0")),
    "P": ("PARTITION", lambda j: j.partition()),
    "Q": ("PRIORITY", lambda j: str(j.get("priority", 0))),
    "R": ("NODELIST(REASON)", lambda j: j.nodes_or_reason()),
    "S": ("START_TIME", lambda j: stamp(j.start_s(), "N/A")),
    "T": ("STATE", lambda j: j.state),
    "U": ("UID", lambda j: str(j.get("uid", 0))),
    "V": ("SUBMIT_TIME", lambda j: stamp(j.get("submit_s"), "N/A")),
    "W": ("LICENSES", _const("(null)")),
    "X": ("CORE_SPEC", _const("N/A")),
    "Y": ("SCHEDNODES", _const("(null)")),
    "Z": ("WORK_DIR", lambda j: j.text("work_dir")),
}

_SAME = {
    "account": "a",
    "arrayjobid": "F",
    "arraytaskid": "K",
    "batchhost": "B",
    "command": "o",
    "comment": "k",
    "contiguous": "O",
    "cores": "I",
    "corespec": "X",
    "dependency": "E",
    "endtime": "e",
    "feature": "f",
    "groupid": "G",
    "groupname": "g",
    "jobarrayid": "i",
    "jobid": "A",
    "licenses": "W",
    "mincpus": "c",
    "minmemory": "m",
    "mintmpdisk": "d",
    "name": "j",
    "nice": "y",
    "nodelist": "N",
    "nodes": "N",
    "numcpus": "C",
    "numnodes": "D",
    "oversubscribe": "h",
    "partition": "P",
    "priority": "p",
    "prioritylong": "Q",
    "qos": "q",
    "reason": "r",
    "reasonlist": "R",
    "reqnodes": "n",
    "reservation": "v",
    "schednodes": "Y",
    "sct": "z",
    "selectjobinfo": "s",
    "shared": "h",
    "sockets": "H",
    "starttime": "S",
    "state": "T",
    "statecompact": "t",
    "submittime": "V",
    "threads": "J",
    "timeleft": "L",
    "timelimit": "l",
    "timeused": "M",
    "userid": "U",
    "username": "u",
    "wckey": "w",
    "workdir": "Z",
}

#: Names of ``-O`` in lower case.
NAMES: dict[str, Field] = {
    **{name: LETTERS[letter] for name, letter in _SAME.items()},
    "accruetime": ("ACCRUE_TIME", _accrue),
    "admin_comment": ("ADMIN_COMMENT", _const("(null)")),
    "allocnodes": ("ALLOC_NODES", lambda j: str(j.get("submit_host", ""))),
    "allocsid": ("ALLOC_SID", lambda j: str(j.get("alloc_sid", 0))),
    "associd": ("ASSOC_ID", _const("0")),
    "batchflag": ("BATCH_FLAG", lambda j: "1" if j.get("batch", True) else "0"),
    "boardspernode": ("BOARDS_PER_NODE", _const("*")),
    "burstbuffer": ("BURST_BUFFER", _const("(null)")),
    "burstbufferstate": ("BURST_BUFFER_STATE", _const("(null)")),
    "cluster": ("CLUSTER", lambda j: j.cluster),
    "clusterfeature": ("CLUSTER_FEATURES", _const("(null)")),
    "container": ("CONTAINER", _const("(null)")),
    "cpus-per-task": ("CPUS_PER_TASK", lambda j: str(max(1, j.res.get("cpus_per_task", 0)))),
    "cpus-per-tres": ("CPUS_PER_TRES", _const("N/A")),
    "deadline": ("DEADLINE", _const("N/A")),
    "delayboot": ("DELAY_BOOT", lambda j: format_elapsed(0)),
    "derivedec": ("DERIVED_EC", lambda j: str(j.get("derived_code", 0))),
    "eligibletime": ("ELIGIBLE_TIME", _eligible),
    "exit_code": ("EXIT_CODE", lambda j: str(j.exit_status())),
    "hetjobid": ("HET_JOB_ID", _const("N/A")),
    "hetjobidset": ("HET_JOB_ID_SET", _const("N/A")),
    "hetjoboffset": ("HET_JOB_OFFSET", _const("N/A")),
    "lastschedeval": ("LAST_SCHED_EVAL", _const("N/A")),
    "maxcpus": ("MAX_CPUS", _const("0")),
    "maxnodes": (
        "MAX_NODES",
        lambda j: str(j.res.get("max_nodes") or max(1, j.res.get("min_nodes", 1))),
    ),
    "mcslabel": ("MCSLABEL", _const("(null)")),
    "mem-per-tres": ("MEM_PER_TRES", _const("N/A")),
    "mintime": ("TIME_MIN", lambda j: format_elapsed(0)),
    "network": ("NETWORK", _const("(null)")),
    "ntperboard": ("NTASKS_PER_BOARD", _const("0")),
    "ntpercore": ("NTASKS_PER_CORE", _const("N/A")),
    "ntpernode": ("NTASKS_PER_NODE", lambda j: str(j.res.get("ntasks_per_node", 0))),
    "ntpersocket": ("NTASKS_PER_SOCKET", _const("N/A")),
    "numtasks": ("TASKS", lambda j: str(j.get("num_tasks", 1))),
    "origin": ("ORIGIN", _const("NA")),
    "originraw": ("ORIGIN_RAW", _const("NA")),
    "pendingtime": ("PENDING_TIME", _pending_s),
    "preempttime": ("PREEMPT_TIME", _const("N/A")),
    "prefer": ("PREFER", _const("(null)")),
    "profile": ("PROFILE", _const("NotSet")),
    "reboot": ("REBOOT", _const("0")),
    "reqswitch": ("REQ_SWITCH", _const("0")),
    "requeue": ("REQUEUE", lambda j: "1" if j.get("requeue", True) else "0"),
    "resizetime": ("RESIZE_TIME", _const("N/A")),
    "restartcnt": ("RESTART_COUNT", lambda j: str(j.get("restarts", 0))),
    "siblingsactive": ("ACTIVE_SIBLINGS", _const("NA")),
    "siblingsactiveraw": ("ACTIVE_SIBLINGS_RAW", _const("NA")),
    "siblingsviable": ("VIABLE_SIBLINGS", _const("NA")),
    "siblingsviableraw": ("VIABLE_SIBLINGS_RAW", _const("NA")),
    "statereason": ("STATE_REASON", lambda j: j.reason()),
    "stderr": ("STDERR", lambda j: j.std_err()),
    "stdin": ("STDIN", lambda j: j.std_in()),
    "stdout": ("STDOUT", lambda j: j.std_out()),
    "system_comment": ("SYSTEM_COMMENT", _const("(null)")),
    "tres-alloc": ("TRES_ALLOC", lambda j: j.tres()),
    "tres-bind": ("TRES_BIND", _const("N/A")),
    "tres-freq": ("TRES_FREQ", _const("N/A")),
    "tres-per-job": ("TRES_PER_JOB", _const("N/A")),
    "tres-per-node": ("TRES_PER_NODE", lambda j: j.gres()),
    "tres-per-socket": ("TRES_PER_SOCKET", _const("N/A")),
    "tres-per-task": ("TRES_PER_TASK", _const("N/A")),
    "wait4switch": ("WAIT4SWITCH", lambda j: format_elapsed(0)),
}


def id_key(j: JobView) -> tuple[int, float]:
    """Order of ids: an array's started tasks, then its record of the others."""
    task = j.get("array_task_id")
    if task is not None:
        return j.array_id, float(task)
    return j.array_id, float("inf") if j.get("array_job_id") else -1.0


#: Sort keys that are not the text of the column.
SORT_KEYS: dict[str, Callable[[JobView], Any]] = {
    "i": id_key,
    "A": lambda j: j.id,
    "F": lambda j: j.array_id,
    "K": id_key,
    "t": lambda j: STATE_ORDER.get(j.state, 99),
    "T": lambda j: STATE_ORDER.get(j.state, 99),
    "p": lambda j: j.get("priority", 0),
    "Q": lambda j: j.get("priority", 0),
    "y": lambda j: j.get("nice", 0),
    "M": lambda j: j.elapsed_s(),
    "l": lambda j: j.get("time_limit_s") or float("inf"),
    "L": lambda j: (j.get("time_limit_s") or float("inf")) - j.elapsed_s(),
    "S": lambda j: j.start_s() or float("inf"),
    "e": lambda j: j.end_s() or float("inf"),
    "V": lambda j: j.get("submit_s", 0.0),
    "C": lambda j: j.get("num_cpus", 1),
    "D": lambda j: j.get("num_nodes", 1),
    "c": lambda j: j.min_cpus(),
    "U": lambda j: j.get("uid", 0),
    "G": lambda j: j.get("gid", 0),
    "m": lambda j: j.res.get("mem_per_cpu_mib") or j.res.get("mem_per_node_mib") or 0,
}


class StepView:
    """One step of a job."""

    __slots__ = ("job", "now_s", "step")

    def __init__(self, job: JobView, step: dict[str, Any]) -> None:
        self.job = job
        self.step = step
        self.now_s = job.now_s

    def shown_id(self) -> str:
        return f"{self.job.shown_id()}.{self.step['step_id']}"

    def nodes(self) -> str:
        layout = self.step.get("layout") or {}
        return _fold(layout.get("nodes") or [])

    def elapsed(self) -> str:
        return format_elapsed(max(0.0, self.now_s - self.step.get("start_s", self.now_s)))


STEP_LETTERS: dict[str, Field] = {
    "A": ("TASKS", lambda s: str(s.step.get("ntasks", 1))),
    "b": ("TRES_PER_NODE", lambda s: s.job.gres()),
    "i": ("STEPID", lambda s: s.shown_id()),
    "j": ("NAME", lambda s: str(s.step.get("name", ""))),
    "l": ("TIME_LIMIT", lambda s: format_limit(s.step.get("time_limit_s"))),
    "M": ("TIME", lambda s: s.elapsed()),
    "N": ("NODELIST", lambda s: s.nodes()),
    "P": ("PARTITION", lambda s: s.job.partition()),
    "S": ("START_TIME", lambda s: stamp(s.step.get("start_s"), "N/A")),
    "u": ("USER", lambda s: str(s.job.get("user", ""))),
    "U": ("UID", lambda s: str(s.job.get("uid", 0))),
}

STEP_NAMES: dict[str, Field] = {
    "stepid": STEP_LETTERS["i"],
    "jobid": ("JOBID", lambda s: str(s.job.id)),
    "stepname": STEP_LETTERS["j"],
    "name": STEP_LETTERS["j"],
    "stepstate": ("STATE", lambda s: str(s.step.get("state", "RUNNING"))),
    "state": ("STATE", lambda s: str(s.step.get("state", "RUNNING"))),
    "numtasks": STEP_LETTERS["A"],
    "timelimit": STEP_LETTERS["l"],
    "timeused": STEP_LETTERS["M"],
    "nodes": STEP_LETTERS["N"],
    "nodelist": STEP_LETTERS["N"],
    "partition": STEP_LETTERS["P"],
    "starttime": STEP_LETTERS["S"],
    "username": STEP_LETTERS["u"],
    "userid": STEP_LETTERS["U"],
}
