"""Daemons are killed under running jobs; nothing is lost, nothing runs twice."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from tests.support.live import Cluster, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


def test_controller_killed_under_a_job_with_a_step(fresh: Cluster) -> None:
    body = "srun bash -c 'echo start $SLURM_PROCID; sleep 4; echo end $SLURM_PROCID'\necho done\n"
    j = fresh.sbatch("-N2", "-o", "out", script=body)
    out = fresh.work / "out"
    wait_for(lambda: out.exists() and out.read_text().count("start") == 2, 20, fresh.logs)

    fresh.kill_controller()
    time.sleep(0.5)
    fresh.ctl("up")
    fresh.wait_state(j, "COMPLETED", timeout_s=30)

    text = out.read_text()
    assert text.count("start") == 2
    assert text.count("end") == 2
    assert text.endswith("done\n")
    assert "Restarts=0" in fresh.show(j)


def test_agent_killed_and_restarted_adopts_its_tasks(fresh: Cluster) -> None:
    j = fresh.sbatch("-o", "out", script="echo start; sleep 3; exit 7\n")
    wait_for(lambda: (fresh.work / "out").exists(), 20, fresh.logs)
    node = fresh.run("squeue", "-h", "-j", j, "-o", "%N").stdout.strip()

    os.kill(fresh.agent_pid(node), signal.SIGKILL)
    fresh.wait_state(j, "FAILED", timeout_s=30)

    out = fresh.run("sacct", "-nXP", "-j", j, "-o", "ExitCode,NodeList").stdout.strip()
    assert out == f"7:0|{node}"
    assert (fresh.work / "out").read_text() == "start\n"


def test_node_killed_with_its_tasks_requeues_onto_the_spare(fresh: Cluster) -> None:
    body = (
        "echo $SLURM_RESTART_COUNT:$SLURM_JOB_NODELIST\n"
        '[ -n "$SLURM_RESTART_COUNT" ] || srun bash -c "touch there; sleep 100"\n'
    )
    j = fresh.sbatch("-N2", "--requeue", "--open-mode=append", "-o", "out", script=body)
    wait_for(lambda: (fresh.work / "there").exists(), 20, fresh.logs)

    fresh.kill_node("trn1-002")
    fresh.wait_state(j, "COMPLETED", timeout_s=60)

    lines = [w for w in (fresh.work / "out").read_text().split() if ":trn1" in w]
    assert lines == [":trn1-[001-002]", "1:trn1-[001,003]"]
    states = dict(
        line.split() for line in fresh.run("sinfo", "-hN", "-o", "%N %T").stdout.strip().split("\n")
    )
    assert states["trn1-002"].startswith("down")


def test_200_random_controller_kills_lose_nothing(fresh: Cluster) -> None:
    """Mixed load; the controller dies at random moments; every accepted id ends exactly once."""
    rng = random.Random(20)
    marks = fresh.work / "marks"
    marks.mkdir()
    accepted: list[str] = []
    body = f"echo x >> {marks}/$SLURM_JOB_ID\nsleep 0.$((RANDOM % 5))\n"
    script = fresh.work / "load.sh"
    script.write_text("#!/bin/bash\n" + body)
    for kill in range(200):
        for _ in range(rng.randint(1, 2)):
            done = fresh.run("sbatch", "--parsable", "-o", "/dev/null", str(script), rc=None)
            if done.returncode == 0:
                accepted.append(done.stdout.strip())
        if kill % 10 == 0:
            done = fresh.run(
                "sbatch", "--parsable", "--array=1-3", "-o", "/dev/null", str(script), rc=None
            )
            if done.returncode == 0:
                accepted.append(done.stdout.strip())
        time.sleep(rng.random() * 0.15)
        fresh.kill_controller()
        fresh.ctl("up", "--quiet")
    wait_for(lambda: not fresh.run("squeue", "-h").stdout, 120, fresh.logs)

    assert len(accepted) > 200
    rows = fresh.run("sacct", "-nXP", "-o", "JobID,JobIDRaw,State").stdout.split()
    states = {r.split("|")[0].split("_")[0]: r.split("|")[2] for r in rows}
    assert {j: states.get(j) for j in accepted} == dict.fromkeys(accepted, "COMPLETED")
    for row in rows:
        raw = row.split("|")[1]
        assert (marks / raw).read_text() == "x\n", f"job {row} did not run exactly once"
