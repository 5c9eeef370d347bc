"""Steps: how they start and end, and what their supervisors say."""

from __future__ import annotations

import msgspec

from nodeagent.core.effects import (
    AnyEffect,
    Drop,
    Record,
    Spawn,
    StopAgent,
    Sweep,
    TellStep,
)
from nodeagent.core.events import FromStep, StepFound, SupervisorCame
from nodeagent.core.state import (
    AgentState,
    StepState,
    end,
    fenced,
    is_clean,
    of_job,
    send,
    send_outcome,
    started,
    tell,
)
from nodeagent.order import Key
from scheduler.api.agentwire import (
    EndJob,
    EndStep,
    Forget,
    JobCleaned,
    Launch,
    LaunchFailed,
    Output,
    PmiBarrierIn,
    Signal,
    StepEnded,
    StepStarted,
    TasksExited,
)
from scheduler.api.records import Usage

# ---------------------------------------------------------------- the controller's orders


def on_launch(state: AgentState, launch: Launch, effects: list[AnyEffect]) -> None:
    """Start the step; a repeated order only repeats the answer."""
    key = Key(launch.job_id, launch.step_id, launch.attempt)
    known = state.steps.get(key)
    if known is not None:
        if known.over:
            send_outcome(state, known, effects)
        elif known.pids:
            send(state, started(known), effects)
        return
    if fenced(state, key):
        attempt = state.cleaned.get(key.job_id, -1)
        if attempt >= key.attempt:
            send(state, JobCleaned(job_id=key.job_id, attempt=attempt), effects)
        return
    step = StepState(key=key, tasks=launch.tasks, phase="waiting", launch=launch)
    state.steps[key] = step
    for older in of_job(state, key.job_id, key.attempt - 1):
        end(state, older, "", effects)
    _start_if_free(state, step, effects)


def _start_if_free(state: AgentState, step: StepState, effects: list[AnyEffect]) -> None:
    """Start a waiting step unless an older attempt of its job still has processes here."""
    older = of_job(state, step.key.job_id, step.key.attempt - 1)
    if step.phase != "waiting" or step.over or any(not one.over for one in older):
        return
    assert step.launch is not None
    effects.append(Spawn(step.launch))
    step.phase, step.launch = "starting", None


def cancel_waiting(state: AgentState, step: StepState, effects: list[AnyEffect]) -> None:
    """A step that was never started ends without ever having had a task."""
    job_id, step_id, attempt = step.key
    outcome = StepEnded(job_id=job_id, step_id=step_id, attempt=attempt, exits=[])
    step.launch = None
    _ended(state, step, outcome, effects)


def on_signal(state: AgentState, message: Signal, effects: list[AnyEffect]) -> None:
    """To one step or to all steps of the job, of this attempt."""
    for step in of_job(state, message.job_id):
        wanted = message.all_steps or step.key.step_id == message.step_id
        if wanted and step.key.attempt == message.attempt and not step.over:
            tell(state, step.key, message, effects)


def on_end_step(state: AgentState, message: EndStep, effects: list[AnyEffect]) -> None:
    """Kill; for a step that is over or unknown the answer comes at once."""
    key = Key(message.job_id, message.step_id, message.attempt)
    step = state.steps.get(key)
    if step is None:  # never came here, or forgotten: it has no process
        clean = is_clean(state, key.job_id)
        job_id, step_id, attempt = key
        ended = StepEnded(job_id=job_id, step_id=step_id, attempt=attempt, exits=[], clean=clean)
        send(state, ended, effects)
    elif step.over:
        send_outcome(state, step, effects)
    elif step.phase == "waiting":
        cancel_waiting(state, step, effects)
    else:
        end(state, step, message.notice, effects)


def on_end_job(state: AgentState, message: EndJob, effects: list[AnyEffect]) -> None:
    """Kill all steps of the job up to the attempt; ``JobCleaned`` when none has a process."""
    job_id, attempt = message.job_id, message.attempt
    state.ending_jobs[job_id] = max(attempt, state.ending_jobs.get(job_id, -1))
    for step in of_job(state, job_id, attempt):
        if step.over:
            effects.append(TellStep(step.key, message))  # it may hold output still
        elif step.phase == "waiting":
            cancel_waiting(state, step, effects)
        else:
            tell(state, step.key, message, effects)
    _clean_if_done(state, job_id, effects)


def _clean_if_done(state: AgentState, job_id: int, effects: list[AnyEffect]) -> None:
    attempt = state.ending_jobs.get(job_id)
    if attempt is None or any(not step.over for step in of_job(state, job_id, attempt)):
        return
    del state.ending_jobs[job_id]
    state.cleaned[job_id] = max(attempt, state.cleaned.get(job_id, -1))
    send(state, JobCleaned(job_id=job_id, attempt=state.cleaned[job_id]), effects)


def on_forget(state: AgentState, message: Forget, effects: list[AnyEffect]) -> None:
    """The controller has committed these: no need to remember them."""
    keys = [Key(*step) for step in message.steps]
    for job_id, attempt in message.jobs:
        if state.cleaned.get(job_id, attempt + 1) <= attempt:
            del state.cleaned[job_id]
        keys += [step.key for step in of_job(state, job_id, attempt)]
    for key in keys:
        step = state.steps.get(key)
        if step is not None and step.over:
            del state.steps[key]
            effects.append(Drop(key))
            effects.append(TellStep(key, _forget(key)))


def _forget(key: Key) -> Forget:
    return Forget(steps=[(key.job_id, key.step_id, key.attempt)])


def on_stop(state: AgentState, effects: list[AnyEffect], *, kill: bool) -> None:
    """End the agent, at once or after everything it runs."""
    state.stopping = True
    if kill:
        for step in list(state.steps.values()):
            if step.phase == "waiting" and not step.over:
                cancel_waiting(state, step, effects)
            else:
                end(state, step, "", effects)
    if not kill or all(step.over for step in state.steps.values()):
        effects.append(StopAgent())


# ---------------------------------------------------------------- supervisors


def on_step_found(state: AgentState, event: StepFound, effects: list[AnyEffect]) -> None:
    """A step of an earlier life of the agent."""
    step = StepState(key=event.key, tasks=event.tasks, phase="running")
    state.steps[event.key] = step
    if event.outcome is not None:
        _ended(state, step, event.outcome, effects)
    elif not event.alive:
        on_supervisor_died(state, event.key, None, effects)


def on_supervisor_came(state: AgentState, event: SupervisorCame, effects: list[AnyEffect]) -> None:
    """Adopt it, give it what was kept for it."""
    key = event.key
    step = state.steps.get(key)
    if step is None:
        if not event.kept:  # forgotten: it only holds output that nobody may want any more
            effects.append(TellStep(key, _forget(key)))
            return
        over = fenced(state, key)
        step = StepState(key=key, tasks=event.tasks, phase="running", connected=True)
        state.steps[key] = step
        if over:
            end(state, step, "", effects)
    step.connected = True
    if step.over:
        return
    if step.phase in ("waiting", "starting"):
        step.phase, step.launch = "running", None
    held, step.held = step.held, []
    effects.extend(TellStep(key, message) for message in held)


def on_supervisor_left(state: AgentState, key: Key) -> None:
    """Keep messages for it until it comes again."""
    step = state.steps.get(key)
    if step is not None:
        step.connected = False


def on_supervisor_said(
    state: AgentState, key: Key, message: FromStep, effects: list[AnyEffect]
) -> None:
    """Note it and pass it on."""
    if isinstance(message, Output):
        send(state, message, effects)
        return
    step = state.steps.get(key)
    if step is None or step.over:
        return
    match message:
        case StepStarted(pids=pids):
            step.phase, step.pids = "running", pids
            send(state, message, effects)
        case TasksExited(exits=exits):
            known = {one.task for one in step.exits}
            new = [one for one in exits if one.task not in known]
            step.exits += new
            if new:
                send(state, msgspec.structs.replace(message, exits=new), effects)
        case PmiBarrierIn():
            step.barrier = message
            send(state, message, effects)
        case StepEnded() | LaunchFailed():
            _ended(state, step, message, effects)


def on_supervisor_died(
    state: AgentState,
    key: Key,
    outcome: StepEnded | LaunchFailed | None,
    effects: list[AnyEffect],
) -> None:
    """It ended well when the journal has its outcome; else look for what it left behind."""
    step = state.steps.get(key)
    if step is None:
        return
    step.connected = False
    if step.over or step.phase == "sweeping":
        return
    if outcome is not None:
        _ended(state, step, outcome, effects)
        return
    step.phase = "sweeping"
    effects.append(Sweep(key))


def on_swept(state: AgentState, key: Key, effects: list[AnyEffect]) -> None:
    """What the lost supervisor had started is gone."""
    step = state.steps.get(key)
    if step is None or step.phase != "sweeping" or step.over:
        return
    job_id, step_id, attempt = key
    lost = StepEnded(
        job_id=job_id,
        step_id=step_id,
        attempt=attempt,
        exits=step.exits,
        usage=Usage(),
        lost=True,
    )
    effects.append(Record(key, lost))
    _ended(state, step, lost, effects)


def _ended(
    state: AgentState,
    step: StepState,
    outcome: StepEnded | LaunchFailed,
    effects: list[AnyEffect],
) -> None:
    """The step has no process any more."""
    step.phase = "failed" if isinstance(outcome, LaunchFailed) else "ended"
    step.outcome = outcome
    step.barrier = None
    step.held.clear()
    send_outcome(state, step, effects)
    job_id = step.key.job_id
    _clean_if_done(state, job_id, effects)
    for later in of_job(state, job_id):
        _start_if_free(state, later, effects)
    if state.stopping and all(one.over for one in state.steps.values()):
        effects.append(StopAgent())
