"""Small helpers that the commands share: messages, users, version."""

from __future__ import annotations

import sys

from clusterctl.slurm.errors import CommandError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: The Slurm whose behaviour the commands follow; clients parse the first two words.
SLURM_VERSION = "22.05.8"


def version_text() -> str:
    """``slurm-wlm 22.05.8``, alone on its line: clients split it."""
    return f"slurm-wlm {SLURM_VERSION}\n"


def out(text: str) -> None:
    """``text`` on stdout, whatever bytes its names were made of."""
    sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))


def err(text: str) -> None:
    """One or more lines on stderr."""
    sys.stdout.flush()
    sys.stderr.buffer.write(text.encode("utf-8", "surrogateescape"))
    sys.stderr.flush()


def say(command: str, text: str) -> None:
    """A message of the command: ``command: text`` on stderr."""
    err(f"{command}: {text}\n")


def error(command: str, text: str, exit_code: int = 1) -> CommandError:
    """An exception that prints ``command: error: text``."""
    return CommandError(f"{command}: error: {text}", exit_code=exit_code)


def uid_of(name: str) -> int | None:
    """The uid of a user name or of a number in text form; None when there is none."""
    import pwd

    if name.isascii() and name.isdigit():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError, UnicodeError):
        return None


def user_name(uid: int) -> str:
    """The name of a uid, or the number when it has none."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def words(text: str | None) -> list[str]:
    """A comma separated list without its empty parts."""
    return [part for part in (text or "").split(",") if part]


def warn_reply(command: str, reply: dict[str, Any]) -> None:
    """The reply's warning, if it has one, on stderr."""
    for line in (reply.get("warning") or "").splitlines():
        say(command, line)
