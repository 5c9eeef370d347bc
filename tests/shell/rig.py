"""A controller in this process: real store, socket, loop and core; agents made up of memory.

async with Rig(tmp_path, nodes=2) as rig:
    job_id = await rig.submit("#!/bin/sh\\ntrue\\n")
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from scheduler.api import agentwire, wire
from scheduler.api.frames import encode_frame, read_frame, unix_address
from scheduler.api.records import Device, JobSpec, Node, Partition, Payload, TaskExit
from scheduler.core import machine
from scheduler.core.state import Settings
from scheduler.parts import Core, Setup
from scheduler.server import Server
from scheduler.service import Controller
from scheduler.store import FILE_NAME, Reader, Store, prepare

WAIT_S = 10.0
TO_AGENT = msgspec.json.Decoder(agentwire.ToAgent)


class PipeLink:
    """The controller's end of a link to a made-up agent."""

    def __init__(self) -> None:
        self.to_agent: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.to_controller: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.closed = False

    async def send(self, body: bytes) -> None:
        if self.closed:
            raise ConnectionError("link is closed")
        await self.to_agent.put(body)

    async def receive(self) -> bytes | None:
        return None if self.closed else await self.to_controller.get()

    async def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.to_agent.put_nowait(None)
            self.to_controller.put_nowait(None)


class FakeAgent:
    """Keeps what was launched; ends it when told, when the test says, or at once (``auto``)."""

    def __init__(self, node: Node, auto: bool) -> None:
        self.node = node
        self.auto = auto
        self.link: PipeLink | None = None
        self.received: list[agentwire.ToAgent] = []
        self.running: dict[tuple[int, str, int], agentwire.Launch] = {}
        self.ended: dict[tuple[int, str, int], agentwire.StepEnded] = {}
        self.starts: list[tuple[int, str, int]] = []
        self.changed = asyncio.Event()
        self.refuse = False
        self.dials = 0
        self.task: asyncio.Task[None] | None = None

    def say(self, message: agentwire.Message) -> None:
        if self.link is not None and not self.link.closed:
            self.link.to_controller.put_nowait(msgspec.json.encode(message))

    async def serve(self, link: PipeLink) -> None:
        self.link = link
        while (body := await link.to_agent.get()) is not None:
            message = TO_AGENT.decode(body)
            self.received.append(message)
            self.on_message(message)
            self.changed.set()

    def on_message(self, message: agentwire.ToAgent) -> None:
        if isinstance(message, agentwire.Welcome):
            self.say(self.registration())
            for ended in self.ended.values():
                self.say(ended)
        elif isinstance(message, agentwire.Launch):
            key = (message.job_id, message.step_id, message.attempt)
            if key in self.running or key in self.ended:
                return
            self.running[key] = message
            self.starts.append(key)
            self.say(agentwire.StepStarted(job_id=key[0], step_id=key[1], attempt=key[2]))
            if self.auto:
                self.end(key)
        elif isinstance(message, agentwire.EndStep):
            self.end((message.job_id, message.step_id, message.attempt), signal=9)
        elif isinstance(message, agentwire.EndJob):
            for key in [k for k in self.running if k[0] == message.job_id]:
                self.end(key, signal=9)
            self.say(agentwire.JobCleaned(job_id=message.job_id, attempt=message.attempt))
        elif isinstance(message, agentwire.Forget):
            for step in message.steps:
                self.ended.pop(tuple(step), None)

    def registration(self) -> agentwire.Register:
        steps = [
            agentwire.StepReport(
                job_id=k[0], step_id=k[1], attempt=k[2], tasks=launch.tasks, running=True
            )
            for k, launch in self.running.items()
        ]
        steps += [
            agentwire.StepReport(
                job_id=k[0], step_id=k[1], attempt=k[2], tasks=[], running=False, exits=m.exits
            )
            for k, m in self.ended.items()
        ]
        return agentwire.Register(
            protocol=wire.PROTOCOL,
            version="test",
            node=self.node.name,
            boot_id="b",
            agent_id=f"{self.node.name}-1",
            pid=4242,
            cpus=self.node.cpus,
            mem_mib=self.node.mem_mib,
            device_cores=[d.cores for d in self.node.devices],
            boot_s=1.0,
            start_s=2.0,
            steps=steps,
        )

    def end(self, key: tuple[int, str, int], code: int = 0, signal: int = 0) -> None:
        launch = self.running.pop(key, None)
        if launch is None:
            return
        exits = [TaskExit(task=t, code=code, signal=signal, at_s=1.0) for t in launch.tasks]
        clean = not any(k[0] == key[0] for k in self.running)
        message = agentwire.StepEnded(
            job_id=key[0], step_id=key[1], attempt=key[2], exits=exits, clean=clean
        )
        self.ended[key] = message
        self.say(agentwire.TasksExited(job_id=key[0], step_id=key[1], attempt=key[2], exits=exits))
        self.say(message)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


class FakeTransport:
    """Opens links to the made-up agents."""

    def __init__(self, agents: dict[str, FakeAgent]) -> None:
        self.agents = agents

    async def open(self, node: str) -> PipeLink:
        agent = self.agents[node]
        agent.dials += 1
        if agent.refuse:
            raise ConnectionRefusedError("refused by the test")
        link = PipeLink()
        agent.task = asyncio.create_task(agent.serve(link))
        return link

    async def close(self) -> None:
        return None


class Client:
    """One connection to the controller's socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, message: wire.Message) -> None:
        self.writer.write(encode_frame(msgspec.json.encode(message)))

    async def receive(self) -> Any:
        async with asyncio.timeout(WAIT_S):
            body = await read_frame(self.reader)
        return None if body is None else msgspec.json.decode(body, type=wire.Reply)

    async def ask(self, message: wire.Message) -> Any:
        self.send(message)
        return await self.receive()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


def make_nodes(count: int) -> list[Node]:
    return [
        Node(
            name=f"n{i:03}",
            addr=f"127.0.7.{i}",
            cpus=16,
            mem_mib=65536,
            devices=[Device(index=d, cores=2) for d in range(16)],
            instance_type="trn1.32xlarge",
        )
        for i in range(1, count + 1)
    ]


def make_setup(home: Path, transport: FakeTransport, nodes: int, settings: dict[str, Any]) -> Setup:
    names = [n.name for n in make_nodes(nodes)]
    return Setup(
        home=home,
        config_path=home / "cluster.toml",
        settings=lambda: Settings(**{"cluster": "peer", **settings}),
        nodes=lambda: make_nodes(nodes),
        partitions=lambda: [
            Partition(name="main", nodes=names, default=True),
            Partition(name="debug", nodes=names[:2], max_time_s=1800),
        ],
        transports=dict.fromkeys(names, transport),
        hosts={n.name: n.addr for n in make_nodes(nodes)},
        real_hosts=dict.fromkeys(names, "testhost"),
        heartbeat_s=30.0,
        host="testhost",
        version="test",
    )


class Rig:
    """Controller, socket and agents; ``crash`` and ``start`` again on the same home."""

    def __init__(
        self,
        home: Path,
        nodes: int = 1,
        auto: bool = True,
        core: Core = machine,
        wrap: Callable[[Any], Any] | None = None,
        **settings: Any,
    ) -> None:
        self.home = home
        self.agents = {n.name: FakeAgent(n, auto) for n in make_nodes(nodes)}
        self.transport = FakeTransport(self.agents)
        self.setup = make_setup(home, self.transport, nodes, settings)
        self.core = core
        self.wrap = wrap
        self.clients: list[Client] = []
        self.controller: Controller
        self.server: Server

    async def __aenter__(self) -> Rig:
        await self.start()
        return self

    async def start(self, wait: bool = True) -> None:
        path = self.home / FILE_NAME
        prepare(path)
        store = Store.open(path)
        if self.wrap is not None:
            store._conn = self.wrap(store._conn)
        self.controller = Controller(self.setup, store, Reader(path), self.core)
        self.server = Server(self.home / "controller.sock", self.controller.dispatch)
        self.controller.start()
        await self.server.start()
        if wait:
            await self.nodes_up()

    async def nodes_up(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while not all(n.responding for n in self.controller.state.nodes.values()):
                await asyncio.sleep(0.005)

    async def stop(self) -> None:
        for client in self.clients:
            await client.close()
        self.clients.clear()
        await self.server.stop()
        await self.controller.stop()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()
        for agent in self.agents.values():
            if agent.task is not None:
                agent.task.cancel()

    async def client(self) -> Client:
        address, fd = unix_address(str(self.home / "controller.sock"))
        reader, writer = await asyncio.open_unix_connection(address)
        assert fd is None
        client = Client(reader, writer)
        self.clients.append(client)
        return client

    async def ask(self, message: wire.Message) -> Any:
        client = await self.client()
        reply = await client.ask(message)
        await client.close()
        self.clients.remove(client)
        return reply

    async def submit(self, script: str = "#!/bin/sh\ntrue\n", **spec: Any) -> int:
        reply = await self.ask(submission(script, **spec))
        assert isinstance(reply, wire.Submitted), reply
        return reply.job_id

    async def ended(self, job_id: int) -> dict[str, Any]:
        reply = await self.ask(wire.WaitJob(job_id=job_id))
        assert isinstance(reply, wire.Jobs), reply
        return reply.jobs[0]


def submission(script: str = "#!/bin/sh\ntrue\n", key: str = "", **spec: Any) -> wire.Submit:
    payload = Payload(script=script, env={"PATH": "/bin", "HOME": "/root"})
    return wire.Submit(spec=JobSpec(**{"name": "job", **spec}), payload=payload, key=key)
