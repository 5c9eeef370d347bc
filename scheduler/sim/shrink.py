"""Runs plans; finds a short list of acts that still breaks the same rule."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace

from scheduler.sim.acts import Act, Plan
from scheduler.sim.cluster import Cluster
from scheduler.sim.loop import Failure


def play(plan: Plan, *, trace: list[str] | None = None) -> Failure | None:
    """Let the plan happen; what it broke, or None.  ``trace`` takes what happened, in words."""
    cluster = Cluster(plan, trace=trace is not None)
    try:
        cluster.run()
    except Failure as failure:
        return failure
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.name} line {last.lineno}"
        return Failure(f"crash {type(error).__name__} in {last.name}", f"{error} ({where})")
    finally:
        if trace is not None and cluster.loop.trace is not None:
            trace += cluster.loop.trace
    return None


def shrink(plan: Plan, rule: str, most_runs: int = 2000) -> Plan:
    """Fewer acts that still break ``rule`` (delta debugging)."""
    runs = 0

    def fails(acts: Sequence[Act]) -> bool:
        nonlocal runs
        runs += 1
        found = play(replace(plan, acts=tuple(acts)))
        return found is not None and found.rule == rule

    acts = reduce(list(plan.acts), fails, lambda: runs < most_runs)
    return replace(plan, acts=tuple(acts))


def reduce(
    acts: list[Act], fails: Callable[[Sequence[Act]], bool], go_on: Callable[[], bool]
) -> list[Act]:
    """The delta debugging of Zeller and Hildebrandt, by complements only."""
    size = max(1, len(acts) // 2)
    while go_on():
        start, shorter = 0, False
        while start < len(acts) and go_on():
            rest = acts[:start] + acts[start + size :]
            if fails(rest):
                acts, shorter = rest, True
            else:
                start += size
        if size > 1:
            size = max(1, size // 2)
        elif not shorter:
            break
    return acts
