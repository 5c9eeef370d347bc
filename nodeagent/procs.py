"""What /proc tells about the processes of a step.  Standard library only.

Processes come and go while one looks: everything here takes a vanished process as "not there".
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from typing import NamedTuple

PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
PAGE = os.sysconf("SC_PAGE_SIZE")
MARKER = b"CLUSTERCTL_STEP="

_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int | bytes) -> None:
    """``prctl(2)``; raises ``OSError``."""
    argument = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    if _libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Stat(NamedTuple):
    """Part of /proc/PID/stat.  ``start`` is in clock ticks since boot: with the pid unique."""

    pid: int
    state: str
    ppid: int
    session: int
    start: int


def stat(pid: int) -> Stat | None:
    """The process ``pid``, None when there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            raw = file.read()
    except OSError:
        return None
    rest = raw[raw.rindex(b")") + 2 :].split()
    return Stat(pid, chr(rest[0][0]), int(rest[1]), int(rest[3]), int(rest[19]))


def boot_id() -> str:
    """Changes with every boot of the machine."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb", buffering=0) as file:
            return file.read().decode().strip()
    except OSError:
        return ""


def alive(pid: int, start: int) -> bool:
    """Whether ``pid`` is still the process that started at ``start`` and not a zombie."""
    found = stat(pid)
    return found is not None and found.start == start and found.state not in "ZX"


def all_stats() -> list[Stat]:
    """Every process."""
    found = (stat(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [one for one in found if one is not None]


def descendants(roots: set[int], *, stats: list[Stat] | None = None) -> list[Stat]:
    """All processes below ``roots`` (which are not included), zombies too."""
    children: dict[int, list[Stat]] = {}
    for one in all_stats() if stats is None else stats:
        children.setdefault(one.ppid, []).append(one)
    result: list[Stat] = []
    todo = list(roots)
    while todo:
        for child in children.get(todo.pop(), ()):
            if child.pid not in roots:
                result.append(child)
                todo.append(child.pid)
    return result


def environment(pid: int) -> bytes:
    """The environment the process was started with; empty when it may not be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read()
    except OSError:
        return b""


def marked(marker: str, leader: tuple[int, int] | None) -> list[Stat]:
    """Processes that carry ``CLUSTERCTL_STEP=marker`` or are in the session of ``leader`` (pid,
    start time of the supervisor), and all below them.

    This is how a step's processes are found when its supervisor is gone and they belong to
    nobody any more.  A session whose number was taken over by another leader is not touched.
    """
    wanted = MARKER + os.fsencode(marker)
    stats = all_stats()
    own = os.getpid()
    session = 0
    if leader is not None:
        holder = stat(leader[0])
        session = leader[0] if holder is None or holder.start == leader[1] else 0
    roots = {
        one.pid
        for one in stats
        if one.pid != own
        and one.state not in "ZX"
        and ((session and one.session == session) or wanted in environment(one.pid).split(b"\0"))
    }
    below = descendants(roots, stats=stats)
    return [one for one in stats if one.pid in roots] + [
        one for one in below if one.state not in "ZX" and one.pid != own
    ]


def send(pid: int, signum: int) -> None:
    """Signal one process; a vanished or foreign one is passed over."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def kill_all(processes: list[Stat]) -> None:
    """SIGKILL, stopping all of them first so that none can fork away in between."""
    if len(processes) > 1:
        for one in processes:
            send(one.pid, signal.SIGSTOP)
    for one in processes:
        send(one.pid, signal.SIGKILL)


def rss_mib(pids: list[int]) -> float:
    """Sum of the resident sets.  Shared pages count once per process: an upper bound."""
    pages = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/statm", "rb") as file:
                pages += int(file.read().split()[1])
        except (OSError, IndexError):
            continue
    return pages * PAGE / 2**20


def pss_mib(pids: list[int]) -> float:
    """Sum of the proportional sets: shared pages are divided among those that map them."""
    kib = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
                for line in file:
                    if line.startswith(b"Pss:"):
                        kib += int(line.split()[1])
                        break
        except OSError:
            continue
    return kib / 1024


_SHM = "/dev/shm"
_SEGMENT = "mpich_shm_"


def segments_in_use(pid: int) -> set[str]:
    """MPICH segments that the process has mapped or open."""
    found = set()
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            for line in file:
                at = line.find(f"{_SHM}/{_SEGMENT}")
                if at >= 0:
                    found.add(line[at:].rstrip("\n"))
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return found


def sweep_mpi_segments(uid: int, since_s: float) -> None:
    """Remove shared memory that killed MPICH ranks of ``uid`` left behind since ``since_s``.

    The name of a segment is a hash that only MPICH can compute, so ours are found by owner,
    age and use: a segment is listed first and then looked for in every process.  Its creator
    has it open or mapped from its first moment on, so one that nobody has is left over.  Ranks
    of the step on another local node may end a moment later: their supervisor comes here too.
    """
    left = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(_SHM):
            if entry.name.startswith(_SEGMENT):
                with contextlib.suppress(OSError):
                    found = entry.stat(follow_symlinks=False)
                    if found.st_uid == uid and found.st_ctime >= since_s:
                        left.add(entry.path)
    if not left:
        return
    for name in os.listdir("/proc"):
        if name.isdigit():
            left -= segments_in_use(int(name))
    for path in sorted(left):
        with contextlib.suppress(OSError):
            os.unlink(path)
