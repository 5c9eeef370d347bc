"""Frames over asyncio transports, and the three kinds of peers the agent has."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable

from scheduler.api.errors import ProtocolError
from scheduler.api.frames import MAX_FRAME, encode_frame, unix_address

_CREDENTIALS = struct.Struct("=iII")  # struct ucred: pid, uid, gid


class FramePeer(asyncio.Protocol):
    """Cuts the stream into frames.  Subclasses say what to do with them."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self.uid = self.gid = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        sock = transport.get_extra_info("socket")
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, self.uid, self.gid = _CREDENTIALS.unpack(raw)
        self.opened()

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        while len(buffer) >= 4 and self.transport is not None:
            size = int.from_bytes(buffer[:4], "big")
            if size > MAX_FRAME:
                self.refused(f"announced a message of {size} bytes; the limit is {MAX_FRAME}")
                self.close()
                return
            if len(buffer) < 4 + size:
                return
            body = bytes(buffer[4 : 4 + size])
            del buffer[: 4 + size]
            self.frame(body)

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self.closed()

    def send(self, body: bytes) -> None:
        """Queue a frame; nothing happens when the peer is gone."""
        if self.transport is not None and not self.transport.is_closing():
            try:
                self.transport.write(encode_frame(body))
            except ProtocolError as error:
                self.refused(str(error))

    def close(self) -> None:
        """Close after what is queued is sent."""
        if self.transport is not None:
            self.transport.close()

    def opened(self) -> None:
        """The peer connected."""

    def frame(self, body: bytes) -> None:
        """A frame arrived."""
        raise NotImplementedError

    def closed(self) -> None:
        """The connection is gone, whoever closed it."""

    def refused(self, reason: str) -> None:
        """The peer broke the protocol."""


async def listen(path: str, make: Callable[[], FramePeer], *, mode: int) -> asyncio.Server:
    """Serve a unix socket of any path length; a stale one is replaced.

    Only for the holder of the node's lock: no other agent can be using the path.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    address, folder = unix_address(path)
    try:
        if os.path.lexists(path):
            os.unlink(path)
        mask = os.umask(0o777 & ~mode)
        try:
            sock.bind(address)
        finally:
            os.umask(mask)
        sock.listen(1024)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    finally:
        if folder is not None:
            os.close(folder)
    return await asyncio.get_running_loop().create_unix_server(make, sock=sock)
