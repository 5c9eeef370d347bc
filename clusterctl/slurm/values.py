"""Values of the submission options, checked and normalised as sbatch, srun and salloc do.

Every function raises ``CommandError`` with Slurm's text and exit code.
"""

from __future__ import annotations

from clusterctl.slurm.errors import CommandError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: Exit status for a value that an option cannot have.
BAD_VALUE = 255

_SIGNALS = (
    "HUP",
    "INT",
    "QUIT",
    "ILL",
    "TRAP",
    "ABRT",
    "BUS",
    "FPE",
    "KILL",
    "USR1",
    "SEGV",
    "USR2",
    "PIPE",
    "ALRM",
    "TERM",
    "STKFLT",
    "CHLD",
    "CONT",
    "STOP",
    "TSTP",
    "TTIN",
    "TTOU",
    "URG",
    "XCPU",
    "XFSZ",
    "VTALRM",
    "PROF",
    "WINCH",
    "IO",
    "PWR",
    "SYS",
)


def signal_number(text: str) -> int | None:
    """The number of ``USR1``, ``SIGUSR1``, ``sigusr1`` or ``10``; None for anything else."""
    if text.isascii() and text.isdigit():
        number = int(text)
        return number if 0 < number < 65 else None
    name = text.upper()
    if name.startswith("SIG"):
        name = name[3:]
    return _SIGNALS.index(name) + 1 if name in _SIGNALS else None


def signal_name(number: int) -> str:
    """``SIGTERM`` for 15; the number itself when it has no name."""
    return f"SIG{_SIGNALS[number - 1]}" if 0 < number <= len(_SIGNALS) else str(number)


def bad(command: str, option: str) -> CommandError:
    """``sbatch: error: Invalid --time specification``."""
    return CommandError(f"{command}: error: Invalid --{option} specification", exit_code=BAD_VALUE)


def _number(text: str) -> int | None:
    body = text[1:] if text[:1] in ("-", "+") else text
    return int(text) if body.isascii() and body.isdigit() and len(body) < 19 else None


def count(command: str, option: str, text: str) -> int:
    """A positive number, as ``--ntasks`` takes it."""
    value = _number(text)
    if value is None or not 0 < value < 2**31:
        raise CommandError(f'{command}: error: Invalid numeric value "{text}" for --{option}.')
    return value


def number(command: str, option: str, text: str) -> int:
    """Any whole number."""
    value = _number(text)
    if value is None:
        raise bad(command, option)
    return value


def loose_number(text: str) -> int:
    """The number at the start of ``text``, 0 when there is none (--nice, --priority)."""
    end = 1 if text[:1] in ("-", "+") else 0
    while end < len(text) and text[end] in "0123456789":
        end += 1
    return _number(text[:end]) or 0


def memory_mib(command: str, option: str, text: str) -> int:
    """``4G``, ``512`` (MiB), ``100KB``: MiB, rounded up."""
    body = text.upper()
    if len(body) > 1 and body.endswith("B") and body[-2] in "KMGT":
        body = body[:-1]
    unit = body[-1:]
    digits = body[:-1] if unit in ("K", "M", "G", "T") else body
    if not (digits.isascii() and digits.isdigit() and len(digits) < 16):
        raise bad(command, option)
    value = int(digits)
    if unit == "K":
        return -(-value // 1024)
    return value * {"G": 1024, "T": 1024 * 1024}.get(unit, 1)


def _node_count(text: str) -> int | None:
    scale = {"k": 1024, "m": 1024 * 1024}.get(text[-1:].lower(), 1)
    value = _number(text[:-1] if scale > 1 else text)
    return None if value is None else value * scale


def nodes(command: str, text: str) -> tuple[int, int]:
    """``--nodes=MIN[-MAX]`` with ``k`` and ``m`` as suffixes: (min, max)."""
    low_text, dash, high_text = text.partition("-")
    if text.startswith("-") and _number(text) is not None:
        return 1, 1  # Slurm takes -1 for one node
    low = _node_count(low_text)
    high = _node_count(high_text) if dash else low
    if low is None or high is None:
        raise CommandError(
            f'{command}: error: "{text}" is not a valid node count', exit_code=BAD_VALUE
        )
    if high < low:
        raise CommandError(
            f"{command}: error: Maximum node count {high} is less than minimum node count {low}",
            exit_code=BAD_VALUE,
        )
    return low, high


def time_limit_s(command: str, option: str, text: str) -> int:
    """``--time``: seconds, -1 for no limit."""
    from scheduler.api.times import parse_limit

    try:
        return parse_limit(text)
    except ValueError:
        raise bad(command, option) from None


def begin_s(command: str, option: str, text: str) -> float:
    """``--begin``: seconds since the epoch."""
    import time

    from scheduler.api.times import TimeError, parse_begin

    try:
        return parse_begin(text, time.time())
    except TimeError as error:
        lines = [error.detail] if error.detail else []
        lines.append(f"{command}: error: Invalid --{option} specification")
        raise CommandError(*lines, exit_code=BAD_VALUE) from None


def signal_at(command: str, text: str) -> dict[str, Any]:
    """``--signal=[{R|B}:]SIG[@SECONDS]`` as a ``SignalAt`` record."""
    body = text
    batch = False
    head, colon, tail = body.partition(":")
    if colon:
        if not head or head.strip("RBrb"):
            raise bad(command, "signal")
        batch = "B" in head.upper()
        body = tail
    name, at, seconds_text = body.partition("@")
    signum = signal_number(name)
    seconds = _number(seconds_text) if at else 60
    if signum is None or seconds is None or not 0 <= seconds <= 65535:
        raise bad(command, "signal")
    record: dict[str, Any] = {"signum": signum, "before_s": seconds}
    if batch:
        record["batch"] = True
    return record


def gres(command: str, text: str) -> dict[str, int]:
    """``--gres=neuron:2,neuroncore:4``, also ``gres:neuron:2``, ``neuron=2`` and ``none``."""
    found: dict[str, int] = {}
    if text.lower() in ("none", ""):
        return found
    for part in text.split(","):
        fields = part.replace("=", ":").split(":")
        if fields[0] == "gres" and len(fields) > 1:
            fields = fields[1:]
        name = fields[0]
        if not name or len(fields) > 3:
            raise CommandError(f"{command}: error: Invalid generic resource (gres) specification")
        amount = 1
        if len(fields) > 1:
            value = _node_count(fields[-1])
            if value is None and len(fields) == 2:
                # "neuron:x" is a type to Slurm; no node here has one
                raise CommandError(
                    f"{command}: error: Batch job submission failed: "
                    "Requested node configuration is not available"
                )
            if value is None or value < 0:
                raise CommandError(
                    f"{command}: error: Invalid generic resource (gres) specification"
                )
            amount = value
        found[name] = found.get(name, 0) + amount
    return found


def host_names(command: str, text: str) -> list[str]:
    """``--nodelist`` and ``--exclude``: the names, or those in a file (a text with a ``/``)."""
    from scheduler.api.hostlist import HostlistError, expand

    if "/" in text:
        try:
            with open(text, encoding="utf-8") as file:
                text = ",".join(file.read().split())
        except (OSError, UnicodeDecodeError) as error:
            raise CommandError(
                f"{command}: error: Unable to read node file {text}: {error}"
            ) from None
    try:
        return expand(text)
    except HostlistError as error:
        lines = [f"{command}: error: {error.detail}"] if error.detail else []
        raise CommandError(*lines, f"{command}: error: {error}", exit_code=BAD_VALUE) from None
