"""A link over a pair of streams: what both transports end in."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

from scheduler.api.frames import encode_frame, read_frame


class Writer(Protocol):
    """What a link needs of ``asyncio.StreamWriter`` or ``asyncssh.SSHWriter``."""

    def write(self, data: bytes, /) -> None: ...
    async def drain(self) -> None: ...
    def close(self) -> None: ...
    async def wait_closed(self) -> None: ...


class StreamLink:
    """Frames over ``reader`` and ``writer`` (see :class:`scheduler.transport.base.Link`)."""

    def __init__(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        self._reader = reader
        self._writer = writer
        self._closed = False

    async def send(self, body: bytes) -> None:
        """Queue one frame; waits when the peer does not read.  Raises ``ConnectionError``."""
        if self._closed:
            raise ConnectionResetError("the link is closed")
        try:
            self._writer.write(encode_frame(body))
            await self._writer.drain()
        except ConnectionError:
            raise
        except OSError as error:  # asyncssh: write on a channel that is not open for sending
            raise ConnectionResetError(str(error)) from error

    async def receive(self) -> bytes | None:
        """The next frame, None when the peer closed; ``ConnectionError`` or ``EOFError``."""
        return await read_frame(self._reader)

    async def close(self) -> None:
        """Close; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
