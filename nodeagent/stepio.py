"""Output and input of a step that are carried to and from srun.

Bytes of a task's stdout or stderr keep their place by offset: they stay in memory until srun
has them (``OutputAck``), are sent again after a cut, and a task that writes faster than srun
reads waits at its pipe.  Standard library only.
"""

from __future__ import annotations

import os
from typing import Any

from scheduler.api.text import pack, unpack

#: Bytes kept of one stream before its pipe is left alone (the task then blocks in write).
BUFFER_MAX = 1 << 20
#: Bytes sent of one stream beyond what is acknowledged.
WINDOW = 256 << 10
CHUNK = 64 << 10


class OutStream:
    """One task's stdout (``fd`` 1) or stderr (2)."""

    def __init__(self, task: int, fd: int, pipe: int) -> None:
        self.task = task
        self.fd = fd
        self.pipe: int | None = pipe
        self.buffer = bytearray()
        self.base = 0  # offset of buffer[0]: everything before is acknowledged
        self.sent = 0  # offset up to which this attachment was sent
        self.eof_sent = False
        self.watched = False

    @property
    def end(self) -> int:
        return self.base + len(self.buffer)

    @property
    def full(self) -> bool:
        return len(self.buffer) >= BUFFER_MAX

    @property
    def delivered(self) -> bool:
        """Everything there was is acknowledged and the end was said."""
        return self.pipe is None and not self.buffer and self.eof_sent

    def read(self) -> int | None:
        """Take what the pipe holds: number of bytes, 0 when there were none, None at its end."""
        if self.pipe is None:
            return None
        try:
            data = os.read(self.pipe, CHUNK)
        except BlockingIOError:
            return 0
        except OSError:  # the other end of a terminal is gone
            return None
        self.buffer += data
        return len(data) or None

    def close(self) -> None:
        if self.pipe is not None:
            os.close(self.pipe)
            self.pipe = None

    def write(self, data: bytes) -> None:
        """A line of the supervisor itself."""
        self.buffer += data

    def restart(self, offset: int) -> None:
        """srun (re)attached and has everything before ``offset``."""
        self.acknowledge(offset)
        self.sent = self.base
        self.eof_sent = False

    def acknowledge(self, offset: int) -> None:
        done = min(offset, self.end) - self.base
        if done > 0:
            del self.buffer[:done]
            self.base += done
        self.sent = max(self.sent, self.base)

    def next_message(self) -> dict[str, Any] | None:
        """The next ``Output`` (without the step's identity) that may be sent now."""
        start = self.sent - self.base
        room = WINDOW - start
        data = bytes(self.buffer[start : start + min(CHUNK, room)]) if room > 0 else b""
        last = self.pipe is None and self.sent + len(data) == self.end
        if not data and (self.eof_sent or not last):
            return None
        message = {
            "type": "Output",
            "task": self.task,
            "fd": self.fd,
            "offset": self.sent,
            "data": pack(data),
        }
        self.sent += len(data)
        if last:
            self.eof_sent = True
            message["eof"] = True
        return message


class InStream:
    """One task's stdin, fed by srun."""

    def __init__(self, task: int, pipe: int) -> None:
        self.task = task
        self.pipe: int | None = pipe
        self.buffer = bytearray()
        self.end = False
        self.watched = False

    def feed(self, data: bytes, *, eof: bool) -> None:
        if self.pipe is None or self.end:
            return
        self.buffer += data
        self.end = eof

    def flush(self) -> None:
        """Write what the task takes now; closes at the end or when the task reads no more."""
        while self.pipe is not None and self.buffer:
            try:
                done = os.write(self.pipe, self.buffer[:CHUNK])
            except BlockingIOError:
                return
            except OSError:  # nobody reads any more
                self.close()
                return
            del self.buffer[:done]
        if self.end:
            self.close()

    def close(self) -> None:
        self.buffer.clear()
        if self.pipe is not None:
            os.close(self.pipe)
            self.pipe = None


class Stdin:
    """``Input`` messages in order of offset, repeated ones dropped, to all tasks or to one."""

    def __init__(self) -> None:
        self.streams: dict[int, InStream] = {}
        self._next: dict[int | None, int] = {}

    def take(self, message: dict[str, Any]) -> None:
        """Raises ``ValueError`` for data that is not packed text."""
        target: int | None = message.get("task")
        expected = self._next.get(target, 0)
        data = unpack(message.get("data", ""))
        skip = expected - int(message.get("offset", 0))
        if skip < 0:
            return  # a part was lost with a link; it comes again
        data = data[skip:]
        self._next[target] = expected + len(data)
        chosen = self.streams.values() if target is None else [self.streams.get(target)]
        for stream in chosen:
            if stream is not None:
                stream.feed(data, eof=bool(message.get("eof", False)))

    def close(self) -> None:
        for stream in self.streams.values():
            stream.close()
