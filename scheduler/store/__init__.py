"""Where the controller's state is kept: SQLite, one writer, one transaction a turn."""

from scheduler.store.reader import AccountingFilter, Reader
from scheduler.store.schema import FILE_NAME, SCHEMA_VERSION, prepare
from scheduler.store.writer import JOURNAL_KEEP, Loaded, Store, TurnRows

__all__ = [
    "FILE_NAME",
    "JOURNAL_KEEP",
    "SCHEMA_VERSION",
    "AccountingFilter",
    "Loaded",
    "Reader",
    "Store",
    "TurnRows",
    "prepare",
]
