"""Jobs from submission to their end, in the pure core."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.api import wire
from scheduler.api.records import Partition
from tests.support.world import World


def test_a_job_starts_at_once_and_completes() -> None:
    w = World()

    j = w.submit(ntasks=2, gres={"neuron": 4})

    job = w.job(j)
    assert job.state == "RUNNING"
    assert [a.node for a in job.allocs] == ["n001"]
    assert job.allocs[0].devices == [0, 1, 2, 3]
    assert job.allocs[0].cores == list(range(8))
    assert job.allocs[0].cpu_ids == [0, 1]
    w.finish(j)
    assert (job.state, job.completing, job.code) == ("COMPLETED", False, 0)


@pytest.mark.parametrize(
    ("code", "signal", "state"), [(3, 0, "FAILED"), (0, 9, "FAILED"), (0, 0, "COMPLETED")]
)
def test_exit_codes_and_signals_stay_apart(code: int, signal: int, state: str) -> None:
    w = World()
    j = w.submit()

    w.finish(j, code, signal)

    job = w.job(j)
    assert (job.state, job.code, job.signal_code) == (state, code, signal)


def test_never_two_jobs_on_one_core_and_contiguous_devices() -> None:
    w = World(nodes=1)
    a = w.submit(gres={"neuron": 15})
    b = w.submit(gres={"neuroncore": 1})
    c = w.submit(gres={"neuron": 1})

    assert w.states(a, b, c) == ["RUNNING", "RUNNING", "PENDING"]
    assert w.job(b).allocs[0].cores == [30]
    assert w.job(c).reason == "Resources"
    w.finish(b)
    assert w.job(c).allocs[0].cores == [30, 31]


def test_order_is_priority_then_age() -> None:
    w = World(nodes=1)
    first = w.submit(exclusive=True)
    low = w.submit(exclusive=True, nice=100)
    high = w.submit(exclusive=True)

    assert w.job(high).reason == "Resources"
    assert w.job(low).reason == "Priority"
    w.finish(first)
    assert w.states(low, high) == ["PENDING", "RUNNING"]


def test_backfill_does_not_delay_the_blocked_job() -> None:
    w = World(nodes=2)
    running = w.submit(exclusive=True, time_limit_s=3600)
    big = w.submit(nodes=2, exclusive=True, time_limit_s=3600)
    short = w.submit(exclusive=True, time_limit_s=1800)
    w.finish(short)
    long = w.submit(exclusive=True, time_limit_s=7200)

    assert w.states(running, big, short, long) == ["RUNNING", "PENDING", "COMPLETED", "PENDING"]


def test_jobs_without_limits_do_not_overtake_a_big_one() -> None:
    w = World(nodes=2)
    running = w.submit(exclusive=True)
    big = w.submit(nodes=2, exclusive=True)
    small = w.submit()

    assert w.states(running, big, small) == ["RUNNING", "PENDING", "PENDING"]


CONFIG = "Requested node configuration is not available"


@pytest.mark.parametrize(
    ("wanted", "message", "detail"),
    [
        (
            {"nodes": 5},
            "Node count specification invalid",
            "5 nodes asked for, partition main has 4",
        ),
        ({"cpus_per_task": 17}, CONFIG, "17 CPUs asked for, the most there is is 16"),
        ({"mem_per_node_mib": 10**6}, CONFIG, "1000000 MiB of memory asked for"),
        ({"gres": {"neuron": 17}}, CONFIG, "17 neuron devices asked for, the most there is is 16"),
        ({"gres": {"neuroncore": 33}}, CONFIG, "33 neuron cores asked for"),
        ({"ntasks": 65}, "More processors requested than permitted", "(4 nodes, 64 CPUs)"),
        ({"constraint": "gpu"}, "Invalid feature specification", "features gpu"),
    ],
)
def test_what_can_never_run_is_refused_and_the_limit_named(
    wanted: dict[str, Any], message: str, detail: str
) -> None:
    w = World()

    reply = w.try_submit(**wanted)

    assert isinstance(reply, wire.Error)
    assert reply.message == message
    assert detail in reply.warning
    assert not w.state.jobs


def test_enforce_part_limits_no_lets_it_pend_with_the_reason() -> None:
    main = Partition(name="main", nodes=["n001", "n002"], default=True, max_time_s=600)
    w = World(nodes=2, partitions=[main], enforce_part_limits="NO")

    long = w.submit(time_limit_s=1200)
    wide = w.submit(nodes=3, time_limit_s=60)

    assert w.job(long).reason == "PartitionTimeLimit"
    assert w.job(wide).reason == "PartitionNodeLimit"
    w.submit(nodes=1024)
    assert [j.reason for j in w.state.jobs.values()][-1] == "PartitionConfig"  # CPUs, too
    refused = w.try_submit(cpus_per_task=1000, nodes=1)
    assert isinstance(refused, wire.Error)
    assert refused.warning == "CPU count per node can not be satisfied"


def test_time_limit_terms_then_kills() -> None:
    w = World(kill_wait_s=30)
    j = w.submit(time_limit_s=60)
    agent = w.agents["n001"]
    agent.stubborn = True

    w.advance(61)
    assert (w.job(j).state, w.job(j).completing) == ("TIMEOUT", True)
    assert ("batch", 15) in agent.signals
    w.advance(30)

    assert (w.job(j).state, w.job(j).completing) == ("TIMEOUT", False)


def test_cancel_running_and_pending() -> None:
    w = World(nodes=1)
    a = w.submit(exclusive=True)
    b = w.submit(exclusive=True)

    reply = w.ask(wire.Cancel(ids=[str(a), str(b)]))

    assert isinstance(reply, wire.Results)
    assert w.states(a, b) == ["CANCELLED", "CANCELLED"]
    assert not w.job(a).completing


def test_array_is_one_record_with_a_throttle() -> None:
    w = World()

    j = w.submit(array="0-5%2")

    head = w.job(j)
    running = [i for i in w.state.jobs if i != j]
    assert head.array_tasks == [2, 3, 4, 5]
    assert head.reason == "JobArrayTaskLimit"
    assert [w.job(i).array_task_id for i in running] == [0, 1]
    for _ in range(6):
        for i in list(w.state.jobs):
            if w.job(i).state == "RUNNING":
                w.finish(i)
    assert [w.job(i).array_task_id for i in sorted(w.state.jobs)] == [5, 0, 1, 2, 3, 4]
    assert set(w.states(*w.state.jobs)) == {"COMPLETED"}


def test_cancel_one_array_task_that_has_not_started() -> None:
    w = World(nodes=1)
    blocker = w.submit(exclusive=True)
    j = w.submit(array="1-3")

    w.ask(wire.Cancel(ids=[f"{j}_2"]))

    assert w.job(j).array_tasks == [1, 3]
    gone = [x for x in w.state.jobs.values() if x.array_task_id == 2]
    assert [x.state for x in gone] == ["CANCELLED"]
    assert w.job(blocker).state == "RUNNING"


@pytest.mark.parametrize(
    ("kind", "code", "expected"),
    [
        ("afterok", 0, "RUNNING"),
        ("afterok", 1, "PENDING"),
        ("afternotok", 1, "RUNNING"),
        ("afternotok", 0, "PENDING"),
        ("afterany", 1, "RUNNING"),
    ],
)
def test_dependencies(kind: str, code: int, expected: str) -> None:
    w = World()
    a = w.submit()
    b = w.submit(dependency=f"{kind}:{a}")
    assert (w.job(b).state, w.job(b).reason) == ("PENDING", "Dependency")

    w.finish(a, code)

    assert w.job(b).state == expected
    if expected == "PENDING":
        assert w.job(b).reason == "DependencyNeverSatisfied"


def test_dependency_on_an_array_waits_for_all_of_it() -> None:
    w = World()
    a = w.submit(array="0-1")
    b = w.submit(dependency=f"afterok:{a}")
    tasks = [i for i in w.state.jobs if w.job(i).array_job_id == a]

    w.finish(tasks[0])
    assert w.job(b).state == "PENDING"
    w.finish(tasks[1])

    assert w.job(b).state == "RUNNING"


def test_singleton_and_unknown_target_and_bad_kind() -> None:
    w = World()
    a = w.submit(name="x")
    b = w.submit(name="x", dependency="singleton")
    c = w.submit(dependency="afterok:4711")
    bad = w.try_submit(dependency="afterfoo:1")

    assert w.states(a, b, c) == ["RUNNING", "PENDING", "RUNNING"]
    assert isinstance(bad, wire.Error)
    assert bad.message == "Job dependency problem"
    w.finish(a)
    assert w.job(b).state == "RUNNING"


def test_hold_release_requeue() -> None:
    w = World(requeue_delay_s=1.0)
    j = w.submit(hold=True)
    assert w.job(j).reason == "JobHeldUser"
    assert w.job(j).priority == 0

    w.ask(wire.Control(op="release", ids=[str(j)]))
    assert w.job(j).state == "RUNNING"
    w.ask(wire.Control(op="requeue", ids=[str(j)]))
    assert (w.job(j).state, w.job(j).reason) == ("PENDING", "BeginTime")
    w.advance(1.5)

    job = w.job(j)
    assert (job.state, job.restarts, job.attempt) == ("RUNNING", 1, 2)


def test_begin_time() -> None:
    w = World()
    j = w.submit(begin_s=w.now + 100)
    assert w.job(j).reason == "BeginTime"

    w.advance(99)
    assert w.job(j).state == "PENDING"
    w.advance(1)

    assert w.job(j).state == "RUNNING"


def test_repeated_submission_gets_the_same_id() -> None:
    w = World()

    a = w.submit(key="k1")
    b = w.submit(key="k1")

    assert a == b
    assert len(w.state.jobs) == 1


def test_finished_jobs_leave_memory_after_min_job_age() -> None:
    w = World(min_job_age_s=300)
    j = w.submit()
    w.finish(j)

    w.advance(301)

    assert j not in w.state.jobs


def test_signal_before_the_limit() -> None:
    from scheduler.api.records import SignalAt

    w = World()
    j = w.submit(time_limit_s=600, signal=SignalAt(signum=10, before_s=120, batch=True))

    w.advance(481)

    assert ("batch", 10) in w.agents["n001"].signals
    assert w.job(j).state == "RUNNING"


@pytest.mark.parametrize(
    ("nodes", "ntasks", "tasks"),
    [(2, 4, [3, 1]), (3, 8, [6, 1, 1]), (2, 0, [1, 1])],
)
def test_task_layout_fills_nodes(nodes: int, ntasks: int, tasks: list[int]) -> None:
    w = World()

    j = w.submit(nodes=nodes, ntasks=ntasks)

    assert [a.tasks for a in w.job(j).allocs] == tasks


def test_node_range_takes_the_most() -> None:
    w = World()

    j = w.submit(min_nodes=1, max_nodes=3, nodes_given=True)

    assert len(w.job(j).allocs) == 3
