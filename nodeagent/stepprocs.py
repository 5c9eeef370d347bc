"""The processes of a step: who lives, how each task ended, ending all of them, memory.

The supervisor is a child subreaper: a process that loses its parent becomes its child, so
everything the step ever started is below it, and nothing is left when it has no child.
Standard library only.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from nodeagent import procs
from nodeagent.cgroup import StepGroup


class StepProcesses:
    """Living tasks by pid, ends in the order they were seen."""

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self.started: dict[str, int] = {}
        self.exits: list[dict[str, Any]] = []
        self.childless = False
        self.killed = False
        self.oom = False
        self.group: StepGroup | None = None  # where the kernel enforces the memory limit
        self.since_s = time.time()
        self._user_cpu_s = self._system_cpu_s = 0.0
        self._max_rss_mib = 0.0

    def add(self, rank: int, pid: int) -> None:
        self.pids[pid] = rank
        self.started[str(rank)] = pid

    def reap(self) -> list[tuple[int, int]]:
        """Collect the dead: (rank, wait status) of tasks.  Sets ``childless``."""
        ended: list[tuple[int, int]] = []
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                self.childless = True
                return ended
            if pid == 0:
                self.childless = False
                return ended
            self._user_cpu_s += usage.ru_utime
            self._system_cpu_s += usage.ru_stime
            self._max_rss_mib = max(self._max_rss_mib, usage.ru_maxrss / 1024)
            rank = self.pids.pop(pid, None)
            if rank is not None:
                ended.append((rank, status))

    def ended(self, rank: int, status: int, *, in_mpi: bool, launch_error: str) -> dict[str, Any]:
        """Record one task's end (``status`` as wait gives it) as a ``TaskExit``."""
        exit_record: dict[str, Any] = {"task": rank, "at_s": time.time()}
        if os.WIFSIGNALED(status):
            exit_record["signal"] = os.WTERMSIG(status)
        elif os.WEXITSTATUS(status):
            exit_record["code"] = os.WEXITSTATUS(status)
        if in_mpi:
            exit_record["in_mpi"] = True
        if self.group is not None and not self.oom:
            self.oom = self.group.oom_killed()
        if self.oom and exit_record.get("signal") == signal.SIGKILL:
            exit_record["oom"] = True
        if launch_error:
            exit_record["launch_error"] = launch_error
        self.exits.append(exit_record)
        return exit_record

    def everything(self) -> list[procs.Stat]:
        """All living processes of the step."""
        return [one for one in procs.descendants({os.getpid()}) if one.state not in "ZX"]

    def signal_all(self, signum: int) -> None:
        for one in self.everything():
            procs.send(one.pid, signum)

    def signal_tasks(self, signum: int) -> None:
        for pid in self.pids:
            procs.send(pid, signum)

    def kill_task(self, rank: int) -> None:
        """SIGKILL one task."""
        for pid, its_rank in self.pids.items():
            if its_rank == rank:
                procs.send(pid, signal.SIGKILL)

    def kill(self) -> None:
        """SIGKILL all there are now; more may be forked meanwhile: call until ``childless``."""
        self.killed = True
        if self.group is not None:
            self.group.kill()
        procs.kill_all(self.everything())

    @property
    def abnormal(self) -> bool:
        """Whether any task did not end by itself."""
        return self.killed or any("signal" in one or "in_mpi" in one for one in self.exits)

    def over_memory(self, limit_mib: int) -> bool:
        """Sample the memory in use.

        The cheap sum of resident sets counts shared pages several times; only when it is
        over the limit the exact proportional one is asked for.
        """
        pids = [one.pid for one in self.everything()]
        used = procs.rss_mib(pids)
        if used > limit_mib:
            used = procs.pss_mib(pids) or used
        self._max_rss_mib = max(self._max_rss_mib, used)
        return used > limit_mib

    def usage(self) -> dict[str, Any]:
        """A ``Usage`` record: CPU of all reaped processes, largest memory seen."""
        if self.group is not None:
            self._max_rss_mib = max(self._max_rss_mib, self.group.peak_mib())
        return {
            "user_cpu_s": round(self._user_cpu_s, 6),
            "system_cpu_s": round(self._system_cpu_s, 6),
            "max_rss_mib": round(self._max_rss_mib),
        }
