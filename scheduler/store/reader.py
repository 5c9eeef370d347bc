"""Read-only side of the state file: accounting queries on a connection of their own.

Rows are as of the last commit, so active jobs are found here as well.
"""

from __future__ import annotations

import re
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from scheduler.api.records import Job, Step

_job_decoder = msgspec.json.Decoder(Job)
_step_decoder = msgspec.json.Decoder(Step)
_ID = re.compile(r"(\d{1,18})(?:_(\d{1,9}))?(?:\.(\w+))?")


@dataclass
class AccountingFilter:
    """Which rows; empty lists match all.  Times in seconds since the epoch."""

    ids: list[str] = field(default_factory=list)
    users: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    accounts: list[str] = field(default_factory=list)
    start_s: float | None = None
    end_s: float | None = None


class Reader:
    """Answers from the state file without touching the writer.  Usable from one thread at a
    time, whichever; ``sqlite3.Error`` passes through."""

    def __init__(self, path: Path) -> None:
        self._conn = sqlite3.connect(
            f"file:{quote(str(path))}?mode=ro", uri=True, check_same_thread=False, timeout=10.0
        )
        self._conn.execute("PRAGMA query_only = ON")
        self._conn.execute("PRAGMA cache_size = -2000")

    def close(self) -> None:
        """Close the connection."""
        self._conn.close()

    def accounting(self, wanted: AccountingFilter) -> list[tuple[Job, list[Step]]]:
        """Jobs with the steps of their newest attempt, ordered by id.

        Ids are ``12``, ``12_3`` or ``12.0``; one that is none of these matches nothing.
        """
        where, values = _conditions(wanted)
        sql = f"SELECT data FROM jobs WHERE {where} ORDER BY id"
        jobs = [_job_decoder.decode(data) for (data,) in self._conn.execute(sql, values)]
        return [(job, self.steps(job)) for job in jobs]

    def steps(self, job: Job) -> list[Step]:
        """Steps of the job's newest attempt in the order they started."""
        found = [
            _step_decoder.decode(data)
            for (data,) in self._conn.execute(
                "SELECT data FROM steps WHERE job_id = ? AND attempt = ?", (job.id, job.attempt)
            )
        ]
        # The batch step comes first, numbered ones by number.
        found.sort(key=lambda s: int(s.step_id) if s.step_id.isdecimal() else -1)
        return found

    def job(self, job_id: int) -> list[Job]:
        """The job of that id, or all records of that array."""
        return [
            _job_decoder.decode(data)
            for (data,) in self._conn.execute(
                "SELECT data FROM jobs WHERE id = ? OR array_job_id = ? ORDER BY id",
                (job_id, job_id),
            )
        ]

    def step(self, job_id: int, step_id: str, attempt: int | None = None) -> Step | None:
        """The newest attempt of a step (or the given one); None when there is none."""
        row = self._conn.execute(
            "SELECT data FROM steps WHERE job_id = ? AND step_id = ?"
            " AND (? IS NULL OR attempt = ?) ORDER BY attempt DESC LIMIT 1",
            (job_id, step_id, attempt, attempt),
        ).fetchone()
        return _step_decoder.decode(row[0]) if row else None

    def count_finished(self) -> int:
        """Number of rows that are accounting only."""
        total, active = self._conn.execute(
            "SELECT (SELECT count(*) FROM jobs), (SELECT count(*) FROM jobs WHERE active = 1)"
        ).fetchone()
        return int(total) - int(active)


def parse_id(text: str) -> tuple[int, int | None, str | None] | None:
    """``"12_3.0"`` -> (12, 3, "0"); None when it is no job id."""
    match = _ID.fullmatch(text)
    if match is None:
        return None
    task = int(match[2]) if match[2] is not None else None
    return int(match[1]), task, match[3]


def _conditions(wanted: AccountingFilter) -> tuple[str, list[Any]]:
    parts: list[str] = ["1"]
    values: list[Any] = []
    if wanted.ids:
        ids = sorted({parsed[0] for parsed in map(parse_id, wanted.ids) if parsed})
        marks = ",".join("?" * len(ids))
        parts.append(f"(id IN ({marks}) OR (array_job_id > 0 AND array_job_id IN ({marks})))")
        values += ids + ids
    for column, given in (("name", wanted.names), ("account", wanted.accounts)):
        if given:
            parts.append(f"{column} IN ({','.join('?' * len(given))})")
            values += given
    if wanted.users:
        marks = ",".join("?" * len(wanted.users))
        parts.append(f"(user IN ({marks}) OR CAST(uid AS TEXT) IN ({marks}))")
        values += wanted.users * 2
    if wanted.start_s is not None:
        parts.append("(end_s IS NULL OR end_s >= ?)")
        values.append(wanted.start_s)
    if wanted.end_s is not None:
        parts.append("submit_s <= ?")
        values.append(wanted.end_s)
    return " AND ".join(parts), values
