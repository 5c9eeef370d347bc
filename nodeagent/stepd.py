"""The supervisor of one step on one node (Slurm's slurmstepd).

Parent of the tasks and subreaper of all their offspring; holds their pipes and PMI sockets;
ends what they leave behind; writes the outcome into the journal.  It depends on nobody: the
agent may come and go.  One thread, one loop, standard library only; it lives in a process
forked by :mod:`nodeagent.forkserver`.

It speaks the messages of ``scheduler.api.agentwire`` (as plain objects) with the agent.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from nodeagent import procs
from nodeagent.agentlink import AgentLink
from nodeagent.journal import Journal
from nodeagent.order import Order
from nodeagent.stepfiles import StepFiles
from nodeagent.stepio import InStream, OutStream, Stdin
from nodeagent.stepprocs import StepProcesses
from nodeagent.stepstart import Wireup, start_tasks
from nodeagent.taskenv import NodeConfig

SAMPLE_S = 0.5  # memory is looked at this often when it is limited
ABORT_WAIT_S = 0.1  # the longest that other ranks outlive the one that called MPI_Abort
SWEEP_FIRST_S = 0.01
SWEEP_MAX_S = 1.0
#: Seconds without progress after which output that srun never took is given up.
LINGER_FORGOTTEN_S = 60.0
LINGER_JOB_ENDED_S = 5.0


class Supervisor:
    """Runs the order; ``run()`` returns when there is nothing left to do or to deliver."""

    def __init__(self, order: Order, config: NodeConfig, journal: Journal, link: AgentLink) -> None:
        self.order = order
        self.config = config
        self.journal = journal
        self.link = link
        self.selector = selectors.DefaultSelector()
        self.tasks = StepProcesses()
        self.files: StepFiles | None = None
        self.stdin = Stdin()
        self.wireup: Wireup | None = None
        self.launch_errors: Callable[[], dict[int, str]] = dict
        self.outcome: dict[str, Any] | None = None  # StepEnded or LaunchFailed
        self.give_up_after_s: float | None = None
        self.progress_at = time.monotonic()
        self.attached = False
        self.timers: dict[str, tuple[float, Callable[[], None]]] = {}
        self.said: set[str] = set()
        self.handlers: dict[str, Callable[[dict[str, Any]], None]] = {
            "Signal": self._on_signal,
            "EndStep": self._on_end_step,
            "EndJob": self._on_end_job,
            "Forget": self._on_forget,
            "Input": self._on_input,
            "OutputAck": self._on_output_ack,
            "PmiBarrierOut": self._on_barrier_out,
        }
        self._sweep_s = SWEEP_FIRST_S
        self._watched_link: socket.socket | None = None
        self._link_writing = False

    # ------------------------------------------------------------ messages

    def message(self, kind: str, **fields: Any) -> dict[str, Any]:
        key = self.order.key
        return {
            "type": kind,
            "job_id": key.job_id,
            "step_id": key.step_id,
            "attempt": key.attempt,
            **fields,
        }

    def _hello(self) -> None:
        """Everything a new agent must know."""
        self.attached = False
        self.link.queue(self.message("Hello", pid=os.getpid()))
        if self.tasks.started:
            self.link.queue(self.message("StepStarted", pids=self.tasks.started))
        if self.tasks.exits and self.outcome is None:
            self.link.queue(self.message("TasksExited", exits=self.tasks.exits))
        if self.wireup is not None and self.wireup.barrier is not None:
            self.send_barrier()
        if self.outcome is not None:
            self.link.queue(self.outcome)

    def _keep_link(self, now: float) -> None:
        if self.link.sock is None and now >= self.link.retry_at and self.link.connect(now):
            self._hello()
        if self.link.sock is not None and not self.link.flush():
            self._link_lost(now)
        sock = self.link.sock
        writing = bool(self.link.outgoing)
        if sock is not self._watched_link:
            if sock is not None:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
                self.selector.register(sock, events, self._from_agent)
            self._watched_link, self._link_writing = sock, writing
        elif sock is not None and writing != self._link_writing:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
            self.selector.modify(sock, events, self._from_agent)
            self._link_writing = writing

    def _link_lost(self, now: float) -> None:
        if self._watched_link is not None:
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(self._watched_link)
            self._watched_link = None
        self.link.lost(now)
        self.attached = False

    def _from_agent(self) -> None:
        messages = self.link.receive()
        if messages is None:
            self._link_lost(time.monotonic())
            return
        for message in messages:
            handler = self.handlers.get(message.get("type", ""))
            if handler is not None:
                handler(message)

    def _on_signal(self, message: dict[str, Any]) -> None:
        self._notice(message)
        signum = int(message["signum"])
        if message.get("batch_shell"):
            self.tasks.signal_tasks(signum)
        else:
            self.tasks.signal_all(signum)

    def _notice(self, message: dict[str, Any]) -> None:
        text = message.get("notice", "")
        if text and text not in self.said and self.files is not None and self.outcome is None:
            self.said.add(text)
            self.files.say(text.replace("<at>", time.strftime("%Y-%m-%dT%H:%M:%S")))

    def _on_end_step(self, message: dict[str, Any]) -> None:
        if self.outcome is None:
            self._notice(message)
            self.kill()

    def _on_end_job(self, message: dict[str, Any]) -> None:
        if self.order.key.step_id != "batch":
            message = {**message, "notice": ""}
        self._on_end_step(message)
        self._give_up_after(LINGER_JOB_ENDED_S)

    def _on_forget(self, message: dict[str, Any]) -> None:
        self._give_up_after(LINGER_FORGOTTEN_S)

    def _give_up_after(self, wait_s: float) -> None:
        self.give_up_after_s = min(wait_s, self.give_up_after_s or wait_s)
        self.progress_at = time.monotonic()

    def _on_input(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(ValueError):
            self.stdin.take(message)

    def _on_output_ack(self, message: dict[str, Any]) -> None:
        if self.files is None:
            return
        self.progress_at = time.monotonic()
        offsets: dict[str, int] = message.get("offsets", {})
        attach = bool(message.get("attach", False))
        if attach:
            self.attached = True
        for stream in self.files.out:
            offset = offsets.get(f"{stream.task}:{stream.fd}", 0)
            if attach:
                stream.restart(offset)
            else:
                stream.acknowledge(offset)

    def _on_barrier_out(self, message: dict[str, Any]) -> None:
        if self.wireup is not None:
            self.wireup.barrier_out(int(message["seq"]), message.get("kvs", {}))

    def send_barrier(self) -> None:
        if self.wireup is not None and self.wireup.barrier is not None:
            seq, puts = self.wireup.barrier
            self.link.queue(self.message("PmiBarrierIn", seq=seq, kvs=puts))

    # ------------------------------------------------------------ loop

    def run(self) -> None:
        """From the start of the tasks to the last byte delivered."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self.selector.register(reader, selectors.EVENT_READ, lambda: _drain(reader))
        self._keep_link(time.monotonic())
        start_tasks(self)
        while True:
            self._reap()
            self._pump()
            now = time.monotonic()
            for name, (due, action) in list(self.timers.items()):
                if due <= now:
                    del self.timers[name]
                    action()
            if self.outcome is not None and self._all_delivered(now):
                return
            self._keep_link(now)
            for key, _ in self.selector.select(self._timeout(now)):
                key.data()

    def _timeout(self, now: float) -> float | None:
        due = [at for at, _ in self.timers.values()]
        if self.link.sock is None:
            due.append(self.link.retry_at)
        if self.outcome is not None and self.give_up_after_s is not None:
            due.append(self.progress_at + self.give_up_after_s)
        return max(0.0, min(due) - now) if due else None

    def timer(self, name: str, after_s: float, action: Callable[[], None]) -> None:
        self.timers.setdefault(name, (time.monotonic() + after_s, action))

    def forget_descriptor(self, what: int | socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(what)

    def _pump(self) -> None:
        """Watch the pipes that may be read or written, hand output to the agent."""
        if self.files is None:
            return
        for stream in self.files.out:
            self._watch_output(stream)
            while self.attached and (message := stream.next_message()) is not None:
                self.link.queue({**self.message("Output"), **message})
        for target in self.stdin.streams.values():
            if not target.watched:
                target.flush()
            self._watch_input(target)

    def _watch_output(self, stream: OutStream) -> None:
        wanted = stream.pipe is not None and not stream.full
        if wanted and not stream.watched and stream.pipe is not None:
            self.selector.register(stream.pipe, selectors.EVENT_READ, self._reader(stream))
        elif stream.watched and not wanted and stream.pipe is not None:
            self.forget_descriptor(stream.pipe)
        stream.watched = wanted

    def _reader(self, stream: OutStream) -> Callable[[], None]:
        def read() -> None:
            if stream.read() is None:
                self._close_output(stream)

        return read

    def _close_output(self, stream: OutStream) -> None:
        if stream.pipe is not None:
            self.forget_descriptor(stream.pipe)  # before the number is free for another
            stream.watched = False
            stream.close()

    def _watch_input(self, stream: InStream) -> None:
        wanted = stream.pipe is not None and bool(stream.buffer)
        if wanted and not stream.watched and stream.pipe is not None:
            self.selector.register(stream.pipe, selectors.EVENT_WRITE, self._writer(stream))
            stream.watched = True

    def _writer(self, stream: InStream) -> Callable[[], None]:
        def write() -> None:
            if stream.pipe is not None:
                self.selector.unregister(stream.pipe)
                stream.watched = False
                stream.flush()

        return write

    # ------------------------------------------------------------ start

    def launch_failed(self, reason: str, errno_text: str) -> None:
        """Nothing of the step runs here."""
        self.finish(self.message("LaunchFailed", reason=reason, errno_text=errno_text))

    def tasks_started(self) -> None:
        self.link.queue(self.message("StepStarted", pids=self.tasks.started))
        if self.order.mem_mib > 0 and self.tasks.group is None:
            self.timer("memory", SAMPLE_S, self.sample_memory)

    # ------------------------------------------------------------ ends

    def _reap(self) -> None:
        """Take note of ended tasks; when all have ended, of the end of the step."""
        ended = self.tasks.reap()
        if ended:
            errors = self.launch_errors()
            exits = [self._task_ended(rank, status, errors) for rank, status in ended]
            self._output_of([rank for rank, _ in ended])  # what it wrote comes before its end
            self.link.queue(self.message("TasksExited", exits=exits))
            if any(one.get("in_mpi") for one in exits):
                self.kill()
        if self.tasks.pids or self.outcome is not None or self.files is None:
            return
        if self.tasks.childless:
            self._end()
        elif "sweep" not in self.timers:
            self.kill()

    def _output_of(self, ranks: list[int]) -> None:
        for stream in self.files.out if self.files is not None else ():
            waiting = stream.task in ranks and stream.pipe is not None and not stream.full
            if waiting and stream.read() is None:
                self._close_output(stream)
        self._pump()

    def rank_aborted(self, rank: int) -> None:
        """A rank called MPI_Abort, which returns in it: left alone it would end without error.

        It goes first, so that the first failure is told right; the others follow its end.
        """
        self.tasks.kill_task(rank)
        self.timer("abort", ABORT_WAIT_S, self.kill)

    def _task_ended(self, rank: int, status: int, errors: dict[int, str]) -> dict[str, Any]:
        in_mpi = False
        if self.wireup is not None:
            in_mpi = self.wireup.rank_ended(rank)
            code = self.wireup.abort_code(rank)
            if code is not None and os.WIFSIGNALED(status):
                status = (code & 0xFF) << 8  # we ended it: the code it asked for counts
                in_mpi = True
        return self.tasks.ended(rank, status, in_mpi=in_mpi, launch_error=errors.get(rank, ""))

    def kill(self) -> None:
        """SIGKILL everything of the step, again and again until nothing is left."""
        self.tasks.kill()
        self.timers.pop("sweep", None)
        self.timer("sweep", self._sweep_s, self._sweep)
        self._sweep_s = min(self._sweep_s * 2, SWEEP_MAX_S)

    def _sweep(self) -> None:
        if self.outcome is None and not self.tasks.childless:
            self.kill()

    def _end(self) -> None:
        """All processes are gone: take the rest of their output, write down the outcome."""
        assert self.files is not None
        for stream in self.files.out:
            while stream.read():
                pass
            self._close_output(stream)
        if self.tasks.oom:
            self.files.say(
                f"Detected 1 oom-kill event(s) in StepId={self.order.step_name}. Some of your "
                "processes may have been killed by the cgroup out-of-memory handler."
            )
        for target in self.stdin.streams.values():
            if target.pipe is not None:
                self.forget_descriptor(target.pipe)
        self.stdin.close()
        if self.wireup is not None:
            self.wireup.close()
            if self.wireup.ever_used and self.tasks.abnormal:
                procs.sweep_mpi_segments(self.order.uid, self.tasks.since_s)
        usage = self.tasks.usage()
        if self.tasks.group is not None:
            self.tasks.group.remove()
        self.finish(self.message("StepEnded", exits=self.tasks.exits, usage=usage))

    def finish(self, outcome: dict[str, Any]) -> None:
        """Journal first, then tell: an agent that is away reads the journal."""
        with contextlib.suppress(OSError):  # disk full: the agent is told all the same
            self.journal.write_exit(self.order.key, json.dumps(outcome).encode())
        self.outcome = outcome
        self.progress_at = time.monotonic()
        self.link.queue(outcome)

    def _all_delivered(self, now: float) -> bool:
        """Whether nobody needs this process any more."""
        self.link.flush()
        streams = self.files.out if self.files is not None else []
        if all(stream.delivered for stream in streams) and not self.link.outgoing:
            return True
        wait_s = self.give_up_after_s
        return wait_s is not None and now >= self.progress_at + wait_s

    # ------------------------------------------------------------ memory

    def sample_memory(self) -> None:
        """End the step when its processes use more than its limit; else look again later."""
        if self.tasks.killed or self.outcome is not None:
            return
        if self.tasks.over_memory(self.order.mem_mib):
            self.tasks.oom = True
            self.kill()
        else:
            self.timer("memory", SAMPLE_S, self.sample_memory)


def _drain(pipe: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.read(pipe, 4096)
