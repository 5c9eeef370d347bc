"""Each rule of the auditor is shown to fail by the very name it has.

``BROKEN`` in test_sim.py breaks what users would see; here are the quieter breaks, and rules
that a broken product meets so seldom that they are shown by hand.
"""

from __future__ import annotations

import pytest

from nodeagent.order import Key
from scheduler.api import agentwire
from scheduler.api.records import Job, NodeAlloc, TaskLayout
from scheduler.core.state import Settings
from scheduler.sim.acts import WEIGHTS, plan
from scheduler.sim.auditor import Auditor
from scheduler.sim.cluster import Cluster
from scheduler.sim.loop import Failure, Loop
from scheduler.sim.people import People
from scheduler.sim.shrink import play
from scheduler.store import TurnRows
from tests.sim.mutations import MUTATIONS

STEPS = 60

EXPECTED = {
    "a_row_is_not_written": "lost",
    "the_id_counter_is_not_written": "lost",
    "scripts_are_not_written": "payload",
    "launches_leave_before_the_commit": "uncommitted",
    "the_agent_does_not_wait_for_older_attempts": "double use",
    "the_agent_says_clean_too_early": "early end",
    "what_is_taken_stays_free": "double use",
    "what_is_given_back_stays_taken": "invariant",
    "what_strays_is_never_clean": "liveness",
    "failure_counts_as_success": "end state",
    "jobs_are_ended_when_an_agent_registers": "killed",
    "agents_are_not_told_to_forget": "leftover",
}


def test_every_mutation_has_its_rule() -> None:
    assert set(EXPECTED) == set(MUTATIONS)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_rule_is_broken_by(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.sim.cluster.REST_S", 1500.0)
    MUTATIONS[name](monkeypatch)
    found: list[str] = []
    for seed in range(1, 41):
        failure = play(plan(seed, STEPS))
        if failure is not None:
            found.append(failure.rule)
            if failure.rule == EXPECTED[name]:
                return
    pytest.fail(f"never noticed; instead: {found}")


def _auditor() -> Auditor:
    """It has seen attempt 1 of job 1 committed on n1, which then fell silent."""
    loop = Loop(1)
    auditor = Auditor(loop, Settings(node_timeout_s=10), 1024)
    for node in ("n1", "n2"):
        auditor.link_up(node)
    _commit(auditor, 1, "n1")
    auditor.link_down("n1")
    return auditor


def _commit(auditor: Auditor, attempt: int, node: str) -> None:
    job = Job(id=1, name="j", uid=0, gid=0, user="u", group="g", state="RUNNING", attempt=attempt)
    job.allocs = [NodeAlloc(node=node, cpus=1, cpu_ids=[0])]
    auditor.committed(TurnRows(jobs=[job]))


def _launch(attempt: int) -> agentwire.Launch:
    return agentwire.Launch(
        job_id=1,
        step_id="batch",
        attempt=attempt,
        uid=0,
        gid=0,
        layout=TaskLayout(nodes=["n1"], tasks=[[0]]),
        node_index=0,
        tasks=[0],
        cpu_ids=[0],
    )


def test_a_new_attempt_may_start_beside_an_old_one_that_cannot_be_reached() -> None:
    auditor = _auditor()
    auditor.started("n1", _launch(1))
    auditor.loop.run_until(auditor.loop.now + 11)
    _commit(auditor, 2, "n2")
    auditor.started("n2", _launch(2))
    assert [key for _, key in auditor.facts.live] == [Key(1, "batch", 1), Key(1, "batch", 2)]


def test_a_new_attempt_may_not_start_beside_an_old_one_that_can_be_reached() -> None:
    auditor = _auditor()
    auditor.started("n1", _launch(1))
    auditor.loop.run_until(auditor.loop.now + 9)
    auditor.link_up("n1")
    with pytest.raises(Failure, match="rerun"):
        _commit(auditor, 2, "n2")
    with pytest.raises(Failure, match="fencing"):
        auditor.started("n2", _launch(2))


def test_two_attempts_may_not_be_on_one_node() -> None:
    auditor = _auditor()
    auditor.started("n1", _launch(1))
    auditor.loop.run_until(auditor.loop.now + 11)
    auditor.link_up("n1")
    _commit(auditor, 2, "n1")
    with pytest.raises(Failure, match="fencing"):
        auditor.started("n1", _launch(2))


@pytest.mark.parametrize("silent", [False, True])
def test_an_old_attempt_may_start_after_a_new_one_only_out_of_reach(silent: bool) -> None:
    auditor = _auditor()
    auditor.loop.run_until(auditor.loop.now + 11)
    _commit(auditor, 2, "n2")
    auditor.started("n2", _launch(2))
    if silent:
        auditor.started("n1", _launch(1))
        return
    auditor.facts.down_since["n1"] = None  # as if it had been heard all the time
    with pytest.raises(Failure, match="fencing"):
        auditor.started("n1", _launch(1))


def test_a_node_that_takes_no_job_at_the_end_is_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = People.settle_spares

    def stray(self: People) -> None:
        settle(self)
        controller = self.world.controller
        assert controller is not None
        controller.state.strays["n1"][(0, 0)] = None

    monkeypatch.setattr(People, "settle_spares", stray)
    failure = play(plan(1, 20))
    assert failure is not None
    assert failure.rule == "leak"


def test_histories_contain_every_act_and_reach_every_end() -> None:
    acts: set[str] = set()
    states: set[str] = set()
    attempts = steps = 0
    for seed in range(1, 25):
        chosen = plan(seed, STEPS)
        acts |= {act.kind for act in chosen.acts}
        cluster = Cluster(chosen)
        cluster.run()
        rows = cluster.auditor.facts.rows.values()
        states |= {row.state for row in rows}
        attempts = max([attempts, *(row.attempt for row in rows)])
        steps += sum(1 for _, key in cluster.auditor.facts.ever if key.step_id != "batch")
    assert acts == set(WEIGHTS)
    ends = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}
    assert states == ends
    assert attempts > 1
    assert steps > 20
