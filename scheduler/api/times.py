"""Slurm's durations and dates: time limits, ``--begin`` and the forms in which they print.

Durations are seconds (limits are whole minutes), points in time are seconds since the epoch in
the local time zone.  Rules were compared with sbatch and squeue of Slurm 22.05.

Standard library only (no datetime: the drop-in commands import this module).
"""

from __future__ import annotations

import time

MINUTE_S = 60
HOUR_S = 3600
DAY_S = 86400

#: ``parse_limit``'s value for "no limit".
UNLIMITED_S = -1

#: Slurm keeps limits in 32 bits; larger ones wrap.
_WRAP = 1 << 32
#: squeue prints a span above this as INVALID.
_LONGEST_S = 365 * DAY_S

_UNITS_S = {
    "second": 1,
    "seconds": 1,
    "minute": MINUTE_S,
    "minutes": MINUTE_S,
    "hour": HOUR_S,
    "hours": HOUR_S,
    "day": DAY_S,
    "days": DAY_S,
    "week": 7 * DAY_S,
    "weeks": 7 * DAY_S,
}

_CLOCK_WORDS = {"midnight": 0, "noon": 12, "fika": 15, "teatime": 16}


class TimeError(ValueError):
    """A date that cannot be read; ``detail`` is Slurm's line about the place, or ""."""

    def __init__(self, text: str, pos: int | None = None) -> None:
        self.detail = f"Invalid time specification (pos={pos}): {text}" if pos is not None else ""
        super().__init__(self.detail or "Invalid time specification")


def _digits(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18


def _limit_seconds(text: str) -> int:
    """Seconds of ``M``, ``M:S``, ``H:M:S``, ``D-``, ``D-H``, ``D-H:M`` or ``D-H:M:S``."""
    days, dash, rest = text.partition("-")
    fields = (rest if dash else text).split(":")
    if dash and rest == "":
        fields = ["0"]
    if len(fields) > 3 or not all(_digits(f) for f in fields) or (dash and not _digits(days)):
        raise ValueError(f"invalid time {text!r}")
    values = [int(f) for f in fields]
    if dash:
        hours, minutes, seconds = (*values, 0, 0)[:3]
        return int(days) * DAY_S + hours * HOUR_S + minutes * MINUTE_S + seconds
    if len(values) == 1:
        return values[0] * MINUTE_S
    if len(values) == 2:
        return values[0] * MINUTE_S + values[1]
    return values[0] * HOUR_S + values[1] * MINUTE_S + values[2]


def parse_limit(text: str) -> int:
    """A time limit in seconds, rounded up to whole minutes; ``UNLIMITED_S`` for no limit.

    ``0``, ``-1``, ``UNLIMITED`` and ``INFINITE`` mean no limit.  As in Slurm other negative
    numbers are accepted and stand for a limit too large to be shown.  Raises ``ValueError``.
    """
    if text.lower() in ("unlimited", "infinite"):
        return UNLIMITED_S
    if text.startswith("-") and _digits(text[1:]):
        minutes = -int(text[1:])
        if minutes < -1:
            minutes += 1  # the division that rounds up goes towards zero
    else:
        minutes = (_limit_seconds(text) % _WRAP + MINUTE_S - 1) // MINUTE_S
        if text == str(_WRAP - 1):
            minutes = -1
    if minutes in (0, -1):
        return UNLIMITED_S
    return minutes % _WRAP * MINUTE_S


def _mktime(year: int, month: int, day: int, seconds: int) -> float:
    clock = (seconds // HOUR_S, seconds // MINUTE_S % MINUTE_S, seconds % MINUTE_S)
    return time.mktime((year, month, day, *clock, 0, 0, -1))


class _Date:
    """Reader of one ``--begin`` text; ``pos`` is where it stands."""

    def __init__(self, text: str, now_s: float) -> None:
        self.text = text
        self.pos = 0
        self.now_s = now_s
        local = time.localtime(now_s)
        self.today = (local.tm_year, local.tm_mon, local.tm_mday)
        self.date: tuple[int, int, int] | None = None
        self.year_given = True
        self.clock_s: int | None = None

    def fail(self, pos: int | None = None) -> TimeError:
        return TimeError(self.text, self.pos if pos is None else pos)

    def word(self) -> str:
        end = self.pos
        while end < len(self.text) and self.text[end].isalpha():
            end += 1
        return self.text[self.pos : end].lower()

    def number(self, low: int, high: int) -> int:
        """Two digits (or one before a non-digit) within bounds."""
        end = self.pos
        while end < len(self.text) and end < self.pos + 2 and self.text[end] in "0123456789":
            end += 1
        if end == self.pos or not low <= int(self.text[self.pos : end]) <= high:
            raise self.fail()
        value = int(self.text[self.pos : end])
        self.pos = end
        return value

    def skip(self, char: str) -> bool:
        if self.text.startswith(char, self.pos):
            self.pos += len(char)
            return True
        return False

    def blanks(self) -> None:
        while self.pos < len(self.text) and self.text[self.pos] in " \t":
            self.pos += 1

    def read_now(self) -> float:
        """``now``, ``now+60``, ``now - 2hours``."""
        self.pos += 3
        sign_pos = self.pos
        self.blanks()
        if self.pos >= len(self.text):
            return self.now_s
        if self.text[self.pos] not in "+-":
            raise self.fail()
        sign = 1 if self.text[self.pos] == "+" else -1
        sign_pos = self.pos
        self.pos += 1
        self.blanks()
        start = self.pos
        while self.pos < len(self.text) and self.text[self.pos] in "0123456789":
            self.pos += 1
        if start == self.pos or self.pos - start > 12:
            raise self.fail(sign_pos)
        count = int(self.text[start : self.pos])
        last_digit = self.pos - 1
        self.blanks()
        unit = self.word()
        self.pos += len(unit)
        self.blanks()
        if self.pos < len(self.text) or (unit and unit not in _UNITS_S):
            raise self.fail(last_digit)
        return self.now_s + sign * count * _UNITS_S.get(unit, 1)

    def read_clock(self) -> None:
        """``HH:MM[:SS][am|pm]``."""
        start = self.pos
        hours = self.number(0, 23)
        if not self.skip(":"):
            raise self.fail()
        minutes = self.number(0, 59)
        seconds = self.number(0, 59) if self.skip(":") else 0
        self.blanks()
        half = self.word()
        if half in ("am", "pm"):
            if hours > 12 or hours == 0:
                raise self.fail(start)
            hours = hours % 12 + (12 if half == "pm" else 0)
            self.pos += 2
        self.clock_s = hours * HOUR_S + minutes * MINUTE_S + seconds

    def read_date(self) -> None:
        """``YYYY-MM-DD``, ``MM/DD[/YY]`` or ``MMDDYY``."""
        head = self.text[self.pos : self.pos + 5]
        if len(head) == 5 and _digits(head[:4]) and head[4] == "-":
            self.pos += 5
            month = self.number(1, 12)
            if not self.skip("-"):
                raise self.fail()
            self.date = (int(head[:4]), month, self.number(1, 31))
            return
        month = self.number(1, 12)
        slash = self.skip("/") or self.skip(".")
        day = self.number(1, 31)
        if slash:
            self.year_given = self.skip("/") or self.skip(".")
            year = 2000 + self.number(0, 99) if self.year_given else self.today[0]
        else:
            year = 2000 + self.number(0, 99)
        self.date = (year, month, day)

    def read_word(self) -> None:
        word = self.word()
        if word in _CLOCK_WORDS and self.clock_s is None:
            self.clock_s = _CLOCK_WORDS[word] * HOUR_S
        elif word in ("today", "tomorrow") and self.date is None:
            year, month, day = self.today
            self.date = (year, month, day + (word == "tomorrow"))
        else:
            raise self.fail()
        self.pos += len(word)

    def read(self) -> None:
        """All parts of the text: at most one date and one clock time."""
        while True:
            while self.pos < len(self.text) and self.text[self.pos] in " \t":
                self.pos += 1
            if self.pos >= len(self.text):
                return
            after_date = self.date is not None and self.clock_s is None
            if after_date and self.text[self.pos] in "T-":
                self.pos += 1
                if self.pos >= len(self.text):
                    raise self.fail()
            if self.text[self.pos].isalpha():
                self.read_word()
            elif ":" in self.text[self.pos + 1 : self.pos + 3] and self.clock_s is None:
                self.read_clock()
            elif self.date is None:
                self.read_date()
            else:
                raise self.fail()

    def result(self, past: bool) -> float:
        clock_s = self.clock_s or 0
        if self.date is None:
            year, month, day = self.today
            at_s = _mktime(year, month, day, clock_s)
            if at_s < self.now_s and not past:
                at_s = _mktime(year, month, day + 1, clock_s)
            elif at_s > self.now_s and past:
                at_s = _mktime(year, month, day - 1, clock_s)
            return at_s
        year, month, day = self.date
        at_s = _mktime(year, month, day, clock_s)
        if not self.year_given and at_s < self.now_s and not past:
            at_s = _mktime(year + 1, month, day, clock_s)
        return at_s


def parse_begin(text: str, now_s: float, *, past: bool = False) -> float:
    """The point in time of ``--begin`` (or, with ``past``, of ``sacct -S``).

    Accepts ``now[+-N[unit]]``, ``today``, ``tomorrow``, ``midnight``, ``noon``, ``fika``,
    ``teatime``, ``HH:MM[:SS][am|pm]``, ``YYYY-MM-DD[THH:MM[:SS]]``, ``MM/DD[/YY]``, ``MMDDYY``
    with an optional time, and ``uts`` followed by seconds.  A clock time without a date is the
    next such time, with ``past`` the latest one.  Raises ``TimeError``.
    """
    if not text:
        raise TimeError(text)
    lower = text.lower()
    if lower.startswith("uts") and _digits(text[3:]):
        return float(text[3:])
    reader = _Date(text, now_s)
    reader.blanks()
    if lower[reader.pos :].startswith("now") and reader.word() == "now":
        return reader.read_now()
    try:
        reader.read()
        return reader.result(past)
    except OverflowError:
        raise reader.fail(0) from None


def _parts(seconds: float) -> tuple[int, int, int, int]:
    whole = int(seconds)
    return whole // DAY_S, whole // HOUR_S % 24, whole // MINUTE_S % 60, whole % 60


def format_elapsed(seconds: float) -> str:
    """A span as squeue prints it: ``0:07``, ``1:30:00``, ``2-00:00:00``; INVALID over a year."""
    if seconds < 0 or seconds > _LONGEST_S:
        return "INVALID"
    days, hours, minutes, rest = _parts(seconds)
    if days:
        return f"{days}-{hours:02}:{minutes:02}:{rest:02}"
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}"


def format_padded(seconds: float) -> str:
    """A span as scontrol and sacct print it: ``00:00:07``, ``2-00:00:00``."""
    days, hours, minutes, rest = _parts(max(0, seconds))
    clock = f"{hours:02}:{minutes:02}:{rest:02}"
    return f"{days}-{clock}" if days else clock


def format_limit(limit_s: float | None, *, padded: bool = False) -> str:
    """A limit; None (or negative) is UNLIMITED.  ``padded`` as scontrol, else as squeue."""
    if limit_s is None or limit_s < 0:
        return "UNLIMITED"
    return format_padded(limit_s) if padded else format_elapsed(limit_s)


def format_stamp(at_s: float | None, missing: str = "Unknown") -> str:
    """``2030-01-02T03:04:05`` in local time; ``missing`` for None."""
    if at_s is None:
        return missing
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(int(at_s)))
