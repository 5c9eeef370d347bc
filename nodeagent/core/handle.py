"""Events in, effects out: links, commands, and the controller's messages."""

from __future__ import annotations

import msgspec

from nodeagent.core import steps
from nodeagent.core.effects import AnyEffect, CloseLink, TellCommand, UseHosts
from nodeagent.core.events import (
    AnyEvent,
    CommandLeft,
    CommandSaid,
    ControllerSaid,
    HeartbeatDue,
    LinkClosed,
    LinkOpened,
    StepFound,
    SupervisorCame,
    SupervisorDied,
    SupervisorLeft,
    SupervisorSaid,
    Swept,
)
from nodeagent.core.state import AgentState, send, send_outcome, started, tell
from nodeagent.order import Key
from scheduler.api.agentwire import (
    EndJob,
    EndStep,
    Forget,
    Heartbeat,
    Input,
    JobCleaned,
    Launch,
    OutputAck,
    PmiBarrierOut,
    Register,
    RelayFrame,
    RelayRequest,
    Signal,
    StepEnded,
    StepReport,
    Stop,
    ToAgent,
    Welcome,
)
from scheduler.api.wire import PROTOCOL, Error

NO_CONTROLLER = "Unable to contact slurm controller (connect failure)"


def handle(state: AgentState, event: AnyEvent) -> list[AnyEffect]:
    """Change ``state`` by ``event``; what is to be done, in order."""
    effects: list[AnyEffect] = []
    match event:
        case LinkOpened():
            _on_link_opened(state, event, effects)
        case LinkClosed(link):
            if link == state.link:
                state.link = None
                _drop_commands(state, effects)
        case ControllerSaid(link, message):
            if link == state.link:
                _on_controller(state, link, message, effects)
        case StepFound():
            steps.on_step_found(state, event, effects)
        case SupervisorCame():
            steps.on_supervisor_came(state, event, effects)
        case SupervisorSaid(key, said):
            steps.on_supervisor_said(state, key, said, effects)
        case SupervisorLeft(key):
            steps.on_supervisor_left(state, key)
        case SupervisorDied(key, outcome):
            steps.on_supervisor_died(state, key, outcome, effects)
        case Swept(key):
            steps.on_swept(state, key, effects)
        case CommandSaid():
            _on_command(state, event, effects)
        case CommandLeft(conn):
            if conn in state.commands:
                state.commands.remove(conn)
                send(state, RelayRequest(conn=conn, uid=0, close=True), effects)
        case HeartbeatDue(load, free):
            send(state, Heartbeat(cpu_load=load, free_mem_mib=free), effects)
    return effects


# ---------------------------------------------------------------- links


def _refusal(state: AgentState, welcome: Welcome) -> str:
    if welcome.protocol != PROTOCOL:
        return f"the controller speaks protocol {welcome.protocol}, this agent {PROTOCOL}"
    if (welcome.cluster, welcome.node) != (state.cluster, state.node):
        return (
            f"this is node {state.node} of cluster {state.cluster}, "
            f"not {welcome.node} of {welcome.cluster}"
        )
    if welcome.epoch < state.epoch:
        return f"a newer controller (epoch {state.epoch}) has this node"
    return ""


def _on_link_opened(state: AgentState, event: LinkOpened, effects: list[AnyEffect]) -> None:
    """Register, then say again whatever may not have arrived."""
    welcome = event.welcome
    reason = _refusal(state, welcome)
    if reason:
        effects.append(CloseLink(event.link, reason))
        return
    if state.link is not None:
        effects.append(CloseLink(state.link, "replaced by a newer link"))
        _drop_commands(state, effects)
    state.link = event.link
    state.epoch = welcome.epoch
    effects.append(UseHosts(welcome.hosts, welcome.heartbeat_s))
    send(state, _register(state), effects)
    for step in state.steps.values():
        if step.over:
            send_outcome(state, step, effects)
            continue
        if step.pids:
            send(state, started(step), effects)
        if step.barrier is not None:
            send(state, step.barrier, effects)
    for job_id, attempt in state.cleaned.items():
        send(state, JobCleaned(job_id=job_id, attempt=attempt), effects)


def _register(state: AgentState) -> Register:
    reports = []
    for step in state.steps.values():
        if step.phase == "failed":
            continue  # its LaunchFailed follows
        ended = step.outcome if isinstance(step.outcome, StepEnded) else None
        reports.append(
            StepReport(
                job_id=step.key.job_id,
                step_id=step.key.step_id,
                attempt=step.key.attempt,
                tasks=step.tasks,
                running=not step.over,
                lost=ended is not None and ended.lost,
                exits=ended.exits if ended is not None else step.exits,
                usage=ended.usage if ended is not None else None,
            )
        )
    return msgspec.structs.replace(
        state.identity, steps=reports, cleaned=list(state.cleaned.items())
    )


# ---------------------------------------------------------------- commands


def _unavailable() -> str:
    return msgspec.json.encode(Error(code="unavailable", message=NO_CONTROLLER)).decode()


def _drop_commands(state: AgentState, effects: list[AnyEffect]) -> None:
    """The controller's side of their connections went with the link."""
    effects.extend(TellCommand(conn, _unavailable(), close=True) for conn in state.commands)
    state.commands.clear()


def _on_command(state: AgentState, event: CommandSaid, effects: list[AnyEffect]) -> None:
    if state.link is None:
        effects.append(TellCommand(event.conn, _unavailable(), close=True))
        return
    if event.conn not in state.commands:
        state.commands.append(event.conn)
    request = RelayRequest(conn=event.conn, uid=event.uid, gid=event.gid, data=event.data)
    send(state, request, effects)


# ---------------------------------------------------------------- the controller's messages


def _on_controller(
    state: AgentState, link: int, message: ToAgent, effects: list[AnyEffect]
) -> None:
    match message:
        case Launch():
            steps.on_launch(state, message, effects)
        case Signal():
            steps.on_signal(state, message, effects)
        case EndStep():
            steps.on_end_step(state, message, effects)
        case EndJob():
            steps.on_end_job(state, message, effects)
        case Forget():
            steps.on_forget(state, message, effects)
        case Input(job_id=job, step_id=name, attempt=attempt):
            tell(state, Key(job, name, attempt), message, effects)
        case OutputAck(job_id=job, step_id=name, attempt=attempt):
            tell(state, Key(job, name, attempt), message, effects)
        case PmiBarrierOut(job_id=job, step_id=name, attempt=attempt):
            key = Key(job, name, attempt)
            step = state.steps.get(key)
            if step is not None and step.barrier is not None and step.barrier.seq == message.seq:
                step.barrier = None
            tell(state, key, message, effects)
        case RelayFrame(conn=conn, data=data, close=close):
            if conn in state.commands:
                if close:
                    state.commands.remove(conn)
                effects.append(TellCommand(conn, data, close=close))
        case Stop(kill=kill):
            steps.on_stop(state, effects, kill=kill)
        case Welcome():
            effects.append(CloseLink(link, "a second Welcome on one link"))
            state.link = None
            _drop_commands(state, effects)
