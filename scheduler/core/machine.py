"""Dispatch: one event in, effects out; and the scheduling pass."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.core.effects import AnyEffect
from scheduler.core.events import AnyEvent
from scheduler.core.state import State


def handle(state: State, event: AnyEvent) -> list[AnyEffect]:
    """Apply ``event`` to ``state`` and say what is to be done."""
    raise NotImplementedError


def schedule(state: State, now_s: float, budget: int) -> Iterator[AnyEffect]:
    """Start what can be started, best first; ``budget`` counts decisions (jobs looked at)."""
    raise NotImplementedError
