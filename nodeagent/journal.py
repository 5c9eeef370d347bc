"""The node's journal: one folder a step in NODE_DIR/spool, named JOB.STEP.ATTEMPT.

``launch.json``  the Launch message          ``stepd.json``  pid and start time of the supervisor
``slurm_script`` the batch script            ``exit.json``   StepEnded or LaunchFailed

A supervisor claims its step by renaming a complete folder into place: the second of two for
the same step fails and ends.  It then looks at ``generation``, which every agent writes before
it reads the spool: a launch ordered by an agent that is gone is taken back, as the new agent may
already have told the controller that no such step is here.

Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from typing import Any

from nodeagent.order import Key, parse_key

SCRIPT = "slurm_script"


def write_atomic(path: str, data: bytes, *, durable: bool) -> None:
    """Replace ``path`` by ``data``: all or nothing, on disk before return when ``durable``."""
    part = f"{path}.{os.getpid()}.part"
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(part, path)


def _write(path: str, data: bytes, mode: int = 0o600) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)


class Journal:
    """Reads and writes the journal of the node in ``node_dir``."""

    def __init__(self, node_dir: str) -> None:
        self.spool = os.path.join(node_dir, "spool")
        self._generation_path = os.path.join(self.spool, "generation")

    def path(self, key: Key, name: str = "") -> str:
        return os.path.join(self.spool, str(key), name) if name else f"{self.spool}/{key}"

    # ------------------------------------------------------------ the agent's side

    def begin(self, generation: str, *, others_enter: bool) -> None:
        """Make the spool and declare a new agent.  ``others_enter``: for tasks of other users."""
        os.makedirs(self.spool, mode=0o711 if others_enter else 0o700, exist_ok=True)
        write_atomic(self._generation_path, generation.encode(), durable=False)
        for name in os.listdir(self.spool):
            if name.startswith("tmp-"):
                shutil.rmtree(os.path.join(self.spool, name), ignore_errors=True)

    def steps(self) -> Iterator[tuple[Key, dict[str, Any]]]:
        """Every claimed step with its ``stepd.json`` ({} when unreadable), in order of name."""
        for name in sorted(os.listdir(self.spool)):
            try:
                key = parse_key(name)
            except ValueError:
                continue
            yield key, self.read(key, "stepd.json") or {}

    def read(self, key: Key, name: str) -> dict[str, Any] | None:
        """A JSON file of a step, None when it is missing or damaged."""
        raw = self.read_bytes(key, name)
        if raw is None:
            return None
        try:
            value = json.loads(raw)
        except ValueError:
            return None
        return value if isinstance(value, dict) else None

    def read_bytes(self, key: Key, name: str) -> bytes | None:
        try:
            with open(self.path(key, name), "rb") as file:
                return file.read()
        except OSError:
            return None

    def has(self, key: Key) -> bool:
        return os.path.isdir(self.path(key))

    def write_exit(self, key: Key, body: bytes) -> None:
        """The outcome of a step, durable.  Makes the folder when it never came to be."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.path(key), 0o700)
        write_atomic(self.path(key, "exit.json"), body, durable=True)

    def drop(self, key: Key) -> None:
        """Remove a step that the controller has committed; unknown ones are no error."""
        folder = self.path(key)
        try:
            for name in os.listdir(folder):
                os.unlink(os.path.join(folder, name))
            os.rmdir(folder)
        except FileNotFoundError:
            return
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)

    # ------------------------------------------------------------ the supervisor's side

    def generation(self) -> str:
        """The agent that owns the node now ("" when none ever did)."""
        try:
            with open(self._generation_path, "rb", buffering=0) as file:
                return file.read().decode()
        except OSError:
            return ""

    def claim(
        self,
        key: Key,
        files: dict[str, tuple[bytes, int]],
        *,
        generation: str,
        owner: tuple[int, int] | None,
    ) -> bool:
        """Make the step's folder with ``files`` (name -> content, mode).

        False when another supervisor has it or the agent that ordered it is gone.  ``owner``
        (uid, gid): the user that must be able to enter and to read the batch script.
        Raises ``OSError`` (disk full and the like).
        """
        part = os.path.join(self.spool, f"tmp-{os.getpid()}")
        os.mkdir(part, 0o711 if owner else 0o700)
        try:
            for name, (content, mode) in files.items():
                _write(os.path.join(part, name), content, mode)
            if owner and SCRIPT in files:
                os.chown(os.path.join(part, SCRIPT), *owner)
            os.rename(part, self.path(key))
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
        if self.generation() != generation:
            self.drop(key)
            return False
        return True
