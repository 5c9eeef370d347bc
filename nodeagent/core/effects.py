"""What the agent's core wants done.  Every effect is safe to carry out twice."""

from __future__ import annotations

import msgspec

from nodeagent.order import Key
from scheduler.api.agentwire import (
    EndJob,
    EndStep,
    Forget,
    FromAgent,
    Input,
    Launch,
    LaunchFailed,
    OutputAck,
    PmiBarrierOut,
    Signal,
    StepEnded,
)

ToStep = Signal | EndStep | EndJob | Forget | Input | OutputAck | PmiBarrierOut


class Send(msgspec.Struct, frozen=True):
    """Send up on ``link``."""

    link: int
    message: FromAgent


class CloseLink(msgspec.Struct, frozen=True):
    """Close a link; ``reason`` goes to the log."""

    link: int
    reason: str


class UseHosts(msgspec.Struct, frozen=True):
    """The controller's view of all nodes' addresses, and how often it wants a heartbeat."""

    hosts: dict[str, str]
    heartbeat_s: float


class Spawn(msgspec.Struct, frozen=True):
    """Have the fork server start a supervisor."""

    launch: Launch


class TellStep(msgspec.Struct, frozen=True):
    """To the step's supervisor; dropped when none is connected."""

    key: Key
    message: ToStep


class Sweep(msgspec.Struct, frozen=True):
    """End all processes that carry the step's mark; answered by ``Swept``."""

    key: Key


class Record(msgspec.Struct, frozen=True):
    """Write the outcome of a step whose supervisor cannot into the journal."""

    key: Key
    outcome: StepEnded | LaunchFailed


class Drop(msgspec.Struct, frozen=True):
    """Remove the step from the journal."""

    key: Key


class TellCommand(msgspec.Struct, frozen=True):
    """A frame (JSON text, "" for none) for a command; ``close`` ends its connection."""

    conn: int
    data: str = ""
    close: bool = False


class StopAgent(msgspec.Struct, frozen=True):
    """End this process.  What runs goes on unless it was ended before."""


AnyEffect = (
    Send | CloseLink | UseHosts | Spawn | TellStep | Sweep | Record | Drop | TellCommand | StopAgent
)
