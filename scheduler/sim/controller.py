"""The controller's shell around the real core (compare :mod:`scheduler.service`)."""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from scheduler import launch
from scheduler.api import agentwire, wire
from scheduler.api.records import Payload
from scheduler.core import effects as fx
from scheduler.core import events, machine
from scheduler.core.invariants import check
from scheduler.core.state import State
from scheduler.parts import state_of, turn_rows
from scheduler.sim.loop import Failure
from scheduler.sim.wire import Link
from scheduler.store import TurnRows

if TYPE_CHECKING:
    from scheduler.sim.cluster import Cluster

_from_agent = msgspec.json.Decoder(agentwire.FromAgent)
_event = msgspec.json.Decoder(events.AnyEvent)
_encode = msgspec.json.Encoder().encode
Answer = Callable[[wire.Reply], None]


class Peer:
    """One node's link as the controller sees it."""

    def __init__(self) -> None:
        self.link: Link | None = None
        self.up = False
        self.dials = 0


class Controller:
    """One life of the controller; ``crash`` ends it anywhere."""

    def __init__(self, world: Cluster) -> None:
        self.world = world
        self.loop = world.loop
        self.alive = True
        self.crash_in = ""  # where in a turn it will die: "before", "after" or "between"
        self.store = world.disk.open()
        self.epoch = self.store.next_epoch()
        self.state = self._load()
        self.site = launch.Site(world.cluster_name, "head", self.state.nodes, {})
        self.peers = {name: Peer() for name in world.machines}
        self._inbox: deque[events.AnyEvent] = deque()
        self._answers: dict[int, tuple[Answer, Payload | None]] = {}
        self._next_req = 1
        self._turn_due = False
        self._restarting = True
        self._broken = False
        self._next_pass_s = 0.0
        self._pass_due = False
        self._wake_at_s: float | None = None
        self._wakes = 0
        self._want_turn()

    def _load(self) -> State:
        loaded = self.store.load()
        world = self.world
        return state_of(loaded, world.settings, world.node_records(), world.partitions)

    def crash(self) -> None:
        """Nothing that has not left yet leaves any more."""
        if self.alive:
            self.alive = False
            self.world.controller_gone(self)

    # ------------------------------------------------------------ requests

    def submit(self, request: wire.Submit, answer: Answer) -> None:
        """A submission, with what the store knows of the jobs it names."""
        known: dict[str, tuple[str, int]] = {}
        for target in self.world.targets(request.spec.dependency):
            base = int(target.partition("_")[0])
            if base not in self.state.jobs and base not in self.state.by_array:
                outcome = self.store.outcome(target)
                if outcome is not None:
                    known[target] = outcome
        event = events.JobSubmitted(
            now_s=self.loop.now,
            req=self._expect(answer, request.payload),
            caller=self.world.caller,
            spec=request.spec,
            key=request.key,
            known=known,
        )
        self._post(event)

    def ask(self, request: Any, answer: Answer) -> None:
        """Any other request that changes something."""
        req = self._expect(answer, None)
        now_s = self.loop.now
        self._post(events.Asked(now_s=now_s, req=req, caller=self.world.caller, request=request))

    def _expect(self, answer: Answer, payload: Payload | None) -> int:
        req = self._next_req
        self._next_req += 1
        self._answers[req] = (answer, payload)
        return req

    def _post(self, event: events.AnyEvent) -> None:
        self._inbox.append(event)
        self._want_turn()

    def _want_turn(self) -> None:
        if not self._turn_due:
            self._turn_due = True
            self.loop.after(0.004 * self.loop.draw(40), self._turn)

    # ------------------------------------------------------------ a turn

    def _turn(self) -> None:
        if not self.alive:
            return
        self._turn_due = False
        if self._broken and not self._writable_again():
            return
        size = min(len(self._inbox), 1 + int(self.loop.draw(41) * 12))
        batch = [self._inbox.popleft() for _ in range(size)]
        try:
            self._run_turn(batch)
        except sqlite3.Error as error:
            self.loop.note(f"controller: commit failed ({error})")
            self._broken = True
            self._refuse(batch)
            self._reload()
        if self._inbox:
            self._want_turn()

    def _run_turn(self, batch: list[events.AnyEvent]) -> None:
        if self._restarting:
            batch = [events.Started(now_s=self.loop.now), *batch]
        effects: list[fx.AnyEffect] = []
        for event in batch:
            if self.loop.trace is not None and not isinstance(event, events.TimerFired):
                self.loop.note(f"core: {event}")
            effects += machine.handle(self.state, _event.decode(_encode(event)))
            check_state(self.state)
        effects += self._maybe_schedule()
        effects += machine.wake(self.state)
        rows = self._rows(effects)
        if self.crash_in == "before":
            self.crash()
            return
        if rows:
            self.store.commit(rows)
            self.world.auditor.committed(rows)
        if self.crash_in == "after":
            self.crash()
            return
        if self._restarting:
            self._restarting = False
            self._dial_all()
        self._carry_out(effects)

    def _maybe_schedule(self) -> list[fx.AnyEffect]:
        if not self.state.want_schedule:
            return []
        wait_s = self._next_pass_s - self.loop.now
        if wait_s > 0:
            if not self._pass_due:
                self._pass_due = True
                self.loop.after(wait_s, self._pass)
            return []
        effects = list(machine.schedule(self.state, self.loop.now, 100))
        check_state(self.state)
        self._next_pass_s = self.loop.now + 0.2 * self.loop.draw(42)
        return effects

    def _pass(self) -> None:
        self._pass_due = False
        if self.alive:
            self._want_turn()

    def _rows(self, effects: list[fx.AnyEffect]) -> TurnRows:
        return turn_rows(self.state, effects, lambda req: self._answers[req][1])

    # ------------------------------------------------------------ effects

    def _carry_out(self, effects: list[fx.AnyEffect]) -> None:
        """Answers first, then the rest in order; a crash lets only the first ones out."""
        replies = [e for e in effects if isinstance(e, fx.Reply)]
        others = [e for e in effects if not isinstance(e, fx.Reply)]
        ordered = [*replies, *others]
        if self.crash_in == "between":
            ordered = ordered[: int(self.loop.draw(43) * len(ordered))]
        for effect in ordered:
            if isinstance(effect, fx.Reply):
                found = self._answers.pop(effect.req, None)
                if found is not None:
                    found[0](effect.message)
            elif isinstance(effect, fx.Launch):
                self._launch(effect)
            elif isinstance(effect, fx.Send):
                self._send(effect.node, effect.message)
            elif isinstance(effect, fx.WakeAt):
                self._wake_at(effect.at_s)
        if self.crash_in == "between":
            self.crash()

    def _launch(self, effect: fx.Launch) -> None:
        job = self.state.jobs.get(effect.job_id)
        step = self.state.steps.get((effect.job_id, effect.step_id))
        if job is None or step is None or step.attempt != effect.attempt:
            return
        payload = self.store.payload(job) if step.spec is None else None
        if step.spec is None and payload is None:
            raise Failure("payload", f"the script of job {job.id} is not in the store")
        message = launch.build(job, step, effect.node, payload, self.site)
        if message is not None:
            self._send(effect.node, message)

    def _send(self, node: str, message: agentwire.ToAgent) -> None:
        peer = self.peers[node]
        if peer.up and peer.link is not None:
            peer.link.down(_encode(message))

    def _wake_at(self, at_s: float) -> None:
        self._wake_at_s = at_s
        self._wakes += 1
        number = self._wakes
        self.loop.after(at_s - self.loop.now, lambda: self._woken(number))

    def _woken(self, number: int) -> None:
        if self.alive and number == self._wakes and self._wake_at_s is not None:
            self._wake_at_s = None
            self._post(events.TimerFired(now_s=self.loop.now))

    # ------------------------------------------------------------ trouble

    def _refuse(self, batch: list[events.AnyEvent]) -> None:
        for event in batch:
            found = self._answers.pop(getattr(event, "req", 0), None)
            if found is not None:
                found[0](wire.Error(code="unavailable", message="disk full"))

    def _reload(self) -> None:
        for name, peer in self.peers.items():
            if peer.link is not None:
                self.world.sever(peer.link, self.world.machines[name])
            peer.link, peer.up = None, False
            peer.dials += 1
            self.world.auditor.link_down(name)
        self._inbox = deque(
            e for e in self._inbox if isinstance(e, events.JobSubmitted | events.Asked)
        )
        self._wake_at_s = None
        self._restarting = True
        self.state = self._load()
        self.site.nodes = self.state.nodes
        self.loop.after(1.0, self._retry)

    def _retry(self) -> None:
        if self.alive:
            self._want_turn()

    def _writable_again(self) -> bool:
        try:
            self.store.probe()
        except sqlite3.Error:
            self._refuse(list(self._inbox))
            self._inbox.clear()
            self.loop.after(1.0, self._retry)
            return False
        self._broken = False
        return True

    # ------------------------------------------------------------ links

    def _dial_all(self) -> None:
        for name in self.peers:
            self._dial_later(name, 0.05)

    def _dial_later(self, name: str, longest_s: float) -> None:
        peer = self.peers[name]
        peer.dials += 1
        number = peer.dials
        wait_s = longest_s * self.loop.draw(44, self.world.machines[name].number)
        self.loop.after(wait_s, lambda: self._dial(name, number))

    def _dial(self, name: str, number: int) -> None:
        peer = self.peers[name]
        if not self.alive or number != peer.dials or peer.link is not None:
            return
        link = self.world.connect(self, name)
        if link is None:
            self._dial_later(name, 2.0)
            return
        peer.link = link
        welcome = agentwire.Welcome(
            protocol=wire.PROTOCOL,
            cluster=self.world.cluster_name,
            node=name,
            epoch=self.epoch,
            heartbeat_s=5.0,
            kill_wait_s=self.world.settings.kill_wait_s,
        )
        link.down(_encode(welcome))
        self.loop.after(15.0, lambda: self._check_registered(name, link))

    def _check_registered(self, name: str, link: Link) -> None:
        peer = self.peers[name]
        if self.alive and peer.link is link and not peer.up:
            self.world.sever(link, self.world.machines[name])
            peer.link = None
            self._dial_later(name, 1.0)

    def arrived(self, name: str, link: Link, body: bytes) -> None:
        """A frame of an agent."""
        peer = self.peers[name]
        if not self.alive or peer.link is not link:
            return
        message = _from_agent.decode(body)
        if not peer.up:
            assert isinstance(message, agentwire.Register), message
            peer.up = True
            self.world.auditor.link_up(name)
        assert not isinstance(
            message, agentwire.Output | agentwire.PmiBarrierIn | agentwire.RelayRequest
        )
        self._post(events.AgentSaid(now_s=self.loop.now, node=name, message=message))

    def link_ended(self, name: str, link: Link) -> None:
        """The controller notices the end of a link."""
        peer = self.peers[name]
        if not self.alive or peer.link is not link:
            return
        peer.link = None
        if peer.up:
            peer.up = False
            self.world.auditor.link_down(name)
            self._post(events.LinkLost(now_s=self.loop.now, node=name))
        self._dial_later(name, 1.0)


def check_state(state: State) -> None:
    """The core's invariants, as a failure of the simulation."""
    try:
        check(state)
    except AssertionError as error:
        raise Failure("invariant", str(error)) from error
