"""The one writer: a transaction a turn, durable when ``commit`` returns.

WAL with ``synchronous=FULL``; explicit ``BEGIN IMMEDIATE``; rows go in by ``executemany``.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from scheduler.api.records import Job, Node, Payload, Step

#: Events kept in the journal (the newest).
JOURNAL_KEEP = 10_000
_TRIM_EVERY = 500

_encode = msgspec.json.Encoder().encode
_job_decoder = msgspec.json.Decoder(Job)
_step_decoder = msgspec.json.Decoder(Step)
_node_decoder = msgspec.json.Decoder(Node)
_payload_decoder = msgspec.json.Decoder(Payload)

_PUT_JOB = (
    "INSERT INTO jobs (id, active, state, uid, user, name, partition, account, submit_s,"
    " start_s, end_s, array_job_id, array_task_id, data)"
    " VALUES (?, 1, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
    " ON CONFLICT (id) DO UPDATE SET active = 1, state = excluded.state, uid = excluded.uid,"
    " user = excluded.user, name = excluded.name, partition = excluded.partition,"
    " account = excluded.account, submit_s = excluded.submit_s, start_s = excluded.start_s,"
    " end_s = excluded.end_s, array_job_id = excluded.array_job_id,"
    " array_task_id = excluded.array_task_id, data = excluded.data"
)
_PUT_STEP = (
    "INSERT INTO steps (job_id, step_id, attempt, state, start_s, end_s, data)"
    " VALUES (?, ?, ?, ?, ?, ?, ?)"
    " ON CONFLICT (job_id, attempt, step_id) DO UPDATE SET state = excluded.state,"
    " start_s = excluded.start_s, end_s = excluded.end_s, data = excluded.data"
)
_PUT_NODE = "INSERT OR REPLACE INTO nodes (name, data) VALUES (?, ?)"
_PUT_META = "INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)"
_PUT_PAYLOAD = "INSERT OR REPLACE INTO payloads (id, data) VALUES (?, ?)"
_PUT_EVENT = "INSERT INTO journal (at_s, event) VALUES (?, ?)"
_FORGET = "UPDATE jobs SET active = 0 WHERE id = ?"
#: A payload belongs to a job, or to all tasks of an array; it goes when none is in memory.
_DROP_PAYLOAD = (
    "DELETE FROM payloads WHERE id IN (SELECT coalesce(nullif(array_job_id, 0), id) FROM jobs"
    " WHERE id = ?) AND NOT EXISTS (SELECT 1 FROM jobs WHERE active = 1"
    " AND (jobs.id = payloads.id OR jobs.array_job_id = payloads.id))"
)


class Connection(Protocol):
    """What the store needs of a connection (tests put one in that fails on purpose)."""

    def execute(self, sql: str, parameters: Sequence[Any] = ..., /) -> Any: ...
    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> Any: ...
    def close(self) -> None: ...


@dataclass
class TurnRows:
    """What one turn changed.  ``payloads`` by job or array id; ``events`` as (time, JSON)."""

    jobs: list[Job] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    meta: dict[str, int] = field(default_factory=dict)
    forgotten_jobs: list[int] = field(default_factory=list)
    payloads: dict[int, bytes] = field(default_factory=dict)
    events: list[tuple[float, bytes]] = field(default_factory=list)

    def __bool__(self) -> bool:
        """True when there is something besides events to write."""
        return bool(
            self.jobs
            or self.steps
            or self.nodes
            or self.meta
            or self.forgotten_jobs
            or self.payloads
        )


@dataclass
class Loaded:
    """The hot part of the state: jobs in memory, running steps, nodes, counters."""

    jobs: list[Job]
    steps: list[Step]
    nodes: list[Node]
    meta: dict[str, int]
    last_event_s: float


def connect(path: Path) -> sqlite3.Connection:
    """The writer's connection with the settings the durability promise rests on."""
    conn = sqlite3.connect(path, isolation_level=None, timeout=10.0)
    conn.execute("PRAGMA journal_mode = WAL")
    conn.execute("PRAGMA synchronous = FULL")
    conn.execute("PRAGMA foreign_keys = OFF")
    conn.execute("PRAGMA cache_size = -4000")
    conn.execute("PRAGMA journal_size_limit = 16777216")
    return conn


class Store:
    """Writes turns, gives back what a restart needs.  ``sqlite3.Error`` passes through."""

    def __init__(self, conn: Connection, journal_keep: int = JOURNAL_KEEP) -> None:
        self._conn = conn
        self._keep = journal_keep
        self._since_trim = 0

    @classmethod
    def open(cls, path: Path) -> Store:
        """Open a prepared state file."""
        return cls(connect(path))

    def close(self) -> None:
        """Close the connection; what was committed stays."""
        self._conn.close()

    # ------------------------------------------------------------------ writing

    def commit(self, turn: TurnRows) -> None:
        """Write all of ``turn`` or nothing.

        Raises ``sqlite3.Error`` (disk full, I/O error); then nothing of it is in the file.
        """
        conn = self._conn
        conn.execute("BEGIN IMMEDIATE")
        try:
            self._write(turn)
            conn.execute("COMMIT")
        except BaseException:
            self._rollback()
            raise

    def _rollback(self) -> None:
        try:
            self._conn.execute("ROLLBACK")
        except sqlite3.Error:
            # SQLite has rolled back by itself already (it does so when the disk is full).
            return

    def _write(self, turn: TurnRows) -> None:
        conn = self._conn
        if turn.jobs:
            conn.executemany(_PUT_JOB, [_job_row(j) for j in turn.jobs])
        if turn.steps:
            conn.executemany(_PUT_STEP, [_step_row(s) for s in turn.steps])
        if turn.nodes:
            conn.executemany(_PUT_NODE, [(n.name, _encode(n)) for n in turn.nodes])
        if turn.meta:
            conn.executemany(_PUT_META, list(turn.meta.items()))
        if turn.payloads:
            conn.executemany(_PUT_PAYLOAD, list(turn.payloads.items()))
        if turn.forgotten_jobs:
            ids = [(i,) for i in turn.forgotten_jobs]
            conn.executemany(_FORGET, ids)
            conn.executemany(_DROP_PAYLOAD, ids)
        if turn.events:
            conn.executemany(_PUT_EVENT, turn.events)
            self._trim(len(turn.events))

    def _trim(self, added: int) -> None:
        self._since_trim += added
        if self._since_trim >= _TRIM_EVERY:
            self._since_trim = 0
            self._conn.execute(
                "DELETE FROM journal WHERE seq <= (SELECT max(seq) FROM journal) - ?",
                (self._keep,),
            )

    def probe(self) -> None:
        """Write one small row durably.  Raises ``sqlite3.Error`` while that is impossible."""
        self._conn.execute("BEGIN IMMEDIATE")
        try:
            self._conn.execute(
                "INSERT INTO meta (key, value) VALUES ('probe', 1)"
                " ON CONFLICT (key) DO UPDATE SET value = value + 1"
            )
            self._conn.execute("COMMIT")
        except BaseException:
            self._rollback()
            raise

    def next_epoch(self) -> int:
        """Count one more start of the controller; its number fences the links to the agents."""
        self._conn.execute("BEGIN IMMEDIATE")
        try:
            self._conn.execute(
                "INSERT INTO meta (key, value) VALUES ('epoch', 1)"
                " ON CONFLICT (key) DO UPDATE SET value = value + 1"
            )
            row = self._conn.execute("SELECT value FROM meta WHERE key = 'epoch'").fetchone()
            self._conn.execute("COMMIT")
        except BaseException:
            self._rollback()
            raise
        return int(row[0])

    # ------------------------------------------------------------------ reading

    def load(self) -> Loaded:
        """What was in memory at the last commit."""
        conn = self._conn
        jobs = [
            _job_decoder.decode(data)
            for (data,) in conn.execute("SELECT data FROM jobs WHERE active = 1 ORDER BY id")
        ]
        steps = [
            _step_decoder.decode(data)
            for (data,) in conn.execute(
                "SELECT data FROM steps WHERE end_s IS NULL ORDER BY job_id, start_s, step_id"
            )
        ]
        nodes = [
            _node_decoder.decode(data)
            for (data,) in conn.execute("SELECT data FROM nodes ORDER BY name")
        ]
        meta = {
            str(key): int(value)
            for key, value in conn.execute(
                "SELECT key, value FROM meta WHERE key NOT IN ('probe', 'epoch')"
            )
        }
        last = conn.execute("SELECT at_s FROM journal ORDER BY seq DESC LIMIT 1").fetchone()
        return Loaded(jobs, steps, nodes, meta, float(last[0]) if last else 0.0)

    def payload(self, job: Job) -> Payload | None:
        """Script, arguments and environment of ``job`` (one copy for all tasks of an array)."""
        row = self._conn.execute(
            "SELECT data FROM payloads WHERE id = ?", (job.array_job_id or job.id,)
        ).fetchone()
        return _payload_decoder.decode(row[0]) if row else None

    def outcome(self, target: str) -> tuple[str, int] | None:
        """(state, exit code) of a dependency's target (``"12"``, ``"12_3"``) that left memory.

        An array is COMPLETED when all its tasks are, else it has the state of a task that is
        not.  None when nobody knows the id.
        """
        base, _, task = target.partition("_")
        sql = "SELECT data FROM jobs WHERE active = 0 AND (id = ? OR array_job_id = ?)"
        worst: tuple[str, int] | None = None
        for (data,) in self._conn.execute(sql, (int(base), int(base))):
            job = _job_decoder.decode(data)
            if task.isdecimal() and job.array_task_id != int(task):
                continue
            if worst is None or worst[0] == "COMPLETED":
                worst = (job.state, job.code)
        return worst

    def journal(self) -> Iterator[bytes]:
        """Events from the oldest kept to the newest, as JSON."""
        for (event,) in self._conn.execute("SELECT event FROM journal ORDER BY seq"):
            yield event


def _job_row(job: Job) -> tuple[Any, ...]:
    return (
        job.id,
        job.state,
        job.uid,
        job.user,
        job.name,
        job.partition,
        job.account,
        job.submit_s,
        job.start_s,
        job.end_s,
        job.array_job_id,
        job.array_task_id,
        _encode(job),
    )


def _step_row(step: Step) -> tuple[Any, ...]:
    return (
        step.job_id,
        step.step_id,
        step.attempt,
        step.state,
        step.start_s,
        step.end_s,
        _encode(step),
    )
