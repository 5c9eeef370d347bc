"""A small controller for tests of the commands: answers from a table, keeps what was asked.

Every request is decoded with the real wire types, so a command that sends something else fails.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from scheduler.api import wire
from scheduler.api.frames import recv_frame, send_frame

Answer = Any
Handler = Callable[[Any], Answer]


class FakeController:
    """Listens on ``path``; ``answers`` maps a request's class to a reply or a function.

    A function may return a list: all of it is sent.  ``None`` closes the connection without an
    answer, as a controller does that is killed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.asked: list[Any] = []
        self.answers: dict[type, Answer | Handler] = {
            wire.Ping: wire.Pong(version="0", protocol=1, cluster="peer", host="vm", pid=1)
        }
        self.errors: list[str] = []
        self._decoder = msgspec.json.Decoder(wire.Request)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen(16)
        self._links: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._socket.accept()
            except OSError:
                return
            self._links.append(link)
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        with link:
            while True:
                try:
                    body = recv_frame(link)
                except OSError:
                    return
                if body is None:
                    return
                try:
                    request = self._decoder.decode(body)
                except msgspec.ValidationError as error:
                    self.errors.append(f"{error}: {body!r}")
                    return
                self.asked.append(request)
                answer = self.answers.get(type(request))
                if callable(answer):
                    answer = answer(request)
                if answer is None:
                    return
                for message in answer if isinstance(answer, list) else [answer]:
                    send_frame(link, msgspec.json.encode(message))

    def of(self, kind: type) -> list[Any]:
        """The requests of one class, in order."""
        return [r for r in self.asked if isinstance(r, kind)]

    def stop(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(5)
        for link in self._links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()
        os.unlink(self.path)
