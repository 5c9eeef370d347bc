"""Memory limits by cgroup v2, where the agent has a subtree of its own.

The kernel's interface (Documentation/admin-guide/cgroup-v2): a delegated cgroup is one whose folder
we may write; its memory controller reaches children only after ``+memory`` in its
``cgroup.subtree_control``, and that needs it to hold no process itself.  So the agent first moves
into a child ``agent``.  Where any of this is not allowed (no v2, not delegated, other processes in
the same cgroup) limits are sampled instead.  Standard library only.
"""

from __future__ import annotations

import contextlib
import os

_UNIT = 1024 * 1024


def own_cgroup(proc: str = "/proc/self") -> str | None:
    """Folder of this process in the cgroup v2 hierarchy, None without one."""
    try:
        with open(os.path.join(proc, "cgroup")) as file:
            path = next((line[3:].strip() for line in file if line.startswith("0::")), None)
        with open(os.path.join(proc, "mountinfo")) as file:
            mounts = [line.split(" ") for line in file]
    except OSError:
        return None
    if path is None:
        return None
    for fields in mounts:
        if fields[fields.index("-") + 1] == "cgroup2":
            return os.path.join(fields[4], path.lstrip("/"))
    return None


def _write(folder: str, name: str, text: str) -> None:
    fd = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _words(folder: str, name: str) -> list[str]:
    try:
        with open(os.path.join(folder, name)) as file:
            return file.read().split()
    except OSError:
        return []


def delegated(folder: str | None) -> str | None:
    """Make ``folder`` (our own cgroup) ready for children with memory limits.

    Returns the folder to make step cgroups in, or None where it cannot be done; then nothing
    was changed.
    """
    if folder is None or "memory" not in _words(folder, "cgroup.controllers"):
        return None
    if "memory" in _words(folder, "cgroup.subtree_control"):
        return folder if os.access(folder, os.W_OK) else None
    if os.path.basename(folder) == "agent":  # moved there by an agent before this one
        parent = os.path.dirname(folder)
        if "memory" in _words(parent, "cgroup.subtree_control") and os.access(parent, os.W_OK):
            return parent
        return None
    child = os.path.join(folder, "agent")
    try:
        os.makedirs(child, exist_ok=True)
        _write(child, "cgroup.procs", "0")
    except OSError:
        return None
    try:
        _write(folder, "cgroup.subtree_control", "+memory")
    except OSError:  # others live here: back, as if nothing had been
        with contextlib.suppress(OSError):
            _write(folder, "cgroup.procs", "0")
            os.rmdir(child)
        return None
    return folder


class StepGroup:
    """The cgroup of one step on this node."""

    def __init__(self, parent: str, name: str, mem_mib: int) -> None:
        """Make it with a limit of ``mem_mib`` MiB.  Raises ``OSError``."""
        self.path = os.path.join(parent, name)
        os.makedirs(self.path, exist_ok=True)
        try:
            _write(self.path, "memory.max", str(mem_mib * _UNIT))
            _write(self.path, "memory.oom.group", "1")
        except OSError:
            self.remove()
            raise
        with contextlib.suppress(OSError):  # a kernel without swap accounting has no such file
            _write(self.path, "memory.swap.max", "0")

    @property
    def procs(self) -> str:
        """The file a process writes ``0`` to in order to enter."""
        return os.path.join(self.path, "cgroup.procs")

    def oom_killed(self) -> bool:
        """Whether the kernel ended processes here for want of memory."""
        words = _words(self.path, "memory.events")
        counts = dict(zip(words[::2], words[1::2], strict=False))
        return counts.get("oom_kill", "0") != "0"

    def peak_mib(self) -> float:
        """The most memory used, MiB; 0 where the kernel does not tell."""
        words = _words(self.path, "memory.peak")
        return int(words[0]) / _UNIT if words else 0.0

    def kill(self) -> None:
        """SIGKILL everything in it at once (Linux 5.14 and newer)."""
        with contextlib.suppress(OSError):
            _write(self.path, "cgroup.kill", "1")

    def remove(self) -> None:
        """Remove it; stays when a process is left in it."""
        with contextlib.suppress(OSError):
            os.rmdir(self.path)


def step_group(name: str, mem_mib: int, proc: str = "/proc/self") -> StepGroup | None:
    """A cgroup for a step with a memory limit, None where limits have to be sampled."""
    own = own_cgroup(proc)
    parent = os.path.dirname(own) if own and os.path.basename(own) == "agent" else own
    if parent is None or "memory" not in _words(parent, "cgroup.subtree_control"):
        return None
    try:
        return StepGroup(parent, name, mem_mib)
    except OSError:
        return None
