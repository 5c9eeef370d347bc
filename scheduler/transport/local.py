"""Links to agents on this machine: the unix socket in each node's directory."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from scheduler.api.errors import Unavailable
from scheduler.api.frames import unix_address
from scheduler.config import ClusterConfig
from scheduler.provision import local, proc
from scheduler.transport.stream import StreamLink

#: How long a fresh agent may take until its socket answers, seconds.
START_TIMEOUT_S = 30.0


class LocalTransport:
    """Opens links to local nodes; starts an agent that does not run."""

    def __init__(self, config: ClusterConfig, start_timeout_s: float = START_TIMEOUT_S) -> None:
        self._config = config
        self._start_timeout_s = start_timeout_s

    async def open(self, node: str) -> StreamLink:
        """Connect to the agent of ``node``.  Raises ``Unavailable`` with the reason."""
        node_dir = self._config.node_dir(node)
        link = await self._connect(node_dir)
        if link is not None:
            return link
        document = local.node_document(self._config, node)
        try:
            process = await asyncio.to_thread(local.start_agent, node_dir, document)
        except OSError as error:
            raise Unavailable(f"{node}: cannot start the agent: {error}") from None
        return await self._wait(node, node_dir, process)

    async def close(self) -> None:
        """Nothing is held between links."""

    async def _wait(self, node: str, node_dir: Path, process: proc.ProcessId) -> StreamLink:
        """Connect as soon as the agent listens, as long as it lives."""
        pause_s = 0.01
        deadline = asyncio.get_running_loop().time() + self._start_timeout_s
        while True:
            alive = process.alive()  # before the attempt: it may end just after answering
            link = await self._connect(node_dir)
            if link is not None:
                return link
            if not alive:
                line = proc.last_line(node_dir / "agent.log")
                raise Unavailable(f"{node}: the agent ended at its start: {line}")
            if asyncio.get_running_loop().time() > deadline:
                raise Unavailable(
                    f"{node}: the agent (pid {process.pid}) does not listen on "
                    f"{node_dir / 'agent.sock'} after {self._start_timeout_s:g} s"
                )
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.2)

    @staticmethod
    async def _connect(node_dir: Path) -> StreamLink | None:
        """A link, None when nobody listens."""
        fd: int | None = None
        try:
            address, fd = unix_address(str(node_dir / "agent.sock"))
            reader, writer = await asyncio.open_unix_connection(address)
        except OSError:
            return None
        finally:
            if fd is not None:
                os.close(fd)
        return StreamLink(reader, writer)
