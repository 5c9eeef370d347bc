"""Formats of squeue and sinfo: ``-o "%.18i %P"`` and ``-O "JobID:10,State"``.

A column is a field with a title and a function from a row to its text.
"""

from __future__ import annotations

from clusterctl.slurm.output import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any, TypeAlias

    #: Title and text of a field.
    Field: TypeAlias = tuple[str, Callable[[Any], str]]

#: Columns of squeue whose text (a span of time) may be wider than its column.
NEVER_CUT = frozenset(("l", "L", "M", "timelimit", "timeleft", "timeused"))

#: Width of a column of ``-O`` when none is given.
LIST_WIDTH = 20


class Column:
    """One column: ``width`` 0 is the text as it is; ``field`` None is literal text only."""

    __slots__ = ("field", "name", "right", "suffix", "width")

    def __init__(
        self, name: str, field: Field | None, width: int, right: bool, suffix: str
    ) -> None:
        self.name = name
        self.field = field
        self.width = width
        self.right = right
        self.suffix = suffix

    def fit(self, text: str, *, cut: bool = True) -> str:
        """``text`` cut and padded to the column, with what follows it."""
        if self.width:
            text = text[: self.width] if cut else text
            text = text.rjust(self.width) if self.right else text.ljust(self.width)
        return text + self.suffix


def percent(
    command: str,
    text: str,
    fields: Mapping[str, Field],
    kind: str,
    tell: Callable[[str], None] | None = None,
) -> list[Column]:
    """Columns of a ``%[.][width]letter`` format; ``kind`` ("job") is for the error's words.

    ``tell`` prints the error line, if it is not to have the usual lead-in.

    An unknown letter prints as it stands, with an error line, and does not fail the command.
    """
    if text == "%all":
        columns = [Column(k, f, 0, False, "|") for k, f in fields.items()]
        columns[-1].suffix = ""
        return columns
    head, *parts = text.split("%")
    columns = [Column("", None, 0, False, head)] if head else []
    for part in parts:
        if not part:
            continue
        at = 1 if part[0] == "." else 0
        start = at
        while at < len(part) and part[at] in "0123456789":
            at += 1
        letter = part[at : at + 1]
        width = int(part[start:at] or 0)
        field = fields.get(letter)
        if field is None:
            complaint = f"Invalid {kind} format specification: {letter}"
            if tell is not None:
                tell(complaint)
            else:
                say(command, f"error: {complaint}")
            columns.append(Column("", None, 0, False, "%" + part))
        else:
            columns.append(Column(letter, field, width, part[0] == ".", part[at + 1 :]))
    return columns


def by_name(command: str, text: str, fields: Mapping[str, Field], kind: str) -> list[Column]:
    """Columns of a ``name[:[.][width][suffix]],...`` list; names in any case."""
    columns = []
    for part in text.split(","):
        name, colon, rest = part.partition(":")
        field = fields.get(name.lower())
        if field is None:
            say(command, f"error: Invalid {kind} format specification: {name}")
            continue
        right = rest.startswith(".")
        rest = rest[1:] if right else rest
        at = 0
        while at < len(rest) and rest[at] in "0123456789":
            at += 1
        width = int(rest[:at] or 0) if colon else LIST_WIDTH
        columns.append(Column(name.lower(), field, width, right, rest[at:]))
    return columns


def header(columns: Iterable[Column]) -> str:
    """The line of titles."""
    return "".join(c.fit(c.field[0]) if c.field else c.suffix for c in columns)


def line(columns: Iterable[Column], row: Any) -> str:
    """One row."""
    return "".join(
        c.fit(c.field[1](row), cut=c.name not in NEVER_CUT) if c.field else c.suffix
        for c in columns
    )


def mem_text(mib: int) -> str:
    """``512M``, ``4G``: the largest unit that holds it exactly; ``0`` for none."""
    if mib == 0:
        return "0"
    for unit in "MGTP":
        if mib % 1024 or unit == "P":
            return f"{mib}{unit}"
        mib //= 1024
    raise AssertionError


def tres_text(tres: Mapping[str, int]) -> str:
    """``cpu=2,mem=4G,node=1,billing=2,gres/neuron=4``."""
    return ",".join(f"{k}={mem_text(v) if k == 'mem' else v}" for k, v in tres.items())
