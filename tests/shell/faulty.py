"""A connection that fails on purpose."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any


class FaultyConnection:
    """Passes on to a real connection; the ``fail_at``-th statement from ``arm`` on raises."""

    def __init__(self, conn: Any, message: str = "disk I/O error") -> None:
        self.conn = conn
        self.message = message
        self.count = 0
        self.fail_at = 0
        self.failed = 0

    def arm(self, fail_at: int) -> None:
        self.count = 0
        self.fail_at = fail_at

    def _step(self, sql: str) -> None:
        if sql.startswith(("SELECT", "ROLLBACK")):
            return
        self.count += 1
        if self.fail_at and self.count >= self.fail_at:
            self.fail_at = 0
            self.failed += 1
            raise sqlite3.OperationalError(self.message)

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        self._step(sql)
        return self.conn.execute(sql, parameters)

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]]) -> Any:
        self._step(sql)
        return self.conn.executemany(sql, parameters)

    def close(self) -> None:
        self.conn.close()
