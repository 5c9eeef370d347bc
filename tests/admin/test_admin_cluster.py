"""up, down, status and logs on real local clusters."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler.provision import local, proc
from tests.admin.conftest import end_all
from tests.admin.run import clusterctl, command, environment, good, wait_for_text

pytestmark = pytest.mark.e2e

SMALL = ("--nodes", "2", "--spares", "1", "--instance-type", "trn1.2xlarge")


@pytest.fixture
def small(home: Path) -> Iterator[Path]:
    """The home of a running cluster of two nodes and a spare."""
    good(home, "up", *SMALL)
    yield home
    clusterctl(home, "down")


def status(home: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(good(home, "status", "--json"))
    return value


def pids(home: Path) -> dict[str, int]:
    """Controller and agents by name."""
    found = status(home)
    result = {node["name"]: node["agent_pid"] for node in found["nodes"]}
    return result | {"controller": found["controller"]["pid"]}


def processes_of(home: Path) -> list[str]:
    """Command lines that name ``home``, whatever process has them."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(home) in line:
                found.append(f"{entry.name} {line}")
    return found


def kill(pid: int) -> None:
    """SIGKILL, and wait until it is gone."""
    process = proc.identify(pid)
    assert process is not None
    proc.send_signal(process, signal.SIGKILL)
    assert proc.wait_gone(process, 10)


def test_up_is_idempotent_and_down_leaves_nothing(home: Path) -> None:
    assert "2 nodes and 1 spare up" in good(home, "up", *SMALL)
    before = pids(home)
    assert set(before) == {"trn1-001", "trn1-002", "trn1-003", "controller"}
    assert all(before.values())
    good(home, "up")
    good(home, "up", *SMALL)
    assert pids(home) == before
    for pid in before.values():
        assert os.getsid(pid) == pid
    text = good(home, "status")
    assert "trn1-003  idle (spare)" in text
    assert "cluster stopped (3 agents)" in good(home, "down")
    assert processes_of(home) == []
    assert "nothing runs" in good(home, "down")


def test_other_sizes_are_refused_and_nothing_changes(small: Path) -> None:
    before, text = pids(small), (small / "cluster.toml").read_text()
    done = clusterctl(small, "up", "--nodes", "3", "--instance-type", "inf2.xlarge")
    assert done.returncode == 1
    assert "has 2 nodes and instance type trn1.2xlarge" in done.stderr
    assert str(small / "cluster.toml") in done.stderr
    assert pids(small) == before
    assert (small / "cluster.toml").read_text() == text


def test_two_ups_at_once_make_one_cluster(home: Path) -> None:
    both = [
        subprocess.Popen(
            command("up", *SMALL),
            env=environment(home),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        results = [process.communicate(timeout=100) for process in both]
        assert [process.returncode for process in both] == [0, 0], results
        assert all("2 nodes and 1 spare up" in out for out, _ in results)
        lines = [line for line in processes_of(home) if "-m scheduler" in line]
        assert len(lines) == 1
    finally:
        for process in both:
            process.kill()
        clusterctl(home, "down")


def test_up_restarts_a_dead_agent(small: Path) -> None:
    before = pids(small)
    kill(before["trn1-002"])
    good(small, "up")
    after = pids(small)
    assert after.pop("trn1-002") not in (0, before.pop("trn1-002"))
    assert after == before


def test_up_restarts_a_dead_controller_only(small: Path) -> None:
    before = pids(small)
    kill(before["controller"])
    assert clusterctl(small, "status").returncode == 1
    good(small, "up")
    after = pids(small)
    assert after.pop("controller") != before.pop("controller")
    assert after == before


def test_down_without_controller_ends_the_agents(small: Path) -> None:
    kill(pids(small)["controller"])
    good(small, "down")
    assert processes_of(small) == []


def test_down_keep_jobs_leaves_the_agents(small: Path) -> None:
    before = pids(small)
    good(small, "down", "--keep-jobs")
    assert proc.identify(before["controller"]) is None
    assert local.agent_process(small / "nodes/trn1-001") is not None
    good(small, "up")
    after = pids(small)
    before.pop("controller"), after.pop("controller")
    assert after == before


def test_down_of_one_cluster_leaves_another(small: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    try:
        good(other, "up", "--nodes", "1", "--spares", "0", "--instance-type", "inf2.xlarge")
        before = pids(small)
        good(other, "down")
        assert processes_of(other) == []
        assert pids(small) == before
    finally:
        end_all(other)


def test_down_cancels_what_runs_and_keeps_what_waits(small: Path, tmp_path: Path) -> None:
    submit = ("sbatch", "--parsable", "-o", str(tmp_path / "out"))
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\necho begun\nsleep 1000\n")
    running = good(small, *submit, str(script), cwd=tmp_path).strip()
    waiting = good(small, *submit, "--hold", str(script), cwd=tmp_path).strip()
    wait_for_text(tmp_path / "out", "begun")
    good(small, "down")
    assert processes_of(small) == []
    good(small, "up")
    shown = good(small, "squeue", "-h", "-t", "all", "-S", "i", "-o", "%i %T")
    assert shown == f"{running} CANCELLED\n{waiting} PENDING\n"


def test_stopped_controller_is_ended_by_down(small: Path) -> None:
    os.kill(pids(small)["controller"], signal.SIGSTOP)
    good(small, "down")
    assert processes_of(small) == []


def test_sbatch_starts_the_cluster_and_logs_shows_its_output(home: Path, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\n#SBATCH -N1\necho out; echo name $(hostname); echo err >&2\n")
    try:
        good(home, "up", *SMALL)
        good(home, "down")  # a cluster that was stopped is started again
        done = clusterctl(home, "sbatch", "--wait", str(script), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("starting the local one") == 1
        job = done.stdout.split()[-1]
        assert good(home, "logs", job).splitlines()[0] == "out"
        assert good(home, "logs", "-f", job) == (tmp_path / f"slurm-{job}.out").read_text()
        missing = clusterctl(home, "logs", "999")
        assert (missing.returncode, missing.stdout) == (1, "")
        assert "no job 999" in missing.stderr
    finally:
        clusterctl(home, "down")


def test_logs_follows_until_the_end(small: Path, tmp_path: Path) -> None:
    script, go = tmp_path / "job.sh", tmp_path / "go"
    os.mkfifo(go)
    script.write_text(f"#!/bin/sh\necho first\nread x <{go}\necho $x\n")
    job = good(small, "sbatch", "--parsable", str(script), cwd=tmp_path).strip()
    reader = subprocess.Popen(
        command("logs", "-f", job), env=environment(small), stdout=subprocess.PIPE, text=True
    )
    try:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "first\n"
        go.write_text("second\n")
        assert reader.stdout.read() == "second\n"
        assert reader.wait(30) == 0
    finally:
        reader.kill()
        reader.wait()
