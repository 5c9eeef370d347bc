"""Detached processes: identity, stopping, locks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from scheduler.provision import proc, sweep
from tests.admin.run import wait_for_text

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
#: Says that it is ready, then ignores SIGTERM.
STUBBORN = [
    sys.executable,
    "-uc",
    "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready'); time.sleep(60)",
]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def test_detached_process_has_its_own_session_and_can_be_stopped(log: Path) -> None:
    process = proc.spawn_detached(SLEEP, log, proc.daemon_environment())
    try:
        assert process.alive()
        assert os.getsid(process.pid) == process.pid
        assert os.readlink(f"/proc/{process.pid}/fd/0") == "/dev/null"
        assert os.readlink(f"/proc/{process.pid}/fd/2") == str(log)
        assert os.readlink(f"/proc/{process.pid}/cwd") == "/"
    finally:
        assert not proc.stop(process)
    assert not process.alive()
    assert not proc.stop(process)  # again: nothing to do


def test_interrupts_are_not_ignored(log: Path) -> None:
    # A daemon ignores no more than whoever started it (these tests may run under nohup).
    process = proc.spawn_detached(SLEEP, log, proc.daemon_environment())
    try:
        ours, theirs = (
            int(Path(f"/proc/{pid}/status").read_text().split("SigIgn:")[1].split()[0], 16)
            for pid in ("self", process.pid)
        )
        interrupts = 1 << (signal.SIGINT - 1) | 1 << (signal.SIGHUP - 1)
        assert theirs & interrupts & ~ours == 0
    finally:
        proc.stop(process)


def test_process_that_ignores_term_is_killed(log: Path) -> None:
    process = proc.spawn_detached(STUBBORN, log, proc.daemon_environment())
    wait_for_text(log, "ready")
    assert proc.stop(process, term_s=0.2)
    assert not process.alive()


def test_a_pid_of_another_process_is_neither_running_nor_signalled(tmp_path: Path) -> None:
    other = subprocess.Popen(SLEEP)
    try:
        real = proc.identify(other.pid)
        assert real is not None
        stale = proc.ProcessId(real.pid, real.start - 1)
        proc.write_pid_file(tmp_path / "pid", stale)
        assert proc.running(tmp_path / "pid") is None
        assert not proc.send_signal(stale, signal.SIGKILL)
        assert proc.wait_gone(stale, 0)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_zombie_is_not_alive() -> None:
    child = subprocess.Popen(["/bin/sleep", "60"])
    process = proc.identify(child.pid)
    assert process is not None
    proc.send_signal(process, signal.SIGKILL)
    assert proc.wait_gone(process, 10)
    assert not process.alive()
    assert child.wait() == -signal.SIGKILL


@pytest.mark.parametrize("content", [b"", b"12", b"{}", b'{"pid": "x", "start": 1}', b"\xff"])
def test_damaged_pid_file_names_nobody(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "pid").write_bytes(content)
    assert proc.running(tmp_path / "pid") is None


def test_lock_excludes_and_is_released(tmp_path: Path) -> None:
    with proc.locked(tmp_path / "lock") as first:
        assert first
        with proc.locked(tmp_path / "lock", wait=False) as second:
            assert not second
    with proc.locked(tmp_path / "lock", wait=False) as third:
        assert third


def test_environment_of_daemons_has_nothing_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("PMI_FD", "5")
    monkeypatch.setenv("CLUSTERCTL_SOCKET", "/x")
    environment = proc.daemon_environment({"CLUSTERCTL_HOME": "/h"})
    assert not [name for name in environment if name.startswith(("SLURM", "PMI"))]
    assert "CLUSTERCTL_SOCKET" not in environment
    assert environment["CLUSTERCTL_HOME"] == "/h"
    assert environment["PATH"] == os.environ["PATH"]


def test_atomic_write_leaves_no_part(tmp_path: Path) -> None:
    proc.write_atomic(tmp_path / "f", b"one")
    proc.write_atomic(tmp_path / "f", b"two", 0o600)
    assert (tmp_path / "f").read_bytes() == b"two"
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600
    with pytest.raises(OSError, match="directory"):
        proc.write_atomic(tmp_path, b"x")
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_sweep_ends_tasks_their_children_and_nothing_else(tmp_path: Path, log: Path) -> None:
    node, other = tmp_path / "n1", tmp_path / "n10"
    ready = tmp_path / "ready"
    # A task with a child in a session of its own and without the mark in its environment.
    task = [
        "/bin/sh",
        "-c",
        f"env -i setsid sleep 60 & echo $! >{ready}; : >{ready}.written; wait",
    ]
    marked = proc.spawn_detached(task, log, {"CLUSTERCTL_STEP": f"1.0.1@{node}"})
    agent = proc.spawn_detached([*SLEEP, "nodeagent", str(node)], log, {})
    foreign = proc.spawn_detached(SLEEP, log, {"CLUSTERCTL_STEP": f"1.0.1@{other}"})
    try:
        for _ in range(1000):
            if Path(f"{ready}.written").exists():
                break
            threading.Event().wait(0.01)
        child = proc.identify(int(ready.read_text()))
        assert child is not None
        assert sweep.sweep([node]) == 3
        assert [p.alive() for p in (marked, agent, child, foreign)] == [False, False, False, True]
        assert sweep.sweep([node]) == 0
    finally:
        assert sweep.sweep([node, other]) == 1
