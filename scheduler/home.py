"""The controller's side of the state directory: lock, ``controller.json``, log, sanity."""

from __future__ import annotations

import fcntl
import json
import logging
import logging.handlers
import os
import time
from pathlib import Path
from typing import Any

from scheduler.api.errors import Unavailable

LOCK_NAME = "controller.lock"
INFO_NAME = "controller.json"
SOCKET_NAME = "controller.sock"
LOG_NAME = "log/controller.log"

_LOG_BYTES = 10 * 1024 * 1024
_LOG_FILES = 4
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message and whatever ``extra`` gave."""

    def format(self, record: logging.LogRecord) -> str:
        """The line for ``record``."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "from": record.name,
            "message": record.getMessage(),
        }
        line |= {k: v for k, v in record.__dict__.items() if k not in _STANDARD}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _QuietRotation(logging.handlers.RotatingFileHandler):
    """A log that cannot be written (full disk) is no reason to print or to stop."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Drop the record."""


def open_log(home: Path) -> logging.Handler:
    """Log to ``HOME/log/controller.log``, at most 40 MB; returns the handler (to be removed)."""
    path = home / LOG_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _QuietRotation(path, maxBytes=_LOG_BYTES, backupCount=_LOG_FILES - 1, delay=True)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger("scheduler")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    return handler


class Lock:
    """Holds ``HOME/controller.lock`` for the life of the process (flock, so a crash frees it)."""

    def __init__(self, home: Path) -> None:
        """Take the lock.  Raises ``Unavailable`` naming the process that has it."""
        path = home / LOCK_NAME
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()
            os.close(self._fd)
            raise Unavailable(
                f"another controller (pid {owner or 'unknown'}) runs on {home}; "
                "stop it with clusterctl down, or use another state directory"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Give the lock back (the file stays, it is the lock's identity)."""
        os.close(self._fd)


def write_info(home: Path, info: dict[str, Any]) -> None:
    """``controller.json``, replaced in one step; for tools that look for the process."""
    path = home / INFO_NAME
    new = path.with_suffix(".json.new")
    new.write_text(json.dumps(info) + "\n", encoding="utf-8")
    os.replace(new, path)


def remove_info(home: Path) -> None:
    """Take ``controller.json`` away at a clean end."""
    (home / INFO_NAME).unlink(missing_ok=True)


def filesystem_of(path: Path) -> str:
    """Type of the file system ``path`` is on, from /proc/self/mounts; "" when unknown."""
    best, kind = "", ""
    target = os.path.realpath(path)
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    for line in lines:
        _, mount, found, *_ = line.split(" ")
        mount = mount.replace("\\040", " ")
        inside = target == mount or target.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, found
    return kind


def volatile_warning(home: Path) -> str:
    """A sentence when the state directory does not survive a reboot, else ""."""
    kind = filesystem_of(home)
    if kind in ("tmpfs", "ramfs"):
        return f"{home} is on {kind}: jobs and accounting are lost when this machine restarts"
    return ""
