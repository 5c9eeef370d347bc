"""Seeded random histories: submissions, ends, cuts, restarts; invariants after every event."""

from __future__ import annotations

import random

import pytest

from scheduler.api import wire
from scheduler.api.states import TERMINAL
from tests.support.world import World


def _act(w: World, rng: random.Random, accepted: list[int]) -> None:
    choice = rng.random()
    if choice < 0.35:
        fields: dict[str, object] = {"requeue": rng.random() < 0.8}
        if rng.random() < 0.4:
            fields["nodes"] = rng.randint(1, 3)
        if rng.random() < 0.5:
            fields["gres"] = {rng.choice(["neuron", "neuroncore"]): rng.randint(1, 5)}
        if rng.random() < 0.3:
            fields["ntasks"] = rng.randint(1, 12)
        if rng.random() < 0.2:
            fields["array"] = f"0-{rng.randint(0, 4)}%{rng.randint(1, 3)}"
        if rng.random() < 0.2 and accepted:
            fields["dependency"] = f"afterany:{rng.choice(accepted)}"
        if rng.random() < 0.3:
            fields["time_limit_s"] = 60 * rng.randint(1, 5)
        reply = w.try_submit(**fields)
        if isinstance(reply, wire.Submitted):
            accepted.append(reply.job_id)
    elif choice < 0.6:
        agent = rng.choice(list(w.agents.values()))
        if agent.running:
            key = rng.choice(list(agent.running))
            agent.end(key, code=rng.choice([0, 0, 0, 1]), signal=rng.choice([0, 0, 0, 9]))
    elif choice < 0.7:
        running = [j.id for j in w.state.jobs.values() if j.state == "RUNNING"]
        if running:
            w.step(rng.choice(running))
    elif choice < 0.76:
        jobs = list(w.state.jobs)
        if jobs:
            w.ask(wire.Cancel(ids=[str(rng.choice(jobs))]))
    elif choice < 0.82:
        agent = rng.choice(list(w.agents.values()))
        if agent.linked:
            agent.cut()
        else:
            agent.register()
    elif choice < 0.86:
        w.restart()
    elif choice < 0.9:
        jobs = list(w.state.jobs)
        op = rng.choice(["hold", "release", "requeue"])
        if jobs:
            w.ask(wire.Control(op=op, ids=[str(rng.choice(jobs))]))
    else:
        w.advance(rng.choice([0.5, 5, 30]))


@pytest.mark.parametrize("seed", range(40))
def test_random_history_keeps_the_invariants_and_ends_everything(seed: int) -> None:
    rng = random.Random(seed)
    w = World(nodes=3, spares=1, cpus=8, devices=4, node_timeout_s=10, min_job_age_s=10**9)
    accepted: list[int] = []
    for _ in range(120):
        _act(w, rng, accepted)

    assert all(i in w.state.jobs for i in accepted)
    w.restart()
    for agent in w.agents.values():
        if not agent.linked:
            agent.register()
    w.ask(wire.Cancel())
    w.advance(120)

    left = [j for j in w.state.jobs.values() if j.state not in TERMINAL or j.completing]
    assert left == []
    for agent in w.agents.values():
        assert not agent.running
        assert len(agent.starts) == len(set(agent.starts)), "something was started twice"
