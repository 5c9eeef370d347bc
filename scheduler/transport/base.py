"""The seam between the controller's node links and what carries them.

A transport opens links; a link carries frames (bodies of :mod:`scheduler.api.frames`).
"""

from __future__ import annotations

from typing import Protocol


class Link(Protocol):
    """An ordered two-way stream of frames to one node's agent."""

    async def send(self, body: bytes) -> None:
        """Queue one frame; waits when the peer does not read (back-pressure).

        Raises ``ConnectionError`` when the link is gone.
        """

    async def receive(self) -> bytes | None:
        """The next frame, None when the peer closed.  Raises ``ConnectionError``/``EOFError``."""

    async def close(self) -> None:
        """Close; safe to call twice."""


class Transport(Protocol):
    """Opens links to nodes of one kind (local, ssh)."""

    async def open(self, node: str) -> Link:
        """Dial the agent of ``node``, starting it first where it does not run.

        Raises ``scheduler.api.errors.Unavailable`` with the reason when it cannot be reached.
        """

    async def close(self) -> None:
        """Drop what the transport holds (connections); running agents stay."""
