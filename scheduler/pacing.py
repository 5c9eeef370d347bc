"""When the next scheduling pass may run and how deep it looks.

A lone submission is scheduled at once.  In a burst passes keep a distance that grows with what
they cost, so that taking jobs in and answering go on meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable

#: Shortest distance between two passes, seconds: the settling delay of a burst.
SETTLE_S = 0.004
#: Longest distance, seconds.
MAX_SETTLE_S = 0.5
#: A pass may take this much, seconds; its depth (budget, in decisions) is adapted to it.
TARGET_S = 0.05
MIN_BUDGET = 100
MAX_BUDGET = 10_000


class Pacer:
    """Turns seconds into decisions.  ``clock`` is a monotonic clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.budget = 1000
        self._began_s = 0.0
        self._next_s = float("-inf")

    def wait_s(self) -> float:
        """Seconds until a pass may run; 0 when it may now."""
        return max(0.0, self._next_s - self._clock())

    def begin(self) -> int:
        """A pass starts; its budget."""
        self._began_s = self._clock()
        return self.budget

    def end(self) -> None:
        """The pass is over: adapt depth and distance to what it took."""
        now_s = self._clock()
        took_s = now_s - self._began_s
        if took_s > TARGET_S:
            self.budget = max(MIN_BUDGET, int(self.budget * TARGET_S / took_s))
        elif took_s < TARGET_S / 4:
            self.budget = min(MAX_BUDGET, self.budget * 2)
        self._next_s = now_s + min(MAX_SETTLE_S, max(SETTLE_S, 2 * took_s))
