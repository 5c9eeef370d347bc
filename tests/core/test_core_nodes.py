"""Nodes that go, come back, restart; fencing; spares; drains."""

from __future__ import annotations

from scheduler.api import agentwire, wire
from scheduler.core import events
from tests.support.world import World


def test_lost_node_requeues_the_job_onto_the_spare() -> None:
    w = World(nodes=2, spares=1, node_timeout_s=10, requeue_delay_s=1)
    j = w.submit(nodes=2, exclusive=True)
    assert [a.node for a in w.job(j).allocs] == ["n001", "n002"]

    w.agents["n002"].cut()
    w.advance(9)
    assert w.job(j).state == "RUNNING"
    w.advance(3)

    job = w.job(j)
    assert (job.state, job.restarts, job.attempt) == ("RUNNING", 1, 2)
    assert [a.node for a in job.allocs] == ["n001", "n003"]
    assert w.state.nodes["n002"].state == "DOWN"
    assert w.state.nodes["n002"].reason == "Not responding"
    assert not w.state.nodes["n003"].spare


def test_what_comes_back_with_an_old_attempt_is_ended_before_the_node_is_used() -> None:
    w = World(nodes=1, node_timeout_s=10)
    j = w.submit()
    old = w.agents["n001"]
    old.cut()
    w.advance(12)
    assert w.job(j).state == "PENDING"
    assert (j, "batch", 1) in old.running

    old.register()

    assert (j, "batch", 1) not in old.running
    assert (w.job(j).state, w.job(j).attempt) == ("RUNNING", 2)
    assert old.starts == [(j, "batch", 1), (j, "batch", 2)]


def test_a_late_end_of_an_older_attempt_is_dropped() -> None:
    w = World(nodes=2, node_timeout_s=10)
    j = w.submit(nodelist=[])
    w.agents["n001"].cut()
    w.advance(12)
    assert w.job(j).allocs[0].node == "n002"

    w.event(
        events.AgentSaid(
            now_s=w.now,
            node="n001",
            message=agentwire.StepEnded(job_id=j, step_id="batch", attempt=1, exits=[]),
        )
    )

    assert w.job(j).state == "RUNNING"


def test_short_silence_changes_nothing() -> None:
    w = World(nodes=1, node_timeout_s=10)
    j = w.submit()
    w.agents["n001"].cut()
    w.advance(5)

    w.agents["n001"].register()
    w.advance(20)

    assert (w.job(j).state, w.job(j).attempt) == ("RUNNING", 1)


def test_a_launch_that_never_arrived_is_sent_again() -> None:
    w = World(nodes=1)
    w.launch_blocked = True
    j = w.submit()
    assert w.agents["n001"].starts == []
    w.launch_blocked = False

    w.restart()

    assert w.agents["n001"].starts == [(j, "batch", 1)]


def test_controller_restart_keeps_running_jobs() -> None:
    w = World(nodes=2)
    a = w.submit(nodes=2)
    b = w.submit(hold=True)

    w.restart()

    assert w.states(a, b) == ["RUNNING", "PENDING"]
    assert w.agents["n001"].starts == [(a, "batch", 1)]
    w.finish(a)
    assert w.job(a).state == "COMPLETED"


def test_end_reported_while_the_controller_was_away() -> None:
    w = World(nodes=1)
    j = w.submit()
    agent = w.agents["n001"]
    agent.linked = False
    agent.end((j, "batch", 1), code=7)
    agent.linked = True

    w.restart()

    assert (w.job(j).state, w.job(j).code) == ("FAILED", 7)
    assert agent.ended == {}


def test_agent_that_died_with_its_tasks_is_down_and_the_job_goes_elsewhere() -> None:
    w = World(nodes=1, spares=1)
    j = w.submit()
    agent = w.agents["n001"]
    agent.cut()
    agent.lost = dict(agent.running)
    agent.running = {}
    agent.agent_id = "n001-2"

    agent.register()
    w.advance(2)

    assert w.state.nodes["n001"].state == "DOWN"
    assert w.state.nodes["n001"].reason == "Node unexpectedly rebooted"
    assert (w.job(j).state, w.job(j).allocs[0].node) == ("RUNNING", "n002")


def test_agent_restart_with_living_tasks_is_adopted() -> None:
    w = World(nodes=1)
    j = w.submit()
    agent = w.agents["n001"]
    agent.cut()
    agent.agent_id = "n001-2"

    agent.register()

    assert (w.job(j).state, w.job(j).attempt) == ("RUNNING", 1)
    assert w.state.nodes["n001"].state == "UP"


def test_no_requeue_is_node_fail() -> None:
    w = World(nodes=1, node_timeout_s=10)
    j = w.submit(requeue=False)
    w.agents["n001"].cut()
    w.advance(11)

    assert (w.job(j).state, w.job(j).reason) == ("NODE_FAIL", "NodeDown")
    assert "n001" in w.job(j).detail


def test_drain_needs_a_reason_and_keeps_the_running_job() -> None:
    w = World(nodes=1)
    j = w.submit()
    bad = w.ask(wire.UpdateNode(names=["n001"], state="DRAIN"))
    assert isinstance(bad, wire.Error)

    w.ask(wire.UpdateNode(names=["n001"], state="DRAIN", reason="test"))
    k = w.submit()
    assert w.states(j, k) == ["RUNNING", "PENDING"]
    w.finish(j)
    assert w.job(k).state == "PENDING"
    w.ask(wire.UpdateNode(names=["n001"], state="RESUME"))

    assert w.job(k).state == "RUNNING"


def test_a_drain_by_a_person_takes_no_spare() -> None:
    w = World(nodes=2, spares=1)

    w.ask(wire.UpdateNode(names=["n001"], state="DRAIN", reason="test"))

    assert w.state.nodes["n003"].spare


def test_missing_devices_drain_the_node() -> None:
    w = World(nodes=1, devices=16, register=False)
    agent = w.agents["n001"]
    agent.say(
        agentwire.Register(
            protocol=1,
            version="0",
            node="n001",
            boot_id="b",
            agent_id="a",
            pid=1,
            cpus=16,
            mem_mib=65536,
            device_cores=[2] * 15,
            boot_s=0,
            start_s=0,
        )
    )

    node = w.state.nodes["n001"]
    assert node.drain
    assert node.reason == "gres/neuron count reported lower than configured (15 < 16)"


def test_action_reasons_are_refused_loudly() -> None:
    w = World(nodes=1)

    reply = w.ask(wire.UpdateNode(names=["n001"], state="FAIL", reason="Action:Replace"))

    assert isinstance(reply, wire.Error)
    assert "not built" in reply.message
    assert not w.state.nodes["n001"].fail
