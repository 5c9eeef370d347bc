"""Histories that the fault simulation found, each in its shortest form."""

from __future__ import annotations

from scheduler.api import agentwire, wire
from scheduler.api.records import Device, Node, Partition
from scheduler.core import effects as fx
from scheduler.core import events, machine
from scheduler.core.state import Settings, State
from scheduler.parts import merge_node
from tests.support.world import FakeAgent, World


def _inbox(agent: FakeAgent) -> list[agentwire.Message]:
    """Messages that the agent gets from now on (it goes on acting on them)."""
    got: list[agentwire.Message] = []
    receive = agent.receive

    def keep(message: agentwire.Message) -> None:
        got.append(message)
        receive(message)

    agent.receive = keep  # type: ignore[method-assign]
    return got


def _stop_answering(agent: FakeAgent) -> None:
    """The agent takes orders and has not carried them out yet."""
    agent.receive = lambda message: None  # type: ignore[method-assign]


# ---------------------------------------------------------------------- dependencies


def test_a_cancelled_array_that_never_started_lets_its_dependents_go() -> None:
    w = World(nodes=1)
    array = w.submit(array="0-3", hold=True)
    after = w.submit(dependency=f"afterany:{array}")
    only_good = w.submit(dependency=f"afterok:{array}")

    w.ask(wire.Cancel(ids=[str(array)]))
    w.advance(1)

    assert w.states(after) == ["RUNNING"]
    assert w.job(only_good).reason == "DependencyNeverSatisfied"


def test_a_dependency_waits_until_the_nodes_of_its_target_are_clean() -> None:
    w = World(nodes=2, kill_wait_s=30)
    first = w.submit(exclusive=True)
    w.agents["n001"].stubborn = True
    after = w.submit(dependency=f"afterany:{first}")

    w.ask(wire.Cancel(ids=[str(first)]))
    w.submit(hold=True)  # has the queue looked at again
    w.advance(5)
    assert (w.job(first).state, w.job(first).completing) == ("CANCELLED", True)
    assert w.states(after) == ["PENDING"]

    w.advance(30)
    assert not w.job(first).completing
    assert w.states(after) == ["RUNNING"]


def test_a_failed_task_counts_as_long_as_its_array_is_remembered() -> None:
    w = World(nodes=1, min_job_age_s=10)
    array = w.submit(array="0-1")
    bad, good = sorted(j.id for j in w.state.jobs.values())
    w.finish(bad, code=1)
    w.advance(60)
    assert w.states(bad, good) == ["FAILED", "RUNNING"]

    after = w.submit(dependency=f"afterok:{array}", kill_on_invalid_dep=False)
    w.finish(good)
    w.advance(1)

    assert w.job(after).reason == "DependencyNeverSatisfied"
    w.ask(wire.Cancel(ids=[str(after)]))
    w.advance(60)
    assert array not in w.state.by_array


def test_a_requeued_job_still_depends_on_a_target_that_is_long_over() -> None:
    w = World(nodes=1, min_job_age_s=10)
    target = w.submit()
    after = w.submit(dependency=f"afterok:{target}", kill_on_invalid_dep=True)
    waits = w.submit(dependency=f"afterok:{after}", kill_on_invalid_dep=False)  # keeps it known
    w.finish(target, code=1)
    w.advance(40)
    assert w.states(after, waits) == ["CANCELLED", "PENDING"]

    w.ask(wire.Control(op="requeue", ids=[str(after)]))
    w.advance(5)

    assert w.states(after) == ["CANCELLED"]
    w.ask(wire.Cancel(ids=[str(waits)]))
    w.advance(60)
    assert not w.state.jobs


def test_jobs_cannot_be_made_to_wait_for_each_other() -> None:
    w = World(nodes=1, min_job_age_s=10)
    first = w.submit(hold=True)
    array = w.submit(array="0-1", dependency=f"afterok:{first}")
    last = w.submit(dependency=f"afterok:{array}_1")

    for target in (first, array, last):
        reply = w.ask(wire.UpdateJob(id=str(first), dependency=f"afterany:{target}"))
        text = "Job dependency problem" if target == first else "Circular job dependency"
        assert reply == wire.Error(code="rejected", message=text)
    assert w.job(first).deps == []
    other = w.submit(hold=True)
    assert isinstance(
        w.ask(wire.UpdateJob(id=str(first), dependency=f"afterany:{other}")), wire.Results
    )

    w.ask(wire.Cancel())
    w.advance(60)
    assert not w.state.jobs, "two that wait for each other were never forgotten"


# ---------------------------------------------------------------------- arrays


def test_a_requeued_task_keeps_to_the_throttle() -> None:
    w = World(nodes=1, requeue_delay_s=1)
    array = w.submit(array="0-1%1")
    running = next(j.id for j in w.state.jobs.values() if j.state == "RUNNING")
    w.ask(wire.Control(op="requeue", ids=[str(running)]))
    w.advance(5)

    members = [w.state.jobs[i] for i in w.state.by_array[array]]
    assert sorted(j.state for j in members) == ["PENDING", "RUNNING"]
    assert [j.reason for j in members if j.state == "PENDING"] == ["JobArrayTaskLimit"]


def test_cancelling_a_step_of_an_array_reaches_tasks_before_one_without_it() -> None:
    w = World(nodes=1, cpus=2)
    array = w.submit(array="0-1")
    first, second = sorted(w.state.jobs)
    assert w.states(first, second) == ["RUNNING", "RUNNING"]
    w.step(first, overlap=True)
    got = _inbox(w.agents["n001"])

    w.ask(wire.Cancel(ids=[f"{array}.0"]))

    assert [m.job_id for m in got if isinstance(m, agentwire.EndStep)] == [first]
    assert (first, "0") not in w.state.steps


# ---------------------------------------------------------------------- spares


def test_a_spare_is_no_room_for_larger_jobs() -> None:
    w = World(nodes=1, spares=1, cpus=8, node_timeout_s=10)
    reply = w.try_submit(ntasks=9)
    assert isinstance(reply, wire.Error)
    assert reply.code == "infeasible"

    w.agents["n001"].cut()
    w.advance(11)
    assert not w.state.nodes["n002"].spare
    for fields in ({"ntasks": 9}, {"nodes": 2}):
        assert isinstance(w.try_submit(**fields), wire.Error), "two nodes never serve at once"


def test_a_spare_never_shrinks_a_partition_that_it_is_not_in() -> None:
    main = Partition(name="main", nodes=["n001", "n002", "n003"], default=True)
    fast = Partition(name="fast", nodes=["n001", "n002"])
    w = World(nodes=2, spares=1, partitions=[main, fast], node_timeout_s=10)
    w.agents["n001"].cut()
    w.advance(11)
    keeps = w.submit(nodelist=["n003"])  # the stand-in is busy when n001 is back
    assert w.states(keeps) == ["RUNNING"]

    w.agents["n001"].register()
    assert w.states(w.submit(nodes=2, partitions=["fast"])) == ["RUNNING"]

    w.finish(keeps)
    w.ask(wire.UpdateNode(names=["n001"], weight=1))
    assert [n.spare for n in w.state.nodes.values()] == [False, False, True]


def test_nodes_added_to_the_cluster_file_come_into_service() -> None:
    w = World(nodes=1, spares=1)
    w.settings = Settings()
    added = Node(name="n003", cpus=16, mem_mib=65536, devices=w.state.nodes["n001"].devices)
    nodes = [*w.state.nodes.values(), added]
    w.partitions = [Partition(name="main", nodes=[n.name for n in nodes], default=True)]
    w.state = State(w.settings, nodes, w.partitions, [], [], dict(w.state.meta))
    w.agents["n003"] = FakeAgent(w, "n003")
    w.event(events.Started(now_s=w.now))
    for agent in w.agents.values():
        agent.register()

    assert [n.spare for n in w.state.nodes.values()] == [False, True, False]
    assert w.states(w.submit(nodes=2)) == ["RUNNING"]


def test_the_cluster_file_says_who_stands_by_the_row_who_serves() -> None:
    row = Node(name="n1", cpus=4, spare=False, standby=False)
    merged = merge_node(Node(name="n1", cpus=8, spare=True, standby=True), row)
    assert (merged.cpus, merged.spare, merged.standby) == (8, False, True)


# ---------------------------------------------------------------------- nodes


def test_a_node_set_down_is_held_until_its_agent_has_cleaned_it() -> None:
    w = World(nodes=1)
    old = w.submit(exclusive=True, requeue=False)
    agent = w.agents["n001"]
    receive = agent.receive
    _stop_answering(agent)

    w.ask(wire.UpdateNode(names=["n001"], state="DOWN", reason="smoke"))
    w.ask(wire.UpdateNode(names=["n001"], state="RESUME"))
    new = w.submit(exclusive=True)
    assert (w.job(old).state, w.job(old).completing) == ("NODE_FAIL", True)
    assert w.states(new) == ["PENDING"]

    agent.receive = receive  # type: ignore[method-assign]
    agent.receive(agentwire.EndJob(job_id=old, attempt=1))
    assert not w.job(old).completing
    assert w.states(new) == ["RUNNING"]


def test_a_node_set_down_that_falls_silent_gives_its_jobs_back() -> None:
    w = World(nodes=2, node_timeout_s=10, requeue_delay_s=1)
    job = w.submit(exclusive=True)
    _stop_answering(w.agents["n001"])
    w.ask(wire.UpdateNode(names=["n001"], state="DOWN", reason="smoke"))
    assert w.job(job).completing

    w.agents["n001"].cut()
    w.advance(9)
    assert w.job(job).completing
    w.advance(5)

    assert (w.job(job).state, w.job(job).allocs[0].node) == ("RUNNING", "n002")


def test_a_launch_is_not_repeated_on_a_machine_that_rebooted() -> None:
    w = World(nodes=2, node_timeout_s=100, requeue_delay_s=1)
    w.launch_blocked = True  # it ran, and the confirmation was lost with the machine
    job = w.submit()
    agent = w.agents["n001"]
    agent.cut()
    w.launch_blocked = False
    w.reboot("n001")

    w.advance(5)

    assert agent.starts == [(job, "batch", 2)]
    assert (w.job(job).state, w.job(job).restarts) == ("RUNNING", 1)


def test_a_launch_that_was_lost_with_the_agent_before_it_had_processes_is_repeated() -> None:
    w = World(nodes=1, node_timeout_s=100)
    w.launch_blocked = True
    job = w.submit(requeue=False)
    agent = w.agents["n001"]
    agent.cut()
    agent.running[(job, "batch", 1)] = [0]  # handed to the fork server
    agent.register()
    agent.cut()
    del agent.running[(job, "batch", 1)]
    agent.agent_id += "b"
    w.launch_blocked = False
    agent.register()

    assert agent.starts == [(job, "batch", 1)]
    assert w.states(job) == ["RUNNING"]


def test_a_lost_step_does_not_free_the_node_under_the_script() -> None:
    w = World(nodes=2, node_timeout_s=100, requeue_delay_s=0)
    job = w.submit(exclusive=True)
    w.step(job, overlap=True)
    agent = w.agents["n001"]
    agent.cut()
    agent.lost[(job, "0", 1)] = agent.running.pop((job, "0", 1))
    _stop_answering(agent)

    agent.register()

    assert (job, "batch", 1) in agent.running
    assert w.state.pool.nodes["n001"].jobs == 1, "the script runs there"


def test_a_loss_that_is_told_again_takes_no_other_job_with_it() -> None:
    w = World(nodes=1)
    lost = w.submit(requeue=False)
    agent = w.agents["n001"]
    agent.end((lost, "batch", 1), lost=True)
    agent.lost[(lost, "batch", 1)] = [0]  # "Forget" did not arrive
    other = w.submit(requeue=False)
    agent.cut()
    agent.agent_id += "b"

    agent.register()

    assert w.states(lost, other) == ["NODE_FAIL", "RUNNING"]
    assert w.state.nodes["n001"].state == "UP"


def test_a_node_that_lost_the_tasks_of_an_ending_job_is_usable_again() -> None:
    w = World(nodes=1, node_timeout_s=100, kill_wait_s=1)
    job = w.submit(exclusive=True)
    agent = w.agents["n001"]
    agent.cut()
    w.ask(wire.Cancel(ids=[str(job)]))
    w.advance(5)
    agent.lost[(job, "batch", 1)] = agent.running.pop((job, "batch", 1))

    agent.register()

    assert not w.job(job).completing
    assert w.states(w.submit(exclusive=True)) == ["RUNNING"]


# ---------------------------------------------------------------------- steps


def test_clean_does_not_cover_a_step_whose_launch_is_under_way() -> None:
    w = World(nodes=1)
    job = w.submit(exclusive=True)
    agent = w.agents["n001"]
    w.launch_blocked = True
    w.step(job, overlap=True)
    receive = agent.receive
    _stop_answering(agent)

    agent.end((job, "batch", 1))  # says clean: it does not know of step 0

    assert w.job(job).completing
    assert w.state.pool.nodes["n001"].jobs == 1
    agent.receive = receive  # type: ignore[method-assign]
    w.advance(60)
    assert not w.job(job).completing
    assert w.state.pool.nodes["n001"].jobs == 0


def test_a_failed_launch_is_forgotten_by_the_agent() -> None:
    w = World(nodes=1)
    job = w.submit()
    w.launch_blocked = True
    w.step(job, overlap=True)
    agent = w.agents["n001"]
    got = _inbox(agent)
    failed = agentwire.LaunchFailed(job_id=job, step_id="0", attempt=1, reason="fork")

    agent.say(failed)
    agent.say(failed)

    forget = [m for m in got if isinstance(m, agentwire.Forget)]
    assert [m.steps for m in forget] == [[(job, "0", 1)]] * 2


def test_the_loss_of_one_share_ends_the_others() -> None:
    w = World(nodes=2)
    job = w.submit(nodes=2, exclusive=True)
    w.step(job, nodes=2, overlap=True)
    other = w.agents["n002"]
    assert (job, "0", 1) in other.running

    w.agents["n001"].end((job, "0", 1), lost=True)

    assert (job, "0", 1) not in other.running
    assert w.job(job).state == "RUNNING"


def test_a_script_that_was_cancelled_before_its_node_heard_of_it_ends_the_job() -> None:
    w = World(nodes=1, node_timeout_s=100)
    w.launch_blocked = True
    job = w.submit(requeue=False)
    agent = w.agents["n001"]
    agent.cut()
    w.ask(wire.Cancel(ids=[f"{job}.batch"]))
    assert w.states(job) == ["RUNNING"]

    agent.register()

    assert (w.job(job).state, w.job(job).signal_code) == ("FAILED", 9)
    assert agent.starts == []
    assert not w.job(job).completing


# ---------------------------------------------------------------------- timers


def test_a_timer_due_at_the_moment_of_the_last_one_is_asked_for_again() -> None:
    node = Node(name="n1", cpus=1, devices=[Device(index=0, cores=2)])
    state = State(Settings(), [node], [Partition(name="main", nodes=["n1"], default=True)])
    state.at(50.0, "begin", "1")
    assert machine.wake(state) == [fx.WakeAt(at_s=50.0)]
    machine.handle(state, events.TimerFired(now_s=50.0))
    state.at(50.0, "begin", "2")

    assert machine.wake(state) == [fx.WakeAt(at_s=50.0)]
