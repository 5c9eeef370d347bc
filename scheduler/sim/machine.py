"""A simulated machine: the agent's shell around the real ``nodeagent.core``, and its journal."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from neuron_runtime.device import build_machine
from nodeagent.core import AgentState, effects, events, handle
from nodeagent.order import Key
from scheduler.api import agentwire
from scheduler.api.wire import PROTOCOL
from scheduler.sim.procs import Supervisor
from scheduler.sim.wire import Link

if TYPE_CHECKING:
    from scheduler.sim.cluster import Cluster

_from_controller = msgspec.json.Decoder(agentwire.ToAgent)
_outcome = msgspec.json.Decoder(agentwire.StepEnded | agentwire.LaunchFailed)
_said = msgspec.json.Decoder(events.FromStep)
_encode = msgspec.json.Encoder().encode


@dataclass
class Entry:
    """A step's folder in the journal."""

    tasks: list[int]
    supervisor: Supervisor | None = None
    exit: bytes | None = None


class Machine:
    """One node: off, or on with or without an agent."""

    def __init__(self, world: Cluster, name: str, number: int) -> None:
        plan = world.plan
        self.world = world
        self.name = name
        self.number = number
        kind = plan.instance_type
        self.devices = build_machine(kind, name, plan.seed).devices if kind else []
        self.journal: dict[Key, Entry] = {}
        self.supervisors: list[Supervisor] = []
        self.generation = 0  # of the agent that owns the journal
        self.agent: Agent | None = None
        self.on = True
        self.boots = 1
        self.fork_fails = False
        self.cut = False  # the network between controller and node

    def draw(self, *what: int) -> float:
        return self.world.loop.draw(30, self.number, *what)

    # ------------------------------------------------------------ power and agents

    def start_agent(self) -> None:
        """An agent comes up, unless there is one or the machine is off."""
        if self.agent is not None or not self.on:
            return
        self.generation += 1
        self.agent = Agent(self)
        self.world.loop.note(f"{self.name}: agent {self.generation} starts")
        self.agent.adopt()

    def crash_agent(self) -> None:
        """The agent is killed; supervisors and tasks go on."""
        agent = self.agent
        if agent is None:
            return
        self.world.loop.note(f"{self.name}: agent {self.generation} crashes")
        agent.alive = False
        self.agent = None
        for supervisor in self.supervisors:
            supervisor.connected = False
        self.world.agent_gone(self)

    def power_off(self, *, keep_journal: bool) -> None:
        """Everything that runs here is gone at once."""
        if not self.on:
            return
        self.world.loop.note(f"{self.name}: off, journal kept: {keep_journal}")
        self.world.auditor.node_died(self.name)
        if self.agent is not None:
            self.agent.alive = False
            self.agent = None
        self.on = False
        left = [e.supervisor for e in self.journal.values() if e.supervisor is not None]
        for supervisor in [*self.supervisors, *left]:
            supervisor.vanish()
        self.supervisors.clear()
        if not keep_journal:
            self.journal.clear()
        self.world.node_gone(self)

    def power_on(self) -> None:
        """The machine boots and starts an agent."""
        if not self.on:
            self.boots += 1
        self.on = True
        self.start_agent()

    # ------------------------------------------------------------ supervisors

    def fork(self, agent: Agent, launch: agentwire.Launch) -> None:
        """The fork server was told to start a supervisor."""
        if self.fork_fails:
            self.fork_fails = False
            self.world.loop.after(0.01, lambda: agent.fork_failed(launch))
            return
        chance = self.draw(1)
        wait_s = 4.0 * chance if chance > 0.97 else 0.03 * chance
        generation = agent.number
        self.world.loop.after(wait_s, lambda: self._claim(agent, generation, launch))

    def _claim(self, agent: Agent, generation: int, launch: agentwire.Launch) -> None:
        key = Key(launch.job_id, launch.step_id, launch.attempt)
        if not self.on or (not agent.alive and self.draw(2) < 0.5):
            return  # the order was lost with the fork server
        if key in self.journal or self.generation != generation:
            return
        supervisor = Supervisor(self, launch)
        self.journal[key] = Entry(launch.tasks, supervisor)
        self.supervisors.append(supervisor)
        self.world.loop.note(f"{self.name}: {key} starts")
        self.connect(supervisor)
        supervisor.start()

    def connect(self, supervisor: Supervisor) -> None:
        """One attempt to reach the agent, which is there or will be."""
        agent = self.agent
        if agent is None or not supervisor.alive or supervisor.connected:
            return
        supervisor.connected = True
        agent.supervisor_came(supervisor)
        supervisor.hello()

    def supervisor_left(self, supervisor: Supervisor) -> None:
        """Its process ended; the agent hears of it."""
        supervisor.connected = False
        self.supervisors = [s for s in self.supervisors if s is not supervisor]
        agent = self.agent
        if agent is not None:
            wait_s = 0.01 * self.draw(3)
            self.world.loop.after(wait_s, lambda: agent.check_supervisor(supervisor.key))

    def from_supervisor(self, supervisor: Supervisor, message: events.FromStep) -> None:
        """Over the unix socket: in order and soon."""
        agent = self.agent
        body = _encode(message)
        if agent is not None:
            agent.post(events.SupervisorSaid(supervisor.key, _said.decode(body)))

    def write_exit(self, key: Key, body: bytes) -> None:
        """The outcome of a step into its folder, which is made when it is missing."""
        self.journal.setdefault(key, Entry([])).exit = body

    def calm(self) -> None:
        """No more trouble from here."""
        self.fork_fails = False
        for supervisor in self.supervisors:
            supervisor.calm()


class Agent:
    """The shell of one agent process (compare :mod:`nodeagent.service`)."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.number = machine.generation
        self.alive = True
        plan = machine.world.plan
        identity = agentwire.Register(
            protocol=PROTOCOL,
            version="0",
            node=machine.name,
            boot_id=f"boot-{machine.boots}",
            agent_id=f"{machine.name}-{self.number}",
            pid=self.number,
            cpus=plan.cpus,
            mem_mib=machine.world.mem_mib,
            device_cores=[len(d.cores) if d.present else 0 for d in machine.devices],
            boot_s=0.0,
            start_s=machine.world.loop.now,
        )
        self.state = AgentState(cluster=machine.world.cluster_name, identity=identity)
        self.links: dict[int, Link] = {}
        self._numbers = 0
        self._inbox: deque[events.AnyEvent] = deque()
        self._busy = False
        self._beats = 0

    def adopt(self) -> None:
        """Take over the steps of an earlier agent."""
        machine = self.machine
        for key in sorted(machine.journal, key=str):
            entry = machine.journal[key]
            alive = entry.supervisor is not None and entry.supervisor.alive
            self.post(events.StepFound(key, entry.tasks, alive, self._outcome(key)))
        for supervisor in machine.supervisors:
            wait_s = 2.0 * machine.draw(4)
            machine.world.loop.after(wait_s, lambda s=supervisor: machine.connect(s))  # type: ignore[misc]

    def _outcome(self, key: Key) -> agentwire.StepEnded | agentwire.LaunchFailed | None:
        entry = self.machine.journal.get(key)
        return None if entry is None or entry.exit is None else _outcome.decode(entry.exit)

    # ------------------------------------------------------------ what happens

    def post(self, event: events.AnyEvent) -> None:
        """Feed the core; effects are carried out in order, one event after the other."""
        if not self.alive:
            return
        self._inbox.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._inbox and self.alive:
                for effect in handle(self.state, self._inbox.popleft()):
                    self._carry_out(effect)
        finally:
            self._busy = False

    def arrived(self, link: Link, body: bytes) -> None:
        """A frame of a controller."""
        if not self.alive:
            return
        message = _from_controller.decode(body)
        if link.agent_number == 0:
            assert isinstance(message, agentwire.Welcome)
            self._numbers += 1
            link.agent_number = self._numbers
            self.links[link.agent_number] = link
            self.post(events.LinkOpened(link.agent_number, message))
            return
        if self.links.get(link.agent_number) is link:
            self.machine.world.loop.note(f"{self.machine.name} <- {message}")
            self.post(events.ControllerSaid(link.agent_number, message))

    def link_closed(self, link: Link) -> None:
        """The agent notices the end of a link."""
        if self.alive and self.links.get(link.agent_number) is link:
            del self.links[link.agent_number]
            self.post(events.LinkClosed(link.agent_number))

    def supervisor_came(self, supervisor: Supervisor) -> None:
        key = supervisor.key
        tasks = supervisor.launch.tasks if key not in self.state.steps else []
        kept = key in self.state.steps or key in self.machine.journal
        self.post(events.SupervisorCame(key, tasks, kept))

    def check_supervisor(self, key: Key) -> None:
        """Its connection or its process ended: has it done its work, or is it lost?"""
        if not self.alive:
            return
        step = self.state.steps.get(key)
        if step is None:
            return
        if step.over:
            self.post(events.SupervisorLeft(key))
        else:
            self.post(events.SupervisorDied(key, self._outcome(key)))

    def fork_failed(self, launch: agentwire.Launch) -> None:
        if not self.alive:
            return
        key = Key(launch.job_id, launch.step_id, launch.attempt)
        outcome = agentwire.LaunchFailed(
            job_id=key.job_id,
            step_id=key.step_id,
            attempt=key.attempt,
            reason="no supervisor could be started",
            errno_text="Cannot allocate memory",
        )
        self.machine.world.auditor.launch_failed(self.machine.name, key)
        self.machine.write_exit(key, _encode(outcome))
        self.post(events.SupervisorDied(key, outcome))

    # ------------------------------------------------------------ effects

    def _carry_out(self, effect: effects.AnyEffect) -> None:
        machine = self.machine
        match effect:
            case effects.Send(link, message):
                if (found := self.links.get(link)) is not None:
                    machine.world.loop.note(f"{machine.name} -> {message}")
                    found.up(_encode(message))
            case effects.TellStep(key, order):
                body = _encode(order)
                for supervisor in machine.supervisors:
                    if supervisor.key == key and supervisor.connected:
                        machine.world.loop.after(0.0, lambda s=supervisor: s.told(body))  # type: ignore[misc]
            case effects.Spawn(launch):
                machine.fork(self, launch)
            case effects.Drop(key):
                machine.journal.pop(key, None)
            case effects.Record(key, outcome):
                machine.write_exit(key, _encode(outcome))
            case effects.Sweep(key):
                self._sweep(key)
            case effects.UseHosts(_, heartbeat_s):
                self._beats += 1
                self._beat(self._beats, heartbeat_s)
            case effects.CloseLink(link, _):
                if (found := self.links.pop(link, None)) is not None:
                    machine.world.agent_closed(machine, found)
            case effects.TellCommand() | effects.StopAgent():
                raise AssertionError(f"nobody asked for {effect}")

    def _sweep(self, key: Key) -> None:
        """End what a vanished supervisor left."""
        machine = self.machine

        def swept() -> None:
            entry = machine.journal.get(key)
            if self.alive:
                if entry is not None and entry.supervisor is not None:
                    entry.supervisor.swept()
                self.post(events.Swept(key))

        machine.world.loop.after(0.02 + machine.draw(5), swept)

    def _beat(self, series: int, every_s: float) -> None:
        if not self.alive or self.state.link is None or series != self._beats:
            return
        self.post(events.HeartbeatDue(0.0, 1))
        self.machine.world.loop.after(every_s, lambda: self._beat(series, every_s))
