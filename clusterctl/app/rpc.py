"""Requests of the administration commands to a cluster's controller."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from scheduler.api import wire
from scheduler.api.errors import ProtocolError, Unavailable, from_code
from scheduler.api.frames import recv_frame, send_frame, unix_address

R = TypeVar("R", bound=wire.Message)

_decoder = msgspec.json.Decoder(wire.Reply)


#: Socket of the tunnel that ``clusterctl --host`` opened.
tunnel: Path | None = None


class NotRunning(Unavailable):
    """No controller listens in this home."""


@contextmanager
def connection(home: Path, timeout_s: float | None = 10.0) -> Iterator[socket.socket]:
    """A connection to the controller of ``home``.  Raises ``NotRunning``.

    With ``clusterctl --host`` it goes to the far controller, through the tunnel's socket.
    """
    path = tunnel or home / "controller.sock"
    fd: int | None = None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout_s)
        try:
            address, fd = unix_address(str(path))
            sock.connect(address)
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            raise NotRunning(f"no cluster runs in {home} (start it with: clusterctl up)") from None
        except OSError as error:
            raise Unavailable(f"cannot connect to {path}: {error.strerror or error}") from None
        finally:
            if fd is not None:
                os.close(fd)
        yield sock


def ask(sock: socket.socket, request: wire.Message, kind: type[R]) -> R:
    """Send ``request`` and read its answer, which must be a ``kind``.

    Raises the error that the controller answered, or ``Unavailable``/``ProtocolError``.
    """
    try:
        send_frame(sock, msgspec.json.encode(request))
        body = recv_frame(sock)
    except TimeoutError:
        raise Unavailable("the controller does not answer") from None
    except (OSError, EOFError) as error:
        raise Unavailable(f"the controller closed the connection: {error}") from None
    if body is None:
        raise Unavailable("the controller closed the connection")
    try:
        reply = _decoder.decode(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"the controller's answer is not understood: {error}") from None
    if isinstance(reply, wire.Error):
        raise from_code(reply.code, reply.message)
    if not isinstance(reply, kind):
        raise ProtocolError(f"the controller answered {type(reply).__name__}, not {kind.__name__}")
    return reply


def call(home: Path, request: wire.Message, kind: type[R], timeout_s: float | None = 10.0) -> R:
    """One request on a connection of its own; see ``ask`` and ``connection`` for errors."""
    with connection(home, timeout_s) as sock:
        return ask(sock, request, kind)
