"""Links between the controller and agents: in order, late, and cut at any instant.

What the real transports can do to messages: delay them, lose the rest of a stream at a cut,
deliver the head of a cut stream late (the peer may have a newer link by then), tell the two ends
of a cut at different times.  A repeated message stands for one that was said again.
"""

from __future__ import annotations

from collections.abc import Callable

from scheduler.sim.loop import Loop

#: Seconds a message is under way, at most; now and then it takes much longer.
_FAST_S, _SLOW_S = 0.02, 1.5


class Link:
    """One connection.  ``number`` is also its name in the series of draws."""

    def __init__(
        self,
        loop: Loop,
        number: int,
        to_agent: Callable[[Link, bytes], None],
        to_controller: Callable[[Link, bytes], None],
    ) -> None:
        self.number = number
        self.agent_number = 0  # what the agent calls it
        self.severed_at: float | None = None
        self._loop = loop
        self._ends = (to_agent, to_controller)
        self._last_s = [0.0, 0.0]
        self._head_s = [0.0, 0.0]  # after a cut: what arrives up to here still arrives

    def down(self, body: bytes) -> None:
        """Controller to agent."""
        self._send(0, body)

    def up(self, body: bytes) -> None:
        """Agent to controller."""
        self._send(1, body)

    def _send(self, way: int, body: bytes) -> None:
        if self.severed_at is not None:
            return
        loop = self._loop
        chance = loop.draw(1, self.number, way)
        delay_s = _SLOW_S * chance if chance > 0.97 else _FAST_S * chance
        again = b'"Welcome"' not in body and b'"Register"' not in body
        times = 2 if again and loop.draw(2, self.number, way) < 0.03 else 1
        at_s = max(self._last_s[way], loop.now + delay_s)
        self._last_s[way] = at_s
        for _ in range(times):
            loop.after(at_s - loop.now, lambda: self._arrive(way, at_s, body))

    def _arrive(self, way: int, at_s: float, body: bytes) -> None:
        if self.severed_at is not None and at_s > self._head_s[way]:
            return
        self._ends[way](self, body)

    def sever(self) -> None:
        """From now on nothing enters; of what is under way a head arrives."""
        if self.severed_at is not None:
            return
        self.severed_at = self._loop.now
        for way in (0, 1):
            left_s = max(0.0, self._last_s[way] - self._loop.now)
            self._head_s[way] = self._loop.now + left_s * (
                self._loop.draw(3, self.number, way) * 1.5 - 0.25
            )
