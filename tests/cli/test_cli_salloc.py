"""salloc: the command that runs here while the allocation lasts."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.api import wire
from tests.cli.conftest import Runner
from tests.cli.fake_controller import FakeController

GRANTED = "salloc: Granted job allocation 9\n"
RELEASED = "salloc: Relinquishing job allocation 9\n"

JOB: dict[str, Any] = {
    "id": 9,
    "state": "RUNNING",
    "name": "interactive",
    "account": "root",
    "partition": "main",
    "node_list": "n[001-002]",
    "allocs": [
        {"node": "n001", "cpus": 3, "tasks": 3},
        {"node": "n002", "cpus": 1, "tasks": 1},
    ],
    "res": {"ntasks": 4},
}


@pytest.fixture
def fake(controller: FakeController) -> FakeController:
    def wait(request: wire.WaitJob) -> Any:
        return wire.Jobs(jobs=[JOB]) if request.until == "allocated" else []

    controller.answers |= {
        wire.Submit: wire.Submitted(job_id=9),
        wire.WaitJob: wait,
        wire.EndAllocation: wire.Ok(),
    }
    return controller


def test_exit_code(run: Runner, fake: FakeController) -> None:
    assert run("salloc", "sh", "-c", "exit 6") == (6, "", GRANTED + RELEASED)
    assert fake.of(wire.Submit)[-1].spec.name == "interactive"
    assert fake.of(wire.EndAllocation)[-1].code == 6


def test_environment(run: Runner, fake: FakeController) -> None:
    ran = run("salloc", "-Q", "-n4", "sh", "-c", "env | grep ^SLURM_ | sort")
    found = dict(line.split("=", 1) for line in ran.out.splitlines())
    assert found["SLURM_JOB_ID"] == found["SLURM_JOBID"] == "9"
    assert found["SLURM_JOB_CPUS_PER_NODE"] == found["SLURM_TASKS_PER_NODE"] == "3,1"
    assert found["SLURM_JOB_NODELIST"] == "n[001-002]"
    assert (found["SLURM_NTASKS"], found["SLURM_NNODES"]) == ("4", "2")
    assert found["SLURM_CLUSTER_NAME"] == "peer"
    assert "SLURM_JOB_USER" not in found


def test_unknown_command(run: Runner, fake: FakeController) -> None:
    ran = run("salloc", "nosuchcommand")
    assert ran.status == 1
    assert ran.err == (
        GRANTED
        + 'salloc: error: _fork_command: Unable to find command "nosuchcommand"\n'
        + RELEASED
    )


def test_command_ended_by_a_signal(run: Runner, fake: FakeController) -> None:
    assert run("salloc", "sh", "-c", "kill -9 $$").status == 0
    assert fake.of(wire.EndAllocation)[-1].signal == 9


def test_no_shell_leaves_the_allocation(run: Runner, fake: FakeController) -> None:
    assert run("salloc", "--no-shell") == (0, "", GRANTED)
    assert fake.of(wire.EndAllocation) == []


def test_job_that_ends_first(run: Runner, fake: FakeController) -> None:
    fake.answers[wire.WaitJob] = wire.Jobs(jobs=[JOB])
    ran = run("salloc", "-K", "sleep", "30")
    assert ran == (0, "", GRANTED + "salloc: Job allocation 9 has been revoked.\n")


def test_immediate(run: Runner, fake: FakeController) -> None:
    fake.answers[wire.WaitJob] = []
    ran = run("salloc", "-I1", "true")
    assert ran.status == 1
    assert ran.err == (
        "salloc: error: Unable to allocate resources: Requested nodes are busy\n"
        "salloc: Job allocation 9 has been revoked.\n"
    )
    assert len(fake.of(wire.EndAllocation)) == 1


def test_refusal(run: Runner, fake: FakeController) -> None:
    fake.answers[wire.Submit] = wire.Error(
        code="rejected", message="Invalid partition name specified"
    )
    fake.answers[wire.GetNodes] = wire.Nodes(nodes=[], partitions=[])
    assert run("salloc", "-p", "nosuch", "true") == (
        1,
        "",
        (
            "salloc: error: invalid partition specified: nosuch\n"
            "salloc: error: Job submit/allocate failed: Invalid partition name specified\n"
        ),
    )
