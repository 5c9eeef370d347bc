"""Tables of the state file and their migrations.

Every table keeps its records as JSON (``data``) beside the few columns that queries need.
``jobs.active`` is 1 while the record is in the controller's memory; rows with 0 are accounting.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING

from scheduler.api.errors import Unavailable

if TYPE_CHECKING:
    import sqlite_utils

#: Name of the state file in the cluster's home.
FILE_NAME = "state.db"

#: Number of migrations there are; ``PRAGMA user_version`` of a file that has them all.
SCHEMA_VERSION = 1


def _initial(db: sqlite_utils.Database) -> None:
    db["jobs"].create(
        {
            "id": int,
            "active": int,
            "state": str,
            "uid": int,
            "user": str,
            "name": str,
            "partition": str,
            "account": str,
            "submit_s": float,
            "start_s": float,
            "end_s": float,
            "array_job_id": int,
            "array_task_id": int,
            "data": bytes,
        },
        pk="id",
        not_null={"active", "state", "data", "array_job_id"},
    )
    db.execute("CREATE INDEX jobs_active ON jobs (id) WHERE active = 1")
    db.execute("CREATE INDEX jobs_array ON jobs (array_job_id) WHERE array_job_id > 0")
    db["jobs"].create_index(["end_s"], index_name="jobs_end")
    db["steps"].create(
        {
            "job_id": int,
            "step_id": str,
            "attempt": int,
            "state": str,
            "start_s": float,
            "end_s": float,
            "data": bytes,
        },
        pk=("job_id", "attempt", "step_id"),
        not_null={"data"},
    )
    db.execute("CREATE INDEX steps_running ON steps (job_id) WHERE end_s IS NULL")
    db["nodes"].create({"name": str, "data": bytes}, pk="name", not_null={"data"})
    db["meta"].create({"key": str, "value": int}, pk="key", not_null={"value"})
    db["payloads"].create({"id": int, "data": bytes}, pk="id", not_null={"data"})
    db["journal"].create({"seq": int, "at_s": float, "event": bytes}, pk="seq")


def _migrate(path: Path) -> None:
    # Imported here: only a new or an old file needs it, and it takes 0.1 s.
    import sqlite_utils
    from sqlite_utils import Migrations

    migrations = Migrations("scheduler")
    migrations(name="initial")(_initial)
    db = sqlite_utils.Database(str(path))
    try:
        migrations.apply(db)
        db.conn.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        db.conn.commit()
    finally:
        db.conn.close()


def version_of(path: Path) -> int:
    """Schema version of the file at ``path``; 0 when it is new or empty.

    Raises ``Unavailable`` when it is not a state file that can be read.
    """
    if not path.exists():
        return 0
    try:
        conn = sqlite3.connect(path)
        try:
            found = int(conn.execute("PRAGMA user_version").fetchone()[0])
            conn.execute("SELECT count(*) FROM sqlite_master").fetchone()
        finally:
            conn.close()
    except sqlite3.Error as error:
        raise Unavailable(
            f"{path} cannot be read as a state file ({error}); restore it from a copy or move "
            "it away to begin with an empty one"
        ) from None
    return found


def prepare(path: Path) -> None:
    """Create the tables, or bring those of an older version up to date.

    Raises ``Unavailable`` for a file of a newer version, one that is no database, and a disk
    that cannot be written.
    """
    found = version_of(path)
    if found > SCHEMA_VERSION:
        raise Unavailable(
            f"{path} was written by a newer version of clusterctl (schema {found}, this one "
            f"knows {SCHEMA_VERSION}); install that version or use another state directory"
        )
    if found < SCHEMA_VERSION:
        try:
            _migrate(path)
        except (sqlite3.Error, OSError) as error:
            raise Unavailable(f"{path} cannot be prepared ({error})") from None
