"""Does an answer say what the recording says?

The recorded text becomes a pattern: its placeholders match what they stand for, everything else
must be there to the letter.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from difflib import unified_diff
from itertools import groupby

from tests.golden.records import Record

FORM_ONLY = "values vary"
#: How many seconds a short job took is not always what it was in the recording.
SHORT_JOB = ("sacct/times",)
SORTED = "stdout lines sorted"
BEGIN = "PLUS n"

#: A date is "near the run" when it is less than so many days away (an unlimited job ends in 365).
_NEAR_DAYS = 400
_DATE = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d"


@dataclass(frozen=True)
class Answer:
    """What our command said; ``rc`` is None where it was still running when given up."""

    rc: int | None
    out: str
    err: str


@dataclass(frozen=True)
class Place:
    """What the placeholders stand for in this run."""

    jobs: dict[str, str]  # J001 -> id
    cwd: str
    tmp: str
    host: str
    conf: str


def difference(record: Record, answer: Answer, place: Place) -> str:
    """Empty when the answer is the recorded one, else what differs."""
    found = []
    if record.rc != answer.rc:
        found.append(f"exit code: recorded {_code(record.rc)}, ours {_code(answer.rc)}\n")
    wanted_out, out = record.out, answer.out
    if record.family == "squeue":
        wanted_out, out = without_history(wanted_out, out, place)
    if SORTED in record.note:
        wanted_out, out = _sort(wanted_out), _sort(out)
    if BEGIN in record.note and same_begin(wanted_out, out):
        out = wanted_out
    if FORM_ONLY in record.note or record.name in SHORT_JOB:
        wanted_out, out = form(wanted_out), form(out)
    wanted_err, err = record.err, answer.err
    if record.family == "srun":
        wanted_err, err = _ends_sorted(wanted_err), _ends_sorted(err)
    found.append(_compare("stdout", wanted_out, out, place))
    found.append(_compare("stderr", wanted_err, err, place))
    return "".join(found)


def _code(rc: int | None) -> str:
    return "still running" if rc is None else str(rc)


def _sort(text: str) -> str:
    return "".join(sorted(text.splitlines(keepends=True)))


_TASK_END = r"srun: (error: n\d+: task|Force Terminated)"


def _ends_sorted(text: str) -> str:
    """Tasks that end at the same time are told of in any order."""
    lines = text.splitlines(keepends=True)
    runs = groupby(lines, key=lambda line: bool(re.match(_TASK_END, line)))
    return "".join(x for ends, run in runs for x in (sorted(run) if ends else run))


def _compare(stream: str, wanted: str, got: str, place: Place) -> str:
    ours, theirs = got.splitlines(keepends=True), wanted.splitlines(keepends=True)
    shown = [next((want for want in theirs if same_line(want, mine, place)), mine) for mine in ours]
    if shown == theirs:
        return ""
    lines = list(unified_diff(theirs, shown, n=0))[3:]
    return f"{stream} (- recorded, + ours):\n" + "".join(
        line if line.endswith("\n") else line + "$\n" for line in lines if line[0] != "@"
    )


# ---------------------------------------------------------------- lines


def same_line(wanted: str, got: str, place: Place) -> bool:
    """True when the line is the recorded one, with other values in place of the placeholders."""
    if wanted == got:
        return True
    match = re.fullmatch(_pattern(wanted, place), got)
    return match is not None and all(_near(text) for text in match.groups() if text)


def _near(text: str) -> bool:
    then = time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    return abs(then - time.time()) < _NEAR_DAYS * 86400


def _pattern(wanted: str, place: Place) -> str:
    known = "|".join(place.jobs.values())
    parts = {
        **{f"<{name}>": job for name, job in place.jobs.items()},
        "<JNEW>": rf"(?:(?!(?:{known or 'none'})\b)70\d{{4}})",
        "YYYY-MM-DDThh:mm:ss": f"({_DATE})",
        "Ddd Mmm DD hh:mm:ss YYYY": r"[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}",
        "M:SS": r"[01]:\d\d",
        "00:00:SS": r"00:0[01]:\d\d",
        "<cwd>": re.escape(place.cwd),
        "<tmp>": re.escape(place.tmp),
        "<conf>": re.escape(place.conf),
        "<host>": re.escape(place.host),
        "<prio>": r"\d+",
        "<pid>": r"\d+",
        "<port>": r"\d+",
        "<n>": r"[\d.]+",
        "<addr>": r"[\w.]+",
        "<arch>": r"\w+",
        "<os>": r".+",
    }
    token = "|".join(re.escape(p) for p in sorted(parts, key=len, reverse=True))
    pieces = re.split(f"({token})", wanted)
    # A folder or host name is not as wide as its placeholder: blanks beside it do not count.
    loose = any(p in wanted for p in ("<cwd>", "<host>", "<tmp>"))
    if re.search(r"\b(CD|F|COMPLETED|FAILED) ", wanted):
        parts["0:00"] = r"0:0\d"  # a short job, ended
        pieces = [p for piece in pieces for p in re.split(r"(\b0:00\b)", piece)]
    text = "".join(parts.get(piece) or re.escape(piece) for piece in pieces)
    return re.sub(r"(?:\\ ){2,}", " +", text) if loose else text


# ---------------------------------------------------------------- special notes


def without_history(wanted: str, got: str, place: Place) -> tuple[str, str]:
    """Leave out rows of jobs from before the group's setup: the two histories differ."""
    mine = set(place.jobs.values())

    def old(line: str) -> bool:
        match = re.match(r" *(70\d{4})(?:\b|_)", line)
        return match is not None and match[1] not in mine

    theirs = [x for x in wanted.splitlines(keepends=True) if not re.match(r" *<JNEW>", x)]
    ours = [x for x in got.splitlines(keepends=True) if not old(x)]
    return "".join(theirs), "".join(ours)


def form(text: str) -> str:
    """The header as it is; of the other lines the cells' kinds."""
    header, _, rest = text.partition("\n")
    return "".join([f"{header}\n", *(_line_form(line) for line in rest.splitlines())])


def _line_form(line: str) -> str:
    cells = line.split("|") if "|" in line else line.split()
    return "|".join(_cell_form(cell) for cell in cells) + "\n"


def _cell_form(cell: str) -> str:
    if re.fullmatch(r"(<J\d{3}>|70\d{4})(_.*)?", cell):
        return "job"
    if re.fullmatch(r"[\d.:\-]+", cell) or cell in ("UNLIMITED", "M:SS"):
        return "number"
    if re.fullmatch(r"YYYY.*|\d{4}-.*", cell):
        return "date"
    return "text" if cell else ""


def same_begin(wanted: str, got: str) -> bool:
    """``PLUS n`` may be one more; ``PLUS`` and ``CLOCK`` may name the same time of day."""
    theirs, ours = wanted.split(), got.split()
    if len(theirs) != 2 or len(ours) != 2:
        return False
    if theirs[0] == ours[0] == "PLUS":
        return int(ours[1]) - int(theirs[1]) in (0, 1)
    kinds = {theirs[0], ours[0]}
    return kinds <= {"PLUS", "CLOCK"} and abs(_day_time(theirs) - _day_time(ours)) <= 3


def _day_time(words: list[str]) -> float:
    """Seconds since midnight that the words mean now."""
    if words[0] == "CLOCK":
        hours, minutes, seconds = (int(x) for x in words[1].split(":"))
        return hours * 3600 + minutes * 60 + seconds
    now = time.localtime(time.time() + int(words[1]))
    return now.tm_hour * 3600 + now.tm_min * 60 + now.tm_sec
