"""Who owns which NeuronCore: a core belongs to one process until that process dies.

One lock file, byte N stands for core N, held by a POSIX record lock. The kernel drops such locks
when the process ends, however it ends, does not pass them on to forked children, and tells who
holds them (F_GETLK). They are also dropped when the process closes *any* descriptor of the file,
so each process keeps exactly one per file, here, and never opens a second.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import struct
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LOCK_NAME = "cores.lock"

# struct flock on 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid.
_FLOCK = struct.Struct("hhqqi4x")


@dataclass(frozen=True)
class Owner:
    """What the owner of a core said about itself."""

    pid: int
    command: str
    job: str
    step: str
    tag: str


class CoreBusy(Exception):
    """A wanted core is owned by another process."""

    def __init__(self, core_id: int, owner: Owner) -> None:
        self.core_id = core_id
        self.owner = owner
        job = f" (job {owner.job})" if owner.job else ""
        super().__init__(f"NeuronCore {core_id} is owned by pid {owner.pid}{job}: {owner.command}")


class _Held:
    """This process's descriptor of one lock file and the cores it owns through it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.pid = os.getpid()
        self.cores: set[int] = set()


_held: dict[str, _Held] = {}
_mutex = threading.RLock()


def _describe_self() -> Owner:
    try:
        command = Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except (OSError, UnicodeDecodeError):
        command = ""
    return Owner(
        pid=os.getpid(),
        command=command[:1024],
        job=os.environ.get("SLURM_JOB_ID", ""),
        step=os.environ.get("SLURM_STEP_ID", ""),
        tag=os.environ.get("NEURON_PROCESS_TAG", str(os.getpid()))[:255],
    )


class CoreLocks:
    """The owner files of one device directory."""

    def __init__(self, folder: Path, core_count: int) -> None:
        self.folder = folder
        self.core_count = core_count
        self._key = os.path.realpath(folder / LOCK_NAME)

    def _own(self) -> _Held | None:
        held = _held.get(self._key)
        if held is not None and held.pid != os.getpid():
            # After a fork: the locks stayed with the parent.
            del _held[self._key]
            return None
        return held

    def acquire(self, cores: Iterable[int]) -> None:
        """Own ``cores``, all or none. Call with the directory's lock held.

        Raises:
            CoreBusy: another process owns one of them.
            OSError: the lock file cannot be opened.
        """
        with _mutex:
            held = self._own()
            if held is None:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                held = _held[self._key] = _Held(os.open(self._key, flags, 0o666))
            taken: list[int] = []
            for core_id in cores:
                if core_id in held.cores:
                    continue
                try:
                    fcntl.lockf(held.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, core_id)
                except OSError as error:
                    if error.errno not in (errno.EACCES, errno.EAGAIN):
                        raise
                    owner = self.owner(core_id)
                    self._release(held, taken)
                    raise CoreBusy(core_id, owner or Owner(0, "?", "", "", "")) from None
                held.cores.add(core_id)
                taken.append(core_id)
            text = json.dumps(asdict(_describe_self()))
            for core_id in taken:
                self._write(core_id, text)

    def _write(self, core_id: int, text: str) -> None:
        target = self.folder / f"nc{core_id}.json"
        scratch = self.folder / f"nc{core_id}.{os.getpid()}.tmp"
        scratch.write_text(text)
        scratch.rename(target)

    def _release(self, held: _Held, cores: Iterable[int]) -> None:
        for core_id in list(cores):
            (self.folder / f"nc{core_id}.json").unlink(missing_ok=True)
            fcntl.lockf(held.descriptor, fcntl.LOCK_UN, 1, core_id)
            held.cores.discard(core_id)

    def release_all(self) -> None:
        """Give up every core this process owns here."""
        with _mutex:
            held = self._own()
            if held is not None:
                self._release(held, held.cores)
                os.close(held.descriptor)
                del _held[self._key]

    def _holder(self, descriptor: int, core_id: int) -> int | None:
        query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, core_id, 1, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, query))
        return None if kind == fcntl.F_UNLCK else pid

    def holders(self) -> dict[int, int]:
        """Core id -> pid of its living owner (this process included)."""
        with _mutex:
            held = self._own()
            if held is not None:
                return self._query(held.descriptor, held.cores)
            try:
                descriptor = os.open(self._key, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                return {}
            try:
                return self._query(descriptor, set())
            finally:
                os.close(descriptor)

    def _query(self, descriptor: int, own: set[int]) -> dict[int, int]:
        found: dict[int, int] = {}
        for core_id in range(self.core_count):
            pid = os.getpid() if core_id in own else self._holder(descriptor, core_id)
            if pid is not None:
                found[core_id] = pid
        return found

    def owner(self, core_id: int) -> Owner | None:
        """The living owner of ``core_id`` and what it said about itself."""
        pid = self.holders().get(core_id)
        if pid is None:
            return None
        try:
            said: dict[str, Any] = json.loads((self.folder / f"nc{core_id}.json").read_text())
            owner = Owner(**said)
        except (OSError, ValueError, TypeError):
            return Owner(pid, "", "", "", "")
        # A note of a dead predecessor says nothing about the present owner.
        return owner if owner.pid == pid else Owner(pid, "", "", "", "")

    def forget_dead(self) -> list[int]:
        """Remove the notes of dead owners; returns the cores they were about."""
        living = self.holders()
        dead = []
        for core_id in range(self.core_count):
            note = self.folder / f"nc{core_id}.json"
            if core_id not in living and note.exists():
                note.unlink(missing_ok=True)
                dead.append(core_id)
        return dead
