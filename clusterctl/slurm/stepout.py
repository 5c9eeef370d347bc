"""Where srun writes the tasks' output: its own streams or files, whole lines, with labels."""

from __future__ import annotations

import os

from clusterctl.slurm.errors import CommandError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

#: A line longer than this is written in pieces, bytes.
LONGEST_LINE = 1 << 16

#: Letters of a file name pattern that differ between tasks: the nodes open such files.
_PER_TASK = "tnN"


def per_task(pattern: str) -> bool:
    """True when each task (or node) has its own file under this pattern."""
    i = 0
    while i < len(pattern) - 1:
        if pattern[i] != "%":
            i += 1
            continue
        i += 1
        while i < len(pattern) and pattern[i] in "0123456789":
            i += 1
        if pattern[i : i + 1] and pattern[i] in _PER_TASK:
            return True
        i += 1
    return False


def expand(pattern: str, letters: dict[str, str]) -> str:
    """``pattern`` with its letters replaced; unknown ones stay, ``%4j`` pads with zeros."""
    text = ""
    i = 0
    while i < len(pattern):
        char = pattern[i]
        i += 1
        if char != "%":
            text += char
            continue
        start = i
        while i < len(pattern) and pattern[i] in "0123456789":
            i += 1
        digits, letter = pattern[start:i], pattern[i : i + 1]
        i += 1
        if letter == "%":
            text += "%"
        elif letter in letters:
            text += letters[letter].rjust(min(int(digits or 0), 10), "0")
        else:
            text += f"%{digits}{letter}"
    return text


def open_file(path: str, *, append: bool) -> int:
    """A descriptor to write the file; an existing one is emptied unless ``append``."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_APPEND if append else os.O_TRUNC)
    try:
        return os.open(path, flags, 0o666)
    except OSError as error:
        raise CommandError(
            f"srun: error: Could not open stdout file {path}: {error.strerror}"
        ) from None


def write_all(fd: int, data: bytes) -> bool:
    """Write everything; False when nobody reads any more."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            import select

            select.select([], [fd], [])
        except OSError:
            return False
    return True


class Sink:
    """One of srun's two streams."""

    def __init__(self, fd: int, label: Callable[[int], bytes] | None, *, lines: bool) -> None:
        self.fd = fd
        self.label = label
        self.lines = lines or label is not None
        self.open = True
        self._partial: dict[int, bytes] = {}

    def write(self, task: int, data: bytes) -> None:
        """Output of a task: whole lines go out, the rest waits for its end."""
        if not self.lines:
            self._out(data)
            return
        data = self._partial.pop(task, b"") + data
        head, newline, tail = data.rpartition(b"\n")
        if len(tail) > LONGEST_LINE:
            head, newline, tail = data, b"", b""
        if tail:
            self._partial[task] = tail
        if head or newline:
            self._emit(task, head + newline)

    def finish(self, task: int) -> None:
        """The task's stream is at its end."""
        rest = self._partial.pop(task, b"")
        if rest:
            self._emit(task, rest + (b"\n" if self.label is not None else b""))

    def finish_all(self) -> None:
        for task in sorted(self._partial):
            self.finish(task)

    def _emit(self, task: int, data: bytes) -> None:
        if self.label is not None:
            mark = self.label(task)
            data = b"".join(mark + line for line in data.splitlines(keepends=True))
        self._out(data)

    def _out(self, data: bytes) -> None:
        if self.open and self.fd >= 0:
            self.open = write_all(self.fd, data)


def label_of(ntasks: int) -> Callable[[int], bytes]:
    """``"  3: "``, as wide as the largest task number."""
    width = len(str(max(0, ntasks - 1)))
    return lambda task: b"%*d: " % (width, task)
