"""Barriers of PMI-1 over the nodes of a step.

Each agent sends its ranks' pairs once per barrier; when all nodes are in, all get the pairs of
all.  The last answered barrier of a step is kept: a node whose link was cut before the answer
arrived repeats its message and gets the same answer.
"""

from __future__ import annotations

from collections.abc import Callable

from scheduler.api import agentwire
from scheduler.core.state import State

Send = Callable[[str, agentwire.ToAgent], None]
StepKey = tuple[int, str]


class _StepBarriers:
    __slots__ = ("answered_seq", "attempt", "kvs", "waiting")

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self.waiting: dict[int, dict[str, dict[str, str]]] = {}  # seq -> node -> pairs
        self.answered_seq = -1
        self.kvs: dict[str, str] = {}


class PmiHub:
    """Merges barriers; ``send`` delivers to an agent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._steps: dict[StepKey, _StepBarriers] = {}

    def on_barrier(self, state: State, node: str, message: agentwire.PmiBarrierIn) -> None:
        """A node entered a barrier (or says so again)."""
        key = (message.job_id, message.step_id)
        step = state.steps.get(key)
        if step is None or step.attempt != message.attempt or node not in step.layout.nodes:
            return
        found = self._steps.get(key)
        if found is None or found.attempt != message.attempt:
            found = self._steps[key] = _StepBarriers(message.attempt)
        if message.seq == found.answered_seq:
            self._answer(message, [node], found.kvs)
            return
        if message.seq < found.answered_seq:
            return
        entered = found.waiting.setdefault(message.seq, {})
        entered[node] = message.kvs
        if all(n in entered for n in step.layout.nodes):
            kvs: dict[str, str] = {}
            for name in step.layout.nodes:
                kvs |= entered[name]
            found.answered_seq = message.seq
            found.kvs = kvs
            found.waiting = {s: w for s, w in found.waiting.items() if s > message.seq}
            self._answer(message, step.layout.nodes, kvs)

    def _answer(
        self, message: agentwire.PmiBarrierIn, nodes: list[str], kvs: dict[str, str]
    ) -> None:
        out = agentwire.PmiBarrierOut(
            job_id=message.job_id,
            step_id=message.step_id,
            attempt=message.attempt,
            seq=message.seq,
            kvs=kvs,
        )
        for name in nodes:
            self._send(name, out)

    def step_ended(self, job_id: int, step_id: str) -> None:
        """Nobody of this step will ask again."""
        self._steps.pop((job_id, step_id), None)

    def __len__(self) -> int:
        return len(self._steps)
