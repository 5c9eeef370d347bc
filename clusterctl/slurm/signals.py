"""Signals as bytes on a pipe, so that one ``poll`` waits for everything.

``_signal`` instead of ``signal``: the latter loads ``enum`` for its names.
"""

from __future__ import annotations

# typeshed has no stub of signal's C part
import _signal  # type: ignore[import-not-found]
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


def _note(signum: int, frame: object) -> None:
    """The wake-up descriptor has the signal's number; nothing else is to be done."""


class Signals:
    """While open, the given signals are collected; ``fd`` is readable when there are some."""

    def __init__(self, signals: Iterable[int]) -> None:
        self.fd, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._before_fd = _signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before = {number: _signal.signal(number, _note) for number in signals}

    def taken(self) -> list[int]:
        """The signals that came since the last call."""
        try:
            return list(os.read(self.fd, 4096))
        except BlockingIOError:
            return []

    def close(self) -> None:
        """Put back what was there before."""
        for number, handler in self._before.items():
            _signal.signal(number, handler if handler is not None else _signal.SIG_DFL)
        _signal.set_wakeup_fd(self._before_fd)
        os.close(self.fd)
        os.close(self._write)

    def __enter__(self) -> Signals:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def describe(signum: int) -> str:
    """``Terminated``, ``Killed``, ``Segmentation fault``."""
    return str(_signal.strsignal(signum) or "") or f"Signal {signum}"
