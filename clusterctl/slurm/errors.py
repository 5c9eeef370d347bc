"""How a command ends early."""

from __future__ import annotations


class CommandError(Exception):
    """Print ``lines`` on stderr and leave with ``exit_code``."""

    def __init__(self, *lines: str, exit_code: int = 1) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines
        self.exit_code = exit_code


class ControllerError(Exception):
    """The controller's ``Error`` reply."""

    def __init__(self, code: str, message: str, warning: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.warning = warning


class NoController(Exception):
    """Nobody answers on the controller's socket; ``hint`` says what to do."""

    def __init__(self, path: str, hint: str) -> None:
        super().__init__(f"{path}: {hint}")
        self.path = path
        self.hint = hint
