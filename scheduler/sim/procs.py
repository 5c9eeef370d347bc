"""A step's supervisor and its tasks on a simulated machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from nodeagent.core.effects import ToStep
from nodeagent.core.events import FromStep
from nodeagent.order import Key
from scheduler.api import agentwire
from scheduler.api.records import TaskExit
from scheduler.api.states import STEP_BATCH

if TYPE_CHECKING:
    from scheduler.sim.machine import Machine

_SIGTERM, _SIGKILL = 15, 9
_to_step = msgspec.json.Decoder(ToStep)
_encode = msgspec.json.Encoder().encode


def step_number(step_id: str) -> int:
    """A number for the series of draws."""
    return 10**6 if step_id == STEP_BATCH else int(step_id)


class Supervisor:
    """Parent of one step's tasks.  Lives until all of them ended and the agent was told, or
    until it is killed; then ``orphans`` says whether tasks outlive it."""

    def __init__(self, machine: Machine, launch: agentwire.Launch) -> None:
        self.machine = machine
        self.launch = launch
        self.key = Key(launch.job_id, launch.step_id, launch.attempt)
        self.exits: list[TaskExit] = []
        self.outcome: agentwire.StepEnded | None = None
        self.connected = False
        self.alive = True
        self.orphans = False
        self.killing = False
        self._left = list(launch.tasks)
        self._hung: list[int] = []
        number = step_number(self.key.step_id)
        self._name = (self.key.job_id, number, self.key.attempt, machine.number)

    def draw(self, *what: int) -> float:
        return self.machine.world.loop.draw(20, *self._name, *what)

    # ------------------------------------------------------------ tasks

    def start(self) -> None:
        """The tasks begin; each has its end drawn, or hangs."""
        world = self.machine.world
        world.auditor.started(self.machine.name, self.launch)
        for rank in self.launch.tasks:
            if self.draw(0, rank) < 0.1 and not world.calm:
                self._hung.append(rank)
                continue
            longest = (0.1, 3.0, 20.0, 80.0)[int(self.draw(1, rank) * 4)]
            self._end_later(rank, longest * self.draw(2, rank), *self._exit(rank))

    def _exit(self, rank: int) -> tuple[int, int, bool]:
        """(code, signal, oom) with which the task ends by itself."""
        chance = self.draw(3, rank)
        if chance < 0.8:
            return 0, 0, False
        if chance < 0.9:
            return 1 + int(self.draw(4, rank) * 3), 0, False
        return (0, 11, False) if chance < 0.97 else (0, _SIGKILL, True)

    def calm(self) -> None:
        """What hangs ends soon."""
        for rank in self._hung:
            self._end_later(rank, 20 * self.draw(5, rank), 0, 0, False)

    def _end_later(self, rank: int, delay_s: float, code: int, signal: int, oom: bool) -> None:
        self.machine.world.loop.after(delay_s, lambda: self._task_ended(rank, code, signal, oom))

    def _task_ended(self, rank: int, code: int, signal: int, oom: bool) -> None:
        if rank not in self._left or not (self.alive or self.orphans):
            return
        self._left.remove(rank)
        if not self.alive:
            self._all_gone()
            return
        ended = TaskExit(
            task=rank, code=code, signal=signal, oom=oom, at_s=self.machine.world.loop.now
        )
        self.exits.append(ended)
        self.machine.world.auditor.task_exited(self.machine.name, self.key, ended)
        job_id, step_id, attempt = self.key
        self.say(
            agentwire.TasksExited(job_id=job_id, step_id=step_id, attempt=attempt, exits=[ended])
        )
        if not self._left:
            self._finish()

    def _all_gone(self) -> None:
        if self.orphans and not self._left:
            self.orphans = False
            self.machine.world.auditor.gone(self.machine.name, self.key)

    def _finish(self) -> None:
        """Journal first, then tell."""
        job_id, step_id, attempt = self.key
        self.outcome = agentwire.StepEnded(
            job_id=job_id, step_id=step_id, attempt=attempt, exits=self.exits
        )
        self.machine.world.auditor.gone(self.machine.name, self.key)
        self.machine.write_exit(self.key, _encode(self.outcome))
        self.say(self.outcome)
        if self.draw(6) < 0.7:  # else it still holds output
            self.machine.world.loop.after(0.01, self._leave)

    def _leave(self) -> None:
        if self.alive:
            self.alive = False
            self.machine.supervisor_left(self)

    # ------------------------------------------------------------ ends from outside

    def killed(self, *, sweep_s: float | None) -> None:
        """SIGKILL to the supervisor; its tasks go on, for ``sweep_s`` when somebody ends them."""
        if not self.alive:
            return
        self.alive = False
        if self.outcome is None:
            self.orphans = True
            if sweep_s is not None:
                self.machine.world.loop.after(sweep_s, self.swept)
        self.machine.supervisor_left(self)

    def swept(self) -> None:
        """Somebody killed the orphans."""
        self._left.clear()
        self._all_gone()

    def vanish(self) -> None:
        """The machine is off."""
        if self.outcome is None and (self.alive or self.orphans):
            self.machine.world.auditor.gone(self.machine.name, self.key)
        self.alive = self.orphans = self.connected = False
        self._left.clear()

    # ------------------------------------------------------------ the agent

    def say(self, message: FromStep) -> None:
        """To the agent; dropped while it is away."""
        if self.connected:
            self.machine.from_supervisor(self, message)

    def hello(self) -> None:
        """Everything a new agent must know."""
        job_id, step_id, attempt = self.key
        pids = {str(rank): 100 + rank for rank in self.launch.tasks}
        self.say(agentwire.StepStarted(job_id=job_id, step_id=step_id, attempt=attempt, pids=pids))
        if self.exits and self.outcome is None:
            exits = list(self.exits)
            self.say(
                agentwire.TasksExited(job_id=job_id, step_id=step_id, attempt=attempt, exits=exits)
            )
        if self.outcome is not None:
            self.say(self.outcome)

    def told(self, body: bytes) -> None:
        """An order from the agent."""
        if not self.alive:
            return
        message = _to_step.decode(body)
        if isinstance(message, agentwire.Signal):
            self._signalled(message.signum)
        elif isinstance(message, agentwire.EndStep | agentwire.EndJob):
            self._kill()
        elif isinstance(message, agentwire.Forget):
            self.machine.world.loop.after(1.0, self._leave)

    def _kill(self) -> None:
        if self.killing or self.outcome is not None:
            return
        self.killing = True
        self.machine.world.auditor.ordered(self.machine.name, self.key, _SIGKILL)
        chance = self.draw(7)
        wait_s = 5.0 * chance if chance > 0.9 else 0.2 * chance
        for rank in self._left:
            self._end_later(rank, wait_s, 0, _SIGKILL, False)

    def _signalled(self, signum: int) -> None:
        if signum != _SIGTERM or self.outcome is not None:
            return
        self.machine.world.auditor.ordered(self.machine.name, self.key, signum)
        style = self.draw(8)
        for rank in self._left:
            if style < 0.6:
                self._end_later(rank, 0.3 * self.draw(9, rank), 0, _SIGTERM, False)
            elif style < 0.8:
                self._end_later(rank, 8 * self.draw(9, rank), 0, 0, False)
