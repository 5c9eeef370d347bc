"""The last broom of ``clusterctl down``: whatever of a node still runs, ended.

Normally agents end what they run and nothing is found.  After an agent was killed, its
supervisors and tasks live on; they are known by what they were started with: agents, fork servers
and supervisors by the node's directory on their command line, tasks by ``CLUSTERCTL_STEP`` in
their environment, and all by their parents.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from scheduler.provision import proc

#: Rounds until processes that fork while we look must all have been met.
_ROUNDS = 20


def _read(pid: int, name: str) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().split(b"\0")
    except OSError:
        return []


def _belongs(pid: int, node_dirs: list[bytes]) -> bool:
    arguments = _read(pid, "cmdline")
    if any(a.startswith(b"nodeagent") for a in arguments) and any(
        a in node_dirs for a in arguments
    ):
        return True
    marks = [v for v in _read(pid, "environ") if v.startswith(b"CLUSTERCTL_STEP=")]
    return any(mark.endswith(b"@" + node_dir) for mark in marks for node_dir in node_dirs)


def _parents() -> dict[int, int]:
    """Parent of every process."""
    result = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                data = Path(f"/proc/{entry}/stat").read_bytes()
            except OSError:
                continue
            result[int(entry)] = int(data[data.rindex(b")") + 2 :].split()[1])
    return result


def _ancestry(pid: int, parents: dict[int, int]) -> set[int]:
    """``pid`` and all above it."""
    result: set[int] = set()
    while pid > 0 and pid not in result:
        result.add(pid)
        pid = parents.get(pid, 0)
    return result


def leftovers(node_dirs: list[Path]) -> list[proc.ProcessId]:
    """All running processes of these nodes and everything below them.

    This process and those above it are never among them (``down`` may be called in a job).
    """
    wanted = [os.fsencode(node_dir) for node_dir in node_dirs]
    parents = _parents()
    spared = _ancestry(os.getpid(), parents)
    roots = {pid for pid in parents if pid not in spared and _belongs(pid, wanted)}
    found = [p for p in parents if p not in spared and _ancestry(p, parents) & roots]
    processes = (proc.identify(pid) for pid in found)
    return [process for process in processes if process is not None]


def sweep(node_dirs: list[Path]) -> int:
    """SIGKILL all leftovers; how many there were.  Raises ``OSError`` if some do not go."""
    ended = 0
    for _ in range(_ROUNDS):
        found = leftovers(node_dirs)
        if not found:
            return ended
        for signum in (signal.SIGSTOP, signal.SIGKILL):  # stopped, none can fork away
            for process in found:
                proc.send_signal(process, signum)
        ended += sum(proc.wait_gone(process, 5.0) for process in found)
    pids = ", ".join(str(process.pid) for process in leftovers(node_dirs))
    raise OSError(f"processes {pids} do not end")
