"""Simulated time, and draws that do not depend on the order in which they are made."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

START_S = 1_000_000.0
_MASK = (1 << 64) - 1


class Failure(Exception):
    """The simulation found something that must not be; ``rule`` names what was broken."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule


def mix(*parts: int) -> int:
    """64 bits that look random, a function of ``parts`` alone (splitmix64 over each)."""
    value = 0x9E3779B97F4A7C15
    for part in parts:
        value = (value ^ part) * 0xBF58476D1CE4E5B9 & _MASK
        value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
        value ^= value >> 31
    return value


class Loop:
    """Calls in order of time; equal times in the order they were asked for."""

    def __init__(self, seed: int, max_calls: int = 2_000_000) -> None:
        self.now = START_S
        self.seed = seed
        self.trace: list[str] | None = None
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._draws: dict[int, int] = {}
        self._calls_left = max_calls

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """``call`` when ``delay_s`` has passed."""
        self._count += 1
        heappush(self._heap, (self.now + max(0.0, delay_s), self._count, call))

    def run_until(self, at_s: float, done: Callable[[], bool] | None = None) -> None:
        """Let time pass up to ``at_s``, or until ``done`` says so."""
        while self._heap and self._heap[0][0] <= at_s:
            if done is not None and done():
                return
            at, _, call = heappop(self._heap)
            self.now = max(self.now, at)
            self._calls_left -= 1
            if self._calls_left < 0:
                raise Failure("liveness", "the simulation does not come to an end")
            call()
        self.now = max(self.now, at_s)

    def draw(self, *what: int) -> float:
        """In [0, 1): the next of the series ``what``; other series do not disturb it."""
        key = mix(self.seed, *what)
        count = self._draws.get(key, 0)
        self._draws[key] = count + 1
        return (mix(key, count) >> 11) / (1 << 53)

    def note(self, text: str) -> None:
        """A line for people, kept when a history is replayed."""
        if self.trace is not None:
            self.trace.append(f"{self.now - START_S:10.4f}  {text}")
