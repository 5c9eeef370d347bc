"""Opens what a step's tasks get as stdin, stdout and stderr.

A name is a pattern relative to the working directory.  "" for output means srun, or for the
batch step Slurm's default file; ``none`` is /dev/null.  Standard library only.
"""

from __future__ import annotations

import fcntl
import os
import struct
import termios
from dataclasses import dataclass, field

from nodeagent.names import differs_by_node, expand
from nodeagent.order import Order
from nodeagent.stepio import InStream, OutStream
from scheduler.api.text import unpack


class CannotOpen(Exception):
    """A file of the step cannot be opened: nothing of it is started."""

    def __init__(self, path: bytes, error: OSError) -> None:
        super().__init__(f"Could not open {os.fsdecode(path)}")
        self.errno_text = os.strerror(error.errno or 0)


@dataclass
class TaskFiles:
    """The descriptors one task starts with; ``close_after`` are of no use once it runs."""

    files: tuple[int, int, int]
    close_after: list[int] = field(default_factory=list)
    terminal: bool = False


class StepFiles:
    """Opens and remembers the files and pipes of all tasks of the step here."""

    def __init__(self, order: Order, node: str, work_dir: bytes) -> None:
        self.order = order
        self.node = node
        self.work_dir = work_dir
        self.out: list[OutStream] = []
        self.stdin: dict[int, InStream] = {}
        self._shared: dict[bytes, int] = {}  # output name -> descriptor
        #: where the supervisor's own messages go: a file, else the first stream of stderr
        self.error_file: int | None = None
        self._null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)

    def _default_output(self) -> bytes:
        array = self.order.names.get("a", "").isdigit() and self.order.names["a"] != "4294967294"
        return b"slurm-%A_%a.out" if array else b"slurm-%j.out"

    def _patterns(self) -> tuple[bytes, bytes]:
        """Patterns of stdout and stderr; b"" is srun."""
        out, err = unpack(self.order.std_out), unpack(self.order.std_err)
        if self.order.batch and not out:
            out = self._default_output()
        return out, err or out

    def _output(self, pattern: bytes, rank: int) -> int:
        """A descriptor for appending.  The same name is opened once.

        Truncation is for the first to open only: of nodes that share a name it is node 0.
        """
        if pattern == b"none" and not self.order.batch:
            return self._null
        path = os.path.join(self.work_dir, expand(pattern, self.order, self.node, rank))
        if path in self._shared:
            return self._shared[path]
        # Not blocking: a FIFO that nobody reads must not hold up the supervisor.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
        first = self.order.node_index == 0 or differs_by_node(pattern)
        if self.order.open_mode != "append" and first:
            flags |= os.O_TRUNC
        try:
            fd = os.open(path, flags, 0o666)
        except OSError as error:
            raise CannotOpen(path, error) from None
        os.set_blocking(fd, True)
        self._shared[path] = fd
        return fd

    def _input(self, rank: int) -> tuple[int, bool]:
        """Descriptor and whether it is to be closed after the start."""
        pattern = unpack(self.order.std_in)
        if pattern == b"none" or (self.order.batch and not pattern):
            return self._null, False
        if pattern and not pattern.isdigit():
            path = os.path.join(self.work_dir, expand(pattern, self.order, self.node, rank))
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError as error:
                raise CannotOpen(path, error) from None
            os.set_blocking(fd, True)
            return fd, True
        if pattern and int(pattern) != rank:
            return self._null, False
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        self.stdin[rank] = InStream(rank, writer)
        return reader, True

    def _stream(self, rank: int, fd: int) -> int:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        self.out.append(OutStream(rank, fd, reader))
        return writer

    def _terminal(self, rank: int) -> TaskFiles:
        """A pseudo-terminal: one descriptor for all three, its output is the task's stdout."""
        master, slave = os.openpty()
        lines, columns = (
            int(text) if text.isdigit() else default
            for text, default in (
                (self.order.env.get("LINES", ""), 24),
                (self.order.env.get("COLUMNS", ""), 80),
            )
        )
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        os.set_blocking(master, False)
        self.out.append(OutStream(rank, 1, master))
        writer = os.dup(master)
        self.stdin[rank] = InStream(rank, writer)
        return TaskFiles((slave, slave, slave), [slave], terminal=True)

    def open(self, rank: int) -> TaskFiles:
        """Raises ``CannotOpen``; ``OSError`` when descriptors run out."""
        if self.order.pty and rank == 0:
            return self._terminal(rank)
        out_pattern, err_pattern = self._patterns()
        close_after = []
        reader, owned = self._input(rank)
        if owned:
            close_after.append(reader)
        ends = []
        for fd, pattern in ((1, out_pattern), (2, err_pattern)):
            if pattern:
                end = self._output(pattern, rank)
                if fd == 2 and self.error_file is None and end != self._null:
                    self.error_file = end
            else:
                end = self._stream(rank, fd)
                close_after.append(end)
            ends.append(end)
        return TaskFiles((reader, ends[0], ends[1]), close_after)

    def say(self, text: str) -> None:
        """A line of the supervisor on the step's stderr."""
        data = f"slurmstepd-{self.node}: error: {text}\n".encode()
        if self.error_file is not None:
            try:
                os.write(self.error_file, data)
            except OSError:
                return  # the user's disk is full or gone: nowhere left to say it
            return
        for stream in self.out:
            if stream.fd == 2 or self.order.pty:
                stream.write(data)
                return
