"""Commands that run on a node and reach the controller through its agent.

Each is a conversation like one on the socket; the agent vouches for the peer's uid.
"""

from __future__ import annotations

from collections.abc import Callable

from scheduler.api import agentwire, wire
from scheduler.api.errors import ProtocolError
from scheduler.api.frames import MAX_FRAME
from scheduler.session import Session

Send = Callable[[str, agentwire.ToAgent], None]

#: Bytes queued on a node's link above which its relayed commands get no further output.
HIGH_WATER = 4 * 1024 * 1024


class RelaySession(Session):
    """A conversation whose frames travel inside the node's link."""

    def __init__(self, hub: RelayHub, node: str, conn: int, uid: int, gid: int) -> None:
        super().__init__(uid, gid, hub.on_request)
        self._hub = hub
        self._node = node
        self._conn = conn

    def send_body(self, body: bytes) -> None:
        """Wrap one frame.  Raises ``ProtocolError`` when it is too large for the link."""
        # Quoting may double the size, and the wrapping frame has the same limit.
        if len(body) > MAX_FRAME // 2:
            raise ProtocolError("too large to be relayed")
        frame = agentwire.RelayFrame(conn=self._conn, data=body.decode("utf-8"))
        self._hub.send(self._node, frame)

    def writable(self) -> bool:
        """False while the link has much to carry."""
        return self._hub.queued(self._node) < HIGH_WATER

    def hold_reading(self, hold: bool) -> None:
        """The agent reads on; what a command may have waiting is bounded by ``RelayHub``."""

    def end(self) -> None:
        """Tell the agent to close the command's connection."""
        self._hub.send(self._node, agentwire.RelayFrame(conn=self._conn, close=True))
        self._hub.drop(self._node, self._conn)
        self.was_closed()


class RelayHub:
    """The relayed conversations of all nodes."""

    def __init__(
        self,
        send: Send,
        queued: Callable[[str], int],
        on_request: Callable[[Session, wire.Request], None],
    ) -> None:
        self.send = send
        self.queued = queued
        self.on_request = on_request
        self._sessions: dict[tuple[str, int], RelaySession] = {}

    def on_relay(self, node: str, message: agentwire.RelayRequest) -> None:
        """A frame of a command on ``node``, or its end."""
        key = (node, message.conn)
        session = self._sessions.get(key)
        if message.close:
            if session is not None:
                del self._sessions[key]
                session.was_closed()
            return
        if session is None:
            session = RelaySession(self, node, message.conn, message.uid, message.gid)
            self._sessions[key] = session
        session.feed(message.data.encode("utf-8"))

    def drop(self, node: str, conn: int) -> None:
        """The conversation is over."""
        self._sessions.pop((node, conn), None)

    def link_drained(self, node: str) -> None:
        """The link of ``node`` has room again."""
        for (name, _), session in list(self._sessions.items()):
            if name == node:
                if session.on_writable is not None:
                    session.on_writable()
                session.pump()

    def link_lost(self, node: str) -> None:
        """All conversations over that link are gone; the commands dial again."""
        for key, session in list(self._sessions.items()):
            if key[0] == node:
                del self._sessions[key]
                session.link_lost = True
                session.was_closed()

    def __len__(self) -> int:
        return len(self._sessions)
