"""``clusterctl relay``: this process's stdin and stdout become a connection to the controller.

The far end of ``clusterctl --host``: run over SSH, it speaks to the controller as the user who
logged in.  Standard library only.  Ends when either side does.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys

from scheduler.api.frames import unix_address

_CHUNK = 1 << 16


def main(path: str) -> int:
    """Connect to the socket at ``path`` and copy both ways; 1 with a message if nobody listens."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fd: int | None = None
    try:
        address, fd = unix_address(path)
        sock.connect(address)
    except OSError as error:
        sys.stderr.write(f"no cluster runs there: {path}: {error.strerror}\n")
        return 1
    finally:
        if fd is not None:
            os.close(fd)
    with sock:
        try:
            _copy(sock)
        except OSError:
            return 1
    return 0


def _copy(sock: socket.socket) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(sock, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is sock:
                    data = sock.recv(_CHUNK)
                    if not data:
                        return
                    _write_all(1, data)
                else:
                    data = os.read(0, _CHUNK)
                    if not data:  # no more requests; answers may still come
                        selector.unregister(0)
                        sock.shutdown(socket.SHUT_WR)
                    else:
                        sock.sendall(data)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
