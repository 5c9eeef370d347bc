"""Durations and dates against recorded behaviour of sbatch and squeue."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.api import times

NOW_S = 1_900_000_000.0  # 2030-03-17T17:46:40 UTC


@pytest.fixture(autouse=True)
def _utc() -> Iterator[None]:
    before = os.environ.get("TZ")
    os.environ["TZ"] = "UTC"
    time.tzset()
    yield
    if before is None:
        del os.environ["TZ"]
    else:
        os.environ["TZ"] = before
    time.tzset()


@pytest.mark.parametrize(
    ("text", "short", "padded"),
    [
        ("1", "1:00", "00:01:00"),
        ("90", "1:30:00", "01:30:00"),
        ("0", "UNLIMITED", "UNLIMITED"),
        ("-1", "UNLIMITED", "UNLIMITED"),
        ("1:30", "2:00", "00:02:00"),
        ("0:30", "1:00", "00:01:00"),
        ("1:99", "3:00", "00:03:00"),
        ("0:00:30", "1:00", "00:01:00"),
        ("25:00:00", "1-01:00:00", "1-01:00:00"),
        ("1-", "1-00:00:00", "1-00:00:00"),
        ("1-2:30:45", "1-02:31:00", "1-02:31:00"),
        ("1-24", "2-00:00:00", "2-00:00:00"),
        ("525600", "365-00:00:00", "365-00:00:00"),
        ("99999999", "INVALID", "19734-04:11:00"),
        ("4294967295", "UNLIMITED", "UNLIMITED"),
        ("infinite", "UNLIMITED", "UNLIMITED"),
    ],
)
def test_limits(text: str, short: str, padded: str) -> None:
    limit_s = times.parse_limit(text)
    assert times.format_limit(limit_s) == short
    assert times.format_limit(limit_s, padded=True) == padded


def test_negative_limit_is_accepted_and_shows_as_invalid() -> None:
    assert times.format_limit(times.parse_limit("-5")) == "INVALID"


@pytest.mark.parametrize(
    "text",
    ["", "-", "1:", ":1", "10m", "1d", "1.5", " 5", "5 ", "Unlim", "abc", "1:2:3:4", "1-2-3", "5x"],
)
def test_bad_limits(text: str) -> None:
    with pytest.raises(ValueError):
        times.parse_limit(text)


@given(st.integers(1, 500_000))
def test_limit_round_trip(minutes: int) -> None:
    assert times.parse_limit(times.format_limit(minutes * 60, padded=True)) == minutes * 60


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("now", "2030-03-17T17:46:40"),
        ("now+1", "2030-03-17T17:46:41"),
        ("NOW+60", "2030-03-17T17:47:40"),
        ("now + 1hour", "2030-03-17T18:46:40"),
        ("now+2weeks", "2030-03-31T17:46:40"),
        ("now-60", "2030-03-17T17:45:40"),
        ("16:00", "2030-03-18T16:00:00"),
        ("18:00", "2030-03-17T18:00:00"),
        ("4:30pm", "2030-03-18T16:30:00"),
        ("midnight", "2030-03-18T00:00:00"),
        ("fika", "2030-03-18T15:00:00"),
        ("today", "2030-03-17T00:00:00"),
        ("tomorrow", "2030-03-18T00:00:00"),
        ("2030-01-20T12:34:56", "2030-01-20T12:34:56"),
        ("2030-01-20 12:34", "2030-01-20T12:34:00"),
        ("01/20/30-12:34", "2030-01-20T12:34:00"),
        ("012030", "2030-01-20T00:00:00"),
        ("01/20", "2031-01-20T00:00:00"),
        ("2030-02-30", "2030-03-02T00:00:00"),
        ("uts1893456000", "2030-01-01T00:00:00"),
    ],
)
def test_begin(text: str, shown: str) -> None:
    assert times.format_stamp(times.parse_begin(text, NOW_S)) == shown


def test_past_clock_time_is_the_latest_one() -> None:
    assert times.format_stamp(times.parse_begin("18:00", NOW_S, past=True)).startswith(
        "2030-03-16T18"
    )


@pytest.mark.parametrize(
    ("text", "pos"),
    [
        ("now+10min", 5),
        ("now+1h", 4),
        ("now+-60", 3),
        ("24:00", 0),
        ("elevenses", 0),
        ("tomorrow+1hour", 8),
        ("01/20/2030", 8),
        ("20.01.30", 0),
        ("2030-13-01", 5),
        ("1893456000", 0),
        ("next week", 0),
        ("12", 2),
        ("1234", 2),
    ],
)
def test_begin_errors_name_the_place(text: str, pos: int) -> None:
    with pytest.raises(times.TimeError) as info:
        times.parse_begin(text, NOW_S)
    assert info.value.detail == f"Invalid time specification (pos={pos}): {text}"


@given(st.text(alphabet="now+-0123456789:/T amptdyh", max_size=16))
def test_any_text_is_a_time_or_a_clear_error(text: str) -> None:
    try:
        at_s = times.parse_begin(text, NOW_S)
    except times.TimeError:
        return
    assert isinstance(at_s, float)


@given(st.integers(0, 365 * 86400))
def test_elapsed_forms(seconds: int) -> None:
    days, _, clock = times.format_padded(seconds).rpartition("-")
    h, m, s = (int(x) for x in clock.split(":"))
    assert int(days or 0) * 86400 + h * 3600 + m * 60 + s == seconds
    assert times.format_elapsed(seconds).endswith(f"{m % 60}:{s:02}"[-4:])
