"""Links to the agents: one task a node that dials, greets, listens and dials again.

The controller speaks first (``Welcome``); the agent's ``Register`` is the full truth about the
node.  What the core is to know becomes ``AgentSaid`` events; the rest goes to the hubs.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from scheduler.api import agentwire
from scheduler.api.errors import ClusterError, ProtocolError
from scheduler.api.wire import PROTOCOL
from scheduler.transport.base import Link, Transport

log = logging.getLogger(__name__)

#: Dials at a time over all nodes.
MAX_DIALS = 10
FIRST_RETRY_S = 0.1
LAST_RETRY_S = 5.0
#: Seconds the agent has to answer ``Welcome``.
REGISTER_S = 15.0
#: Heartbeats that may be missing before the link counts as dead.
MISSED_HEARTBEATS = 3
#: Bytes and messages that may wait for a slow link; beyond, it is cut and set up anew.
MAX_QUEUED_BYTES = 64 * 1024 * 1024
MAX_QUEUED = 20_000
#: Queued bytes under which relayed commands and streams may go on.
LOW_WATER = 1024 * 1024

_decoder = msgspec.json.Decoder(agentwire.FromAgent)
_encode = msgspec.json.Encoder().encode

CoreMessage = (
    agentwire.Register
    | agentwire.Heartbeat
    | agentwire.StepStarted
    | agentwire.LaunchFailed
    | agentwire.TasksExited
    | agentwire.StepEnded
    | agentwire.JobCleaned
)


class Listener(Protocol):
    """Who is told what comes over the links."""

    def agent_said(self, node: str, message: CoreMessage) -> None:
        """A message for the core."""

    def agent_passed(
        self,
        node: str,
        message: agentwire.Output | agentwire.PmiBarrierIn | agentwire.RelayRequest,
    ) -> None:
        """A message for the hubs."""

    def link_lost(self, node: str, why: str) -> None:
        """The link of a registered agent is gone."""

    def link_drained(self, node: str) -> None:
        """The link's queue is short again."""


class _Outbox:
    """Bounded queue of encoded messages to one agent."""

    __slots__ = ("_bodies", "_was_high", "bytes", "ready")

    def __init__(self) -> None:
        self._bodies: deque[bytes] = deque()
        self.bytes = 0
        self.ready = asyncio.Event()
        self._was_high = False

    def put(self, body: bytes) -> bool:
        """Queue; False when the bounds are exceeded."""
        self._bodies.append(body)
        self.bytes += len(body)
        self._was_high = self._was_high or self.bytes > LOW_WATER
        self.ready.set()
        return len(self._bodies) <= MAX_QUEUED and self.bytes <= MAX_QUEUED_BYTES

    async def take(self) -> bytes:
        """The next body, waiting for one."""
        while not self._bodies:
            self.ready.clear()
            await self.ready.wait()
        body = self._bodies.popleft()
        self.bytes -= len(body)
        return body

    def drained(self) -> bool:
        """True once after the queue was long and is short again."""
        if self._was_high and self.bytes <= LOW_WATER:
            self._was_high = False
            return True
        return False

    def empty(self) -> bool:
        """Nothing is waiting."""
        return not self._bodies


class _NodeLink:
    """What is known of one node's link now."""

    __slots__ = ("last_error", "link", "outbox", "pid", "task", "up")

    def __init__(self) -> None:
        self.outbox: _Outbox | None = None
        self.link: Link | None = None
        self.up = False
        self.pid = 0
        self.last_error = ""
        self.task: asyncio.Task[None] | None = None


class Links:
    """All links.  ``transport_of`` gives the transport of a node, ``welcome`` its greeting."""

    def __init__(
        self,
        listener: Listener,
        transports: Mapping[str, Transport],
        welcome: Callable[[str], agentwire.Welcome],
        heartbeat_s: float,
    ) -> None:
        self._listener = listener
        self._transports = transports
        self._welcome = welcome
        self._silence_s = heartbeat_s * MISSED_HEARTBEATS
        self._nodes = {name: _NodeLink() for name in transports}
        self._dials = asyncio.Semaphore(MAX_DIALS)
        self._open = asyncio.Event()
        self._stopping = False

    def start(self) -> None:
        """Have a task for every node; they dial from ``resume`` on."""
        for name, node in self._nodes.items():
            node.task = asyncio.create_task(self._run(name, node), name=f"link {name}")

    async def stop(self) -> None:
        """Close all links; agents and what they run go on."""
        self._stopping = True
        tasks = [n.task for n in self._nodes.values() if n.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def reset(self) -> None:
        """Cut every link and wait for ``resume``: the core starts from the store again and the
        agents are to say everything anew.  No ``link_lost`` is told."""
        self._open.clear()
        for name, node in self._nodes.items():
            node.up = False
            if node.task is not None:
                node.task.cancel()
            node.task = asyncio.create_task(self._run(name, node), name=f"link {name}")

    def resume(self) -> None:
        """Dial; after ``start`` and after ``reset``."""
        self._open.set()

    # ------------------------------------------------------------------ outgoing

    def send(self, node: str, message: agentwire.ToAgent) -> None:
        """Queue a message; dropped when the link is down (registration derives it again)."""
        found = self._nodes.get(node)
        if found is None or found.outbox is None or not found.up:
            return
        if not found.outbox.put(_encode(message)):
            self._cut(node, found, "the agent does not read its messages")

    def _cut(self, name: str, node: _NodeLink, why: str) -> None:
        if not node.up:
            return
        node.up = False
        log.warning("link cut: %s", why, extra={"node": name})
        if node.task is not None:
            node.task.cancel()
            node.task = asyncio.create_task(self._run(name, node), name=f"link {name}")
        self._listener.link_lost(name, why)

    def queued(self, node: str) -> int:
        """Bytes waiting for the link of ``node``."""
        found = self._nodes.get(node)
        return found.outbox.bytes if found is not None and found.outbox is not None else 0

    async def flush(self, timeout_s: float) -> None:
        """Wait until everything queued was handed to the links, at most ``timeout_s``."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        for node in self._nodes.values():
            while node.up and node.outbox is not None and not node.outbox.empty():
                if loop.time() > deadline:
                    return
                await asyncio.sleep(0.005)

    def errors(self) -> dict[str, str]:
        """Nodes that cannot be reached now, with the reason."""
        return {n: s.last_error for n, s in self._nodes.items() if s.last_error and not s.up}

    # ------------------------------------------------------------------ one node

    async def _run(self, name: str, node: _NodeLink) -> None:
        retry_s = FIRST_RETRY_S
        while not self._stopping:
            await self._open.wait()
            started = asyncio.get_running_loop().time()
            why = await self._session(name, node)
            if why != node.last_error:
                log.warning("no link: %s", why, extra={"node": name})
                node.last_error = why
            if asyncio.get_running_loop().time() - started > 2 * LAST_RETRY_S:
                retry_s = FIRST_RETRY_S  # it was up for a while
            # Jitter, so that nodes that fell together do not come back in step.
            await asyncio.sleep(retry_s * random.uniform(0.8, 1.2))
            retry_s = min(2 * retry_s, LAST_RETRY_S)

    async def _session(self, name: str, node: _NodeLink) -> str:
        """Dial and talk until the link ends; says why it ended."""
        try:
            async with self._dials:
                link = await self._transports[name].open(name)
        except ClusterError as error:
            return error.message
        except (OSError, EOFError, TimeoutError) as error:
            return str(error) or type(error).__name__
        except Exception:
            log.exception("dialling failed", extra={"node": name})
            return "internal error while dialling (logged)"
        sender: asyncio.Task[None] | None = None
        mine = node.outbox = _Outbox()
        try:
            await link.send(_encode(self._welcome(name)))
            register = await self._register(name, link)
            node.up = True
            node.pid = register.pid
            node.last_error = ""
            log.info("agent registered", extra={"node": name, "pid": register.pid})
            self._listener.agent_said(name, register)
            sender = asyncio.create_task(self._sender(name, link, mine))
            why = await self._listen(name, link, sender)
        except ClusterError as error:
            why = error.message
        except (OSError, EOFError, TimeoutError) as error:
            why = str(error) or type(error).__name__
        finally:
            if sender is not None:
                sender.cancel()
            if node.outbox is mine:
                node.outbox = None
            await link.close()
        if node.up:
            node.up = False
            self._listener.link_lost(name, why)
        return why

    async def _register(self, name: str, link: Link) -> agentwire.Register:
        async with asyncio.timeout(REGISTER_S):
            body = await link.receive()
        if body is None:
            raise ProtocolError("the agent closed the link at once")
        message = self._decode(body)
        if not isinstance(message, agentwire.Register):
            raise ProtocolError(f"the agent began with {type(message).__name__}, not Register")
        if message.protocol != PROTOCOL:
            raise ProtocolError(
                f"the agent speaks protocol {message.protocol}, the controller {PROTOCOL}; "
                "restart the agent with the same version"
            )
        if message.node != name:
            raise ProtocolError(f"the agent says it is {message.node}, not {name}")
        return message

    @staticmethod
    def _decode(body: bytes) -> agentwire.FromAgent:
        try:
            return _decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"the agent sent what is no message: {error}") from None

    async def _listen(self, name: str, link: Link, sender: asyncio.Task[None]) -> str:
        while True:
            async with asyncio.timeout(self._silence_s):
                body = await link.receive()
            if body is None:
                return "the agent closed the link"
            if sender.done():
                return "sending failed"
            message = self._decode(body)
            if isinstance(
                message, agentwire.Output | agentwire.PmiBarrierIn | agentwire.RelayRequest
            ):
                self._listener.agent_passed(name, message)
            else:
                self._listener.agent_said(name, message)

    async def _sender(self, name: str, link: Link, outbox: _Outbox) -> None:
        try:
            while True:
                await link.send(await outbox.take())
                if outbox.drained():
                    self._listener.link_drained(name)
        except (OSError, EOFError):
            await link.close()  # wakes the reader, which ends the session
