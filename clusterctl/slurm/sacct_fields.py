"""The columns of sacct."""

from __future__ import annotations

from clusterctl.slurm.jobview import JobView, stamp
from clusterctl.slurm.tableformat import tres_text
from scheduler.api.times import format_limit, format_padded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeAlias

    Field: TypeAlias = tuple[str, int, Callable[["Row"], str]]

_UNITS = "KMGTP"
#: Step states as Slurm prints them, where ours say more.
_STEP_STATES = {"TIMEOUT": "CANCELLED", "NODE_FAIL": "CANCELLED"}


class Row:
    """A job, or one of its steps when ``step`` is given.  ``unit`` is the one asked for."""

    __slots__ = ("job", "shown_job_id", "step", "unit")

    def __init__(self, job: JobView, step: dict[str, Any] | None, unit: str) -> None:
        self.job = job
        self.step = step
        self.unit = unit
        self.shown_job_id = job.shown_id()

    def start_s(self) -> float | None:
        if self.step is not None:
            return self.step.get("start_s")
        return None if self.job.pending else self.job.get("start_s")

    def end_s(self) -> float | None:
        at_s: float | None = (self.step or self.job.job).get("end_s")
        return at_s

    def elapsed_s(self) -> int:
        start_s = self.start_s()
        if start_s is None:
            return 0
        end_s = self.end_s()
        until_s = end_s if end_s is not None else self.job.now_s
        return max(0, int(until_s) - int(start_s))

    def state(self) -> str:
        if self.step is not None:
            state = str(self.step.get("state", "RUNNING"))
            return _STEP_STATES.get(state, state)
        state = self.job.base_state
        if state == "CANCELLED" and self.job.get("cancelled_by") is not None:
            return f"CANCELLED by {self.job.get('cancelled_by')}"
        return state

    def exit_code(self) -> str:
        """``code:signal``; a code above 128 is the signal that it stands for."""
        record = self.step if self.step is not None else self.job.job
        signal = record.get("signal" if self.step is not None else "signal_code", 0)
        code = record.get("code", 0)
        if self.step is None and self.job.base_state in ("CANCELLED", "TIMEOUT"):
            return "0:0"
        if code > 128 and not signal:
            return f"{code - 128}:0"
        return f"{code}:{signal}"

    def cpus(self) -> int:
        if self.step is not None:
            return int(self.step.get("cpus", 1))
        return int(self.job.get("num_cpus", 1))

    def nodes(self) -> list[str]:
        if self.step is not None:
            return list((self.step.get("layout") or {}).get("nodes") or [])
        allocs = self.job.get("allocs") or []
        return [a["node"] for a in allocs] or list(self.job.get("last_nodes") or [])

    def node_list(self) -> str:
        names = self.nodes()
        if not names:
            return "None assigned" if self.step is None else ""
        from scheduler.api.hostlist import fold

        return fold(names)

    def num_nodes(self) -> int:
        return len(self.nodes()) or int(self.job.get("num_nodes", 1))

    def usages(self) -> list[dict[str, Any]]:
        if self.step is not None:
            return list((self.step.get("usage") or {}).values())
        steps = self.job.get("steps") or []
        return [u for step in steps for u in (step.get("usage") or {}).values()]

    def cpu_s(self, *names: str) -> float:
        return float(sum(u.get(n, 0.0) for u in self.usages() for n in names))

    def alloc_tres(self) -> str:
        if self.step is None:
            return tres_text(self.job.get("alloc_tres") or {})
        tres = {"cpu": self.cpus()}
        if self.step.get("mem_mib"):
            tres["mem"] = self.step["mem_mib"]
        tres["node"] = self.num_nodes()
        return tres_text(tres)

    def memory(self, mib: float) -> str:
        """Memory in the unit asked for, else in the largest that gives a whole number."""
        if self.unit:
            value = mib * 1024 / 1024 ** _UNITS.index(self.unit)
            return f"{value:.2f}".rstrip("0").rstrip(".") + self.unit
        level = 1
        while mib >= 1024 and mib % 1024 == 0 and level < len(_UNITS) - 1:
            mib /= 1024
            level += 1
        return f"{mib:.2f}".rstrip("0").rstrip(".") + _UNITS[level]

    def req_mem(self) -> str:
        if self.step is not None:
            return ""
        tres = self.job.get("req_tres") or {}
        res = self.job.res
        if res.get("mem_per_node_mib") is None and res.get("mem_per_cpu_mib") is None:
            return self.memory(tres["mem"]) if self.job.pending and tres.get("mem") else "0"
        return self.memory(tres.get("mem", 0))

    def max_rss(self) -> str:
        if self.step is None:
            return ""
        mib = max((u.get("max_rss_mib", 0) for u in self.usages()), default=0)
        return self.memory(mib) if self.unit else f"{mib * 1024}K"

    def max_rss_node(self) -> str:
        if self.step is None:
            return ""
        usage = self.step.get("usage") or {}
        return str(max(usage, key=lambda n: usage[n].get("max_rss_mib", 0), default=""))

    def total_cpu(self, *names: str) -> str:
        seconds = self.cpu_s(*names)
        if seconds >= 3600:
            return format_padded(seconds)
        return f"{int(seconds) // 60:02}:{seconds % 60:06.3f}"

    def job_only(self, text: str) -> str:
        return text if self.step is None else ""


def _text(name: str) -> Callable[[Row], str]:
    return lambda r: r.job_only(r.job.text(name))


def _nothing(row: Row) -> str:
    return ""


def _job_id(row: Row) -> str:
    return row.shown_job_id + (f".{row.step['step_id']}" if row.step is not None else "")


def _raw_id(row: Row) -> str:
    return f"{row.job.id}" + (f".{row.step['step_id']}" if row.step is not None else "")


def _name(row: Row) -> str:
    return str(row.step.get("name", "")) if row.step is not None else row.job.text("name")


def _account(row: Row) -> str:
    return str(row.job.get("account", ""))


def _reserved(row: Row) -> str:
    if row.step is not None:
        return ""
    begin_s = row.job.get("eligible_s")
    start_s = row.start_s() or row.end_s() or row.job.now_s
    return format_padded(max(0.0, start_s - begin_s)) if begin_s is not None else "00:00:00"


def _limit_raw(row: Row) -> str:
    limit_s = row.job.get("time_limit_s")
    return row.job_only("UNLIMITED" if limit_s is None else str(limit_s // 60))


def _derived(row: Row) -> str:
    return row.job_only(f"{row.job.get('derived_code', 0)}:{row.job.get('derived_signal', 0)}")


def _eligible(row: Row) -> str:
    at_s = row.job.get("eligible_s") or row.job.get("begin_s")
    return row.job_only(stamp(at_s, "Unknown"))


def _step_submit(row: Row) -> str:
    at_s = row.job.get("submit_s") if row.step is None else row.start_s()
    return stamp(at_s, "Unknown")


#: Name as printed, width, text.  The order is that of ``--helpformat``.
FIELDS: tuple[Field, ...] = (
    ("Account", 10, _account),
    ("AdminComment", 19, _nothing),
    ("AllocCPUS", 10, lambda r: str(r.cpus())),
    ("AllocNodes", 10, lambda r: str(r.num_nodes() if r.nodes() else 0)),
    ("AllocTRES", 10, lambda r: r.alloc_tres()),
    ("AssocID", 7, lambda r: r.job_only("0")),
    ("AveCPU", 10, lambda r: r.total_cpu("user_cpu_s", "system_cpu_s") if r.step else ""),
    ("AveRSS", 10, lambda r: r.max_rss()),
    ("Cluster", 10, lambda r: r.job.cluster),
    ("Comment", 14, _text("comment")),
    ("Constraints", 15, lambda r: r.job_only(r.job.res.get("constraint") or "")),
    ("CPUTime", 10, lambda r: format_padded(r.elapsed_s() * r.cpus())),
    ("CPUTimeRAW", 10, lambda r: str(r.elapsed_s() * r.cpus())),
    ("DerivedExitCode", 15, _derived),
    ("Elapsed", 10, lambda r: format_padded(r.elapsed_s())),
    ("ElapsedRaw", 10, lambda r: str(r.elapsed_s())),
    ("Eligible", 19, _eligible),
    ("End", 19, lambda r: stamp(r.end_s(), "Unknown")),
    ("ExitCode", 8, lambda r: r.exit_code()),
    ("GID", 6, lambda r: r.job_only(str(r.job.get("gid", 0)))),
    ("Group", 9, lambda r: r.job_only(str(r.job.get("group", "")))),
    ("JobID", -12, _job_id),
    ("JobIDRaw", -12, _raw_id),
    ("JobName", 10, _name),
    ("Layout", 9, lambda r: "Block" if r.step is not None else ""),
    ("MaxRSS", 10, lambda r: r.max_rss()),
    ("MaxRSSNode", 10, lambda r: r.max_rss_node()),
    ("NCPUS", 10, lambda r: str(r.cpus())),
    ("NNodes", 8, lambda r: str(r.num_nodes())),
    ("NodeList", 15, lambda r: r.node_list()),
    ("NTasks", 8, lambda r: str(r.step.get("ntasks", 1)) if r.step is not None else ""),
    ("Partition", 10, lambda r: r.job_only(r.job.partition())),
    ("Priority", 10, lambda r: r.job_only(str(r.job.get("priority", 0)))),
    ("QOS", 10, lambda r: r.job_only(str(r.job.get("qos", "normal")))),
    ("QOSRAW", 6, lambda r: r.job_only("1")),
    ("Reason", 22, lambda r: r.job_only(r.job.reason())),
    ("ReqCPUS", 8, lambda r: str((r.job.get("req_tres") or {}).get("cpu", r.cpus()))),
    ("ReqMem", 10, lambda r: r.req_mem()),
    ("ReqNodes", 8, lambda r: r.job_only(str(max(1, r.job.res.get("min_nodes", 1))))),
    ("ReqTRES", 10, lambda r: r.job_only(tres_text(r.job.get("req_tres") or {}))),
    ("Reservation", 20, _nothing),
    ("Reserved", 10, _reserved),
    ("Start", 19, lambda r: stamp(r.start_s(), "Unknown")),
    ("State", 10, lambda r: r.state()),
    ("Submit", 19, _step_submit),
    ("Suspended", 10, lambda r: "00:00:00"),
    ("SystemCPU", 10, lambda r: r.total_cpu("system_cpu_s")),
    ("Timelimit", 10, lambda r: r.job_only(format_limit(r.job.get("time_limit_s"), padded=True))),
    ("TimelimitRaw", 12, _limit_raw),
    ("TotalCPU", 10, lambda r: r.total_cpu("user_cpu_s", "system_cpu_s")),
    ("UID", 6, lambda r: r.job_only(str(r.job.get("uid", 0)))),
    ("User", 9, lambda r: r.job_only(str(r.job.get("user", "")))),
    ("UserCPU", 10, lambda r: r.total_cpu("user_cpu_s")),
    ("WCKey", 10, _text("wckey")),
    ("WorkDir", 20, _text("work_dir")),
)

BY_NAME: dict[str, Field] = {field[0].lower(): field for field in FIELDS}

#: Columns of Slurm's sacct that nothing here measures: they print empty.
NOT_KEPT = (
    "AveCPUFreq AveDiskRead AveDiskWrite AvePages AveVMSize BlockID ConsumedEnergy "
    "ConsumedEnergyRaw Container DBIndex Flags MaxDiskRead MaxDiskReadNode MaxDiskReadTask "
    "MaxDiskWrite MaxDiskWriteNode MaxDiskWriteTask MaxPages MaxPagesNode MaxPagesTask "
    "MaxRSSTask MaxVMSize MaxVMSizeNode MaxVMSizeTask McsLabel MinCPU MinCPUNode MinCPUTask "
    "ReqCPUFreq ReqCPUFreqGov ReqCPUFreqMax ReqCPUFreqMin ReservationId ResvCPU ResvCPURAW "
    "SubmitLine SystemComment TRESUsageInAve TRESUsageInMax TRESUsageInMaxNode "
    "TRESUsageInMaxTask TRESUsageInMin TRESUsageInMinNode TRESUsageInMinTask TRESUsageInTot "
    "TRESUsageOutAve TRESUsageOutMax TRESUsageOutMaxNode TRESUsageOutMaxTask TRESUsageOutMin "
    "TRESUsageOutMinNode TRESUsageOutMinTask TRESUsageOutTot WCKeyID"
)


def field(name: str) -> Field | None:
    """The column of a name (any case, or the start of one); None when there is none."""
    lower = name.lower()
    found = BY_NAME.get(lower)
    if found is not None:
        return found
    for other in NOT_KEPT.split():
        if other.lower() == lower:
            return other, max(10, len(other)), _nothing
    return None


def all_names() -> list[str]:
    """Every name, sorted as ``--helpformat`` does."""
    return sorted([f[0] for f in FIELDS] + NOT_KEPT.split(), key=str.lower)
