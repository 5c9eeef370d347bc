"""What the agent's core knows, and the small questions asked of it."""

from __future__ import annotations

import msgspec

from nodeagent.core.effects import AnyEffect, Send, TellStep, ToStep
from nodeagent.order import Key
from scheduler.api.agentwire import (
    EndStep,
    FromAgent,
    Launch,
    LaunchFailed,
    PmiBarrierIn,
    Register,
    StepEnded,
    StepStarted,
)
from scheduler.api.records import TaskExit


class StepState(msgspec.Struct):
    """What the agent knows of one launch.

    ``held``: messages for a supervisor that is not connected (yet, or since the agent's start).
    """

    key: Key
    tasks: list[int]
    phase: str  # waiting, starting, running, sweeping, ended, failed
    launch: Launch | None = None  # until it is handed to the fork server
    connected: bool = False
    held: list[ToStep] = msgspec.field(default_factory=list)
    pids: dict[str, int] = msgspec.field(default_factory=dict)
    exits: list[TaskExit] = msgspec.field(default_factory=list)
    barrier: PmiBarrierIn | None = None
    outcome: StepEnded | LaunchFailed | None = None

    @property
    def over(self) -> bool:
        """No process of it is left here."""
        return self.outcome is not None


class AgentState(msgspec.Struct):
    """Everything the core knows.  ``identity`` is the Register message without its steps."""

    cluster: str
    identity: Register
    link: int | None = None
    epoch: int = 0
    steps: dict[Key, StepState] = msgspec.field(default_factory=dict)
    #: job -> attempt: EndJob was asked, not yet clean
    ending_jobs: dict[int, int] = msgspec.field(default_factory=dict)
    #: job -> attempt: clean, until the controller forgets it
    cleaned: dict[int, int] = msgspec.field(default_factory=dict)
    commands: list[int] = msgspec.field(default_factory=list)
    stopping: bool = False

    @property
    def node(self) -> str:
        return self.identity.node


def of_job(state: AgentState, job_id: int, up_to: int | None = None) -> list[StepState]:
    """The job's steps (of attempts ``<= up_to``), in order of start."""
    return [
        step
        for key, step in state.steps.items()
        if key.job_id == job_id and (up_to is None or key.attempt <= up_to)
    ]


def fenced(state: AgentState, key: Key) -> bool:
    """Whether the launch belongs to an attempt that is over here.  The one place of fencing."""
    job_id, _, attempt = key
    ended = max(state.ending_jobs.get(job_id, -1), state.cleaned.get(job_id, -1))
    newer = any(step.key.attempt > attempt for step in of_job(state, job_id))
    return attempt <= ended or newer


def is_clean(state: AgentState, job_id: int) -> bool:
    """Whether no process of the job is left on this node."""
    return all(step.over for step in of_job(state, job_id))


def send(state: AgentState, message: FromAgent, effects: list[AnyEffect]) -> None:
    """To the controller; dropped without a link, as registration says again what matters."""
    if state.link is not None:
        effects.append(Send(state.link, message))


def send_outcome(state: AgentState, step: StepState, effects: list[AnyEffect]) -> None:
    """Say how the step ended."""
    outcome = step.outcome
    assert outcome is not None
    if isinstance(outcome, StepEnded):
        outcome = msgspec.structs.replace(outcome, clean=is_clean(state, step.key.job_id))
    send(state, outcome, effects)


def started(step: StepState) -> StepStarted:
    """The confirmation of its launch."""
    job_id, step_id, attempt = step.key
    return StepStarted(job_id=job_id, step_id=step_id, attempt=attempt, pids=step.pids)


def tell(state: AgentState, key: Key, message: ToStep, effects: list[AnyEffect]) -> None:
    """To a supervisor; kept for one that is on its way."""
    step = state.steps.get(key)
    if step is not None and not step.connected and not step.over:
        step.held.append(message)
    else:
        effects.append(TellStep(key, message))


def end(state: AgentState, step: StepState, notice: str, effects: list[AnyEffect]) -> None:
    """SIGKILL a started step, now or as soon as its supervisor can be told."""
    if step.phase in ("starting", "running"):
        job_id, step_id, attempt = step.key
        order = EndStep(job_id=job_id, step_id=step_id, attempt=attempt, notice=notice)
        tell(state, step.key, order, effects)
