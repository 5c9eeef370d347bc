"""srun attached to its step: output, input, signals, ends; through restarts of the controller."""

from __future__ import annotations

import select
import time

from clusterctl.slurm import client, jsonlite, signals
from clusterctl.slurm.alloc import frame_of
from clusterctl.slurm.errors import CommandError, ControllerError, NoController
from clusterctl.slurm.jobview import task_ranges
from clusterctl.slurm.output import err, say
from scheduler.api.frames import encode_frame
from scheduler.api.text import unpack
from scheduler.api.times import format_stamp

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from clusterctl.slurm.stepin import Source
    from clusterctl.slurm.stepout import Sink

_HUP, _INT, _QUIT, _KILL, _USR1, _USR2, _ALRM, _TERM, _CONT = 1, 2, 3, 9, 10, 12, 14, 15, 18
#: Signals that srun listens to: the first group ends the step, the second is passed on.
ENDING = (_HUP, _QUIT, _TERM)
PASSED = (_USR1, _USR2, _ALRM, _CONT)
CAUGHT = (_INT, *ENDING, *PASSED)

#: Two Ctrl-C within this time end the step, seconds.
_TWICE_S = 1.0
#: Time that Ctrl-C has to end the tasks before they are killed, seconds.
_AFTER_INT_S = 1.0
#: Slurm's KillWait + 2, which its message names.
_ABORT_TEXT = "Job step aborted: Waiting up to 32 seconds for job step to finish."


class StepRun:
    """One attached step; ``run`` returns srun's exit status."""

    def __init__(
        self,
        job_id: int,
        created: dict[str, Any],
        sinks: tuple[Sink, Sink],
        source: Source | None,
        caught: signals.Signals,
    ) -> None:
        self.job_id = job_id
        self.step_id: str = created["step_id"]
        layout = created["layout"]
        self.nodes: list[str] = layout["nodes"]
        self.tasks = {t for ts in layout["tasks"] for t in ts}
        self.sinks = {1: sinks[0], 2: sinks[1]}
        self.source = source
        self.caught = caught
        self.wait_s = 0
        self.kill_on_bad_exit = False  # --kill-on-bad-exit was asked for
        self.quit_on_interrupt = False
        self.raw = False  # a pty: Ctrl-C is a byte of input
        self.offsets: dict[str, int] = {}
        self.ended: dict[int, tuple[int, int]] = {}  # task -> code, signal
        self.done: dict[str, Any] | None = None
        self.gone = False
        self.aborted = False  # by srun's user
        self.told_abort = False
        self.forced = False  # "Force Terminated" was said
        self.in_mpi = False  # a task ended inside MPI, which ended the others
        self.first_end: float | None = None
        self.interrupted_at = -10.0
        self.kill_at: float | None = None
        self.link: client.Connection | None = None
        self.buffer = bytearray()

    @property
    def name(self) -> str:
        return f"StepId={self.job_id}.{self.step_id}"

    # ------------------------------------------------------------------ the loop

    def run(self) -> int:
        """Until the step has ended; srun's exit status: the largest of the tasks."""
        self._attach()
        while self.done is None and not self.gone:
            self._turn()
        for sink in self.sinks.values():
            sink.finish_all()
        if self.link is not None:
            self.link.close()
        return self._status()

    def _turn(self) -> None:
        """Wait for something and deal with it."""
        link = self.link
        assert link is not None
        poll = select.poll()
        poll.register(link.fileno(), select.POLLIN)
        poll.register(self.caught.fd, select.POLLIN)
        reading = self.source is not None and self.source.readable()
        if reading:
            assert self.source is not None
            poll.register(self.source.fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(self._timeout_ms())}
        try:
            if self.caught.fd in ready:
                for signum in self.caught.taken():
                    self._on_signal(signum)
            if link.fileno() in ready:
                self._receive(link)
            elif reading and self.source is not None and self.source.fd in ready:
                message = self.source.read()
                if message is not None:
                    link.send(message)
        except (OSError, EOFError):
            self._reattach()
        self._deadlines()

    def _timeout_ms(self) -> float | None:
        ends = [self.kill_at]
        if self.wait_s and self.first_end is not None and not self.aborted:
            ends.append(self.first_end + self.wait_s)
        left = [at - time.monotonic() for at in ends if at is not None]
        return max(0.0, min(left) * 1000 + 1) if left else None

    def _deadlines(self) -> None:
        now = time.monotonic()
        if self.kill_at is not None and now >= self.kill_at:
            self.kill_at = None
            self._end_step()
        waited = self.first_end is not None and now >= self.first_end + self.wait_s
        if self.wait_s and waited and not self.aborted and len(self.ended) < len(self.tasks):
            self.aborted = True
            say("srun", f"First task exited {self.wait_s}s ago")
            self._tell_tasks()
            say("srun", f"launch/slurm: _step_signal: Terminating {self.name}")
            self._end_step()

    def _attach(self) -> None:
        """A connection turned into the step's stream; raises ``OSError``."""
        if self.link is None:
            self.link = client.Connection()
        self.buffer.clear()
        message = {
            "type": "AttachStep",
            "job_id": self.job_id,
            "step_id": self.step_id,
            "offsets": self.offsets,
        }
        self.link.send(message)

    def _reattach(self) -> None:
        """The controller went away: attach to the next one, however long that takes."""
        if self.link is not None:
            self.link.close()
        self.link = None
        pause_ms = 20.0
        while True:
            try:
                self._attach()
                if self.source is not None:
                    for message in self.source.again():
                        assert self.link is not None
                        self.link.send(message)
                return
            except (OSError, NoController):
                if self.link is not None:
                    self.link.close()
                self.link = None
            poll = select.poll()
            poll.register(self.caught.fd, select.POLLIN)
            if poll.poll(pause_ms) and any(s in (_INT, *ENDING) for s in self.caught.taken()):
                raise CommandError(
                    f"srun: error: lost contact with the controller; {self.name} goes on without "
                    "srun"
                )
            pause_ms = min(pause_ms * 2, 1000.0)

    def _receive(self, link: client.Connection) -> None:
        data = link.sock.recv(1 << 18)
        if not data:
            raise EOFError("the controller closed the connection")
        self.buffer += data
        before = dict(self.offsets)
        ends: list[dict[str, Any]] = []
        while (message := frame_of(self.buffer)) is not None:
            self._on_message(message, ends)
        if ends:
            self._tell_ends(ends)
        if self.offsets != before and self.done is None:
            changed = {k: v for k, v in self.offsets.items() if before.get(k) != v}
            body = jsonlite.dumps({"type": "StepAck", "offsets": changed})
            link.sock.sendall(encode_frame(body))

    # ------------------------------------------------------------------ what comes in

    def _on_message(self, message: dict[str, Any], ends: list[dict[str, Any]]) -> None:
        kind = message.get("type")
        if kind == "Error":
            raise CommandError(f"srun: error: {message.get('message', '')}")
        if kind != "StepEvent":
            return
        if message.get("output"):
            self._on_output(message["output"])
        if message.get("exits"):
            node = message.get("node", "")
            ends += [{**e, "node": node} for e in message["exits"] if e["task"] not in self.ended]
            for end in message["exits"]:
                self.in_mpi = self.in_mpi or bool(end.get("in_mpi"))
                self.ended[end["task"]] = (end.get("code", 0), end.get("signal", 0))
            if self.first_end is None:
                self.first_end = time.monotonic()
        if message.get("killed"):
            if ends:
                self._tell_ends(ends)
                ends.clear()
            self._on_killed(message["killed"], message.get("node", ""))
        if message.get("done") is not None:
            self.done = message["done"]
        if message.get("gone"):
            self.gone = True

    def _on_output(self, output: dict[str, Any]) -> None:
        task, fd = output["task"], output["fd"]
        key = f"{task}:{fd}"
        data = unpack(output.get("data", ""))
        have = self.offsets.get(key, 0)
        skip = have - output.get("offset", 0)
        if 0 <= skip < len(data):
            self.sinks[fd].write(task, data[skip:])
            self.offsets[key] = have + len(data) - skip
        if output.get("eof"):
            self.sinks[fd].finish(task)

    def _on_killed(self, why: str, node: str) -> None:
        if why == "NODE FAILURE":
            say("srun", f"error: Node failure on {node}")
        if self.told_abort:
            return
        self.told_abort = True
        bad_exit = any(code or signum for code, signum in self.ended.values())
        if bad_exit and not self.aborted and why == "CANCELLED":
            say("srun", f"launch/slurm: _step_signal: Terminating {self.name}")
        elif not self.aborted:
            say("srun", _ABORT_TEXT)
        self._tell_cancelled(why)

    def _tell_cancelled(self, why: str) -> None:
        host = self.nodes[0] if self.nodes else "?"
        due = " DUE TO " + why if why in ("TIME LIMIT", "NODE FAILURE") else ""
        err(
            f"slurmstepd-{host}: error: *** STEP {self.job_id}.{self.step_id} ON {host} CANCELLED "
            f"AT {format_stamp(time.time())}{due} ***\n"
        )

    def _tell_ends(self, ends: list[dict[str, Any]]) -> None:
        """One line for all tasks of a node that ended alike."""
        groups: dict[tuple[str, int, int, bool], list[int]] = {}
        for end in sorted(ends, key=lambda e: int(e["task"])):
            key = (end["node"], end.get("code", 0), end.get("signal", 0), bool(end.get("oom")))
            groups.setdefault(key, []).append(end["task"])
        for (node, code, signum, oom), tasks in groups.items():
            if not code and not signum:
                continue
            if signum == _INT and self.aborted:
                continue  # what the user wanted
            if oom:
                what = "Out Of Memory"
            elif signum:
                what = signals.describe(signum)
            else:
                what = f"Exited with exit code {code}"
            noun = "task" if len(tasks) == 1 else "tasks"
            say("srun", f"error: {node}: {noun} {task_ranges(tasks)}: {what}")
        bad = any(e.get("code") or e.get("signal") for e in ends)
        if self.kill_on_bad_exit and bad and not self.told_abort and not self.aborted:
            self.told_abort = True
            if len(self.ended) < len(self.tasks):
                say("srun", f"launch/slurm: _step_signal: Terminating {self.name}")
                self._tell_cancelled("CANCELLED")
        fatal = any(e.get("signal") in (_KILL, _TERM) for e in ends)
        if fatal and not self.aborted and not self.forced:
            self.forced = True
            say("srun", f"Force Terminated {self.name}")

    # ------------------------------------------------------------------ what goes out

    def _on_signal(self, signum: int) -> None:
        if signum == _INT and not self.raw:
            self._on_interrupt()
        elif signum in ENDING:
            self._abort()
        elif signum in PASSED or signum == _INT:
            self._send_signal(signum)

    def _on_interrupt(self) -> None:
        now = time.monotonic()
        if not self.quit_on_interrupt and now - self.interrupted_at > _TWICE_S:
            self.interrupted_at = now
            say("srun", "interrupt (one more within 1 sec to abort)")
            self._tell_tasks()
            return
        say("srun", f"sending Ctrl-C to {self.name}")
        self._send_signal(_INT)
        if not self.aborted:
            self._tell_forced()
            self.kill_at = now + _AFTER_INT_S
        else:
            self._end_step()

    def _abort(self) -> None:
        if not self.aborted:
            self._tell_forced()
        self._end_step()

    def _tell_forced(self) -> None:
        self.aborted = True
        say("srun", "forcing job termination")
        say("srun", _ABORT_TEXT)

    def _tell_tasks(self) -> None:
        for word, tasks in (
            ("running", sorted(self.tasks - self.ended.keys())),
            ("exited", sorted(self.ended)),
        ):
            if tasks:
                noun = "task" if len(tasks) == 1 else "tasks"
                say("srun", f"{self.name} {noun} {task_ranges(tasks)}: {word}")

    def _send_signal(self, signum: int) -> None:
        message = {
            "type": "StepSignal",
            "job_id": self.job_id,
            "step_id": self.step_id,
            "signum": signum,
        }
        assert self.link is not None
        self.link.send(message)

    def _end_step(self) -> None:
        """Have the controller kill the step; asked on a connection of its own."""
        try:
            client.call_again(
                {
                    "type": "StepSignal",
                    "job_id": self.job_id,
                    "step_id": self.step_id,
                    "signum": _KILL,
                }
            )
        except (ControllerError, NoController):
            return  # it is gone already, or the next controller will hear of it again
        if not self.told_abort:
            self.told_abort = True
            if not self.kill_at:
                self._tell_cancelled("CANCELLED")

    # ------------------------------------------------------------------ the result

    def _status(self) -> int:
        if self.gone and not self.ended:
            raise CommandError(f"srun: error: {self.name} is not known any more")
        if self.in_mpi and self.done is not None:
            # The rank that failed first counts, not those that were killed because of it.
            signum, code = self.done.get("signal", 0), self.done.get("code", 0)
            if signum or code:
                return int(128 + signum if signum else code)
        codes = [128 + signum if signum else code for code, signum in self.ended.values()]
        if self.done is not None and len(codes) < len(self.tasks):
            signum = self.done.get("signal", 0)
            codes.append(128 + signum if signum else self.done.get("code", 0))
            if not any(codes) and self.done.get("state") not in (None, "COMPLETED", "RUNNING"):
                codes.append(1)
        return max(codes, default=0)
