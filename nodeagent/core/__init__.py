"""The pure core of the node agent: ``handle(state, event) -> effects``.

It knows every step of the node, decides what to start and to end, what the controller is told
and when a job is clean.  It does no I/O and knows no clock; :mod:`nodeagent.service` (or a
simulator) feeds events and carries effects out.  Effects are safe to carry out twice.

Life of a step: ``waiting`` (an older attempt of its job is still here) -> ``starting`` (handed to
the fork server) -> ``running`` -> ``ended`` or ``failed`` (until the controller says Forget);
``sweeping`` when its supervisor vanished and leftovers are being looked for.
"""

from nodeagent.core.handle import handle
from nodeagent.core.state import AgentState

__all__ = ["AgentState", "handle"]
