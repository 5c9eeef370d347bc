"""The training job on a real cluster: undisturbed, under a dead controller, on a dying node."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.live import REPO, Cluster, live_cluster, wait_for

pytest.importorskip("jax", reason="compiling needs the jax extra")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.jax,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("train"),
]

STEPS = ["--steps", "120", "--checkpoint-every", "10", "--validation-windows", "64"]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    tmp = tmp_path_factory.mktemp("train")
    with live_cluster(tmp, "--nodes", "3", "--spares", "1") as cluster:
        cluster.env["NEURON_COMPILE_CACHE_URL"] = str(tmp / "cache")
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(train: Cluster) -> dict[str, Any]:
    job = start(train)
    train.wait_state(job, "COMPLETED", timeout_s=120)
    text = (train.work / f"train-{job}.out").read_text()
    assert "step 120 loss" in text
    assert "tokens/s" in text
    assert "bits/byte, unigram entropy" in text
    return result(train, job)


def start(cluster: Cluster) -> str:
    return cluster.sbatch(str(REPO / "jobs" / "train.sh"), *STEPS)


def folder(cluster: Cluster, job: str) -> Path:
    return cluster.work / "train-out" / job


def result(cluster: Cluster, job: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder(cluster, job) / "result.json").read_text())
    return found


def wait_for_checkpoint(cluster: Cluster, job: str) -> None:
    """Until training is under way and one checkpoint is complete."""
    checkpoints = folder(cluster, job) / "checkpoints"
    wait_for(
        lambda: checkpoints.is_dir() and any(checkpoints.glob("step-*")),
        90,
        lambda: cluster.show(job),
    )


def ranks(cluster: Cluster, job: str) -> dict[int, float]:
    """Pids of the ranks of the job and when they were started."""
    found = {}
    for pid in cluster.pids(f"SLURM_JOB_ID={job}"):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"jobs.train\0run" in words and b"srun" not in words:
                found[pid] = float(
                    Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
                )
        except OSError:
            continue
    return found


def test_it_beats_the_unigram_entropy(train: Cluster, undisturbed: dict[str, Any]) -> None:
    assert undisturbed["validation_bits_per_byte"] < undisturbed["unigram_bits_per_byte"]


def test_controller_killed_during_training(train: Cluster, undisturbed: dict[str, Any]) -> None:
    job = start(train)
    wait_for_checkpoint(train, job)
    before = ranks(train, job)
    assert len(before) == 4

    train.kill_controller()
    time.sleep(1)
    assert ranks(train, job) == before
    train.ctl("up")

    train.wait_state(job, "COMPLETED", timeout_s=120)
    assert "Restarts=0" in train.show(job)
    assert result(train, job) == undisturbed


def test_node_killed_during_training(train: Cluster, undisturbed: dict[str, Any]) -> None:
    job = start(train)
    wait_for_checkpoint(train, job)
    nodes = train.run("squeue", "-h", "-j", job, "-o", "%N").stdout.strip()

    train.kill_node("trn1-002")

    train.wait_state(job, "COMPLETED", timeout_s=150)
    shown = train.show(job)
    assert "Restarts=1" in shown
    assert nodes == "trn1-[001-002]"
    assert "trn1-002" not in train.run("sacct", "-nXP", "-j", job, "-o", "NodeList").stdout
    text = (train.work / f"train-{job}.out").read_text()
    assert "attempt 2" in text
    assert "resum" in text.lower() or "continu" in text.lower()
    assert result(train, job) == undisturbed
    assert os.path.exists(train.home)
