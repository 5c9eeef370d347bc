"""A terminal whose keys go to the other side as they are (``srun --pty``)."""

from __future__ import annotations

import os
import termios

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class RawTerminal:
    """Raw mode while open; ``raw`` is False when ``fd`` is no terminal."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.raw = os.isatty(fd)
        self._before: list[Any] = termios.tcgetattr(fd) if self.raw else []

    def __enter__(self) -> RawTerminal:
        if self.raw:
            mode = termios.tcgetattr(self.fd)
            mode[0] &= ~(
                termios.BRKINT | termios.ICRNL | termios.INPCK | termios.ISTRIP | termios.IXON
            )
            mode[1] &= ~termios.OPOST
            mode[2] = (mode[2] & ~(termios.CSIZE | termios.PARENB)) | termios.CS8
            mode[3] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN | termios.ISIG)
            termios.tcsetattr(self.fd, termios.TCSAFLUSH, mode)
        return self

    def __exit__(self, *exc: object) -> None:
        if self.raw:
            termios.tcsetattr(self.fd, termios.TCSAFLUSH, self._before)
