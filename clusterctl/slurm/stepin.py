"""srun's standard input on its way to the tasks."""

from __future__ import annotations

import os

from scheduler.api.text import pack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_CHUNK = 1 << 16
#: Bytes kept to be sent again when the controller restarts.
KEEP = 4 << 20


class Source:
    """Reads a descriptor and makes ``StepInput`` messages; keeps the last ones."""

    def __init__(self, fd: int, task: int | None) -> None:
        self.fd = fd
        self.task = task
        self.offset = 0
        self.eof = False
        self._kept: list[tuple[int, bytes]] = []
        self._kept_bytes = 0

    def readable(self) -> bool:
        """False at the end, and for a terminal while srun runs in the background."""
        if self.eof or self.fd < 0:
            return False
        try:
            return not os.isatty(self.fd) or os.tcgetpgrp(self.fd) == os.getpgrp()
        except OSError:
            return True

    def read(self) -> dict[str, Any] | None:
        """The next message; None when there is nothing just now."""
        try:
            data = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        at = self.offset
        if not data:
            self.eof = True
            return self._message(at, b"", eof=True)
        self.offset += len(data)
        self._kept.append((at, data))
        self._kept_bytes += len(data)
        while self._kept_bytes > KEEP and len(self._kept) > 1:
            self._kept_bytes -= len(self._kept.pop(0)[1])
        return self._message(at, data, eof=False)

    def again(self) -> list[dict[str, Any]]:
        """What a new controller may not have passed on; the nodes drop what they know."""
        messages = [self._message(at, data, eof=False) for at, data in self._kept]
        if self.eof:
            messages.append(self._message(self.offset, b"", eof=True))
        return messages

    def _message(self, at: int, data: bytes, *, eof: bool) -> dict[str, Any]:
        message: dict[str, Any] = {"type": "StepInput", "data": pack(data), "offset": at}
        if eof:
            message["eof"] = True
        if self.task is not None:
            message["task"] = self.task
        return message
