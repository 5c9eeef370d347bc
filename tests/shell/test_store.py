"""The state file: whole turns or nothing, and what a restart gets back."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from scheduler.api.errors import Unavailable
from scheduler.api.records import Job, Node, Payload, Step, TaskLayout
from scheduler.store import FILE_NAME, SCHEMA_VERSION, AccountingFilter, Reader, Store, TurnRows
from scheduler.store import prepare as prepare_file
from scheduler.store.writer import connect
from tests.shell.faulty import FaultyConnection


def job(job_id: int, **more: object) -> Job:
    fields = {"name": "j", "uid": 7, "gid": 7, "user": "ann", "group": "ann", "submit_s": 10.0}
    return Job(id=job_id, **{**fields, **more})  # type: ignore[arg-type]


def step(job_id: int, step_id: str, attempt: int = 1, end_s: float | None = None) -> Step:
    layout = TaskLayout(nodes=["n1"], tasks=[[0]])
    return Step(
        job_id=job_id, step_id=step_id, attempt=attempt, name="s", layout=layout, end_s=end_s
    )


def full_turn(number: int) -> TurnRows:
    """A turn that writes to every table."""
    return TurnRows(
        jobs=[job(number), job(number + 100)],
        steps=[step(number, "batch"), step(number, "0")],
        nodes=[Node(name="n1", cpus=number)],
        meta={"next_job_id": number + 1},
        forgotten_jobs=[number - 1],
        payloads={number: b'{"script":"x"}'},
        events=[(float(number), b"{}")],
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / FILE_NAME
    prepare_file(file)
    return file


def contents(path: Path) -> list[object]:
    conn = sqlite3.connect(path)
    tables = ("jobs", "steps", "nodes", "meta", "payloads", "journal")
    found: list[object] = [conn.execute(f"SELECT * FROM {t}").fetchall() for t in tables]
    conn.close()
    return found


def statements_of_a_turn(path: Path) -> int:
    faulty = FaultyConnection(connect(path))
    Store(faulty).commit(full_turn(1))
    faulty.close()
    return faulty.count


def test_every_statement_of_a_turn_may_fail(path: Path) -> None:
    total = statements_of_a_turn(path)
    assert total >= 10
    before = contents(path)
    for k in range(1, total + 1):
        faulty = FaultyConnection(connect(path))
        faulty.arm(k)
        store = Store(faulty)
        with pytest.raises(sqlite3.OperationalError):
            store.commit(full_turn(2))
        assert faulty.failed == 1
        faulty.close()
        assert contents(path) == before
        # The same connection goes on after a failure.
    store = Store.open(path)
    store.commit(full_turn(2))
    store.close()
    assert contents(path) != before


def test_a_failed_turn_leaves_the_connection_usable(path: Path) -> None:
    faulty = FaultyConnection(connect(path))
    store = Store(faulty)
    for k in range(1, statements_of_a_turn(path) + 1):
        faulty.arm(k)
        with pytest.raises(sqlite3.OperationalError):
            store.commit(full_turn(k * 10))
        store.commit(full_turn(k * 10))
        assert store.load().meta["next_job_id"] == k * 10 + 1
    store.close()


def test_load_gives_back_what_is_in_memory(path: Path) -> None:
    store = Store.open(path)
    store.commit(
        TurnRows(
            jobs=[job(3, state="RUNNING"), job(1), job(2, state="COMPLETED", end_s=20.0)],
            steps=[step(3, "batch"), step(3, "0", end_s=15.0)],
            nodes=[Node(name="n1", drain=True)],
            meta={"next_job_id": 4},
            events=[(20.0, b"{}")],
        )
    )
    store.commit(TurnRows(forgotten_jobs=[2]))
    loaded = store.load()
    assert [j.id for j in loaded.jobs] == [1, 3]
    assert [s.step_id for s in loaded.steps] == ["batch"]
    assert loaded.nodes[0].drain
    assert (loaded.meta, loaded.last_event_s) == ({"next_job_id": 4}, 20.0)
    assert store.outcome("2") == ("COMPLETED", 0)
    assert store.outcome("1") is None  # in memory: the core knows it better
    store.close()


def test_an_array_has_one_payload_until_its_last_task_is_forgotten(path: Path) -> None:
    store = Store.open(path)
    head = job(5, array_job_id=5, array_tasks=[2])
    tasks = [job(6, array_job_id=5, array_task_id=0), job(7, array_job_id=5, array_task_id=1)]
    store.commit(TurnRows(jobs=[head, *tasks], payloads={5: b'{"script":"s"}'}))
    assert store.payload(tasks[0]) == store.payload(head) == Payload(script="s")
    store.commit(TurnRows(forgotten_jobs=[5, 6]))
    assert store.payload(tasks[1]) == Payload(script="s")
    store.commit(TurnRows(forgotten_jobs=[7]))
    assert store.payload(tasks[1]) is None
    store.close()


def test_the_journal_is_bounded(path: Path) -> None:
    store = Store(connect(path), journal_keep=50)
    for number in range(30):
        store.commit(TurnRows(meta={"n": number}, events=[(1.0, b"%d" % number)] * 20))
    kept = list(store.journal())
    assert 50 <= len(kept) <= 550
    assert kept[-1] == b"29"
    store.close()


def test_epochs_grow(path: Path) -> None:
    for expected in (1, 2, 3):
        store = Store.open(path)
        assert store.next_epoch() == expected
        store.close()


def test_a_full_disk_changes_nothing(path: Path) -> None:
    conn = connect(path)
    store = Store(conn)
    store.commit(full_turn(1))
    before = contents(path)
    pages = conn.execute("PRAGMA page_count").fetchone()[0]
    conn.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        store.commit(TurnRows(payloads={9: b"x" * 100_000}, meta={"next_job_id": 99}))
    assert contents(path) == before
    conn.execute("PRAGMA max_page_count = 1000000")
    store.commit(TurnRows(payloads={9: b"x" * 100_000}))
    store.close()


def test_a_file_of_a_newer_version_is_refused(path: Path) -> None:
    conn = sqlite3.connect(path)
    conn.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    conn.close()
    with pytest.raises(Unavailable, match="newer version"):
        prepare_file(path)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    file = tmp_path / FILE_NAME
    file.write_bytes(b"this is not a database, but long enough to look like a header\n" * 40)
    with pytest.raises(Unavailable, match="cannot be read"):
        prepare_file(file)


def test_prepare_twice_keeps_the_rows(path: Path) -> None:
    store = Store.open(path)
    store.commit(full_turn(1))
    store.close()
    before = contents(path)
    prepare_file(path)
    assert contents(path) == before


def test_accounting_by_window_user_and_id(path: Path) -> None:
    store = Store.open(path)
    store.commit(
        TurnRows(
            jobs=[
                job(1, state="COMPLETED", start_s=11.0, end_s=20.0, attempt=2),
                job(2, submit_s=30.0, user="bob", uid=8),
                job(3, array_job_id=3, array_task_id=4, submit_s=40.0),
            ],
            steps=[step(1, "0", 2, 19.0), step(1, "batch", 2, 20.0), step(1, "batch", 1, 15.0)],
        )
    )
    reader = Reader(path)

    def ids(**wanted: object) -> list[int]:
        return [j.id for j, _ in reader.accounting(AccountingFilter(**wanted))]  # type: ignore[arg-type]

    assert ids() == [1, 2, 3]
    assert ids(start_s=25.0) == [2, 3]
    assert ids(end_s=25.0) == [1]
    assert ids(users=["bob"]) == ids(users=["8"]) == [2]
    assert ids(ids=["3_4"]) == ids(ids=["3"]) == [3]
    assert ids(ids=["x'; DROP TABLE jobs; --"]) == []
    [(_, steps)] = reader.accounting(AccountingFilter(ids=["1"]))
    assert [(s.step_id, s.attempt) for s in steps] == [("batch", 2), ("0", 2)]
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader._conn.execute("DELETE FROM jobs")
    reader.close()
    store.close()
