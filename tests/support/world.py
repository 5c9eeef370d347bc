"""A cluster in memory: the real core, made-up agents, a clock that stands still.

    w = World(nodes=4)
    j = w.submit(nodes=2)
    w.run_until(j, "RUNNING")
    w.finish(j)

Every message passes the wire codec; ``check(state)`` runs after every event.
"""

from __future__ import annotations

from typing import Any

import msgspec

from scheduler.api import agentwire, wire
from scheduler.api.records import (
    Device,
    Job,
    JobSpec,
    Node,
    Partition,
    Payload,
    Resources,
    StepSpec,
    TaskExit,
)
from scheduler.core import effects as fx
from scheduler.core import events, machine
from scheduler.core.invariants import check
from scheduler.core.state import Settings, State

_TO_AGENT = msgspec.json.Decoder(agentwire.ToAgent)
_FROM_AGENT = msgspec.json.Decoder(agentwire.FromAgent)
_EVENT = msgspec.json.Decoder(events.AnyEvent)


class FakeAgent:
    """Runs nothing: keeps what was launched and ends it when told, or when the test says."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.running: dict[tuple[int, str, int], list[int]] = {}
        self.ended: dict[tuple[int, str, int], agentwire.StepEnded] = {}
        self.signals: list[tuple[str, int]] = []
        self.stubborn = False  # does not end on SIGTERM
        self.linked = True
        self.starts: list[tuple[int, str, int]] = []
        self.agent_id = f"{name}-1"
        self.boot_id = "b"
        self.lost: dict[tuple[int, str, int], list[int]] = {}

    def say(self, message: agentwire.Message) -> None:
        if self.linked:
            decoded = _FROM_AGENT.decode(msgspec.json.encode(message))
            self.world.event(
                events.AgentSaid(now_s=self.world.now, node=self.name, message=decoded)
            )

    def register(self) -> None:
        node = self.world.state.nodes[self.name]
        reports = [
            agentwire.StepReport(job_id=k[0], step_id=k[1], attempt=k[2], tasks=t, running=True)
            for k, t in self.running.items()
        ]
        reports += [
            agentwire.StepReport(
                job_id=k[0], step_id=k[1], attempt=k[2], tasks=t, running=False, lost=True
            )
            for k, t in self.lost.items()
        ]
        reports += [
            agentwire.StepReport(
                job_id=k[0], step_id=k[1], attempt=k[2], tasks=[], running=False, exits=m.exits
            )
            for k, m in self.ended.items()
        ]
        self.linked = True
        self.say(
            agentwire.Register(
                protocol=wire.PROTOCOL,
                version="0",
                node=self.name,
                boot_id=self.boot_id,
                agent_id=self.agent_id,
                pid=1,
                cpus=node.cpus,
                mem_mib=node.mem_mib,
                device_cores=[d.cores for d in node.devices],
                boot_s=1.0,
                start_s=2.0,
                steps=reports,
            )
        )
        for message in list(self.ended.values()):
            self.say(message)

    def launch(self, effect: fx.Launch) -> None:
        key = (effect.job_id, effect.step_id, effect.attempt)
        if not self.linked or key in self.running or key in self.ended:
            return
        step = self.world.state.steps[(effect.job_id, effect.step_id)]
        self.running[key] = step.layout.tasks[step.layout.nodes.index(self.name)]
        self.starts.append(key)
        self.say(agentwire.StepStarted(job_id=key[0], step_id=key[1], attempt=key[2]))

    def receive(self, message: agentwire.Message) -> None:
        if not self.linked:
            return
        decoded = _TO_AGENT.decode(msgspec.json.encode(message))
        if isinstance(decoded, agentwire.Signal):
            self.signals.append((decoded.step_id, decoded.signum))
            if decoded.signum == 15 and not self.stubborn:
                self.end((decoded.job_id, decoded.step_id, decoded.attempt), signal=15)
        elif isinstance(decoded, agentwire.EndStep):
            self.end((decoded.job_id, decoded.step_id, decoded.attempt), signal=9)
        elif isinstance(decoded, agentwire.EndJob):
            for key in [k for k in self.running if k[0] == decoded.job_id]:
                if key[2] <= decoded.attempt:
                    self.end(key, signal=9)
            for key in [k for k in self.lost if k[0] == decoded.job_id]:
                del self.lost[key]
            self.say(agentwire.JobCleaned(job_id=decoded.job_id, attempt=decoded.attempt))
        elif isinstance(decoded, agentwire.Forget):
            for step in decoded.steps:
                self.ended.pop(tuple(step), None)

    def end(self, key: tuple[int, str, int], code: int = 0, signal: int = 0, **more: Any) -> None:
        tasks = self.running.pop(key, None)
        if tasks is None:
            return
        exits = [TaskExit(task=t, code=code, signal=signal, at_s=self.world.now) for t in tasks]
        others = any(k[0] == key[0] for k in self.running)
        message = agentwire.StepEnded(
            job_id=key[0], step_id=key[1], attempt=key[2], exits=exits, clean=not others, **more
        )
        self.ended[key] = message
        self.say(message)

    def cut(self) -> None:
        self.linked = False
        self.world.event(events.LinkLost(now_s=self.world.now, node=self.name))


class World:
    """The core with ``nodes`` nodes of ``devices`` x 2 cores and fake agents."""

    def __init__(
        self,
        nodes: int = 4,
        *,
        cpus: int = 16,
        mem_mib: int = 65536,
        devices: int = 16,
        spares: int = 0,
        partitions: list[Partition] | None = None,
        register: bool = True,
        **settings: Any,
    ) -> None:
        names = [f"n{i:03d}" for i in range(1, nodes + spares + 1)]
        records = [
            Node(
                name=n,
                cpus=cpus,
                mem_mib=mem_mib,
                devices=[Device(index=i, cores=2) for i in range(devices)],
                spare=i >= nodes,
                standby=i >= nodes,
            )
            for i, n in enumerate(names)
        ]
        self.partitions = partitions or [Partition(name="main", nodes=names, default=True)]
        self.settings = Settings(**settings)
        self.now = 1_000_000.0
        self.state = State(self.settings, records, self.partitions)
        self.replies: dict[int, wire.Reply] = {}
        self.news: list[fx.StepNews] = []
        self.req = 0
        self.admin = events.Caller(uid=0, gid=0, user="root", group="root", admin=True)
        self.caller = self.admin
        self.agents = {n: FakeAgent(self, n) for n in names}
        self.launch_blocked = False
        self._depth = 0
        self._queue: list[events.AnyEvent] = []
        self.event(events.Started(now_s=self.now))
        if register:
            for agent in self.agents.values():
                agent.register()

    # ------------------------------------------------------------ engine

    def event(self, event: events.AnyEvent) -> None:
        self._queue.append(_EVENT.decode(msgspec.json.encode(event)))
        if self._depth:
            return
        self._depth = 1
        try:
            while self._queue:
                self._turn(self._queue.pop(0))
        finally:
            self._depth = 0

    def _turn(self, event: events.AnyEvent) -> None:
        out = machine.handle(self.state, event)
        check(self.state)
        if self.state.want_schedule:
            out += list(machine.schedule(self.state, self.now, 1000))
            check(self.state)
        dirty = self.state.take_dirty()
        for record in [*dirty.jobs, *dirty.steps, *dirty.nodes]:
            again = msgspec.json.decode(msgspec.json.encode(record), type=type(record))
            assert again == record
        for effect in out:
            self._carry_out(effect)

    def _carry_out(self, effect: fx.AnyEffect) -> None:
        if isinstance(effect, fx.Reply):
            self.replies[effect.req] = effect.message
        elif isinstance(effect, fx.Launch):
            if not self.launch_blocked:
                self.agents[effect.node].launch(effect)
        elif isinstance(effect, fx.Send):
            self.agents[effect.node].receive(effect.message)
        elif isinstance(effect, fx.StepNews):
            self.news.append(effect)

    def advance(self, seconds: float) -> None:
        """Let time pass, stopping at every timer on the way."""
        end = self.now + seconds
        while self.state.timers and self.state.timers[0][0] <= end:
            self.now = max(self.now, self.state.timers[0][0])
            self.event(events.TimerFired(now_s=self.now))
        self.now = end
        self.event(events.TimerFired(now_s=self.now))

    def restart(self) -> None:
        """The controller is killed and started again from what was committed."""
        jobs = [_copy(j) for j in self.state.jobs.values()]
        steps = [_copy(s) for s in self.state.steps.values()]
        nodes = [_copy(n) for n in self.state.nodes.values()]
        self.state = State(
            self.settings, nodes, self.partitions, jobs, steps, dict(self.state.meta)
        )
        self.event(events.Started(now_s=self.now))
        for agent in self.agents.values():
            if agent.linked:
                agent.register()

    def reboot(self, name: str) -> None:
        """The machine comes back with an empty disk: nothing of it is left."""
        agent = self.agents[name]
        agent.running.clear()
        agent.ended.clear()
        agent.boot_id += "b"
        agent.agent_id += "b"
        agent.register()

    # ------------------------------------------------------------ verbs

    def ask(self, request: wire.Message) -> wire.Reply:
        self.req += 1
        self.event(events.Asked(now_s=self.now, req=self.req, caller=self.caller, request=request))
        return self.replies[self.req]

    def try_submit(self, *, key: str = "", **fields: Any) -> wire.Reply:
        res = {f: fields.pop(f) for f in list(fields) if f in Resources.__struct_fields__}
        if "nodes" in fields:
            count = fields.pop("nodes")
            res.update(min_nodes=count, max_nodes=count, nodes_given=True)
        spec = JobSpec(name=fields.pop("name", "job"), resources=Resources(**res), **fields)
        request = wire.Submit(spec=spec, payload=Payload(script="#!/bin/sh\n"), key=key)
        spec = msgspec.json.decode(msgspec.json.encode(request), type=wire.Request).spec
        self.req += 1
        self.event(
            events.JobSubmitted(
                now_s=self.now, req=self.req, caller=self.caller, spec=spec, key=key
            )
        )
        return self.replies[self.req]

    def submit(self, **fields: Any) -> int:
        reply = self.try_submit(**fields)
        assert isinstance(reply, wire.Submitted), reply
        return reply.job_id

    def job(self, job_id: int) -> Job:
        return self.state.jobs[job_id]

    def step(self, job_id: int, **fields: Any) -> wire.Reply:
        spec = StepSpec(name="s", argv=["true"], **fields)
        return self.ask(wire.CreateStep(job_id=job_id, spec=spec))

    def finish(self, job_id: int, code: int = 0, signal: int = 0) -> None:
        """The batch script ends."""
        job = self.job(job_id)
        self.agents[job.allocs[0].node].end((job_id, "batch", job.attempt), code, signal)

    def states(self, *ids: int) -> list[str]:
        return [self.job(i).state for i in ids]


def _copy(record: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(record), type=type(record))
