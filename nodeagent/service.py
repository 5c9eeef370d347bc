"""The shell of the agent: sockets, processes and clock around :mod:`nodeagent.core`."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import logging
import os
import platform
import signal
from collections import deque

import msgspec

from nodeagent import isolate, procs
from nodeagent.core import AgentState, effects, events, handle
from nodeagent.devices import Devices
from nodeagent.forkclient import ForkClient
from nodeagent.forkserver import SUPERVISOR_SOCKET
from nodeagent.journal import Journal
from nodeagent.links import FramePeer, listen
from nodeagent.machine import Machine
from nodeagent.order import Key
from nodeagent.taskenv import NodeConfig
from scheduler.api.agentwire import (
    LaunchFailed,
    Output,
    PmiBarrierIn,
    Register,
    StepEnded,
    StepStarted,
    TasksExited,
    ToAgent,
    Welcome,
)
from scheduler.api.wire import PROTOCOL, Error, Message

log = logging.getLogger("nodeagent")

AGENT_SOCKET = "agent.sock"
SWEEP_WAIT_S = 0.02
SWEEP_WAIT_MAX_S = 1.0


class Hello(Message):
    """First message of a supervisor on each of its connections."""

    job_id: int
    step_id: str
    attempt: int
    pid: int


FromSupervisor = (
    Hello | StepStarted | LaunchFailed | TasksExited | StepEnded | Output | PmiBarrierIn
)
_supervisor_decoder = msgspec.json.Decoder(FromSupervisor)
_controller_decoder = msgspec.json.Decoder(ToAgent)
_outcome_decoder = msgspec.json.Decoder(StepEnded | LaunchFailed)
_encoder = msgspec.json.Encoder()


def _abnormal(event: events.AnyEvent) -> bool:
    """Whether processes of a step were killed, which cannot have given back their devices."""
    match event:
        case events.Swept():
            return True
        case events.SupervisorSaid(_, StepEnded(exits=exits)):
            return any(one.signal for one in exits)
        case events.SupervisorDied(_, StepEnded(exits=exits)):
            return any(one.signal for one in exits)
    return False


class SupervisorPeer(FramePeer):
    """A supervisor's connection to NODE_DIR/steps.sock."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self.agent = agent
        self.key: Key | None = None

    def opened(self) -> None:
        if self.uid != os.geteuid():
            self.close()

    def frame(self, body: bytes) -> None:
        try:
            message = _supervisor_decoder.decode(body)
        except msgspec.DecodeError as error:
            self.refused(str(error))
            self.close()
            return
        if isinstance(message, Hello):
            self.key = Key(message.job_id, message.step_id, message.attempt)
            self.agent.supervisor_came(self.key, self)
        elif self.key is not None:
            self.agent.post(events.SupervisorSaid(self.key, message))

    def closed(self) -> None:
        if self.key is not None:
            self.agent.supervisor_left(self.key, self)

    def refused(self, reason: str) -> None:
        log.error("supervisor of %s: %s", self.key, reason)


class OuterPeer(FramePeer):
    """A connection to agent.sock: the controller's link, or a command on this node."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self.agent = agent
        self.number = 0  # 0: has not said yet what it is
        self.is_link = False

    def opened(self) -> None:
        if self.uid not in (0, os.geteuid()):
            log.warning("refused a connection of uid %d", self.uid)
            self.close()

    def frame(self, body: bytes) -> None:
        if self.is_link:
            self._from_controller(body)
            return
        try:
            kind = json.loads(body).get("type", "")
        except (ValueError, AttributeError):
            self._answer_error("protocol", "the message is not a JSON object")
            return
        if self.number == 0:
            self.number = self.agent.admit(self)
        if kind == "Welcome":
            self.is_link = True
            self._from_controller(body)
        else:
            self.agent.post(events.CommandSaid(self.number, self.uid, self.gid, body.decode()))

    def _from_controller(self, body: bytes) -> None:
        try:
            message = _controller_decoder.decode(body)
        except msgspec.DecodeError as error:
            self.refused(f"the controller's message is not understood: {error}")
            self.close()
            return
        if isinstance(message, Welcome) and self.agent.links.get(self.number) is not self:
            self.agent.links[self.number] = self
            self.agent.commands.pop(self.number, None)
            self.agent.post(events.LinkOpened(self.number, message))
        else:
            self.agent.post(events.ControllerSaid(self.number, message))

    def _answer_error(self, code: str, text: str) -> None:
        self.send(_encoder.encode(Error(code=code, message=text)))
        self.close()

    def closed(self) -> None:
        self.agent.left(self.number)

    def refused(self, reason: str) -> None:
        log.error("connection %d: %s", self.number, reason)


class Agent:
    """Carries out the effects of the core; one per node directory."""

    def __init__(self, config: NodeConfig, generation: str) -> None:
        self.config = config
        self.generation = generation
        self.journal = Journal(config.dir)
        self.machine = Machine()
        self.devices = Devices(config)
        self.state = AgentState(
            cluster=config.cluster, identity=self._identity(generation, self.devices.prepare())
        )
        self.links: dict[int, OuterPeer] = {}
        self.commands: dict[int, OuterPeer] = {}
        self.supervisors: dict[Key, SupervisorPeer] = {}
        self.forks = ForkClient(config.dir, generation, self._fork_trouble)
        self.stopped = asyncio.Event()
        self._numbers = 0
        self._inbox: deque[events.AnyEvent] = deque()
        self._busy = False
        self._heartbeat: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def _identity(self, generation: str, device_cores: list[int]) -> Register:
        try:
            version = importlib.metadata.version("clusterctl")
        except importlib.metadata.PackageNotFoundError:
            version = "0"  # run from a source tree
        return Register(
            protocol=PROTOCOL,
            version=version,
            node=self.config.node,
            boot_id=procs.boot_id(),
            agent_id=generation,
            pid=os.getpid(),
            cpus=self.config.cpus,
            mem_mib=self.config.mem_mib,
            device_cores=device_cores,
            boot_s=self.machine.boot_s,
            start_s=self.machine.now_s(),
            os=f"{platform.system()} {platform.release()}",
            arch=platform.machine(),
        )

    # ------------------------------------------------------------ life

    async def run(self) -> None:
        """Until told to stop.  Raises ``OSError`` when the node directory is not usable."""
        path = self.config.dir
        self.journal.begin(self.generation, others_enter=os.geteuid() == 0)
        isolate.write_hosts(path, self.config.hosts)
        self._adopt()
        inner = await listen(
            os.path.join(path, SUPERVISOR_SOCKET), lambda: SupervisorPeer(self), mode=0o600
        )
        await self.forks.start()
        outer = await listen(os.path.join(path, AGENT_SOCKET), lambda: OuterPeer(self), mode=0o600)
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self.stopped.set)
        log.info("agent of node %s is up, pid %d", self.config.node, os.getpid())
        try:
            await self.stopped.wait()
        finally:
            outer.close()
            inner.close()
            for peer in [*self.links.values(), *self.commands.values()]:
                peer.close()
            await asyncio.sleep(0)
            self.forks.stop()
            for name in (AGENT_SOCKET, SUPERVISOR_SOCKET):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(path, name))
            log.info("agent of node %s ends", self.config.node)

    def _adopt(self) -> None:
        """Take over the steps of an earlier agent."""
        for key, identity in self.journal.steps():
            alive = self._lives(identity)
            outcome = self._outcome(key)
            if alive and outcome is None:
                self._watch(key, int(identity["pid"]))
            tasks = identity.get("tasks", [])
            self.post(events.StepFound(key, tasks, alive, outcome))

    def _lives(self, identity: dict[str, object]) -> bool:
        pid, start = identity.get("pid"), identity.get("start")
        if not isinstance(pid, int) or not isinstance(start, int):
            return False
        return identity.get("boot_id") == procs.boot_id() and procs.alive(pid, start)

    def _outcome(self, key: Key) -> StepEnded | LaunchFailed | None:
        raw = self.journal.read_bytes(key, "exit.json")
        if raw is None:
            return None
        try:
            return _outcome_decoder.decode(raw)
        except msgspec.DecodeError as error:
            log.error("spool %s/exit.json: %s", key, error)
            return None

    def _watch(self, key: Key, pid: int) -> None:
        """Hear of the death of a supervisor that is not connected."""
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            self._check_supervisor(key)
            return
        loop = asyncio.get_running_loop()

        def died() -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            if key not in self.supervisors:
                self._check_supervisor(key)

        loop.add_reader(descriptor, died)

    # ------------------------------------------------------------ events

    def post(self, event: events.AnyEvent) -> None:
        """Feed the core; effects are carried out in order, one event after the other."""
        if _abnormal(event):
            self.devices.sweep()
        self._inbox.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._inbox:
                for effect in handle(self.state, self._inbox.popleft()):
                    self._carry_out(effect)
        finally:
            self._busy = False

    def admit(self, peer: OuterPeer) -> int:
        """Number a new connection."""
        self._numbers += 1
        self.commands[self._numbers] = peer
        return self._numbers

    def left(self, number: int) -> None:
        """A connection to agent.sock is gone."""
        if self.links.pop(number, None) is not None:
            self.post(events.LinkClosed(number))
        elif self.commands.pop(number, None) is not None:
            self.post(events.CommandLeft(number))

    def supervisor_came(self, key: Key, peer: SupervisorPeer) -> None:
        self.supervisors[key] = peer
        self.forks.alive(key)
        tasks: list[int] = []
        if key not in self.state.steps:
            tasks = (self.journal.read(key, "stepd.json") or {}).get("tasks", [])
        kept = key in self.state.steps or self.journal.has(key)
        self.post(events.SupervisorCame(key, tasks, kept))

    def supervisor_left(self, key: Key, peer: SupervisorPeer) -> None:
        if self.supervisors.get(key) is peer:
            del self.supervisors[key]
            self._check_supervisor(key)

    def _check_supervisor(self, key: Key) -> None:
        """Its connection ended: has it done its work, does it live, or is it lost?"""
        step = self.state.steps.get(key)
        if step is None or step.over:
            if step is not None:
                self.post(events.SupervisorLeft(key))
            return
        outcome = self._outcome(key)
        identity = self.journal.read(key, "stepd.json")
        if outcome is None and identity is not None and self._lives(identity):
            self.post(events.SupervisorLeft(key))
            self._watch(key, int(identity["pid"]))
            return
        if outcome is None:
            log.error("the supervisor of step %s is gone without a word", key)
        self.post(events.SupervisorDied(key, outcome))

    def _fork_trouble(self, key: Key, reason: str, died: bool) -> None:
        if key in self.supervisors:
            return  # its connection tells
        if died and self.journal.has(key):
            log.error("supervisor of step %s %s", key, reason)
            self._check_supervisor(key)
            return
        self.forks.alive(key)
        outcome = LaunchFailed(
            job_id=key.job_id,
            step_id=key.step_id,
            attempt=key.attempt,
            reason="no supervisor could be started",
            errno_text=reason,
        )
        self._record(key, outcome)
        self.post(events.SupervisorDied(key, outcome))

    def _record(self, key: Key, outcome: StepEnded | LaunchFailed) -> None:
        try:
            self.journal.write_exit(key, _encoder.encode(outcome))
        except OSError as error:
            log.error("cannot write the outcome of step %s: %s", key, error)

    # ------------------------------------------------------------ effects

    def _carry_out(self, effect: effects.AnyEffect) -> None:
        match effect:
            case effects.Send(link, message):
                if (peer := self.links.get(link)) is not None:
                    peer.send(_encoder.encode(message))
            case effects.TellStep(key, order):
                if (supervisor := self.supervisors.get(key)) is not None:
                    supervisor.send(_encoder.encode(order))
            case effects.Spawn(launch):
                key = Key(launch.job_id, launch.step_id, launch.attempt)
                self.forks.order(key, _encoder.encode(launch))
            case effects.Drop(key):
                self.journal.drop(key)
            case effects.Record(key, outcome):
                self._record(key, outcome)
            case effects.Sweep(key):
                self._background(self._sweep(key))
            case effects.UseHosts(hosts, heartbeat_s):
                self._use_hosts(hosts, heartbeat_s)
            case effects.CloseLink(link, reason):
                log.warning("link %d closed: %s", link, reason)
                if (peer := self.links.get(link)) is not None:
                    peer.close()
            case effects.TellCommand(conn, data, close):
                self._tell_command(conn, data, close=close)
            case effects.StopAgent():
                asyncio.get_running_loop().call_soon(self.stopped.set)

    def _tell_command(self, conn: int, data: str, *, close: bool) -> None:
        peer = self.commands.get(conn)
        if peer is None:
            return
        if data:
            peer.send(data.encode())
        if close:
            del self.commands[conn]
            peer.close()

    def _background(self, work: asyncio._CoroutineLike[None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _sweep(self, key: Key) -> None:
        """End what a vanished supervisor left, however often it forks meanwhile."""
        identity = self.journal.read(key, "stepd.json") or {}
        leader = None
        if identity.get("boot_id") == procs.boot_id():
            leader = (int(identity["pid"]), int(identity["start"]))
        marker = f"{key}@{self.config.dir}"
        wait_s = SWEEP_WAIT_S
        while found := procs.marked(marker, leader):
            procs.kill_all(found)
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, SWEEP_WAIT_MAX_S)
        launch = self.journal.read(key, "launch.json") or {}
        since_s = self.journal.started_s(key)
        if launch.get("mpi", "pmi1") != "none" and since_s is not None:
            procs.sweep_mpi_segments(int(launch.get("uid", os.geteuid())), since_s)
        self.post(events.Swept(key))

    def _use_hosts(self, hosts: dict[str, str], heartbeat_s: float) -> None:
        if hosts and hosts != self.config.hosts:
            self.config.hosts = hosts
            try:
                isolate.write_hosts(self.config.dir, hosts)
            except OSError as error:
                log.error("cannot write %s/hosts: %s", self.config.dir, error)
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        self._beat(max(0.1, heartbeat_s))

    def _beat(self, every_s: float) -> None:
        self._heartbeat = None
        if self.state.link is None:
            return
        self.post(events.HeartbeatDue(self.machine.load(), self.machine.free_mem_mib()))
        loop = asyncio.get_running_loop()
        self._heartbeat = loop.call_later(every_s, self._beat, every_s)
