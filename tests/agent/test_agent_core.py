"""The pure core: decisions without processes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from nodeagent.core import AgentState, effects, events, handle
from nodeagent.order import Key
from scheduler.api import agentwire as aw
from scheduler.api.records import TaskExit, TaskLayout
from scheduler.api.wire import PROTOCOL

KEY = Key(1, "0", 1)


def new_state() -> AgentState:
    identity = aw.Register(
        protocol=PROTOCOL,
        version="1",
        node="n1",
        boot_id="b",
        agent_id="a",
        pid=1,
        cpus=1,
        mem_mib=1,
        device_cores=[],
        boot_s=0,
        start_s=0,
    )
    return AgentState(cluster="test", identity=identity)


def welcome(epoch: int = 1) -> aw.Welcome:
    return aw.Welcome(protocol=PROTOCOL, cluster="test", node="n1", epoch=epoch)


def launch(attempt: int = 1, step: str = "0", job: int = 1) -> aw.Launch:
    return aw.Launch(
        job_id=job,
        step_id=step,
        attempt=attempt,
        uid=0,
        gid=0,
        layout=TaskLayout(nodes=["n1"], tasks=[[0]]),
        node_index=0,
        tasks=[0],
    )


def ended(key: Key = KEY, code: int = 0) -> aw.StepEnded:
    exits = [TaskExit(task=0, code=code)]
    return aw.StepEnded(job_id=key.job_id, step_id=key.step_id, attempt=key.attempt, exits=exits)


class Core:
    """State and the effects of the last event."""

    def __init__(self) -> None:
        self.state = new_state()
        self.effects: list[effects.AnyEffect] = []
        self.post(events.LinkOpened(1, welcome()))

    def post(self, event: events.AnyEvent) -> list[effects.AnyEffect]:
        self.effects = handle(self.state, event)
        return self.effects

    def said(self, message: aw.ToAgent, link: int = 1) -> list[effects.AnyEffect]:
        return self.post(events.ControllerSaid(link, message))

    def sent(self) -> list[aw.FromAgent]:
        return [one.message for one in self.effects if isinstance(one, effects.Send)]

    def start(self, attempt: int = 1, step: str = "0") -> Key:
        key = Key(1, step, attempt)
        self.said(launch(attempt, step))
        self.post(events.SupervisorCame(key, [0]))
        started = aw.StepStarted(job_id=1, step_id=step, attempt=attempt, pids={"0": 5})
        self.post(events.SupervisorSaid(key, started))
        return key


@pytest.fixture
def core() -> Core:
    return Core()


def test_repeated_launch_is_handed_on_once(core: Core) -> None:
    assert core.said(launch()) == [effects.Spawn(launch())]
    assert core.said(launch()) == []
    core.start()
    core.said(launch())
    assert isinstance(core.sent()[0], aw.StepStarted)
    core.post(events.SupervisorSaid(KEY, ended(code=3)))
    core.said(launch())
    assert core.sent()[0] == aw.StepEnded(
        job_id=1, step_id="0", attempt=1, exits=[TaskExit(task=0, code=3)], clean=True
    )


def test_messages_wait_for_a_supervisor_on_its_way(core: Core) -> None:
    core.said(launch())
    ack = aw.OutputAck(job_id=1, step_id="0", attempt=1, attach=True)
    assert core.said(ack) == []
    core.post(events.SupervisorCame(KEY, [0]))
    assert core.effects == [effects.TellStep(KEY, ack)]
    assert core.said(ack) == [effects.TellStep(KEY, ack)]
    core.post(events.SupervisorLeft(KEY))
    assert core.said(ack) == []


def test_new_link_hears_everything_again(core: Core) -> None:
    core.start()
    other = core.start(step="1")
    barrier = aw.PmiBarrierIn(job_id=1, step_id="1", attempt=1, seq=0, kvs={"a": "b"})
    core.post(events.SupervisorSaid(other, barrier))
    core.post(events.LinkClosed(1))
    core.post(events.SupervisorSaid(KEY, ended()))
    assert core.effects == []
    core.post(events.LinkOpened(2, welcome()))
    register, *rest = core.sent()
    assert isinstance(register, aw.Register)
    assert [(one.step_id, one.running) for one in register.steps] == [("0", False), ("1", True)]
    kinds = [type(one) for one in rest]
    assert kinds == [aw.StepEnded, aw.StepStarted, aw.PmiBarrierIn]
    core.said(aw.PmiBarrierOut(job_id=1, step_id="1", attempt=1, seq=0, kvs={}), link=2)
    core.post(events.LinkOpened(3, welcome()))
    assert aw.PmiBarrierIn not in [type(one) for one in core.sent()]


def test_old_links_have_no_say(core: Core) -> None:
    core.post(events.LinkOpened(2, welcome(epoch=3)))
    assert effects.CloseLink(1, "replaced by a newer link") in core.effects
    assert core.said(launch(), link=1) == []
    (refused,) = core.post(events.LinkOpened(3, welcome(epoch=2)))
    assert isinstance(refused, effects.CloseLink)
    assert refused.link == 3


def test_job_is_clean_when_all_its_steps_are(core: Core) -> None:
    first, second = core.start(), core.start(step="1")
    core.said(aw.EndJob(job_id=1, attempt=1))
    assert [one.key for one in core.effects if isinstance(one, effects.TellStep)] == [first, second]
    core.post(events.SupervisorSaid(first, ended(first)))
    assert [type(one) for one in core.sent()] == [aw.StepEnded]
    core.post(events.SupervisorSaid(second, ended(second)))
    assert core.sent()[-1] == aw.JobCleaned(job_id=1, attempt=1)
    assert core.said(launch(step="2")) != []
    assert [type(one) for one in core.sent()] == [aw.JobCleaned]
    core.said(aw.Forget(jobs=[(1, 1)]))
    assert [one for one in core.effects if isinstance(one, effects.Drop)] == [
        effects.Drop(first),
        effects.Drop(second),
    ]
    assert core.state.steps == {}
    assert core.state.cleaned == {}


def test_newer_attempt_waits_for_the_end_of_the_older(core: Core) -> None:
    core.start()
    core.said(launch(attempt=2))
    (told,) = core.effects
    assert isinstance(told, effects.TellStep)
    assert isinstance(told.message, aw.EndStep)
    assert core.said(launch(attempt=1, step="5")) == []  # fenced off
    core.post(events.SupervisorSaid(KEY, ended()))
    assert core.effects[-1] == effects.Spawn(launch(attempt=2))


def test_waiting_step_can_be_ended(core: Core) -> None:
    core.start()
    core.said(launch(attempt=2))
    core.said(aw.EndStep(job_id=1, step_id="0", attempt=2))
    (said,) = core.sent()
    assert isinstance(said, aw.StepEnded)
    assert (said.attempt, said.exits, said.clean) == (2, [], False)
    core.post(events.SupervisorSaid(KEY, ended()))
    assert not [one for one in core.effects if isinstance(one, effects.Spawn)]


def test_end_job_while_the_supervisor_is_on_its_way(core: Core) -> None:
    core.said(launch())
    core.said(aw.EndJob(job_id=1, attempt=1))
    assert core.effects == []
    core.post(events.SupervisorCame(KEY, [0]))
    (told,) = core.effects
    assert isinstance(told, effects.TellStep)
    assert isinstance(told.message, aw.EndJob)


def test_lost_supervisor_is_swept_before_it_is_told(core: Core) -> None:
    core.start()
    core.said(aw.EndJob(job_id=1, attempt=1))
    assert core.post(events.SupervisorDied(KEY)) == [effects.Sweep(KEY)]
    assert core.post(events.SupervisorDied(KEY)) == []
    core.post(events.Swept(KEY))
    outcome, cleaned = core.sent()
    assert isinstance(outcome, aw.StepEnded)
    assert outcome.lost
    assert isinstance(cleaned, aw.JobCleaned)
    assert isinstance(core.effects[0], effects.Record)


def test_each_exit_is_told_once(core: Core) -> None:
    core.start()
    exits = [TaskExit(task=0, code=1)]
    message = aw.TasksExited(job_id=1, step_id="0", attempt=1, exits=exits)
    core.post(events.SupervisorSaid(KEY, message))
    assert core.sent() == [message]
    assert core.post(events.SupervisorSaid(KEY, message)) == []


def test_steps_found_in_the_journal() -> None:
    state = new_state()
    assert handle(state, events.StepFound(KEY, [0], alive=True)) == []
    other, third = Key(2, "batch", 1), Key(3, "batch", 4)
    assert handle(state, events.StepFound(other, [0], alive=False)) == [effects.Sweep(other)]
    handle(state, events.StepFound(third, [0], alive=False, outcome=ended(third)))
    register = handle(state, events.LinkOpened(1, welcome()))[1]
    assert isinstance(register, effects.Send)
    assert isinstance(register.message, aw.Register)
    assert [one.running for one in register.message.steps] == [True, True, False]


def test_forgotten_supervisor_is_told_so(core: Core) -> None:
    (told,) = core.post(events.SupervisorCame(KEY, [0], kept=False))
    assert isinstance(told, effects.TellStep)
    assert isinstance(told.message, aw.Forget)
    assert core.state.steps == {}


def test_unknown_supervisor_is_adopted(core: Core) -> None:
    core.post(events.SupervisorCame(KEY, [0]))
    assert core.state.steps[KEY].phase == "running"
    late = Key(5, "0", 1)
    core.said(aw.EndJob(job_id=5, attempt=1))
    (told,) = core.post(events.SupervisorCame(late, [0]))
    assert isinstance(told, effects.TellStep)
    assert isinstance(told.message, aw.EndStep)


def test_stop_with_kill_waits_for_the_steps(core: Core) -> None:
    core.start()
    core.said(aw.Stop(kill=True))
    assert effects.StopAgent() not in core.effects
    core.post(events.SupervisorSaid(KEY, ended()))
    assert core.effects[-1] == effects.StopAgent()


FORBIDDEN = {
    "asyncio",
    "time",
    "random",
    "datetime",
    "sqlite3",
    "os",
    "socket",
    "subprocess",
    "threading",
    "logging",
}


def test_core_imports_nothing_of_the_world() -> None:
    """Of its own modules; ``nodeagent.order`` is the only one it takes from the shell."""
    folder = Path(events.__file__).parent
    files = [*folder.glob("*.py"), folder.parent / "order.py"]
    for path in files:
        for item in ast.walk(ast.parse(path.read_text())):
            if isinstance(item, ast.Import):
                names = [one.name for one in item.names]
            elif isinstance(item, ast.ImportFrom):
                names = [item.module or ""]
            else:
                continue
            assert not {name.split(".")[0] for name in names} & FORBIDDEN, path
            ours = {name for name in names if name.startswith("nodeagent")}
            assert all(
                name.startswith("nodeagent.core") or name == "nodeagent.order" for name in ours
            )
