"""Both cores under faults: seeds that must hold, and proof that the auditor can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest

from nodeagent.core import steps as agent_steps
from scheduler.core import (
    control,
    deps,
    lifecycle,
    machine,
    nodes,
    placement,
    queue,
    reports,
    submit,
    timers,
)
from scheduler.sim.__main__ import format_keep, main, parse_keep
from scheduler.sim.acts import Plan, plan
from scheduler.sim.machine import Machine
from scheduler.sim.shrink import play, shrink
from scheduler.store import Store

STEPS = 60


@pytest.mark.parametrize("first", range(0, 96, 12))
def test_seeded_histories_hold(first: int) -> None:
    for seed in range(first, first + 12):
        failure = play(plan(seed, STEPS))
        assert failure is None, f"{failure}: python -m scheduler.sim --seed {seed} --steps {STEPS}"


def test_a_history_is_the_same_each_time() -> None:
    traces: list[list[str]] = [[], []]
    for trace in traces:
        assert play(plan(7, STEPS), trace=trace) is None
    assert traces[0] == traces[1]
    assert any("controller dies" in line for line in traces[0])


# ------------------------------------------------------------ a broken product is found out

Break = Callable[[pytest.MonkeyPatch], None]


def _lost_rows(patch: pytest.MonkeyPatch) -> None:
    """The store forgets the rows of new jobs now and then."""
    commit, count = Store.commit, iter(range(1_000_000))

    def forgetful(self: Store, turn: Any) -> None:
        if any(job.attempt == 0 and next(count) % 3 == 2 for job in turn.jobs):
            turn.jobs = [job for job in turn.jobs if job.attempt]
        commit(self, turn)

    patch.setattr(Store, "commit", forgetful)


def _no_request_key(patch: pytest.MonkeyPatch) -> None:
    """A repeated submission makes another job."""
    build = submit.build

    def keyless(state: Any, event: Any) -> Any:
        job = build(state, event)
        job.request_key = ""
        return job

    patch.setattr(submit, "build", keyless)


def _started_again(patch: pytest.MonkeyPatch) -> None:
    """A node starts what it has started already."""
    claim = Machine._claim

    def forgets(self: Machine, agent: Any, generation: int, launch: Any) -> None:
        claim(self, agent, generation, launch)
        journal, self.journal = self.journal, {}
        claim(self, agent, generation, launch)
        self.journal = journal

    patch.setattr(Machine, "_claim", forgets)


def _early_release(patch: pytest.MonkeyPatch) -> None:
    """A job's nodes are given back when it ends, not when they are clean."""
    everywhere = lifecycle.end_everywhere

    def at_once(state: Any, job: Any) -> Any:
        effects = everywhere(state, job)
        for alloc in job.allocs:
            if not alloc.cleaned:
                state.release_alloc(job, alloc, job.end_s)
        return effects

    patch.setattr(lifecycle, "end_everywhere", at_once)


def _drain_ignored(patch: pytest.MonkeyPatch) -> None:
    for where in (queue, placement):
        patch.setattr(where, "usable", lambda state, node: node.responding and node.state == "UP")


def _throttle_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(queue, "_below_throttle", lambda state, job: True)


def _hold_ignored(patch: pytest.MonkeyPatch) -> None:
    eligible = queue.eligible

    def all_of_them(state: Any, now_s: float) -> Any:
        held = [
            state.jobs[i] for i in state.pending if state.jobs[i].held and not state.jobs[i].deps
        ]
        return eligible(state, now_s) + held

    patch.setattr(queue, "eligible", all_of_them)


def _dependency_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(deps, "_verdict", lambda kind, job: True)


def _cancel_does_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(control, "cancel_job", lambda state, job, task, uid, now_s: [])


def _no_fencing(patch: pytest.MonkeyPatch) -> None:
    """What an agent says of an older attempt counts for the newest."""

    def newest(state: Any, job_id: int, step_id: str, attempt: int) -> Any:
        job, step = state.jobs.get(job_id), state.steps.get((job_id, step_id))
        return (job, step) if job is not None and step is not None else None

    patch.setattr(reports, "find", newest)
    for module in (nodes, reports):
        patch.setattr(module, "current", lambda state, job_id, attempt: state.jobs.get(job_id))


def _limit_too_early(patch: pytest.MonkeyPatch) -> None:
    due = timers._limit_due

    def hasty(state: Any, kind: str, job_id: int, now_s: float) -> Any:
        return due(state, kind, job_id, now_s + 3600)

    arm = lifecycle.arm_limit

    def armed(state: Any, job: Any) -> None:
        arm(state, job)
        if job.time_limit_s is not None:
            state.at(job.start_s + 0.1, "limit", str(job.id))

    patch.setattr(timers, "_limit_due", hasty)
    patch.setattr(lifecycle, "arm_limit", armed)


def _requeue_without_cause(patch: pytest.MonkeyPatch) -> None:
    finish = lifecycle.finish

    def again(state: Any, job: Any, end_state: str, now_s: float, **more: Any) -> Any:
        if end_state == "COMPLETED" and job.restarts == 0:
            job.requeue_after = "requeue"
        return finish(state, job, end_state, now_s, **more)

    patch.setattr(lifecycle, "finish", again)


def _never_killed(patch: pytest.MonkeyPatch) -> None:
    """The agent does not end a job."""
    patch.setattr(agent_steps, "on_end_job", lambda state, message, effects: None)


def _timers_are_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(machine, "wake", lambda state: [])


BROKEN: list[tuple[Break, tuple[str, ...]]] = [
    (_lost_rows, ("lost", "uncommitted", "crash ", "invariant")),
    (_no_request_key, ("resubmitted", "liveness")),  # a second allocation that nobody ends
    (_started_again, ("twice",)),
    (_early_release, ("double use", "early end", "fencing", "invariant")),
    (_drain_ignored, ("drain",)),
    (_throttle_ignored, ("throttle",)),
    (_hold_ignored, ("held",)),
    (_dependency_ignored, ("dependency",)),
    (_cancel_does_nothing, ("undone cancel", "liveness")),
    (_no_fencing, ("fencing", "end state", "early end", "double use", "killed", "crash ")),
    (_limit_too_early, ("end state", "killed")),
    (_requeue_without_cause, ("rerun",)),
    (_never_killed, ("liveness",)),
    (_timers_are_lost, ("liveness",)),
]


def _flapping(seed: int) -> Plan:
    """Little else than jobs, and nodes that go silent and come back with what they ran."""
    kinds = cycle(("submit", "submit", "cut", "heal"))
    chosen = plan(seed, STEPS)
    acts = tuple(
        replace(act, kind=kind, at_s=1.0 + 4.0 * act.number)
        for act, kind in zip(chosen.acts, kinds, strict=False)
    )
    return replace(chosen, nodes=3, node_timeout_s=5.0, return_to_service=2, acts=acts)


@pytest.mark.parametrize(("broken", "rules"), BROKEN, ids=lambda v: getattr(v, "__name__", ""))
def test_the_auditor_finds(
    broken: Break, rules: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    for seed in range(60):
        failure = play(_flapping(seed) if seed % 2 else plan(seed, STEPS))
        if failure is not None:
            assert failure.rule.startswith(rules), failure
            return
    pytest.fail("60 histories did not show it")


def test_a_failure_is_shrunk_and_can_be_played_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _dependency_ignored(monkeypatch)
    seed = next(s for s in range(60) if play(plan(s, STEPS)) is not None)
    small = shrink(plan(seed, STEPS), "dependency", most_runs=150)
    kinds = [act.kind for act in small.acts]
    assert "after" in kinds
    assert len(kinds) <= 6  # two jobs, perhaps what keeps the first one waiting
    keep = format_keep([a.number for a in small.acts])
    code = main(["--seed", str(seed), "--steps", str(STEPS), "--keep", keep, "--trace"])
    out = capsys.readouterr().out
    assert code == 1
    assert f"seed {seed}: dependency: " in out


def test_ranges_of_acts() -> None:
    assert parse_keep("3,17,20-22") == {3, 17, 20, 21, 22}
    assert parse_keep("-") == set()
    assert format_keep([1, 2, 3, 7]) == "1-3,7"
    assert format_keep([]) == "-"


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--keep", "x"], ["--seed", "y"]])
def test_bad_arguments(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
