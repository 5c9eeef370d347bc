"""What administration commands say while they work: one line that changes, then results."""

from __future__ import annotations

import sys


class Progress:
    """A line on stderr, rewritten on a terminal and left out elsewhere.

    ``quiet`` says nothing but errors.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self._live = sys.stderr.isatty() and not quiet
        self._shown = ""

    def update(self, text: str) -> None:
        """Show ``text`` in place of the line before."""
        if self._live and text != self._shown:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
            self._shown = text

    def clear(self) -> None:
        """Remove the line."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = ""

    def note(self, text: str) -> None:
        """A line that stays, on stderr."""
        self.clear()
        if not self.quiet:
            sys.stderr.write(f"clusterctl: {text}\n")

    def result(self, text: str) -> None:
        """A line that stays, on stdout."""
        self.clear()
        if not self.quiet:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()


def plural(count: int, word: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{count} {word}{'' if count == 1 else 's'}"
