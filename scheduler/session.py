"""One conversation with a command: frames in, one request at a time, answers in order.

The same for a connection to the unix socket and for a command that an agent relays.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from scheduler.api import wire
from scheduler.api.errors import ClusterError, ProtocolError

log = logging.getLogger(__name__)

#: Bytes of requests that may wait in one conversation before reading pauses.
MAX_WAITING = 1024 * 1024

_request_decoder = msgspec.json.Decoder(wire.Request)
_encode = msgspec.json.Encoder().encode


def decode_request(body: bytes) -> wire.Request:
    """The request in ``body``.  Raises ``ProtocolError`` that says what is wrong with it."""
    try:
        return _request_decoder.decode(body)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"Invalid request: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"Request is not JSON: {error}") from None


class Session:
    """State of one conversation.  ``on_request`` is called with one request at a time; the next
    one follows after ``answer``."""

    def __init__(
        self, uid: int, gid: int, on_request: Callable[[Session, wire.Request], None]
    ) -> None:
        self.uid = uid
        self.gid = gid
        self.closed = False
        self.link_lost = False  # the relaying agent went away, not the command
        self.on_closed: list[Callable[[], None]] = []
        #: Set while the connection is a step's stream: gets every further request.
        self.stream: Callable[[wire.Request], None] | None = None
        self.on_writable: Callable[[], None] | None = None
        self._on_request = on_request
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._busy = False
        self._pumping = False

    # ------------------------------------------------------------------ transport side

    def send_body(self, body: bytes) -> None:
        """Hand one frame body to the transport."""
        raise NotImplementedError

    def writable(self) -> bool:
        """False while the peer does not read what was sent."""
        raise NotImplementedError

    def hold_reading(self, hold: bool) -> None:
        """Stop or go on reading from the peer."""
        raise NotImplementedError

    def end(self) -> None:
        """Close the conversation after what was sent."""
        raise NotImplementedError

    # ------------------------------------------------------------------ incoming

    def feed(self, body: bytes) -> None:
        """A frame came in."""
        self._waiting.append(body)
        self._waiting_bytes += len(body)
        self.pump()
        if self._waiting_bytes > MAX_WAITING:
            self.hold_reading(True)

    def pump(self) -> None:
        """Work on what waits, as far as answers, and the peer's reading of them, allow."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._waiting and not self.closed and not self._busy:
                if self.stream is None and not self.writable():
                    break
                body = self._waiting.popleft()
                self._waiting_bytes -= len(body)
                self._take(body)
        finally:
            self._pumping = False
        if self._waiting_bytes <= MAX_WAITING:
            self.hold_reading(False)

    def _take(self, body: bytes) -> None:
        try:
            request = decode_request(body)
        except ProtocolError as error:
            self.send(wire.Error(code=error.code, message=error.message))
            return
        if self.stream is not None:
            self.stream(request)
            return
        self._busy = True
        try:
            self._on_request(self, request)
        except ClusterError as error:
            self.answer(wire.Error(code=error.code, message=error.message))
        except Exception:
            # One request that we cannot handle must not end the controller.
            log.exception("request failed", extra={"request": type(request).__name__})
            self.answer(
                wire.Error(code="error", message="Internal error of the controller (logged)")
            )

    def was_closed(self) -> None:
        """The peer is gone."""
        if self.closed:
            return
        self.closed = True
        self._waiting.clear()
        self._waiting_bytes = 0
        for callback in self.on_closed:
            callback()
        self.on_closed.clear()

    # ------------------------------------------------------------------ outgoing

    def send(self, message: Any) -> None:
        """Send a reply (or one of a stream)."""
        if self.closed:
            return
        body = _encode(message)
        try:
            self.send_body(body)
        except ProtocolError:
            error = wire.Error(
                code="error",
                message=f"The answer is too large ({len(body)} bytes); narrow the request",
            )
            self.send_body(_encode(error))

    def answer(self, message: Any) -> None:
        """Answer the request being worked on; the next one may follow."""
        self.send(message)
        self._busy = False
        self.pump()

    def become_stream(self, handler: Callable[[wire.Request], None]) -> None:
        """From now on every request goes to ``handler`` and nothing is answered by itself."""
        self.stream = handler
        self._busy = False
