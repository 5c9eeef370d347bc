"""The controller's unix socket: frames in, frames out, identity from the kernel.

Mode 0600 and the peer's uid (SO_PEERCRED): the controller's own user and root may speak.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import struct
from collections.abc import Callable
from pathlib import Path

from scheduler.api import wire
from scheduler.api.errors import ProtocolError, Unavailable
from scheduler.api.frames import MAX_FRAME, encode_frame, unix_address
from scheduler.session import Session

log = logging.getLogger(__name__)

#: Connections at a time; more are told to come back later.
MAX_SESSIONS = 2000
#: Unread bytes of answers after which a connection gets no further ones.
HIGH_WATER = 1024 * 1024
#: Seconds that a command may leave answers unread before it is cut off.
SLOW_S = 120.0
_BACKLOG = 512


class SocketSession(Session, asyncio.Protocol):
    """A conversation over one connection to the socket."""

    def __init__(self, server: Server) -> None:
        super().__init__(-1, -1, server.on_request)
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._paused_writing = False
        self._held = False
        self._slow: asyncio.TimerHandle | None = None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Look who it is; strangers get an answer and are cut off."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=HIGH_WATER)
        sock = transport.get_extra_info("socket")
        creds = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        _, self.uid, self.gid = struct.unpack("3i", creds)
        self._server.sessions.add(self)
        if self.uid not in self._server.allowed_uids:
            self.send(wire.Error(code="denied", message="Access/permission denied"))
            self.end()
        elif len(self._server.sessions) > MAX_SESSIONS:
            self.send(wire.Error(code="unavailable", message="Too many connections; try again"))
            self.end()

    def data_received(self, data: bytes) -> None:
        """Cut the bytes into frames."""
        buffer = self._buffer
        buffer += data
        start = 0
        while not self.closed and len(buffer) - start >= 4:
            size = int.from_bytes(buffer[start : start + 4], "big")
            if size > MAX_FRAME:
                error = ProtocolError(
                    f"Message of {size} bytes announced; the limit is {MAX_FRAME}"
                )
                self.send(wire.Error(code=error.code, message=error.message))
                self.end()
                return
            if len(buffer) - start - 4 < size:
                break
            body = bytes(buffer[start + 4 : start + 4 + size])
            start += 4 + size
            self.feed(body)
        del buffer[:start]

    def eof_received(self) -> bool:
        """A peer that stops sending is gone (commands keep both directions open)."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over."""
        self._server.sessions.discard(self)
        if self._slow is not None:
            self._slow.cancel()
        self.was_closed()

    def pause_writing(self) -> None:
        """The peer reads too slowly: nothing more for it now, and not for ever."""
        self._paused_writing = True
        if self.stream is None:
            loop = asyncio.get_running_loop()
            self._slow = loop.call_later(SLOW_S, self._cut_off)

    def resume_writing(self) -> None:
        """The peer has caught up."""
        self._paused_writing = False
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None
        if self.on_writable is not None:
            self.on_writable()
        self.pump()

    def _cut_off(self) -> None:
        log.warning("a command did not read its answers and was cut off", extra={"uid": self.uid})
        if self._transport is not None:
            self._transport.abort()

    # Session

    def send_body(self, body: bytes) -> None:
        """Queue one frame.  Raises ``ProtocolError`` when it is too large."""
        assert self._transport is not None
        self._transport.write(encode_frame(body))

    def writable(self) -> bool:
        """False above the high-water mark."""
        return not self._paused_writing

    def hold_reading(self, hold: bool) -> None:
        """Back-pressure to the peer."""
        if hold == self._held or self._transport is None or self._transport.is_closing():
            return
        self._held = hold
        if hold:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def end(self) -> None:
        """Close after what is queued."""
        if self._transport is not None:
            self._transport.close()
        self.was_closed()


class Server:
    """Listens on ``HOME/controller.sock``; the caller holds the lock of the home."""

    def __init__(
        self,
        path: Path,
        on_request: Callable[[Session, wire.Request], None],
        allowed_uids: frozenset[int] | None = None,
    ) -> None:
        self.path = path
        self.on_request = on_request
        self.allowed_uids = allowed_uids or frozenset({0, os.getuid()})
        self.sessions: set[SocketSession] = set()
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        """Bind and listen; a socket left over from a killed controller is replaced.

        Raises ``Unavailable`` when something else is in the way.
        """
        sock = self._bind()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: SocketSession(self), sock=sock, backlog=_BACKLOG
        )

    def _bind(self) -> socket.socket:
        try:
            if not stat.S_ISSOCK(os.lstat(self.path).st_mode):
                raise Unavailable(f"{self.path} is in the way: it is no socket; move it away")
            os.unlink(self.path)
        except FileNotFoundError:
            log.debug("no old socket")
        address, fd = unix_address(str(self.path))
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        mask = os.umask(0o177)
        try:
            sock.bind(address)
        except OSError as error:
            sock.close()
            raise Unavailable(f"cannot listen on {self.path}: {error.strerror}") from None
        finally:
            os.umask(mask)
            if fd is not None:
                os.close(fd)
        sock.setblocking(False)
        return sock

    async def stop(self) -> None:
        """Stop listening, close every conversation, remove the socket."""
        if self._server is not None:
            self._server.close()
        for session in list(self.sessions):
            session.end()
        await asyncio.sleep(0)  # lets the transports send what is queued
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
