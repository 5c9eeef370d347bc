"""What can happen to the agent."""

from __future__ import annotations

import msgspec

from nodeagent.order import Key
from scheduler.api.agentwire import (
    LaunchFailed,
    Output,
    PmiBarrierIn,
    StepEnded,
    StepStarted,
    TasksExited,
    ToAgent,
    Welcome,
)

FromStep = StepStarted | LaunchFailed | TasksExited | StepEnded | Output | PmiBarrierIn


class LinkOpened(msgspec.Struct, frozen=True):
    """A controller connected as link ``link`` (numbers grow) and said ``welcome``."""

    link: int
    welcome: Welcome


class LinkClosed(msgspec.Struct, frozen=True):
    """The link is gone."""

    link: int


class ControllerSaid(msgspec.Struct, frozen=True):
    """A message on ``link`` after its ``Welcome``."""

    link: int
    message: ToAgent


class StepFound(msgspec.Struct, frozen=True):
    """A step in the journal when the agent started.

    ``outcome``: how it ended, None when it has not; ``alive``: its supervisor still runs.
    """

    key: Key
    tasks: list[int]
    alive: bool
    outcome: StepEnded | LaunchFailed | None = None


class SupervisorCame(msgspec.Struct, frozen=True):
    """A supervisor connected; what it has to say follows as ``SupervisorSaid``.

    ``tasks``: of its order, for a step that the agent does not know yet.  ``kept``: its folder
    is in the journal (not forgotten).
    """

    key: Key
    tasks: list[int]
    kept: bool = True


class SupervisorSaid(msgspec.Struct, frozen=True):
    """A message of the step's supervisor."""

    key: Key
    message: FromStep


class SupervisorLeft(msgspec.Struct, frozen=True):
    """The supervisor's connection is gone, it lives and will come again."""

    key: Key


class SupervisorDied(msgspec.Struct, frozen=True):
    """No supervisor runs for the step any more; ``outcome`` is what the journal holds."""

    key: Key
    outcome: StepEnded | LaunchFailed | None = None


class Swept(msgspec.Struct, frozen=True):
    """Nothing of the step is left on the node (answer to ``Sweep``)."""

    key: Key


class CommandSaid(msgspec.Struct, frozen=True):
    """A command on this node sent a frame (JSON text) over connection ``conn``."""

    conn: int
    uid: int
    gid: int
    data: str


class CommandLeft(msgspec.Struct, frozen=True):
    """The command closed its connection."""

    conn: int


class HeartbeatDue(msgspec.Struct, frozen=True):
    """Time for a heartbeat; load average and free memory of the machine."""

    cpu_load: float
    free_mem_mib: int


AnyEvent = (
    LinkOpened
    | LinkClosed
    | ControllerSaid
    | StepFound
    | SupervisorCame
    | SupervisorSaid
    | SupervisorLeft
    | SupervisorDied
    | Swept
    | CommandSaid
    | CommandLeft
    | HeartbeatDue
)
