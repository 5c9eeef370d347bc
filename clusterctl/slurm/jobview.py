"""What the commands read out of a job's view (a plain object with defaults left out)."""

from __future__ import annotations

import os
import time

from clusterctl.slurm.tableformat import mem_text, tres_text
from scheduler.api.states import JOB_STATES, TERMINAL
from scheduler.api.text import show
from scheduler.api.times import format_elapsed, format_limit, format_stamp

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: Order of the states in Slurm's tables; COMPLETING comes after all others.
STATE_ORDER = {
    name: i
    for i, name in enumerate(
        [
            "PENDING",
            "RUNNING",
            "SUSPENDED",
            "COMPLETED",
            "CANCELLED",
            "FAILED",
            "TIMEOUT",
            "NODE_FAIL",
            "PREEMPTED",
            "BOOT_FAIL",
            "DEADLINE",
            "OUT_OF_MEMORY",
            "COMPLETING",
        ]
    )
}


#: Detail of a job after ``scontrol requeuehold``, which stands for its reason.
REQUEUED_HELD = "job requeued in held state"


def stamp(at_s: float | None, missing: str) -> str:
    """A date, in the form that SLURM_TIME_FORMAT asks for."""
    pattern = os.environ.get("SLURM_TIME_FORMAT", "")
    if at_s is None or not pattern or pattern in ("standard", "relative"):
        return format_stamp(at_s, missing)
    return time.strftime(pattern, time.localtime(int(at_s)))


def task_ranges(tasks: list[int]) -> str:
    """``[3, 4, 5, 9]`` as ``3-5,9``; two numbers side by side are a range, as in Slurm."""
    parts: list[str] = []
    i = 0
    while i < len(tasks):
        j = i
        while j + 1 < len(tasks) and tasks[j + 1] == tasks[j] + 1:
            j += 1
        parts.append(f"{tasks[i]}" if i == j else f"{tasks[i]}-{tasks[j]}")
        i = j + 1
    return ",".join(parts)


class JobView:
    """One job, or one record of an array's tasks that have not started."""

    __slots__ = ("cluster", "job", "now_s")

    def __init__(self, job: dict[str, Any], now_s: float) -> None:
        self.job = job
        self.now_s = now_s
        self.cluster = ""

    def get(self, name: str, default: Any = None) -> Any:
        return self.job.get(name, default)

    def text(self, name: str) -> str:
        """A text of the record that may be packed, as people see it."""
        return show(self.job.get(name) or "")

    # ------------------------------------------------------------------ ids

    @property
    def id(self) -> int:
        return int(self.job["id"])

    @property
    def array_id(self) -> int:
        """The array's id, or the job's own."""
        return int(self.job.get("array_job_id") or self.job["id"])

    @property
    def is_head(self) -> bool:
        """The record of an array's tasks that have not started."""
        return bool(self.job.get("array_tasks"))

    def task_text(self, missing: str = "N/A") -> str:
        """``3``, ``3-6%2`` or ``missing`` for what is no array."""
        if self.job.get("array_task_id") is not None:
            return str(self.job["array_task_id"])
        if self.is_head:
            throttle = self.job.get("array_throttle", 0)
            return task_ranges(self.job["array_tasks"]) + (f"%{throttle}" if throttle else "")
        return missing

    def shown_id(self) -> str:
        """``12``, ``12_3`` or ``12_[3-6%2]``."""
        if self.job.get("array_task_id") is not None:
            return f"{self.array_id}_{self.job['array_task_id']}"
        if self.is_head and not self._rest_of_array():
            return f"{self.array_id}_[{self.task_text()}]"
        return str(self.id)

    def _rest_of_array(self) -> bool:
        """Ended before its tasks started, while other tasks of the array did start."""
        everything = self.job.get("array_all")
        return bool(self.ended and everything and everything[0] != len(self.job["array_tasks"]))

    # ------------------------------------------------------------------ state

    @property
    def base_state(self) -> str:
        return str(self.job.get("state", "PENDING"))

    @property
    def state(self) -> str:
        """The state as shown: COMPLETING while processes are being ended."""
        return "COMPLETING" if self.job.get("completing") else self.base_state

    def state_compact(self) -> str:
        return JOB_STATES.get(self.state, self.state)

    @property
    def pending(self) -> bool:
        return self.base_state == "PENDING"

    @property
    def ended(self) -> bool:
        return self.base_state in TERMINAL

    def reason(self) -> str:
        if self.job.get("detail") == REQUEUED_HELD:
            return REQUEUED_HELD
        return str(self.job.get("reason", "None") or "None")

    # ------------------------------------------------------------------ time

    def elapsed_s(self) -> float:
        start_s = self.job.get("start_s")
        if start_s is None or self.pending:
            return 0.0
        end_s = self.job.get("end_s")
        return max(0.0, float((end_s if end_s is not None else self.now_s) - start_s))

    def elapsed(self) -> str:
        return format_elapsed(self.elapsed_s())

    def limit(self) -> str:
        return format_limit(self.job.get("time_limit_s"))

    def left(self) -> str:
        limit_s = self.job.get("time_limit_s")
        if limit_s is None:
            return "UNLIMITED"
        return format_elapsed(max(0.0, limit_s - int(self.elapsed_s())))

    def start_s(self) -> float | None:
        """When it started or is expected to."""
        if not self.pending:
            at_s = self.job.get("start_s")
        else:
            at_s = self.job.get("est_start_s") or self.job.get("begin_s")
        return None if at_s is None else float(at_s)

    def end_s(self) -> float | None:
        """When it ended or will at the latest; None when that is not known."""
        if self.job.get("end_s") is not None and not self.pending:
            return float(self.job["end_s"])
        start_s, limit_s = self.start_s(), self.job.get("time_limit_s")
        return start_s + limit_s if start_s is not None and limit_s is not None else None

    def end(self) -> str:
        if self.end_s() is None and self.start_s() is not None:
            return "NONE"
        return stamp(self.end_s(), "N/A")

    # ------------------------------------------------------------------ resources

    @property
    def res(self) -> dict[str, Any]:
        found: dict[str, Any] = self.job.get("res") or {}
        return found

    def partition(self) -> str:
        """All partitions that it asks for while it waits, else the one it got."""
        names = self.job.get("partitions") or []
        return ",".join(names) if self.pending and names else str(self.job.get("partition", ""))

    def nodes(self) -> str:
        return str(self.job.get("node_list") or "")

    def nodes_or_reason(self) -> str:
        """Slurm's ``%R``: the reason where the job waits or ended badly, else the nodes."""
        if self.base_state in ("PENDING", "FAILED", "TIMEOUT", "DEADLINE", "OUT_OF_MEMORY"):
            return f"({self.reason()})"
        return self.nodes()

    def min_cpus(self) -> int:
        """CPUs that each node must have."""
        per_task = max(1, int(self.res.get("cpus_per_task", 0)))
        return per_task * max(1, int(self.res.get("ntasks_per_node", 0)))

    def min_memory(self) -> str:
        per_cpu = self.res.get("mem_per_cpu_mib")
        return mem_text(per_cpu if per_cpu is not None else self.res.get("mem_per_node_mib") or 0)

    def gres(self, missing: str = "N/A") -> str:
        """``gres:neuron:4``."""
        wanted = self.res.get("gres") or {}
        return ",".join(f"gres:{name}:{n}" for name, n in wanted.items()) or missing

    def tres(self) -> str:
        """What it holds, or asks for while it waits."""
        return tres_text(self.job.get("alloc_tres") or self.job.get("req_tres") or {})

    def batch_host(self, missing: str = "n/a") -> str:
        allocs = self.job.get("allocs") or []
        if allocs:
            return str(allocs[0]["node"])
        nodes = self.job.get("last_nodes") or []
        return str(nodes[0]) if nodes and not self.pending else missing

    # ------------------------------------------------------------------ files

    def _expanded(self, pattern: str) -> str:
        """A file name pattern with what is known of the job, relative to its directory."""
        values = {
            "j": str(self.id),
            "J": str(self.id),
            "A": str(self.array_id),
            "a": self.task_text("4294967294") if not self.is_head else "4294967294",
            "x": self.text("name"),
            "u": str(self.get("user", "")),
            "%": "%",
        }
        text = ""
        i = 0
        while i < len(pattern):
            char = pattern[i]
            i += 1
            if char != "%":
                text += char
                continue
            digits = ""
            while i < len(pattern) and pattern[i] in "0123456789":
                digits += pattern[i]
                i += 1
            letter = pattern[i : i + 1]
            i += 1
            value = values.get(letter)
            if value is None:
                text += f"%{digits}{letter}"
            else:
                text += value.rjust(min(int(digits or 0), 10), "0")
        return os.path.join(self.text("work_dir") or "/", text)

    def std_out(self) -> str:
        default = "slurm-%A_%a.out" if self.job.get("array_job_id") else "slurm-%j.out"
        return self._expanded(self.text("std_out") or default)

    def std_err(self) -> str:
        return self._expanded(self.text("std_err")) if self.get("std_err") else self.std_out()

    def std_in(self) -> str:
        return self._expanded(self.text("std_in") or "/dev/null")

    def exit_status(self) -> int:
        """The status as ``wait`` has it: code in the high byte, signal in the low one."""
        return (int(self.job.get("code", 0)) << 8) | int(self.job.get("signal_code", 0))


def expand_tasks(job: dict[str, Any]) -> list[dict[str, Any]]:
    """One record for each task of an array's head; any other record as it is."""
    tasks = job.get("array_tasks")
    if not tasks or job.get("state") in TERMINAL:
        return [job]
    one = {**job, "array_tasks": [], "of_head": True}
    return [{**one, "array_task_id": task} for task in tasks]
