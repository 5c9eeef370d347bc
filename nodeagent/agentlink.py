"""The supervisor's connection to the agent: frames over a unix socket, made again for ever.

Never blocks the supervisor: what the agent does not take waits here.  Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from typing import Any

from scheduler.api.errors import ProtocolError
from scheduler.api.frames import MAX_FRAME, encode_frame, unix_address

#: Seconds between attempts while the agent is away.
RETRY_FIRST_S = 0.05
RETRY_MAX_S = 2.0


class AgentLink:
    """``sock`` is None while the agent is away; ``retry_at`` says when to try again."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.sock: socket.socket | None = None
        self.outgoing = bytearray()
        self._incoming = bytearray()
        self.retry_at = 0.0
        self._wait_s = RETRY_FIRST_S

    def connect(self, now: float) -> bool:
        """One attempt.  True when connected."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        address, folder = "", None
        try:
            address, folder = unix_address(self.path)
            sock.connect(address)
        except OSError:
            sock.close()
            self.retry_at = now + self._wait_s
            self._wait_s = min(self._wait_s * 2, RETRY_MAX_S)
            return False
        finally:
            if folder is not None:
                os.close(folder)
        sock.setblocking(False)
        self.sock = sock
        self.outgoing.clear()
        self._incoming.clear()
        self._wait_s = RETRY_FIRST_S
        return True

    def lost(self, now: float) -> None:
        if self.sock is not None:
            self.sock.close()
            self.sock = None
        self.outgoing.clear()
        self.retry_at = now + self._wait_s

    def queue(self, message: dict[str, Any]) -> None:
        """Add a message; dropped while the agent is away (it is told all when it is back)."""
        if self.sock is not None:
            self.outgoing += encode_frame(json.dumps(message).encode())

    def flush(self) -> bool:
        """Send what the socket takes.  False when the connection is gone."""
        while self.sock is not None and self.outgoing:
            try:
                done = self.sock.send(self.outgoing)
            except BlockingIOError:
                return True
            except OSError:
                return False
            del self.outgoing[:done]
        return True

    def receive(self) -> list[dict[str, Any]] | None:
        """Complete messages that arrived; None when the connection is gone."""
        if self.sock is None:
            return None
        with contextlib.suppress(BlockingIOError):
            try:
                data = self.sock.recv(1 << 18)
            except BlockingIOError:
                raise
            except OSError:
                return None
            if not data:
                return None
            self._incoming += data
        messages = []
        while len(self._incoming) >= 4:
            size = int.from_bytes(self._incoming[:4], "big")
            if size > MAX_FRAME:
                raise ProtocolError(f"agent announced a message of {size} bytes")
            if len(self._incoming) < 4 + size:
                break
            messages.append(json.loads(self._incoming[4 : 4 + size]))
            del self._incoming[: 4 + size]
        return messages
