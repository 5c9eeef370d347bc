"""Steps: layout, sharing, failures of ranks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from scheduler.api import agentwire, wire
from scheduler.api.records import StepSpec, TaskExit
from scheduler.core import events
from tests.support.world import World


def created(reply: wire.Reply) -> wire.StepCreated:
    assert isinstance(reply, wire.StepCreated), reply
    return reply


@pytest.mark.parametrize(
    ("job", "step", "nodes", "tasks"),
    [
        ({"nodes": 2, "ntasks": 4}, {}, ["n001", "n002"], [[0, 1, 2], [3]]),
        ({"nodes": 2}, {}, ["n001", "n002"], [[0], [1]]),
        ({"nodes": 2}, {"ntasks": 1, "ntasks_given": True}, ["n001"], [[0]]),
        ({"ntasks": 8}, {}, ["n001"], [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ({"nodes": 2, "ntasks_per_node": 2}, {}, ["n001", "n002"], [[0, 1], [2, 3]]),
        (
            {"nodes": 2, "ntasks_per_node": 2},
            {"distribution": "cyclic"},
            ["n001", "n002"],
            [[0, 2], [1, 3]],
        ),
        ({"nodes": 3}, {"nodes": 2}, ["n001", "n002"], [[0], [1]]),
        ({"nodes": 3}, {"nodelist": ["n002"], "nodes": 1}, ["n002"], [[0]]),
    ],
)
def test_layout(job: dict[str, Any], step: dict[str, Any], nodes: list[str], tasks: Any) -> None:
    w = World()
    j = w.submit(**job)

    layout = created(w.step(j, **step)).layout

    assert layout.nodes == nodes
    assert layout.tasks == tasks


def test_a_step_that_does_not_fit_the_allocation_is_refused() -> None:
    w = World()
    j = w.submit(ntasks=2)

    reply = w.step(j, ntasks=3, ntasks_given=True)

    assert isinstance(reply, wire.Error)
    assert reply.code == "rejected"


def test_a_second_step_waits_unless_exact_or_overlap() -> None:
    w = World()
    j = w.submit(ntasks=2)
    created(w.step(j, ntasks=1, ntasks_given=True))

    busy = w.step(j, ntasks=1, ntasks_given=True)
    assert isinstance(busy, wire.Error)
    assert busy.code == "busy"
    created(w.step(j, ntasks=1, ntasks_given=True, overlap=True))
    w.agents["n001"].end((j, "0", 1))
    created(w.step(j, ntasks=1, ntasks_given=True, exact=True))
    created(w.step(j, ntasks=1, ntasks_given=True, exact=True))


def test_steps_share_devices_by_gres() -> None:
    w = World()
    j = w.submit(ntasks=2, gres={"neuron": 2})
    one = created(w.step(j, ntasks=1, ntasks_given=True, exact=True, gres={"neuron": 1}))
    two = created(w.step(j, ntasks=1, ntasks_given=True, exact=True, gres={"neuron": 1}))

    cores = [w.state.steps[(j, s.step_id)].allocs[0].cores for s in (one, two)]
    assert cores == [[0, 1], [2, 3]]


def test_a_rank_that_dies_in_mpi_ends_the_step_everywhere_and_is_named() -> None:
    w = World()
    j = w.submit(nodes=2)
    created(w.step(j))
    died = TaskExit(task=1, signal=11, at_s=w.now, in_mpi=True)
    w.now += 0.1

    w.event(
        events.AgentSaid(
            now_s=w.now,
            node="n002",
            message=agentwire.TasksExited(job_id=j, step_id="0", attempt=1, exits=[died]),
        )
    )

    assert (j, "0", 1) not in w.agents["n001"].running
    assert (j, "0") not in w.state.steps
    first = w.job(j).first_failure
    assert first is not None
    assert (first.task, first.node, first.signal) == (1, "n002", 11)


def test_without_kill_on_bad_exit_the_others_go_on() -> None:
    w = World()
    j = w.submit(nodes=2)
    created(w.step(j))

    w.event(
        events.AgentSaid(
            now_s=w.now,
            node="n002",
            message=agentwire.TasksExited(
                job_id=j, step_id="0", attempt=1, exits=[TaskExit(task=1, code=3, at_s=w.now)]
            ),
        )
    )

    assert (j, "0", 1) in w.agents["n001"].running


def test_batch_end_ends_running_steps_and_the_derived_code_is_kept() -> None:
    w = World()
    j = w.submit(nodes=2)
    created(w.step(j))
    w.agents["n001"].end((j, "0", 1), code=4)
    w.agents["n002"].end((j, "0", 1), code=2)
    created(w.step(j))

    w.finish(j)

    job = w.job(j)
    assert (job.state, job.completing, job.derived_code) == ("COMPLETED", False, 4)
    assert not w.state.steps


def test_step_key_makes_creation_repeatable() -> None:
    w = World()
    j = w.submit()
    spec = StepSpec(name="s", argv=["true"])
    a = created(w.ask(wire.CreateStep(job_id=j, spec=spec, key="k")))
    b = created(w.ask(wire.CreateStep(job_id=j, spec=spec, key="k")))

    assert a.step_id == b.step_id
    assert w.agents["n001"].starts.count((j, "0", 1)) == 1


def test_launch_failure_of_the_batch_script_names_the_reason() -> None:
    w = World()
    w.launch_blocked = True
    j = w.submit()

    w.event(
        events.AgentSaid(
            now_s=w.now,
            node="n001",
            message=agentwire.LaunchFailed(
                job_id=j,
                step_id="batch",
                attempt=1,
                reason="Could not open stdout file /nope/x",
                errno_text="No such file or directory",
            ),
        )
    )

    job = w.job(j)
    assert (job.state, job.code, job.signal_code) == ("FAILED", 0, 53)
    assert job.reason == "JobLaunchFailure"
    assert job.detail == "n001: Could not open stdout file /nope/x: No such file or directory"


def test_cancel_a_step_leaves_the_job() -> None:
    w = World()
    j = w.submit(nodes=2)
    created(w.step(j))

    reply = w.ask(wire.Cancel(ids=[f"{j}.0"]))

    assert msgspec.to_builtins(reply)["results"] == [{"type": "Result", "id": f"{j}.0"}]
    assert w.job(j).state == "RUNNING"
    assert (j, "0") not in w.state.steps
