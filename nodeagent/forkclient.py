"""The agent's hold on its fork server: start it, give it orders, start it again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from nodeagent.links import FramePeer
from nodeagent.order import Key

log = logging.getLogger("nodeagent")

RESTART_FIRST_S = 0.1
RESTART_MAX_S = 5.0


class ForkClient(FramePeer):
    """``on_trouble(key, reason, died)`` hears of supervisors that could not be forked or ended
    badly; orders without a sign of life of their supervisor go again to a new fork server, where
    the journal's claim keeps the step from starting twice."""

    def __init__(
        self, node_dir: str, generation: str, on_trouble: Callable[[Key, str, bool], None]
    ) -> None:
        super().__init__()
        self.node_dir = node_dir
        self.generation = generation
        self.on_trouble = on_trouble
        self.pending: dict[Key, bytes] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self.isolation_trouble: str | None = None
        self.stopping = False
        self.ready = asyncio.Event()
        self._wait_s = RESTART_FIRST_S

    async def start(self) -> None:
        """Start the process; raises ``OSError``."""
        ours, theirs = socket.socketpair()
        package_root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        env = dict(os.environ)
        known = env.get("PYTHONPATH", "")
        env["PYTHONPATH"] = f"{package_root}:{known}" if known else package_root
        with theirs, open(os.path.join(self.node_dir, "agent.log"), "ab") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "nodeagent.forkserver",
                    self.node_dir,
                    self.generation,
                    str(theirs.fileno()),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                env=env,
                start_new_session=True,
            )
        ours.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=ours)

    def order(self, key: Key, body: bytes) -> None:
        """Have a supervisor started for the ``Launch`` in ``body``."""
        self.pending[key] = body
        if self.ready.is_set():
            self.send(body)

    def alive(self, key: Key) -> None:
        """The step's supervisor has spoken."""
        self.pending.pop(key, None)

    def frame(self, body: bytes) -> None:
        message: dict[str, Any] = json.loads(body)
        kind = message["type"]
        if kind == "Ready":
            if message["trouble"] and self.isolation_trouble is None:
                log.warning(
                    "steps run without host name and /etc/hosts of their own: %s",
                    message["trouble"],
                )
            self.isolation_trouble = message["trouble"]
            self._wait_s = RESTART_FIRST_S
            self.ready.set()
            for order in list(self.pending.values()):
                self.send(order)
        else:
            key = Key(*message["key"])
            self.on_trouble(key, message["reason"], kind == "Exited")

    def closed(self) -> None:
        self.ready.clear()
        if self.process is not None:
            self.process.poll()
        if not self.stopping:
            log.error("the fork server is gone; starting another")
            asyncio.get_running_loop().call_later(self._wait_s, self._restart)
            self._wait_s = min(self._wait_s * 2, RESTART_MAX_S)

    def _restart(self) -> None:
        if self.stopping:
            return
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._buffer.clear()
        task = asyncio.get_running_loop().create_task(self.start())
        task.add_done_callback(self._restarted)

    def _restarted(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.error("cannot start the fork server: %s", task.exception())
            asyncio.get_running_loop().call_later(RESTART_MAX_S, self._restart)

    def stop(self) -> None:
        """End it; supervisors go on."""
        self.stopping = True
        if self.transport is not None:
            # At once: closing the transport waits for a turn of the loop, which waits here.
            with contextlib.suppress(OSError):
                self.transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        self.close()
        if self.process is not None:
            try:
                self.process.wait(2)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
