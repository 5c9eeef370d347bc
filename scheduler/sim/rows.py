"""The store of a simulated controller: the real one, on a database in memory that may fail."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scheduler.store import Store
from scheduler.store.schema import FILE_NAME, prepare


@lru_cache(maxsize=1)
def _empty() -> bytes:
    """An empty state file."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / FILE_NAME
        prepare(path)
        conn = sqlite3.connect(path)
        try:
            return conn.serialize()
        finally:
            conn.close()


class Disk:
    """A connection that outlives controllers.  While ``full`` nothing can be written."""

    def __init__(self) -> None:
        self.conn = sqlite3.connect(":memory:", isolation_level=None)
        self.conn.deserialize(_empty())
        self.full = False

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> Any:
        """As ``sqlite3.Connection.execute``."""
        if self.full and sql.startswith("COMMIT"):
            raise sqlite3.OperationalError("database or disk is full")
        return self.conn.execute(sql, parameters)

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> Any:
        """As ``sqlite3.Connection.executemany``."""
        return self.conn.executemany(sql, parameters)

    def close(self) -> None:
        """A controller let go of it; what was committed stays."""

    def open(self) -> Store:
        """What a controller that starts finds.  A transaction of a dead one is rolled back."""
        if self.conn.in_transaction:
            self.conn.execute("ROLLBACK")
        return Store(self, journal_keep=100)

    def job_rows(self) -> dict[int, tuple[int, str]]:
        """Every job ever written: id -> (active, state)."""
        found = self.conn.execute("SELECT id, active, state FROM jobs")
        return {job_id: (active, state) for job_id, active, state in found}
