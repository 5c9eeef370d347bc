"""Starting one task: fork, descriptors, limits, identity, exec.  Standard library only.

The supervisor has one thread, so a plain fork is safe; Python's own ``subprocess`` cannot tell
the child its pid (SLURM_TASK_PID) or give it a terminal.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import struct
from dataclasses import dataclass, field

_EXIT = struct.Struct("=ii")  # rank, errno


@dataclass(slots=True, kw_only=True)
class TaskSpec:
    """Everything the forked child needs.  ``files`` become descriptors 0, 1 and 2."""

    rank: int
    path: bytes
    argv: list[bytes]
    env: dict[bytes, bytes]
    files: tuple[int, int, int]
    keep: list[int] = field(default_factory=list)  # further descriptors, same numbers
    limits: dict[str, int] = field(default_factory=dict)
    user: tuple[int, int, list[int]] | None = None  # uid, gid, groups to change to
    group_procs: str = ""  # cgroup.procs of the step's cgroup, "" without one
    terminal: bool = False  # files[0] is a terminal slave to be made the controlling one


def find_program(name: bytes, search: bytes | None, cwd: bytes) -> bytes:
    """What ``execve`` gets for ``name``: as Slurm, a relative path is shown in full and a name
    that is not found in ``search`` (PATH) is left as it is."""
    if b"/" in name:
        return name if name.startswith(b"/") else os.path.join(cwd, name)
    for folder in (search or b"").split(b":"):
        path = os.path.join(folder or cwd, name)
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    return name


def _apply_limits(limits: dict[str, int]) -> None:
    for name, soft in limits.items():
        number = getattr(resource, f"RLIMIT_{name}", None)
        if number is None:
            continue
        _, hard = resource.getrlimit(number)
        if soft < 0 or soft >= 2**63:
            soft = resource.RLIM_INFINITY
        if hard != resource.RLIM_INFINITY and (soft == resource.RLIM_INFINITY or soft > hard):
            soft = hard
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(number, (soft, hard))


def become(user: tuple[int, int, list[int]]) -> None:
    """Change to ``(uid, gid, groups)`` for good.  Raises ``OSError``."""
    uid, gid, groups = user
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def default_signals() -> None:
    """No signal ignored or blocked, whatever the daemons inherited (``nohup clusterctl up &``)."""
    for number in signal.valid_signals():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _run(spec: TaskSpec) -> None:
    """In the child; returns only by raising."""
    if spec.terminal:
        os.login_tty(os.dup(spec.files[0]))
    else:
        os.setpgid(0, 0)
        for number, fd in enumerate(spec.files):
            os.dup2(fd, number)
    for fd in spec.keep:
        os.set_inheritable(fd, True)
    default_signals()
    _apply_limits(spec.limits)
    if spec.group_procs:
        with open(spec.group_procs, "w") as procs:
            procs.write("0")
    if spec.user is not None:
        become(spec.user)
    if not spec.argv or not spec.path:
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    os.execve(spec.path, spec.argv, {**spec.env, b"SLURM_TASK_PID": b"%d" % os.getpid()})


def start(spec: TaskSpec, errors: int, node: str) -> int:
    """Fork and exec; returns the pid.  Raises ``OSError`` when fork fails.

    A child that cannot exec says so on its stderr, reports (rank, errno) through the pipe
    ``errors`` and exits with the errno, as Slurm's does: 2 not found, 13 not executable.
    """
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):  # so that a signal right after finds the group
            if not spec.terminal:
                os.setpgid(pid, pid)
        return pid
    code = 1
    try:
        _run(spec)
    except OSError as error:
        code = error.errno or 1
        text = os.strerror(code).encode()
        name = spec.path
        line = b"slurmstepd-%s: error: execve(): %s: %s\n" % (node.encode(), name, text)
        with contextlib.suppress(OSError):
            os.write(2, line)
            os.write(errors, _EXIT.pack(spec.rank, code))
    except ValueError as error:  # a NUL in an argument or in the environment
        with contextlib.suppress(OSError):
            line = f"slurmstepd-{node}: error: execve(): {error}\n".encode()
            os.write(2, line)
            os.write(errors, _EXIT.pack(spec.rank, errno.EINVAL))
        code = errno.EINVAL
    finally:
        os._exit(code & 0xFF)


def launch_errors(errors: int) -> dict[int, str]:
    """Read the pipe: rank -> errno text of those that could not exec."""
    found: dict[int, str] = {}
    with contextlib.suppress(BlockingIOError):
        raw = os.read(errors, _EXIT.size * 4096)
        for rank, number in _EXIT.iter_unpack(raw[: len(raw) // _EXIT.size * _EXIT.size]):
            found[rank] = os.strerror(number)
    return found
