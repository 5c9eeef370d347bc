"""Dispatch: one event in, effects out; and the scheduling pass."""

from __future__ import annotations

from scheduler.api import agentwire, wire
from scheduler.api.errors import ClusterError, Infeasible
from scheduler.core import control, nodes, reports, steps, timers
from scheduler.core.effects import AnyEffect, Reply, WakeAt
from scheduler.core.events import (
    AgentSaid,
    AnyEvent,
    Asked,
    JobSubmitted,
    LinkLost,
    Started,
    TimerFired,
)
from scheduler.core.queue import schedule
from scheduler.core.state import State
from scheduler.core.submit import on_job_submitted
from scheduler.core.trial import on_job_tried

__all__ = ["handle", "schedule", "wake"]


def handle(state: State, event: AnyEvent) -> list[AnyEffect]:
    """Apply ``event`` to ``state`` and say what is to be done.

    A caller's mistake is a ``Reply`` with an ``Error``; an AssertionError is a bug in the core.
    """
    if isinstance(event, JobSubmitted) and event.test_only:
        return on_job_tried(state, event)
    if isinstance(event, JobSubmitted):
        return on_job_submitted(state, event)
    if isinstance(event, AgentSaid):
        return _agent_said(state, event)
    if isinstance(event, Asked):
        try:
            return _asked(state, event)
        except ClusterError as error:
            detail = error.detail if isinstance(error, Infeasible) else ""
            answer = wire.Error(code=error.code, message=error.message, warning=detail)
            return [Reply(req=event.req, message=answer)]
    if isinstance(event, LinkLost):
        return nodes.on_link_lost(state, event)
    if isinstance(event, Started):
        timers.rearm(state, event.now_s)
        state.want_schedule = True
        return []
    assert isinstance(event, TimerFired)
    state.wake_s = None  # this one is used up: the next may be due at the same time
    return timers.fire(state, event.now_s)


def wake(state: State) -> list[AnyEffect]:
    """Ask for a ``TimerFired`` when the next timer is due; called once a turn."""
    if not state.timers:
        return []
    at_s = state.timers[0][0]
    if state.wake_s == at_s:
        return []
    state.wake_s = at_s
    return [WakeAt(at_s=at_s)]


def _asked(state: State, event: Asked) -> list[AnyEffect]:
    request = event.request
    if isinstance(request, wire.Cancel):
        return control.on_cancel(state, event, request)
    if isinstance(request, wire.Control):
        return control.on_control(state, event, request)
    if isinstance(request, wire.UpdateJob):
        return control.on_update_job(state, event, request)
    if isinstance(request, wire.UpdateNode):
        return nodes.on_update_node(state, event, request)
    if isinstance(request, wire.UpdatePartition):
        return nodes.on_update_partition(state, event, request)
    if isinstance(request, wire.CreateStep):
        return steps.on_create_step(state, event, request)
    if isinstance(request, wire.StepSignal):
        return steps.on_step_signal(state, event, request)
    assert isinstance(request, wire.EndAllocation)
    return control.on_end_allocation(state, event, request)


def _agent_said(state: State, event: AgentSaid) -> list[AnyEffect]:
    message, name, now_s = event.message, event.node, event.now_s
    if name not in state.nodes:
        return []
    if isinstance(message, agentwire.Register):
        return nodes.on_register(state, name, message, now_s)
    if isinstance(message, agentwire.Heartbeat):
        nodes.on_heartbeat(state, name, message, now_s)
        return []
    if isinstance(message, agentwire.StepStarted):
        return reports.on_step_started(state, name, message)
    if isinstance(message, agentwire.LaunchFailed):
        return reports.on_launch_failed(state, name, message, now_s)
    if isinstance(message, agentwire.TasksExited):
        return reports.on_tasks_exited(state, name, message, now_s)
    if isinstance(message, agentwire.StepEnded):
        return reports.on_step_ended(state, name, message, now_s)
    assert isinstance(message, agentwire.JobCleaned)
    return nodes.on_job_cleaned(state, name, message.job_id, message.attempt, now_s)
