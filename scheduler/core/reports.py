"""What agents say about running steps."""

from __future__ import annotations

from scheduler.api import agentwire, wire
from scheduler.api.records import FirstFailure, Job, Step, TaskExit
from scheduler.api.states import STEP_BATCH
from scheduler.core.effects import AnyEffect, Send, StepNews
from scheduler.core.lifecycle import (
    batch_ended,
    current,
    launch_failed,
    node_failed,
    settle,
    step_progress,
)
from scheduler.core.state import State
from scheduler.core.steps import end_step, step_timer_key, terminate_step


def find(state: State, job_id: int, step_id: str, attempt: int) -> tuple[Job, Step] | None:
    """Job and step of a message, None when it is about something older or ended."""
    job = current(state, job_id, attempt)
    step = state.steps.get((job_id, step_id)) if job is not None else None
    if job is None or step is None or step.attempt != attempt:
        return None
    return job, step


def on_step_started(state: State, node: str, message: agentwire.StepStarted) -> list[AnyEffect]:
    """A node confirmed the launch."""
    found = find(state, message.job_id, message.step_id, message.attempt)
    if found is None:
        return []
    _, step = found
    if node in step.layout.nodes and node not in step.started:
        step.started.append(node)
        state.touch_step(step)
    tasks = step.layout.tasks[step.layout.nodes.index(node)]
    event = wire.StepEvent(started=tasks, node=node)
    return [StepNews(job_id=step.job_id, step_id=step.step_id, event=event)]


def _launch_detail(node: str, message: agentwire.LaunchFailed) -> str:
    return ": ".join(part for part in (node, message.reason, message.errno_text) if part)


def on_launch_failed(
    state: State, node: str, message: agentwire.LaunchFailed, now_s: float
) -> list[AnyEffect]:
    """Nothing of the step runs on that node.  Repeated until ``Forget``."""
    forget = _forget(node, message)
    found = find(state, message.job_id, message.step_id, message.attempt)
    if found is None or node in found[1].ended:
        return [forget]
    return [*_launch_failed(state, *found, node, message, now_s), forget]


def _forget(node: str, message: agentwire.LaunchFailed | agentwire.StepEnded) -> Send:
    steps = [(message.job_id, message.step_id, message.attempt)]
    return Send(node=node, message=agentwire.Forget(steps=steps))


def _launch_failed(
    state: State,
    job: Job,
    step: Step,
    node: str,
    message: agentwire.LaunchFailed,
    now_s: float,
) -> list[AnyEffect]:
    step.ended.append(node)
    step.reason = step.reason or "LaunchFailed"
    step.code = max(step.code, 1)
    if step.step_id == STEP_BATCH:
        detail = _launch_detail(node, message)
        step.code, step.signal = 0, 53
        effects = step_progress(state, job, step, now_s)
        return effects + launch_failed(state, job, "JobLaunchFailure", detail, now_s)
    task = step.layout.tasks[step.layout.nodes.index(node)][0]
    note_failure(
        step, node, TaskExit(task=task, code=1, at_s=now_s, launch_error=message.errno_text)
    )
    job.detail = _launch_detail(node, message)
    state.touch(job)
    return end_step(state, step, "LaunchFailed") + step_progress(state, job, step, now_s)


def on_tasks_exited(
    state: State, node: str, message: agentwire.TasksExited, now_s: float
) -> list[AnyEffect]:
    """Tasks ended while others of the step may go on."""
    found = find(state, message.job_id, message.step_id, message.attempt)
    if found is None:
        return []
    job, step = found
    effects: list[AnyEffect] = []
    event = wire.StepEvent(exits=message.exits, node=node)
    effects.append(StepNews(job_id=job.id, step_id=step.step_id, event=event))
    kill = terminate = False
    for task_exit in message.exits:
        bad = bool(task_exit.code or task_exit.signal)
        if bad or task_exit.in_mpi:
            note_failure(step, node, task_exit)
        kill = kill or task_exit.in_mpi
        terminate = terminate or (bad and step.kill_on_bad_exit)
    wait_s = step.spec.wait_s if step.spec is not None else 0
    if wait_s and step.wait_kill_s is None and step.ntasks > len(message.exits):
        step.wait_kill_s = now_s + wait_s
        state.at(step.wait_kill_s, "step_wait", step_timer_key(step))
    state.touch_step(step)
    if kill and step.step_id != STEP_BATCH:
        effects += end_step(state, step, "")
    elif terminate and step.step_id != STEP_BATCH and step.ntasks > len(message.exits):
        effects += terminate_step(state, step, now_s)
    return effects


def note_failure(step: Step, node: str, task_exit: TaskExit) -> None:
    """Keep the earliest bad end of the step: that is the rank accounting names."""
    first = step.first_failure
    if first is None or task_exit.at_s < first.at_s:
        step.first_failure = FirstFailure(
            task=task_exit.task,
            node=node,
            code=task_exit.code,
            signal=task_exit.signal,
            at_s=task_exit.at_s,
        )


def on_step_ended(
    state: State, node: str, message: agentwire.StepEnded, now_s: float
) -> list[AnyEffect]:
    """One node's share is over.  Repeated until ``Forget``, so a second one changes nothing."""
    forget = _forget(node, message)
    job = current(state, message.job_id, message.attempt)
    found = find(state, message.job_id, message.step_id, message.attempt)
    effects: list[AnyEffect] = []
    # A step whose launch was still under way when the agent said "clean" may run there by now.
    clean = message.clean and job is not None and _none_else_there(state, job, node, message)
    if found is not None and node not in found[1].ended:
        effects += _node_share_ended(state, *found, node, message, now_s)
    if clean and job is not None and job.completing:
        effects = [e for e in effects if not _ends_job(e, node)]  # nothing is left to end there
        for alloc in job.allocs:
            if alloc.node == node:
                state.release_alloc(job, alloc, now_s)
        effects += settle(state, job, now_s)
    return [*effects, forget]


def _none_else_there(state: State, job: Job, node: str, message: agentwire.StepEnded) -> bool:
    return all(
        step.step_id == message.step_id or node in step.ended or node not in step.layout.nodes
        for step in state.active_steps(job)
    )


def _ends_job(effect: AnyEffect, node: str) -> bool:
    return (
        isinstance(effect, Send)
        and effect.node == node
        and isinstance(effect.message, agentwire.EndJob)
    )


def _node_share_ended(
    state: State, job: Job, step: Step, node: str, message: agentwire.StepEnded, now_s: float
) -> list[AnyEffect]:
    step.ended.append(node)
    if node not in step.started:
        step.started.append(node)
    step.usage[node] = message.usage
    for task_exit in message.exits:
        step.code = max(step.code, task_exit.code)
        step.signal = step.signal or task_exit.signal
        step.oom = step.oom or task_exit.oom
        if task_exit.code or task_exit.signal:
            note_failure(step, node, task_exit)
    _prefer_first_failure(step)
    effects: list[AnyEffect] = [
        StepNews(
            job_id=job.id,
            step_id=step.step_id,
            event=wire.StepEvent(exits=message.exits, node=node),
        )
    ]
    if message.lost and not step.killed:
        step.reason = "NODE FAILURE"
        step.signal = step.signal or 9
    effects += step_progress(state, job, step, now_s)
    if message.lost and step.end_s is None:
        effects += end_step(state, step, "NODE FAILURE")  # the others would wait for ever
    if step.step_id == STEP_BATCH and step.end_s is not None:
        if message.lost and not job.completing:
            return effects + node_failed(state, job, node, now_s, gone=False)
        return effects + batch_ended(state, job, step, now_s)
    if step.end_s is None and step.first_failure is not None and step.kill_on_bad_exit:
        effects += terminate_step(state, step, now_s)
    return effects


def share_never_ran(state: State, job: Job, step: Step, now_s: float) -> list[AnyEffect]:
    """The step was killed before one of its nodes heard of it; that share counts as ended."""
    effects = step_progress(state, job, step, now_s)
    if step.step_id == STEP_BATCH and step.end_s is not None and not job.completing:
        step.signal = step.signal or 9
        state.touch_step(step)
        effects += batch_ended(state, job, step, now_s)
    return effects


def _prefer_first_failure(step: Step) -> None:
    """A step ended because one rank died shows that rank's code, not the KILLs after it."""
    first = step.first_failure
    if first is not None and step.killed and not step.reason:
        step.code, step.signal = first.code, first.signal
