"""The controller's loop: events in, one turn at a time, one commit, then effects.

A turn drains the inbox, handles the events in order, runs a scheduling pass when one is due,
commits once - and only then answers, launches and sends.  When the commit fails nothing leaves
and the state is loaded again from the store, which is the truth.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import deque
from typing import Any

import msgspec

from scheduler import launch
from scheduler.api import agentwire, wire
from scheduler.api.records import Payload, Step
from scheduler.clock import Clock
from scheduler.confview import config_values
from scheduler.core import effects as fx
from scheduler.core import events, machine
from scheduler.core.state import State
from scheduler.dispatch import Dispatcher
from scheduler.hubs.pmi import PmiHub
from scheduler.hubs.relay import RelayHub
from scheduler.hubs.stepio import StepHub, final_record
from scheduler.hubs.waits import WaitHub
from scheduler.links import CoreMessage, Links
from scheduler.pacing import Pacer
from scheduler.parts import (
    Core,
    CoreFailed,
    Pass,
    Setup,
    Waiting,
    disk_text,
    state_of,
    turn_rows,
)
from scheduler.query import job_view
from scheduler.session import Session
from scheduler.statusview import status_values
from scheduler.store import Reader, Store, TurnRows

log = logging.getLogger(__name__)

#: Events of one turn; more wait for the next one, so that answers are not held up.
MAX_BATCH = 256
#: Seconds between attempts while the state cannot be written.
RETRY_S = 1.0
#: Events of turns that changed no row, kept for the journal of the next commit.
MAX_QUIET = 1000

_encode = msgspec.json.Encoder().encode


class Controller:
    """One cluster's controller, from ``start`` until ``stopped`` has a result ("" or why)."""

    _floor_s = 0.0

    def __init__(self, setup: Setup, store: Store, reader: Reader, core: Core = machine) -> None:
        self.setup = setup
        self.store = store
        self.reader = reader
        self._core = core
        self.epoch = store.next_epoch()
        self.version = setup.version
        self.state = self._load()
        self.clock = Clock(self._floor_s)
        self.started_s = self.clock.now()
        self.site = launch.Site(
            self.state.settings.cluster, setup.host, self.state.nodes, setup.real_hosts
        )
        self.links = Links(self, setup.transports, self._welcome, setup.heartbeat_s)
        self.dispatch = Dispatcher(self)
        self.pmi = PmiHub(self.links.send)
        self.steps = StepHub(self.links.send, self._step_abandoned)
        self.waits = WaitHub(reader)
        self.relay = RelayHub(self.links.send, self.links.queued, self.dispatch)
        self.pacer = Pacer()
        self.stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._inbox: deque[events.AnyEvent] = deque()
        self._replies: dict[int, Waiting] = {}
        self._next_req = 1
        self._turn_due = False
        self._quiet: deque[tuple[float, bytes]] = deque(maxlen=MAX_QUIET)
        self._restarting = True  # the next turn begins with ``Started``
        self._broken = ""  # why the state cannot be written now
        self._wake_at_s: float | None = None
        self._wake_timer: asyncio.TimerHandle | None = None
        self._pass_timer: asyncio.TimerHandle | None = None
        self._retry_timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """First turn (``Started``); its commit lets the links dial."""
        self.links.start()
        self._turn()

    async def stop(self) -> None:
        """Close everything; agents and jobs go on."""
        for timer in (self._wake_timer, self._pass_timer, self._retry_timer):
            if timer is not None:
                timer.cancel()
        self.steps.stop()
        await self.links.stop()
        await self.dispatch.stop()
        self.reader.close()
        self.store.close()

    def request_stop(self, session: Session, *, stop_agents: bool) -> None:
        """``Shutdown``: answer, with ``stop_agents`` end the agents and what they run."""
        loop = asyncio.get_running_loop()
        self._stopping_task = loop.create_task(self._shut_down(session, stop_agents))

    async def _shut_down(self, session: Session, stop_agents: bool) -> None:
        if stop_agents:
            for name in self.state.nodes:
                self.links.send(name, agentwire.Stop(kill=True))
            await self.links.flush(5.0)
        session.answer(wire.Ok())
        self._stop_for("")

    def finish(self) -> None:
        """End cleanly (SIGTERM); agents and jobs go on."""
        self._stop_for("")

    def _stop_for(self, why: str) -> None:
        """End ``run``; ``why`` is "" for a clean end."""
        if not self.stopped.done():
            self.stopped.set_result(why)

    def _load(self) -> State:
        """A state from the rows, with the sizes that the cluster file gives the nodes."""
        loaded = self.store.load()
        self._floor_s = loaded.last_event_s
        setup = self.setup
        return state_of(loaded, setup.settings(), setup.nodes(), setup.partitions())

    def _welcome(self, node: str) -> agentwire.Welcome:
        return agentwire.Welcome(
            protocol=wire.PROTOCOL,
            cluster=self.state.settings.cluster,
            node=node,
            epoch=self.epoch,
            hosts=self.setup.hosts,
            heartbeat_s=self.setup.heartbeat_s,
            kill_wait_s=self.state.settings.kill_wait_s,
        )

    # ------------------------------------------------------------------ inbox

    def expect_reply(
        self, session: Session, payload: Payload | None = None, job_id: int = 0
    ) -> int:
        """A number for the caller; the ``Reply`` effect with it answers ``session``.

        ``payload`` comes with a submission, ``job_id`` is the job of a new step.
        """
        req = self._next_req
        self._next_req += 1
        self._replies[req] = Waiting(session, payload, job_id)
        return req

    def post(self, event: events.AnyEvent) -> None:
        """Put an event into the inbox; a turn follows soon."""
        self._inbox.append(event)
        self._want_turn()

    def _want_turn(self) -> None:
        if not self._turn_due:
            self._turn_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def agent_said(self, node: str, message: CoreMessage) -> None:
        """From a link: an event for the core."""
        self.post(events.AgentSaid(now_s=self.clock.now(), node=node, message=message))
        if isinstance(message, agentwire.Register):
            self.steps.link_up(node)

    def agent_passed(
        self,
        node: str,
        message: agentwire.Output | agentwire.PmiBarrierIn | agentwire.RelayRequest,
    ) -> None:
        """From a link: something for a hub."""
        if isinstance(message, agentwire.Output):
            self.steps.on_output(node, message)
        elif isinstance(message, agentwire.PmiBarrierIn):
            self.pmi.on_barrier(self.state, node, message)
        else:
            self.relay.on_relay(node, message)

    def link_lost(self, node: str, why: str) -> None:
        """From a link: it is gone."""
        self.relay.link_lost(node)
        self.post(events.LinkLost(now_s=self.clock.now(), node=node, why=why))

    def link_drained(self, node: str) -> None:
        """From a link: there is room again."""
        self.relay.link_drained(node)

    def _step_abandoned(self, job_id: int, step_id: str, attempt: int) -> None:
        """Nobody came back for the step: cancel it as its owner would."""
        step = self.state.steps.get((job_id, step_id))
        job = self.state.jobs.get(job_id)
        if step is None or job is None or step.attempt != attempt:
            return
        caller = events.Caller(
            uid=job.uid, gid=job.gid, user=job.user, group=job.group, admin=False
        )
        request = wire.Cancel(ids=[f"{job_id}.{step_id}"])
        self.post(events.Asked(now_s=self.clock.now(), req=0, caller=caller, request=request))

    # ------------------------------------------------------------------ a turn

    def _turn(self) -> None:
        self._turn_due = False
        if self.stopped.done():
            return
        if self._broken and not self._writable_again():
            return
        batch = [self._inbox.popleft() for _ in range(min(len(self._inbox), MAX_BATCH))]
        try:
            self._run_turn(batch)
        except CoreFailed as failed:
            self._core_failed(failed, batch)
        except sqlite3.Error as error:
            self._commit_failed(error, batch)
        if self._inbox:
            self._want_turn()

    def _run_turn(self, batch: list[events.AnyEvent]) -> None:
        if self._restarting:
            batch = [events.Started(now_s=self.clock.now()), *batch]
        effects: list[fx.AnyEffect] = []
        lines: list[tuple[float, bytes]] = []
        for event in batch:
            effects += self._handle(event)
            lines.append((event.now_s, _encode(event)))
        effects += self._maybe_schedule(lines)
        effects += self._core.wake(self.state)
        rows = self._rows(effects)
        if rows:
            rows.events = [*self._quiet, *lines]
            self.store.commit(rows)
            self._quiet.clear()
        else:
            self._quiet.extend(lines)
        if self._restarting:
            self._restarting = False
            self.links.resume()
        self._carry_out(effects, rows)

    def _handle(self, event: events.AnyEvent) -> list[fx.AnyEffect]:
        try:
            return self._core.handle(self.state, event)
        except Exception as error:
            raise CoreFailed(event, error) from error

    def _maybe_schedule(self, lines: list[tuple[float, bytes]]) -> list[fx.AnyEffect]:
        if not self.state.want_schedule:
            return []
        wait_s = self.pacer.wait_s()
        if wait_s > 0:
            if self._pass_timer is None:
                loop = asyncio.get_running_loop()
                self._pass_timer = loop.call_later(wait_s, self._pass_due)
            return []
        now_s = self.clock.now()
        budget = self.pacer.begin()
        lines.append((now_s, _encode(Pass(now_s=now_s, budget=budget))))
        try:
            effects = list(self._core.schedule(self.state, now_s, budget))
        except Exception as error:
            raise CoreFailed(None, error) from error
        self.pacer.end()
        return effects

    def _pass_due(self) -> None:
        self._pass_timer = None
        self._want_turn()

    def _rows(self, effects: list[fx.AnyEffect]) -> TurnRows:
        return turn_rows(self.state, effects, lambda req: self._replies[req].payload)

    # ------------------------------------------------------------------ effects

    def _carry_out(self, effects: list[fx.AnyEffect], rows: TurnRows) -> None:
        """After the commit: answers first, then launches and messages in the order given."""
        ended = {(s.job_id, s.step_id): s for s in rows.steps if s.end_s is not None}
        for effect in effects:
            if isinstance(effect, fx.Reply):
                self._reply(effect)
        for effect in effects:
            if isinstance(effect, fx.Launch):
                self._launch(effect)
            elif isinstance(effect, fx.Send):
                self.links.send(effect.node, effect.message)
            elif isinstance(effect, fx.StepNews):
                self._news(effect, ended)
            elif isinstance(effect, fx.WakeAt):
                self._wake_at(effect.at_s)
        self.waits.jobs_changed(self.state, rows.jobs, self.clock.now())

    def _reply(self, effect: fx.Reply) -> None:
        found = self._replies.pop(effect.req, None)
        if found is None:
            return
        message = effect.message
        job = self.state.jobs.get(found.job_id)
        if isinstance(message, wire.StepCreated) and job is not None:
            message.job = job_view(job, self.state)
        found.session.answer(message)

    def _launch(self, effect: fx.Launch) -> None:
        job = self.state.jobs.get(effect.job_id)
        step = self.state.steps.get((effect.job_id, effect.step_id))
        if job is None or step is None or step.attempt != effect.attempt:
            return  # ended again within the turn
        payload = self.store.payload(job) if step.spec is None else None
        message = launch.build(job, step, effect.node, payload, self.site)
        if message is not None:
            self.links.send(effect.node, message)

    def _news(self, effect: fx.StepNews, ended: dict[tuple[int, str], Step]) -> None:
        event = effect.event
        if event.done is not None:
            self.pmi.step_ended(effect.job_id, effect.step_id)
            step = ended.get((effect.job_id, effect.step_id))
            if step is not None:
                event = msgspec.structs.replace(event, done=final_record(step) | event.done)
        self.steps.on_news(self.state, effect.job_id, effect.step_id, event)

    def _wake_at(self, at_s: float) -> None:
        if self._wake_timer is not None:
            self._wake_timer.cancel()
        self._wake_at_s = at_s
        delay_s = max(0.0, at_s - self.clock.now())
        loop = asyncio.get_running_loop()
        # The wall clock may be set meanwhile: look again at least once an hour.
        self._wake_timer = loop.call_later(min(delay_s, 3600.0), self._woken)

    def _woken(self) -> None:
        self._wake_timer = None
        at_s = self._wake_at_s
        if at_s is None:
            return
        now_s = self.clock.now()
        if now_s < at_s:
            self._wake_at(at_s)
            return
        self._wake_at_s = None
        self.post(events.TimerFired(now_s=now_s))

    # ------------------------------------------------------------------ when things go wrong

    def _commit_failed(self, error: sqlite3.Error, batch: list[events.AnyEvent]) -> None:
        """Nothing of the turn happened: tell the callers, start again from the rows."""
        self._broken = disk_text(error)
        log.error("the turn could not be committed", extra={"error": str(error)})
        self._refuse(batch)
        self._reload()

    def _refuse(self, batch: list[events.AnyEvent]) -> None:
        message = f"Unable to write the state ({self._broken}); nothing was changed"
        for event in batch:
            req = getattr(event, "req", 0)
            found = self._replies.pop(req, None)
            if found is not None:
                found.session.answer(wire.Error(code="unavailable", message=message))

    def _reload(self) -> None:
        """State from the store; agents register anew, so what they said is not lost."""
        self.links.reset()
        self._inbox = deque(
            e for e in self._inbox if isinstance(e, events.JobSubmitted | events.Asked)
        )
        for timer in (self._wake_timer, self._pass_timer):
            if timer is not None:
                timer.cancel()
        self._wake_timer = self._pass_timer = None
        self._wake_at_s = None
        self._quiet.clear()
        for node in self.state.nodes:
            self.relay.link_lost(node)
        self._restarting = True
        try:
            self.state = self._load()
        except sqlite3.Error as error:
            # What is in memory may hold what was never committed: it must not be used.
            log.critical("the state cannot be loaded again", extra={"error": str(error)})
            self._stop_for(f"cannot read the state file: {error}")
            return
        self.site.nodes = self.state.nodes
        if self._broken:
            self._retry_later()
        else:
            self._want_turn()

    def _retry_later(self) -> None:
        if self._retry_timer is None:
            loop = asyncio.get_running_loop()
            self._retry_timer = loop.call_later(RETRY_S, self._retry)

    def _retry(self) -> None:
        self._retry_timer = None
        self._want_turn()

    def _writable_again(self) -> bool:
        """While broken: try a small write before the core may change anything."""
        try:
            self.store.probe()
        except sqlite3.Error as error:
            self._broken = disk_text(error)
            self._refuse(list(self._inbox))
            self._inbox.clear()
            self._retry_later()
            return False
        log.info("the state can be written again")
        self._broken = ""
        return True

    def _core_failed(self, failed: CoreFailed, batch: list[events.AnyEvent]) -> None:
        """A broken invariant stops the controller; a request that the core cannot take is
        refused and everything else of the turn is done again from the rows."""
        event = failed.event
        text = _encode(event).decode("utf-8", "replace") if event is not None else "schedule"
        log.critical("the core failed", exc_info=failed.error, extra={"event": text[:20_000]})
        asked = isinstance(event, events.Asked | events.JobSubmitted)
        if isinstance(failed.error, AssertionError) or not asked:
            why = f"internal error: {type(failed.error).__name__}: {failed.error}"
            self._stop_for(why)
            return
        found = self._replies.pop(getattr(event, "req", 0), None)
        if found is not None:
            message = "Internal error of the controller (logged); nothing was changed"
            found.session.answer(wire.Error(code="error", message=message))
        others = [e for e in batch if e is not event]
        kept = [e for e in others if isinstance(e, events.JobSubmitted | events.Asked)]
        self._inbox.extendleft(reversed(kept))
        self._reload()

    # ------------------------------------------------------------------ views

    def config_values(self) -> dict[str, str]:
        """``scontrol show config``."""
        return config_values(
            self.state, self.setup.home, self.setup.config_path, self.site.host, self.started_s
        )

    def status(self) -> dict[str, Any]:
        """``clusterctl status``."""
        return status_values(
            self.state,
            started_s=self.started_s,
            now_s=self.clock.now(),
            version=self.version,
            epoch=self.epoch,
            home=str(self.setup.home),
            trouble=self._broken,
            link_errors=self.links.errors(),
            finished=self.reader.count_finished,
        )
