"""What the core wants done.  Imperative names; every effect is safe to carry out twice.

Effects leave the controller only after the commit of the turn that made them.
"""

from __future__ import annotations

import msgspec

from scheduler.api import agentwire, wire


class Effect(msgspec.Struct, kw_only=True, tag=True):
    """Base of all effects."""


class Reply(Effect):
    """Answer the caller ``req``."""

    req: int
    message: wire.Reply


class KeepPayload(Effect):
    """Store the payload that came with submission ``req`` under ``job_id`` (same commit)."""

    req: int
    job_id: int


class Launch(Effect):
    """Send the node its share of a step; the shell builds the message from state and payload."""

    node: str
    job_id: int
    step_id: str
    attempt: int


class Send(Effect):
    """Send ``message`` to the agent of ``node``; dropped when its link is down, because
    registration of the agent derives again whatever is still needed."""

    node: str
    message: agentwire.ToAgent


class StepNews(Effect):
    """Something an attached srun wants to know about a step."""

    job_id: int
    step_id: str
    event: wire.StepEvent


class WakeAt(Effect):
    """Deliver ``TimerFired`` at ``at_s`` or soon after (an earlier one makes it unnecessary)."""

    at_s: float


AnyEffect = Reply | KeepPayload | Launch | Send | StepNews | WakeAt
