"""One tree of errors, each with the text and exit code a Slurm user expects.

Standard library only: the drop-in commands import this module.
"""

from __future__ import annotations


class ClusterError(Exception):
    """Base of every error that may be shown to a user.

    ``code`` is a short stable identifier that goes over the wire, ``exit_code`` the exit
    status a command ends with, ``str(error)`` the text after ``command: error:``.
    """

    code = "error"
    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Rejected(ClusterError):
    """The request is understood and refused (bad value, wrong state)."""

    code = "rejected"


class Infeasible(Rejected):
    """No set of nodes of this cluster could ever satisfy the request.

    ``detail`` names the limit; commands print it on a line of its own.
    """

    code = "infeasible"

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class NotFound(ClusterError):
    """A job, step, node or partition of that name does not exist."""

    code = "not_found"


class Denied(ClusterError):
    """The caller may not do this (another user's job, not an administrator)."""

    code = "denied"


class Busy(ClusterError):
    """Cannot be done now; the same request may succeed later (step resources in use)."""

    code = "busy"


class Unavailable(ClusterError):
    """The controller or a node cannot be reached, or its disk is full."""

    code = "unavailable"


class ProtocolError(ClusterError):
    """A peer spoke something that is not our protocol, or another version of it."""

    code = "protocol"


_BY_CODE: dict[str, type[ClusterError]] = {
    c.code: c
    for c in (
        ClusterError,
        Rejected,
        Infeasible,
        NotFound,
        Denied,
        Busy,
        Unavailable,
        ProtocolError,
    )
}


def from_code(code: str, message: str) -> ClusterError:
    """The error that a reply ``{"type": "Error", "code": ..., "message": ...}`` stands for."""
    return _BY_CODE.get(code, ClusterError)(message)
