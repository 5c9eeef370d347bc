"""Frames on a stream: 4-byte big-endian length, then that many bytes of JSON.

Sync functions need the standard library only (the drop-in commands use them); the async ones
take asyncio streams.  ``unix_address`` makes a socket path of any length usable.
"""

from __future__ import annotations

import os

from scheduler.api.errors import ProtocolError

TYPE_CHECKING = False  # spares the commands the import of typing
if TYPE_CHECKING:
    import asyncio
    from typing import Protocol

    class SocketLike(Protocol):
        """What the sync functions need of a socket."""

        def sendall(self, data: bytes, /) -> None: ...
        def recv(self, size: int, /) -> bytes: ...


#: Largest frame accepted, bytes.  A batch script may be 4 MiB, its environment as much again.
MAX_FRAME = 32 * 1024 * 1024


def encode_frame(body: bytes) -> bytes:
    """``body`` with its length before it.  Raises ``ProtocolError`` when it is too large."""
    if len(body) > MAX_FRAME:
        raise ProtocolError(f"message of {len(body)} bytes is larger than {MAX_FRAME}")
    return len(body).to_bytes(4, "big") + body


def _length(head: bytes) -> int:
    size = int.from_bytes(head, "big")
    if size > MAX_FRAME:
        raise ProtocolError(f"peer announced a message of {size} bytes; the limit is {MAX_FRAME}")
    return size


def send_frame(sock: SocketLike, body: bytes) -> None:
    """Send one frame."""
    sock.sendall(encode_frame(body))


def _recv_exactly(sock: SocketLike, size: int) -> bytes:
    parts = []
    while size:
        part = sock.recv(min(size, 1 << 20))
        if not part:
            raise EOFError("connection closed in the middle of a message")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def recv_frame(sock: SocketLike) -> bytes | None:
    """The next frame's body, or None when the peer closed the connection between frames.

    Raises ``EOFError`` when it closed within a frame, ``ProtocolError`` when it is too large.
    """
    first = sock.recv(4)
    if not first:
        return None
    head = first if len(first) == 4 else first + _recv_exactly(sock, 4 - len(first))
    return _recv_exactly(sock, _length(head))


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """Async ``recv_frame``; ``asyncio.IncompleteReadError`` is turned into ``EOFError``."""
    import asyncio

    try:
        head = await reader.readexactly(4)
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            return None
        raise EOFError("connection closed in the middle of a message") from None
    try:
        return await reader.readexactly(_length(head))
    except asyncio.IncompleteReadError:
        raise EOFError("connection closed in the middle of a message") from None


def unix_address(path: str) -> tuple[str, int | None]:
    """An address for ``bind``/``connect`` that stands for ``path``, whatever its length.

    The kernel takes 107 bytes.  A longer path is reached through an open descriptor of its
    folder (``/proc/self/fd/N/name``): the second value, to be closed after bind or connect.
    """
    if len(os.fsencode(path)) <= 107:
        return path, None
    folder, name = os.path.split(path)
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"/proc/self/fd/{fd}/{name}", fd
