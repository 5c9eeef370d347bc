"""Daemons killed or stopped at bad moments: the cluster heals, and ``down`` leaves nothing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.live import Cluster, live_cluster, own_home, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240), pytest.mark.xdist_group("kills")]

#: Two nodes and a spare of which a silent one is given up soon.
QUICK = """
[nodes."n[1-2]"]
instance_type = "trn1.2xlarge"

[nodes.n3]
instance_type = "trn1.2xlarge"
spare = true

[timeouts]
node_timeout_s = 6
heartbeat_s = 1
"""


def stop_in_time(c: Cluster, seconds: float = 30) -> None:
    """``down`` ends within ``seconds`` and nothing of the home is left."""
    c.ctl("down", timeout_s=seconds)
    assert c.pids("") == []


def part(c: Cluster, what: str) -> list[int]:
    """Pids of supervisors (``stepd``), fork servers or agents: by what their command lines hold."""
    found = []
    for pid in c.pids(what):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if what in words:
            found.append(pid)
    return found


@contextmanager
def begun(c: Cluster, *argv: str) -> Iterator[subprocess.Popen[bytes]]:
    """``clusterctl ARGV`` while it runs; killed at the end if it still does."""
    process = subprocess.Popen(
        [sys.executable, "-m", "clusterctl.main", *argv],
        env=c.env,
        cwd=c.work,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("after_s", [0.05, 0.15, 0.3, 0.5, 0.8])
def test_up_killed_on_its_way(tmp_path: Path, after_s: float) -> None:
    """``up`` dies at any instant: ``down`` finds what it had started, or ``up`` goes on from it."""
    up = ["up", "--nodes", "2", "--spares", "0"]
    with own_home(tmp_path) as c:
        with begun(c, *up):
            time.sleep(after_s)
        stop_in_time(c)
        with begun(c, *up):
            time.sleep(after_s)
        c.ctl(*up, timeout_s=60)
        assert c.run("srun", "hostname").stdout == "trn1-001\n"
        stop_in_time(c)


def test_down_while_up_is_at_work(tmp_path: Path) -> None:
    with own_home(tmp_path) as c:
        with begun(c, "up") as up:
            time.sleep(0.3)
            c.ctl("down", timeout_s=60)
            _, said = up.communicate(timeout=60)
            assert up.returncode == 0, said
        stop_in_time(c)


def test_stopped_agent_is_given_up_and_down_still_ends(tmp_path: Path) -> None:
    """SIGSTOP is what a hung machine looks like: the link is there and nobody answers."""
    with live_cluster(tmp_path, config=QUICK) as c:
        out = c.work / "ran"
        j = c.sbatch("--requeue", script=f"echo $SLURMD_NODENAME >> {out}\nsleep 600\n")
        wait_for(out.exists, 20)
        first = out.read_text().strip()
        os.kill(c.agent_pid(first), signal.SIGSTOP)
        wait_for(lambda: len(out.read_text().split()) == 2, 60, lambda: c.show(j) + c.logs())
        second = out.read_text().split()[1]
        assert second != first
        assert c.run("sinfo", "-h", "-n", first, "-o", "%T").stdout.startswith("down")
        stop_in_time(c)


def test_killed_supervisor_ends_the_job_with_the_reason(fresh: Cluster) -> None:
    flag = fresh.work / "flag"
    j = fresh.sbatch("--no-requeue", script=f"touch {flag}\nsleep 600\n")
    wait_for(flag.exists, 20)
    (script,) = [p for p in fresh.pids(f"SLURM_JOB_ID={j}") if is_shell(p)]
    os.kill(parent(script), signal.SIGKILL)
    fresh.wait_state(j, "NODE_FAIL")
    assert "SystemComment=node trn1-001 was lost" in fresh.show(j)
    wait_for(lambda: not fresh.pids(f"SLURM_JOB_ID={j}"), 20, "tasks of the job live on")
    fresh.run("sbatch", "--wait", "-o", "/dev/null", "--wrap", "true")


def is_shell(pid: int) -> bool:
    try:
        return b"slurm_script" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_random_daemons_killed_under_load(fresh: Cluster) -> None:
    """Controllers, agents, fork servers: whatever dies, accepted jobs end and are known."""
    rng = random.Random(4)
    line = fresh.work / "line"
    jobs = [
        fresh.sbatch("--requeue", "-o", "/dev/null", script=f"echo {i} >> {line}\nsleep 0.5\n")
        for i in range(12)
    ]
    for _ in range(8):
        daemons = [fresh.controller_pid(), *part(fresh, "nodeagent")]
        try:
            os.kill(rng.choice(daemons), signal.SIGKILL)
        except ProcessLookupError:
            continue
        time.sleep(rng.random() * 0.5)
        fresh.ctl("up", timeout_s=90)
    for j in jobs:
        fresh.wait_state(j, "COMPLETED", timeout_s=90)
    assert sorted(set(line.read_text().split()), key=int) == [str(i) for i in range(12)]
