"""Streams between an attached ``srun`` and the agents of its step.

Output stays with the agents until srun acknowledges it, so the controller keeps nearly nothing:
what cannot be handed on now (nobody attached, srun reads slowly) is dropped here and the agents
send it again from the offset that is asked for.  Input is kept up to ``INPUT_KEEP`` bytes a
step for a node whose link comes back.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from scheduler.api import agentwire, wire
from scheduler.api.records import Step, TaskExit, TaskLayout
from scheduler.api.text import unpack
from scheduler.core.state import State
from scheduler.session import Session

log = logging.getLogger(__name__)

Send = Callable[[str, agentwire.ToAgent], None]

#: Bytes of stdin kept per step for a link that comes back.
INPUT_KEEP = 1024 * 1024
#: Seconds without new output after which a step's end is told although an end of stream is
#: missing (its agent is gone, or the task never opened the stream).
EOF_WAIT_S = 3.0
#: Seconds a vanished srun has to attach again before its step is ended.
REATTACH_S = 30.0
#: Seconds that exit records of an ended step are kept for an srun that attaches late.
KEEP_ENDED_S = 60.0


class Stream:
    """One step's stream; lives from the first news or attach to the delivered end."""

    def __init__(self, job_id: int, step_id: str, attempt: int, layout: TaskLayout) -> None:
        self.job_id = job_id
        self.step_id = step_id
        self.attempt = attempt
        self.layout = layout
        self.node_of = {t: n for n, ts in zip(layout.nodes, layout.tasks, strict=True) for t in ts}
        self.session: Session | None = None
        self.attached_once = False
        self.next: dict[str, int] = {}  # "TASK:FD" -> offset that srun gets next
        self.behind = False  # output was dropped because srun reads slowly
        self.ended: set[str] = set()  # streams at their end
        self.started: dict[str, list[int]] = {}
        self.exits: dict[str, list[TaskExit]] = {}
        self.killed = ""
        self.done: dict[str, Any] | None = None
        self.streams: tuple[int, ...] = (1, 2)  # descriptors that go to srun
        self.input: deque[agentwire.Input] = deque()
        self.input_bytes = 0
        self.timer: asyncio.TimerHandle | None = None

    def cancel_timer(self) -> None:
        """Stop whatever the stream waits for."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def complete(self) -> bool:
        """All streams of all started tasks are at their end and handed on."""
        if self.behind:
            return False
        tasks = [t for ts in self.started.values() for t in ts]
        return all(f"{t}:{fd}" in self.ended for t in tasks for fd in self.streams)


def streams_of(step: Step) -> tuple[int, ...]:
    """Descriptors of the tasks that go to srun rather than into files."""
    spec = step.spec
    if spec is None or spec.std_out:
        return ()  # without a name of its own stderr goes where stdout goes
    return (1,) if spec.pty or spec.std_err else (1, 2)


class StepHub:
    """All streams.  ``give_up`` ends a step whose srun died for good."""

    def __init__(self, send: Send, give_up: Callable[[int, str, int], None]) -> None:
        self._send = send
        self._give_up = give_up
        self._streams: dict[tuple[int, str], Stream] = {}
        self.reattach_s = REATTACH_S

    # ------------------------------------------------------------------ commands

    def attach(
        self, session: Session, request: wire.AttachStep, state: State, stored: Step | None
    ) -> None:
        """Make ``session`` the stream of a step; ``stored`` is its row when it has ended."""
        key = (request.job_id, request.step_id)
        step = state.steps.get(key) or stored
        if step is None:
            session.answer(wire.StepEvent(gone=True))
            return
        stream = self._streams.get(key)
        if stream is None or stream.attempt != step.attempt:
            stream = self._new(step)
        if stored is not None and key not in state.steps and stream.done is None:
            stream.done = final_record(stored)
            stream.started = dict(zip(step.layout.nodes, step.layout.tasks, strict=True))
        stream.cancel_timer()
        previous = stream.session
        stream.session = session
        if previous is not None and not previous.closed:
            previous.send(wire.Error(code="busy", message="Another srun attached to the step"))
            previous.end()
        stream.attached_once = True
        stream.next = dict(request.offsets)
        stream.behind = False
        session.become_stream(lambda message: self._from_client(stream, session, message))
        session.on_closed.append(lambda: self._client_gone(stream, session))
        session.on_writable = lambda: self._catch_up(stream)
        self._replay(stream)
        self._ask_again(stream, stream.layout.nodes)
        self._finish(stream)

    def _new(self, step: Step) -> Stream:
        key = (step.job_id, step.step_id)
        older = self._streams.get(key)
        if older is not None:
            older.cancel_timer()
        stream = Stream(step.job_id, step.step_id, step.attempt, step.layout)
        stream.streams = streams_of(step)
        self._streams[key] = stream
        return stream

    def _replay(self, stream: Stream) -> None:
        """Tell a newly attached srun what it may have missed."""
        assert stream.session is not None
        for node, tasks in stream.started.items():
            stream.session.send(wire.StepEvent(started=tasks, node=node))
        for node, exits in stream.exits.items():
            stream.session.send(wire.StepEvent(exits=exits, node=node))
        if stream.killed:
            stream.session.send(wire.StepEvent(killed=stream.killed))

    def _ask_again(self, stream: Stream, nodes: list[str]) -> None:
        """Have the agents send output from where srun is."""
        for node in nodes:
            self._send(
                node,
                agentwire.OutputAck(
                    job_id=stream.job_id,
                    step_id=stream.step_id,
                    attempt=stream.attempt,
                    offsets=self._of_node(stream, node, stream.next),
                    attach=True,
                ),
            )

    @staticmethod
    def _of_node(stream: Stream, node: str, offsets: dict[str, int]) -> dict[str, int]:
        found = {}
        for key, offset in offsets.items():
            task = key.partition(":")[0]
            if task.isdecimal() and stream.node_of.get(int(task)) == node:
                found[key] = offset
        return found

    def _from_client(self, stream: Stream, session: Session, message: wire.Request) -> None:
        if session is not stream.session:
            return
        if isinstance(message, wire.StepAck):
            for node in stream.layout.nodes:
                offsets = self._of_node(stream, node, message.offsets)
                if offsets:
                    self._send(
                        node,
                        agentwire.OutputAck(
                            job_id=stream.job_id,
                            step_id=stream.step_id,
                            attempt=stream.attempt,
                            offsets=offsets,
                        ),
                    )
        elif isinstance(message, wire.StepInput):
            self._input(stream, message)
        elif isinstance(message, wire.StepSignal):
            self.signal(stream, message.signum)
        else:
            text = f"{type(message).__name__} cannot be asked on a step's stream"
            session.send(wire.Error(code="protocol", message=text))

    def signal(self, stream: Stream, signum: int) -> None:
        """Signal the tasks of the step on all its nodes."""
        for node in stream.layout.nodes:
            self._send(
                node,
                agentwire.Signal(
                    job_id=stream.job_id,
                    step_id=stream.step_id,
                    attempt=stream.attempt,
                    signum=signum,
                ),
            )

    def _input(self, stream: Stream, message: wire.StepInput) -> None:
        part = agentwire.Input(
            job_id=stream.job_id,
            step_id=stream.step_id,
            attempt=stream.attempt,
            data=message.data,
            offset=message.offset,
            eof=message.eof,
            task=message.task,
        )
        stream.input.append(part)
        stream.input_bytes += len(message.data)
        while stream.input_bytes > INPUT_KEEP and len(stream.input) > 1:
            stream.input_bytes -= len(stream.input.popleft().data)
        for node in self._input_nodes(stream, part):
            self._send(node, part)

    @staticmethod
    def _input_nodes(stream: Stream, part: agentwire.Input) -> list[str]:
        if part.task is None:
            return stream.layout.nodes
        node = stream.node_of.get(part.task)
        return [node] if node is not None else []

    def _client_gone(self, stream: Stream, session: Session) -> None:
        if stream.session is not session:
            return
        stream.session = None
        stream.cancel_timer()
        key = (stream.job_id, stream.step_id)
        if stream.done is not None:
            self._streams.pop(key, None)
        elif not session.link_lost and self._streams.get(key) is stream:
            loop = asyncio.get_running_loop()
            stream.timer = loop.call_later(self.reattach_s, self._abandoned, stream)

    def _abandoned(self, stream: Stream) -> None:
        stream.timer = None
        if stream.session is None and stream.done is None:
            log.info(
                "srun is gone for good: its step is ended",
                extra={"job": stream.job_id, "step": stream.step_id},
            )
            self._give_up(stream.job_id, stream.step_id, stream.attempt)

    def _catch_up(self, stream: Stream) -> None:
        """Srun reads again: have sent again what was dropped meanwhile."""
        if stream.behind:
            stream.behind = False
            self._ask_again(stream, stream.layout.nodes)

    # ------------------------------------------------------------------ agents and core

    def on_output(self, node: str, message: agentwire.Output) -> None:
        """Bytes of a task: handed on when they are the next ones, else dropped."""
        stream = self._streams.get((message.job_id, message.step_id))
        if stream is None or stream.attempt != message.attempt or stream.session is None:
            return
        key = f"{message.task}:{message.fd}"
        data = unpack(message.data)
        want = stream.next.get(key, 0)
        end = message.offset + len(data)
        if message.offset > want:
            return
        if not stream.session.writable():
            stream.behind = True
            return
        output: dict[str, Any] = {
            "task": message.task,
            "fd": message.fd,
            "offset": message.offset,
            "data": message.data,
            "node": node,
        }
        if message.eof:
            output["eof"] = True
            stream.ended.add(key)
        if end > want or message.eof:
            stream.next[key] = max(want, end)
            stream.session.send(wire.StepEvent(output=output))
        if stream.done is not None:
            self._finish(stream)

    def on_news(self, state: State, job_id: int, step_id: str, event: wire.StepEvent) -> None:
        """Something about a step that was committed; ``done`` waits for the output's end."""
        stream = self._streams.get((job_id, step_id))
        step = state.steps.get((job_id, step_id))
        if stream is None or (step is not None and step.attempt != stream.attempt):
            if step is None or step.spec is None:
                return  # no srun step, or nobody attached and it is over: the row has it all
            stream = self._new(step)
        if event.started is not None:
            stream.started[event.node] = event.started
        if event.exits is not None:
            stream.exits.setdefault(event.node, []).extend(event.exits)
        if event.killed:
            stream.killed = event.killed
        if event.done is None:
            if stream.session is not None:
                stream.session.send(event)
            return
        stream.done = event.done
        stream.cancel_timer()
        self._finish(stream)

    def _finish(self, stream: Stream) -> None:
        """Tell the end when all output is through; give up on missing ends of stream."""
        if stream.done is None:
            return
        loop = asyncio.get_running_loop()
        stream.cancel_timer()
        if stream.session is None:
            stream.timer = loop.call_later(KEEP_ENDED_S, self._drop, stream)
        elif stream.complete():
            self._tell_done(stream)
        else:
            stream.timer = loop.call_later(EOF_WAIT_S, self._tell_done, stream)

    def _tell_done(self, stream: Stream) -> None:
        stream.timer = None
        if stream.session is None:
            return
        if stream.behind:
            # Srun still has output to come, however slowly it reads.
            self._finish(stream)
            return
        stream.session.send(wire.StepEvent(done=stream.done))

    def _drop(self, stream: Stream) -> None:
        key = (stream.job_id, stream.step_id)
        if self._streams.get(key) is stream:
            del self._streams[key]

    def link_up(self, node: str) -> None:
        """The agent registered: ask for output again, repeat the input it may have missed."""
        for stream in list(self._streams.values()):
            if stream.session is None or node not in stream.layout.nodes:
                continue
            self._ask_again(stream, [node])
            for part in stream.input:
                if node in self._input_nodes(stream, part):
                    self._send(node, part)

    def stop(self) -> None:
        """Cancel all timers."""
        for stream in self._streams.values():
            stream.cancel_timer()

    def __len__(self) -> int:
        return len(self._streams)


def final_record(step: Step) -> dict[str, Any]:
    """The final Step record for ``StepEvent.done``."""
    view: dict[str, Any] = msgspec.to_builtins(step, str_keys=True)
    view.pop("spec", None)
    return view
