"""What is done to the cluster: drawn from a seed, a plain list that can be shortened."""

from __future__ import annotations

import random
from dataclasses import dataclass

#: Kind of act -> how often (relative).
WEIGHTS = {
    "submit": 26,
    "array": 6,
    "after": 6,
    "alloc": 4,
    "end_alloc": 4,
    "step": 14,
    "cancel": 6,
    "cancel_step": 2,
    "signal_step": 1,
    "hold": 3,
    "release": 3,
    "requeue": 4,
    "requeuehold": 1,
    "update_limit": 1,
    "update_begin": 1,
    "drain": 2,
    "resume": 3,
    "down": 1,
    "cut": 6,
    "heal": 5,
    "kill_controller": 5,
    "disk_full": 1,
    "crash_agent": 5,
    "kill_node": 2,
    "start_node": 3,
    "kill_supervisor": 2,
    "fork_fails": 1,
    "lose_device": 1,
}


@dataclass(frozen=True, slots=True)
class Act:
    """``kind`` happens at ``at_s`` after the start; ``picks`` decide on what and how.

    A pick is a number in [0, 1) that is read against what there is when the act happens.
    """

    number: int
    at_s: float
    kind: str
    picks: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The cluster's make-up and the acts."""

    seed: int
    nodes: int
    spares: int
    cpus: int
    instance_type: str
    kill_wait_s: float
    node_timeout_s: float
    return_to_service: int
    min_job_age_s: float
    requeue_delay_s: float
    acts: tuple[Act, ...]


def plan(seed: int, steps: int) -> Plan:
    """The plan of ``seed`` with ``steps`` acts."""
    rng = random.Random(seed)
    kinds = list(WEIGHTS)
    # A history has its own taste: some kinds of acts are left out, others are frequent.
    weights = [w * rng.choice((0, 1, 1, 1, 3)) for w in WEIGHTS.values()]
    weights[0] = max(weights[0], WEIGHTS["submit"])
    pace_s = rng.choice((0.02, 0.5, 2.0, 6.0))
    acts = []
    at_s = 1.0
    for number in range(steps):
        at_s += rng.expovariate(1.0) * pace_s if rng.random() < 0.8 else 0.0
        kind = rng.choices(kinds, weights)[0]
        acts.append(Act(number, at_s, kind, tuple(rng.random() for _ in range(8))))
    return Plan(
        seed=seed,
        nodes=rng.randint(1, 4),
        spares=rng.choice((0, 0, 1)),
        cpus=rng.choice((2, 4, 8)),
        instance_type=rng.choice(("", "trn1.2xlarge", "inf2.24xlarge")),
        kill_wait_s=rng.choice((1.0, 5.0, 30.0)),
        node_timeout_s=rng.choice((5.0, 10.0, 30.0)),
        return_to_service=rng.choice((0, 1, 1, 2)),
        min_job_age_s=rng.choice((30.0, 300.0)),
        requeue_delay_s=rng.choice((0.0, 1.0, 10.0)),
        acts=tuple(acts),
    )
