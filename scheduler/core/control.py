"""What users and administrators change: cancel, signal, hold, release, requeue, update."""

from __future__ import annotations

import msgspec

from scheduler.api import wire
from scheduler.api.errors import ClusterError, Denied, Infeasible, NotFound, Rejected
from scheduler.api.records import Job
from scheduler.api.states import STEP_BATCH, TERMINAL
from scheduler.core import arrays, deps
from scheduler.core.effects import AnyEffect, Reply
from scheduler.core.events import Asked
from scheduler.core.lifecycle import (
    arm_limit,
    back_to_queue,
    batch_ended,
    cancel_pending,
    check_deps,
    finish,
    is_over,
    set_reason,
)
from scheduler.core.priority import priority_of
from scheduler.core.state import State
from scheduler.core.steps import end_step, may_control, signal_step
from scheduler.core.submit import limit_reason

OVER = "Job/step already completing or completed"
UNKNOWN = "Invalid job id specified"
DENIED = "Access/permission denied"
SIGKILL = 9


def select(state: State, text: str) -> list[tuple[Job, int | None]]:
    """Records an id names: ``12`` (all of an array), ``12_3``, ``12_[1-4,7]``.

    The second value is a task to take out of an array's head record.  Raises ``NotFound``.
    """
    base, underscore, rest = text.partition("_")
    if not base.isdecimal():
        raise Rejected(f"Invalid job id {text}")
    job_id = int(base)
    if not underscore:
        members = state.by_array.get(job_id)
        if members:
            return [(state.jobs[i], None) for i in list(members)]
        job = state.jobs.get(job_id)
        if job is None:
            raise NotFound(UNKNOWN)
        return [(job, None)]
    tasks = arrays.parse(rest, state.settings.max_array_size)[0]
    found: list[tuple[Job, int | None]] = []
    for task in tasks:
        for i in state.by_array.get(job_id, {}):
            job = state.jobs[i]
            if task in job.array_tasks:
                found.append((job, task))
            elif job.array_task_id == task:
                found.append((job, None))
    if not found:
        raise NotFound(UNKNOWN)
    return found


def on_cancel(state: State, event: Asked, request: wire.Cancel) -> list[AnyEffect]:
    """scancel: by ids, by filters, or both (ids narrowed by the filters)."""
    results: list[wire.Result] = []
    effects: list[AnyEffect] = []
    ids = request.ids or [str(j.id) for j in state.jobs.values() if not is_over(j)]
    for text in ids:
        try:
            _cancel_one(state, event, request, text, effects)
            results.append(wire.Result(id=text))
        except ClusterError as error:
            if request.ids:
                results.append(wire.Result(id=text, code=error.code, message=error.message))
    return [Reply(req=event.req, message=wire.Results(results=results)), *effects]


def _cancel_one(
    state: State, event: Asked, request: wire.Cancel, text: str, effects: list[AnyEffect]
) -> None:
    """Adds to ``effects`` as it goes: what was done to one task stands when the next raises."""
    base, dot, step_id = text.partition(".")
    if dot:
        _cancel_step(state, event, request, base, step_id, effects)
        return
    chosen = select(state, base)
    if not request.signal and all(is_over(job) for job, _ in chosen):
        raise Rejected(OVER)  # scancel tells of it with -v only
    for job, task in chosen:
        if not _matches(job, request):
            continue
        if not may_control(event.caller, job):
            raise Denied(DENIED)
        if request.signal:
            effects += _signal_job(state, job, request)
        else:
            effects += cancel_job(state, job, task, event.caller.uid, event.now_s)


def _matches(job: Job, request: wire.Cancel) -> bool:
    shown = "COMPLETING" if job.completing else job.state
    return (
        (not request.users or job.user in request.users or str(job.uid) in request.users)
        and (not request.states or shown in request.states or job.state in request.states)
        and (not request.partitions or job.partition in request.partitions)
        and (not request.names or job.name in request.names)
        and (not request.accounts or job.account in request.accounts)
        and (not request.qos or job.qos in request.qos)
        and (not request.nodes or any(a.node in request.nodes for a in job.allocs))
    )


def _cancel_step(
    state: State,
    event: Asked,
    request: wire.Cancel,
    base: str,
    step_id: str,
    effects: list[AnyEffect],
) -> None:
    for job, _ in select(state, base):
        if not may_control(event.caller, job):
            raise Denied(DENIED)
        step = state.steps.get((job.id, step_id))
        if step is None:
            raise NotFound(OVER if job.state in TERMINAL else "Invalid job id specified")
        if request.signal and request.signal != SIGKILL:
            effects += signal_step(step, request.signal)
        else:
            effects += end_step(state, step, "CANCELLED")


def _signal_job(state: State, job: Job, request: wire.Cancel) -> list[AnyEffect]:
    """scancel --signal: the steps; -b the batch script; -f both."""
    if job.state == "PENDING":
        raise Rejected("Job is pending execution")
    if job.state != "RUNNING" or job.completing:
        raise Rejected(OVER)
    effects: list[AnyEffect] = []
    for step in state.active_steps(job):
        if step.step_id == STEP_BATCH:
            if request.batch_only or request.full:
                effects += signal_step(step, request.signal, batch_shell=not request.full)
        elif not request.batch_only:
            effects += signal_step(step, request.signal)
    return effects


def cancel_job(state: State, job: Job, task: int | None, uid: int, now_s: float) -> list[AnyEffect]:
    """Cancel a job in whatever state it is; an ended one is left alone without complaint."""
    if job.state == "PENDING":
        if task is not None and len(job.array_tasks) > 1:
            gone = arrays.split(job, task, state.new_job_id())
            state.touch(job)
            state.add_job(gone)
            return cancel_pending(state, gone, uid, now_s)
        if task is not None:
            arrays.split(job, task, 0)
        return cancel_pending(state, job, uid, now_s)
    if job.completing:
        if job.requeue_after:
            job.requeue_after = ""
            job.state = job.end_state = "CANCELLED"
            job.cancelled_by = uid
            state.touch(job)
        return []
    if job.state == "RUNNING":
        job.cancelled_by = uid
        return finish(state, job, "CANCELLED", now_s, gentle=True)
    return []


# ---------------------------------------------------------------------- scontrol verbs


def on_control(state: State, event: Asked, request: wire.Control) -> list[AnyEffect]:
    """hold, uhold, release, requeue, requeuehold."""
    results: list[wire.Result] = []
    effects: list[AnyEffect] = []
    for text in request.ids:
        try:
            for job, task in select(state, text):
                if not may_control(event.caller, job):
                    raise Denied(DENIED)
                if task is not None:
                    raise Rejected(
                        f"{text} has not started; name the whole array {job.array_job_id}"
                    )
                effects += _control(state, event, request.op, job)
            results.append(wire.Result(id=text))
        except ClusterError as error:
            results.append(wire.Result(id=text, code=error.code, message=error.message))
    state.want_schedule = True
    return [Reply(req=event.req, message=wire.Results(results=results)), *effects]


def _control(state: State, event: Asked, op: str, job: Job) -> list[AnyEffect]:
    now_s = event.now_s
    if op in ("hold", "uhold"):
        if job.state in TERMINAL:
            raise Rejected(OVER)
        if job.state == "PENDING":
            job.held = "admin" if op == "hold" and event.caller.admin else "user"
            job.priority = 0
            set_reason(state, job, "JobHeldAdmin" if job.held == "admin" else "JobHeldUser")
            state.touch(job)
        return []
    if op == "release":
        if job.held == "admin" and not event.caller.admin:
            raise Denied(DENIED)
        if job.state in TERMINAL:
            raise Rejected(OVER)
        job.held = ""
        if job.admin_priority == 0:
            job.admin_priority = None
        job.priority = priority_of(state, job, now_s)
        if job.state == "PENDING":
            set_reason(state, job, "None")
        state.touch(job)
        return []
    if op in ("requeue", "requeuehold"):
        return requeue(state, job, now_s, hold=op == "requeuehold")
    if op in ("suspend", "resume"):
        if job.state in TERMINAL:
            raise Rejected(OVER)
        if op == "resume":
            raise Rejected("Job is not suspended")
        if job.state == "PENDING":
            raise Rejected("Job is pending execution")
    raise Rejected(f"{op} is not supported")


def requeue(state: State, job: Job, now_s: float, *, hold: bool) -> list[AnyEffect]:
    """Back to the queue with the same id, from RUNNING or from an ended state."""
    if job.state == "PENDING":
        raise Rejected("Job is pending execution")
    if not job.batch or not job.requeue:
        raise Rejected("Requested operation is presently disabled")
    job.requeue_after = "hold" if hold else "requeue"
    if job.completing:
        state.touch(job)
        return []
    if job.state == "RUNNING":
        return finish(state, job, "CANCELLED", now_s, gentle=True, detail="requeued")
    job.allocs = []
    return back_to_queue(state, job, now_s)


def on_end_allocation(state: State, event: Asked, request: wire.EndAllocation) -> list[AnyEffect]:
    """salloc or srun is done with its allocation."""
    job = state.jobs.get(request.job_id)
    if job is None:
        raise NotFound(UNKNOWN)
    if not may_control(event.caller, job):
        raise Denied(DENIED)
    done = Reply(req=event.req, message=wire.Ok())
    if job.state == "PENDING":
        return [done, *cancel_pending(state, job, event.caller.uid, event.now_s)]
    if job.state != "RUNNING" or job.completing:
        return [done]
    job.code, job.signal_code = request.code, request.signal
    good = not request.code and not request.signal
    end_state = "COMPLETED" if good else "FAILED"
    if not good:
        job.reason = "NonZeroExitCode"
    return [done, *finish(state, job, end_state, event.now_s, gentle=True)]


# ---------------------------------------------------------------------- scontrol update job


def on_update_job(state: State, event: Asked, request: wire.UpdateJob) -> list[AnyEffect]:
    """Change a job; what it would change is checked whole before any of it is done."""
    results: list[wire.Result] = []
    effects: list[AnyEffect] = []
    for job, task in select(state, request.id):
        if not may_control(event.caller, job):
            raise Denied(DENIED)
        if task is not None:
            raise Rejected(f"{request.id} has not started; name the whole array {job.array_job_id}")
        _check_update(state, event, request, job)
        effects += _apply_update(state, event, request, job)
        results.append(wire.Result(id=request.id))
    state.want_schedule = True
    return [Reply(req=event.req, message=wire.Results(results=results)), *effects]


def _check_update(state: State, event: Asked, request: wire.UpdateJob, job: Job) -> None:
    if job.state in TERMINAL:
        raise Rejected(OVER)
    for name in request.partitions or []:
        if name not in state.partitions:
            raise Rejected("Invalid partition name specified")
    for name in (request.nodelist or []) + (request.exclude or []):
        if name not in state.nodes:
            raise Rejected("Invalid node name specified")
    if not event.caller.admin:
        longer = request.time_limit_s is not None and (
            request.time_limit_s < 0
            or (job.time_limit_s is not None and request.time_limit_s > job.time_limit_s)
        )
        if (
            request.priority is not None
            or longer
            or (request.nice is not None and request.nice < 0)
        ):
            raise Denied(DENIED)
    if request.min_nodes is not None and job.state != "PENDING":
        raise Rejected("Requested operation not supported on this system")
    fields = (request.partitions, request.nodelist, request.dependency)
    if job.state != "PENDING" and any(f is not None for f in fields):
        raise Rejected("Job is no longer pending execution")
    if request.dependency:
        deps.check_circle(state, job, deps.parse(request.dependency)[0])
    if request.min_nodes is not None and request.min_nodes < 1:
        raise Rejected("Node count specification invalid")
    trial = msgspec.structs.replace(job, res=_new_resources(job, request))
    for name in request.partitions or job.partitions:
        why = limit_reason(state, trial, name)
        if why in ("PartitionConfig", "PartitionNodeLimit") and request.min_nodes is not None:
            raise Infeasible("Requested node configuration is not available")


def _new_resources(job: Job, request: wire.UpdateJob):  # type: ignore[no-untyped-def]
    changes: dict[str, object] = {}
    if request.min_nodes is not None:
        changes.update(min_nodes=request.min_nodes, nodes_given=True)
        changes.update(max_nodes=request.max_nodes or request.min_nodes)
    if request.nodelist is not None:
        changes["nodelist"] = request.nodelist
    if request.exclude is not None:
        changes["exclude"] = request.exclude
    return msgspec.structs.replace(job.res, **changes)


def _apply_update(state: State, event: Asked, request: wire.UpdateJob, job: Job) -> list[AnyEffect]:
    job.res = _new_resources(job, request)
    for field in ("name", "comment", "requeue", "nice", "account", "array_throttle"):
        value = getattr(request, field)
        if value is not None:
            setattr(job, field, value)
    if request.partitions is not None:
        job.partitions, job.partition = request.partitions, request.partitions[0]
    if request.priority is not None:
        job.admin_priority = request.priority
        job.held = "admin" if request.priority == 0 else ""
    if request.begin_s is not None:
        job.begin_s = request.begin_s
        state.at(request.begin_s, "begin", str(job.id))
    if request.time_limit_s is not None:
        job.time_limit_s = None if request.time_limit_s < 0 else request.time_limit_s
        arm_limit(state, job)
    effects: list[AnyEffect] = []
    if request.dependency is not None:
        job.deps, job.dep_any = (
            deps.parse(request.dependency) if request.dependency else ([], False)
        )
        job.dependency = deps.text_of(job)
        for _, target in job.deps:
            state.depend(job, target)
        effects = check_deps(state, job, event.now_s)
    job.priority = priority_of(state, job, event.now_s)
    state.touch(job)
    return effects


__all__ = [
    "batch_ended",
    "cancel_job",
    "on_cancel",
    "on_control",
    "on_end_allocation",
    "on_update_job",
    "requeue",
    "select",
]
