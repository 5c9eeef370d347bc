"""Daemons that outlive their starter: start detached, recognise again, stop.

A process is known by its pid *and* its start time (field 22 of /proc/PID/stat, clock ticks
since boot), so a pid that was given to somebody else is never mistaken for ours or signalled.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

#: Variables that belong to a job or another cluster and must not reach a daemon.
_FOREIGN = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "PMI_", "NEURON_RT_", "CLUSTERCTL_")


@dataclass(frozen=True)
class ProcessId:
    """A process that cannot be mistaken for another one of the same pid."""

    pid: int
    start: int

    def alive(self) -> bool:
        """True while this very process runs (a zombie does not)."""
        return start_time(self.pid) == self.start


def start_time(pid: int) -> int | None:
    """Start time of ``pid`` in clock ticks since boot, None when it does not run."""
    try:
        data = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = data[data.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def identify(pid: int) -> ProcessId | None:
    """The identity of the process that has ``pid`` now."""
    start = start_time(pid)
    return None if start is None else ProcessId(pid, start)


def write_atomic(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace the file by ``data`` so that a reader sees the old or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_pid_file(path: Path, process: ProcessId) -> None:
    """Record ``process`` in ``path`` (JSON with ``pid`` and ``start``)."""
    text = json.dumps({"pid": process.pid, "start": process.start})
    write_atomic(path, text.encode() + b"\n")


def read_pid_file(path: Path) -> ProcessId | None:
    """The process recorded in ``path``, running or not; None without a readable record."""
    try:
        value = json.loads(path.read_bytes())
        return ProcessId(int(value["pid"]), int(value["start"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def running(path: Path) -> ProcessId | None:
    """The process recorded in ``path`` when it still runs."""
    process = read_pid_file(path)
    return process if process is not None and process.alive() else None


@contextlib.contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold an exclusive lock on ``path``; yields False when ``wait`` is off and it is taken."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(fd)


def package_root() -> Path:
    """The folder from which this installation's packages are imported."""
    return Path(__file__).resolve().parents[2]


@cache
def needs_path() -> bool:
    """True when the interpreter finds our packages only through this process's own path.

    So it is in a source tree that is not installed; children then get the path explicitly.
    """
    code = "import scheduler,os;print(os.path.realpath(os.path.dirname(scheduler.__file__)))"
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() != str(package_root() / "scheduler")


def daemon_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a daemon: ours without what belongs to a job or another cluster."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
    environment.pop("PYTHONPATH", None)
    if needs_path():
        environment["PYTHONPATH"] = str(package_root())
    environment.update(extra or {})
    return environment


#: Daemons started by this process; polled at each start so that none stays a zombie for long.
_children: list[subprocess.Popen[bytes]] = []


def spawn_detached(
    argv: Sequence[str], log: Path, environment: Mapping[str, str], cwd: str = "/"
) -> ProcessId:
    """Start ``argv`` so that it survives us: own session, no terminal, output to ``log``.

    (Not through ``sh -c '... &'``: a shell makes background commands ignore SIGINT, and the
    tasks of jobs would inherit that.)  Raises ``OSError`` when it cannot be started.
    """
    _children[:] = [child for child in _children if child.poll() is None]
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        child = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=fd,
            stderr=fd,
            cwd=cwd,
            env=dict(environment),
            start_new_session=True,
        )
    finally:
        os.close(fd)
    _children.append(child)
    process = identify(child.pid)
    if process is None:
        raise OSError(f"{argv[0]} ended at once: {last_line(log)}")
    return process


def last_line(log: Path, limit: int = 2000) -> str:
    """The last non-empty line of a log, for error messages."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - limit))
            lines = file.read().decode("utf-8", "replace").split("\n")
    except OSError:
        return "no log"
    return next((line.strip() for line in reversed(lines) if line.strip()), "nothing in its log")


def send_signal(process: ProcessId, signum: int) -> bool:
    """Signal exactly this process; False when it is gone.  Raises ``PermissionError``."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        if not process.alive():  # checked while the descriptor pins the pid
            return False
        signal.pidfd_send_signal(fd, signum)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True


def wait_gone(process: ProcessId, timeout_s: float) -> bool:
    """Wait until the process ended; False after ``timeout_s``."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        if not process.alive():
            return True
        return bool(select.select([fd], [], [], timeout_s)[0])
    finally:
        os.close(fd)


def stop(process: ProcessId, term_s: float = 5.0) -> bool:
    """SIGTERM, after ``term_s`` seconds SIGKILL; True when it had to be killed."""
    if not send_signal(process, signal.SIGTERM) or wait_gone(process, term_s):
        return False
    send_signal(process, signal.SIGKILL)
    wait_gone(process, 5.0)
    return True
