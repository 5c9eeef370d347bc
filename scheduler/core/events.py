"""What can happen to the cluster.  Names are in the past tense; every event carries its time.

``now_s`` is the wall clock in seconds since the epoch; the shell never lets it run backwards.
``req`` names the caller to answer (0: nobody); the answer comes back as a ``Reply`` effect.
Events are encoded into the journal as they are, so they hold everything a replay needs.
"""

from __future__ import annotations

import msgspec

from scheduler.api import agentwire, wire
from scheduler.api.records import JobSpec


class Event(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="type", tag=True):
    """Base: when it happened."""

    now_s: float


class Caller(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Who asks: the peer's uid and gid as the kernel told them, names looked up by the shell."""

    uid: int
    gid: int
    user: str
    group: str
    admin: bool  # root, or the user the controller runs as


class JobSubmitted(Event):
    """``payload_env`` is not here: the shell stores the payload under the new id."""

    req: int
    caller: Caller
    spec: JobSpec
    key: str = ""
    test_only: bool = False
    #: outcome of jobs named in the dependency that left memory: id -> (state, code)
    known: dict[str, tuple[str, int]] = msgspec.field(default_factory=dict)


class Asked(Event):
    """A command wants a change other than a submission."""

    req: int
    caller: Caller
    request: (
        wire.Cancel
        | wire.Control
        | wire.UpdateJob
        | wire.UpdateNode
        | wire.UpdatePartition
        | wire.CreateStep
        | wire.StepSignal
        | wire.EndAllocation
    )


class AgentSaid(Event):
    """A message of a registered agent that concerns the core."""

    node: str
    message: (
        agentwire.Register
        | agentwire.Heartbeat
        | agentwire.StepStarted
        | agentwire.LaunchFailed
        | agentwire.TasksExited
        | agentwire.StepEnded
        | agentwire.JobCleaned
    )


class LinkLost(Event):
    """The link to the node's agent is gone; it may come back."""

    node: str
    why: str = ""


class TimerFired(Event):
    """Time moved on: the core looks at everything that is due at ``now_s``."""


class Started(Event):
    """The controller (re)started with the state loaded; links are not up yet."""


AnyEvent = JobSubmitted | Asked | AgentSaid | LinkLost | TimerFired | Started
