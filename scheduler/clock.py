"""The controller's clock: wall time that never runs backwards and never stands still."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Speed of the clock, relative to real time, while it waits for a wall clock that was set back.
_CATCH_UP = 0.9


class Clock:
    """Seconds since the epoch, monotonic also over restarts (``floor_s``: the last time known).

    When the wall clock is set back, time goes on a little slower until the two meet again, so
    that timers still fire.
    """

    def __init__(
        self,
        floor_s: float = 0.0,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._last_s = max(floor_s, wall())
        self._last_monotonic_s = monotonic()

    def now(self) -> float:
        """The present time; never less than what was returned before."""
        mono = self._monotonic()
        slow = self._last_s + _CATCH_UP * max(0.0, mono - self._last_monotonic_s)
        self._last_monotonic_s = mono
        self._last_s = max(slow, self._wall())
        return self._last_s
