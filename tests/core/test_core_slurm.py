"""Behaviour that the recordings of a real Slurm show (see ``tests/golden``), one by one."""

from __future__ import annotations

import msgspec
import pytest

from scheduler.api import agentwire, wire
from scheduler.api.records import JobSpec, TaskExit
from scheduler.core import events
from tests.support.world import World


def _trial(w: World, **fields: object) -> wire.Reply:
    """``sbatch --test-only``."""
    spec = msgspec.convert({"name": "t", "resources": fields}, type=JobSpec)
    w.req += 1
    w.event(events.JobSubmitted(now_s=w.now, req=w.req, caller=w.caller, spec=spec, test_only=True))
    return w.replies[w.req]


def test_a_trial_names_time_and_place_and_leaves_nothing() -> None:
    w = World(nodes=2)
    reply = _trial(w)
    assert isinstance(reply, wire.Submitted)
    assert (reply.start_s, reply.num_cpus, reply.node_list) == (w.now, 1, "n001")
    assert reply.partition == "main"
    assert not w.state.jobs


@pytest.mark.parametrize(("limit_s", "after_s"), [(600, 600), (None, 365 * 86400)])
def test_a_trial_waits_for_the_running_jobs(limit_s: int | None, after_s: int) -> None:
    w = World(nodes=2)
    j = w.submit(nodes=2, exclusive=True, time_limit_s=-1 if limit_s is None else limit_s)
    reply = _trial(w, min_nodes=2, max_nodes=2, nodes_given=True, exclusive=True)
    assert isinstance(reply, wire.Submitted)
    start_s = w.job(j).start_s
    assert start_s is not None
    assert (reply.start_s, reply.node_list) == (start_s + after_s, "n[001-002]")
    assert w.job(j).state == "RUNNING"


def test_a_trial_of_the_impossible_is_refused() -> None:
    reply = _trial(
        World(nodes=2, enforce_part_limits="NO"), min_nodes=9, max_nodes=9, nodes_given=True
    )
    assert isinstance(reply, wire.Error)
    assert reply.message == "Requested node configuration is not available"


def test_states_of_a_partition_outlive_a_restart() -> None:
    w = World()
    assert isinstance(w.ask(wire.UpdatePartition(name="main", state="DOWN")), wire.Ok)
    j = w.submit()
    assert (w.job(j).state, w.job(j).reason) == ("PENDING", "PartitionDown")
    w.restart()
    assert w.state.partitions["main"].state == "DOWN"
    for closed in ("INACTIVE", "DRAIN"):
        w.ask(wire.UpdatePartition(name="main", state=closed))
        reply = w.try_submit()
        assert isinstance(reply, wire.Error)
        assert reply.message == "Required partition not available (inactive or drain)"
    w.ask(wire.UpdatePartition(name="main", state="UP"))
    assert w.job(j).state == "RUNNING"


def test_update_of_an_unknown_partition_or_to_an_unknown_state() -> None:
    w = World()
    unknown = w.ask(wire.UpdatePartition(name="nosuch", state="UP"))
    wrong = w.ask(wire.UpdatePartition(name="main", state="SIDEWAYS"))
    assert isinstance(unknown, wire.Error)
    assert isinstance(wrong, wire.Error)
    assert (unknown.code, wrong.code) == ("not_found", "rejected")


@pytest.mark.parametrize(("policy", "state"), [(1, "DOWN"), (2, "UP")])
def test_a_node_set_down_comes_back_by_itself_with_return_to_service_2(
    policy: int, state: str
) -> None:
    w = World(nodes=1, return_to_service=policy)
    w.ask(wire.UpdateNode(names=["n001"], state="DOWN", reason="broke"))
    assert w.state.nodes["n001"].state == "DOWN"
    w.agents["n001"].say(agentwire.Heartbeat())
    node = w.state.nodes["n001"]
    assert (node.state, node.reason) == (state, "" if state == "UP" else "broke")


def test_an_exclusive_job_has_every_device_of_its_nodes() -> None:
    w = World(nodes=1, devices=4)
    alloc = w.job(w.submit(exclusive=True)).allocs[0]
    assert (alloc.devices, alloc.cores) == ([0, 1, 2, 3], list(range(8)))


def test_dependency_that_failed_says_so() -> None:
    w = World()
    first = w.submit()
    w.finish(first, code=1)
    second = w.submit(dependency=f"afterok:{first}")
    third = w.submit(dependency=f"afterok:{first}", kill_on_invalid_dep=True)
    for j, state in ((second, "PENDING"), (third, "CANCELLED")):
        job = w.job(j)
        assert (job.state, job.reason) == (state, "DependencyNeverSatisfied")
        assert job.dependency == f"afterok:{first}(failed)"


def test_a_task_of_what_is_no_array_is_nobody_to_wait_for() -> None:
    w = World()
    first = w.submit()
    assert w.job(w.submit(dependency=f"afterok:{first}_1")).state == "RUNNING"


def test_after_with_minutes_counts_from_the_beginning_of_the_other() -> None:
    w = World()
    first = w.submit()
    second = w.submit(dependency=f"after:{first}+5")
    assert (w.job(second).state, w.job(second).reason) == ("PENDING", "BeginTime")
    w.restart()
    w.advance(299)
    assert w.job(second).state == "PENDING"
    w.advance(2)
    assert w.job(second).state == "RUNNING"


def test_after_with_minutes_waits_for_the_other_first() -> None:
    w = World()
    first = w.submit(hold=True)
    second = w.submit(dependency=f"after:{first}+1")
    w.advance(300)
    assert (w.job(second).state, w.job(second).reason) == ("PENDING", "Dependency")
    w.ask(wire.Control(op="release", ids=[str(first)]))
    assert w.job(second).reason == "BeginTime"
    w.advance(61)
    assert w.job(second).state == "RUNNING"


@pytest.mark.parametrize("text", ["afterok:1+5", "after:1+", "after:1+x", "after:1+-1"])
def test_minutes_elsewhere_are_refused(text: str) -> None:
    reply = World().try_submit(dependency=text)
    assert isinstance(reply, wire.Error)
    assert reply.message == "Job dependency problem"


def test_a_job_cannot_be_made_to_depend_on_itself() -> None:
    w = World()
    j = w.submit(hold=True)
    for text in (f"afterok:{j}", f"after:{j}+1"):
        reply = w.ask(wire.UpdateJob(id=str(j), dependency=text))
        assert isinstance(reply, wire.Error), text
        assert reply.message == "Job dependency problem"


def test_kill_on_bad_exit_asks_with_term_and_kills_the_stubborn() -> None:
    w = World(nodes=2, kill_wait_s=30)
    j = w.submit(nodes=2)
    w.step(j, kill_on_bad_exit=True)
    other = w.agents["n001"]
    other.stubborn = True
    exits = [TaskExit(task=1, code=3, at_s=w.now)]
    w.agents["n002"].say(agentwire.TasksExited(job_id=j, step_id="0", attempt=1, exits=exits))
    assert other.signals == [("0", 18), ("0", 15)]
    assert (j, "0", 1) in other.running
    w.advance(31)
    assert (j, "0", 1) not in other.running


def test_tasks_per_node_that_cannot_hold_the_tasks_are_refused() -> None:
    reply = World().try_submit(nodes=1, ntasks=8, ntasks_per_node=2)
    assert isinstance(reply, wire.Error)
    assert reply.message == "Requested node configuration is not available"


def test_a_requeued_and_held_job_says_so() -> None:
    w = World()
    j = w.submit()
    w.ask(wire.Control(op="requeuehold", ids=[str(j)]))
    w.advance(5)
    job = w.job(j)
    assert (job.state, job.reason) == ("PENDING", "JobHeldAdmin")
    assert job.detail == "job requeued in held state"


def test_the_end_of_a_batch_job_is_announced_to_its_script_alone() -> None:
    w = World()
    seen: list[tuple[str, str]] = []
    take = w.agents["n001"].receive

    def receive(message: agentwire.Message) -> None:
        if isinstance(message, agentwire.Signal):
            seen.append((message.step_id, message.notice))
        take(message)

    w.agents["n001"].receive = receive  # type: ignore[method-assign]
    w.agents["n001"].stubborn = True
    j = w.submit(time_limit_s=60)
    w.step(j)
    w.advance(61)
    assert ("batch", f"*** JOB {j} ON n001 CANCELLED AT <at> DUE TO TIME LIMIT ***") in seen
    assert {notice for step, notice in seen if step == "0"} == {""}


@pytest.mark.parametrize(("signum", "state"), [(9, "CANCELLED"), (11, "FAILED"), (6, "FAILED")])
def test_a_step_ended_by_kill_is_cancelled_a_crash_has_failed(signum: int, state: str) -> None:
    w = World()
    j = w.submit()
    w.step(j)
    step = w.state.steps[(j, "0")]
    w.agents["n001"].end((j, "0", 1), signal=signum)
    assert (step.state, step.signal) == (state, signum)
