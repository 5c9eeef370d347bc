"""sacct: text as Slurm prints it for the same records."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.api import wire
from tests.cli import views
from tests.cli.conftest import Runner
from tests.cli.fake_controller import FakeController

HEAD = (
    "JobID           JobName  Partition    Account  AllocCPUS      State ExitCode \n"
    "------------ ---------- ---------- ---------- ---------- ---------- -------- \n"
)


def _step(job_id: int, step_id: str, **more: Any) -> dict[str, Any]:
    return {
        "job_id": job_id,
        "step_id": step_id,
        "name": step_id,
        "state": "COMPLETED",
        "start_s": views.START_S,
        "end_s": views.START_S + 5,
        "layout": {"nodes": ["n001"], "tasks": [[0]]},
    } | more


@pytest.fixture
def fake(controller: FakeController) -> FakeController:
    done, failed, cancelled = views.ended()
    done["steps"] = [_step(700021, "0", name="true", cpus=2), _step(700021, "batch")]
    failed["steps"] = [_step(700022, "batch", state="FAILED", code=3)]
    cancelled["steps"] = [_step(700023, "batch", state="CANCELLED", signal=15)]
    array = views.job(
        700032,
        "sarr",
        "FAILED",
        array_job_id=700030,
        array_task_id=2,
        code=1,
        steps=[_step(700032, "batch", state="FAILED", code=1)],
    )
    waiting = views.job(700030, "sarr", array_job_id=700030, array_tasks=[4, 5])
    controller.answers[wire.GetAccounting] = wire.Jobs(
        jobs=[done, failed, waiting, cancelled, array], now_s=views.NOW_S
    )
    return controller


def test_default(run: Runner, fake: FakeController) -> None:
    assert run("sacct", "-j", "700021").out == HEAD + (
        "700021            done1       main       root          1  COMPLETED      0:0 \n"
        "700021.batch      batch                  root          1  COMPLETED      0:0 \n"
        "700021.0           true                  root          2  COMPLETED      0:0 \n"
        "700022            fail1       main       root          1     FAILED      3:0 \n"
        "700022.batch      batch                  root          1     FAILED      3:0 \n"
        "700023            canc1       main       root          1 CANCELLED+      0:0 \n"
        "700023.batch      batch                  root          1  CANCELLED     0:15 \n"
        "700030_2           sarr       main       root          1     FAILED      1:0 \n"
        "700030_2.ba+      batch                  root          1     FAILED      1:0 \n"
        "700030_[4-5]       sarr       main       root          1    PENDING      0:0 \n"
    )
    assert fake.of(wire.GetAccounting)[-1].ids == ["700021"]
    assert fake.of(wire.GetAccounting)[-1].start_s is None


def test_parsable(run: Runner, fake: FakeController) -> None:
    lines = run("sacct", "-P", "-X", "-j", "1", "-o", "jobid,JOBNAME,state,JobIDRaw").out
    assert lines.splitlines()[:4] == [
        "JobID|JobName|State|JobIDRaw",
        "700021|done1|COMPLETED|700021",
        "700022|fail1|FAILED|700022",
        "700023|canc1|CANCELLED by 0|700023",
    ]
    assert run("sacct", "-p", "-n", "-X", "-o", "JobID").out.splitlines()[0] == "700021|"
    other = run("sacct", "-P", "-n", "-X", "--delimiter=;", "-o", "JobID,State").out
    assert other.splitlines()[0] == "700021;COMPLETED"


def test_widths(run: Runner, fake: FakeController) -> None:
    ran = run("sacct", "-X", "-o", "JobID%-20,State%5,ExitCode%10")
    assert ran.out.splitlines()[:4] == [
        "JobID                State   ExitCode ",
        "-------------------- ----- ---------- ",
        "700021               COMP+        0:0 ",
        "700022               FAIL+        3:0 ",
    ]


def test_times_and_memory(run: Runner, fake: FakeController) -> None:
    job = views.job(
        1,
        "m",
        "COMPLETED",
        end_s=views.START_S + 65,
        time_limit_s=600,
        res={"mem_per_node_mib": 1024},
        req_tres={"cpu": 1, "mem": 1024, "node": 1},
        alloc_tres={"cpu": 1, "mem": 1024, "node": 1},
        steps=[_step(1, "batch", usage={"n001": {"max_rss_mib": 3, "user_cpu_s": 1.5}})],
    )
    fake.answers[wire.GetAccounting] = wire.Jobs(jobs=[job], now_s=views.NOW_S)
    fields = "Start,End,Elapsed,ElapsedRaw,Timelimit,TimelimitRaw,ReqMem,ReqTRES,AllocTRES"
    assert run("sacct", "-X", "-P", "-n", "-o", fields).out == (
        f"{views.STAMP}|2027-01-15T08:01:05|00:01:05|65|00:10:00|10|1G|"
        "cpu=1,mem=1G,node=1|cpu=1,mem=1G,node=1\n"
    )
    usage = run("sacct", "-P", "-n", "-o", "JobID,MaxRSS,TotalCPU,NTasks").out
    assert usage.splitlines()[1] == "1.batch|3072K|00:01.500|1"
    assert run("sacct", "-X", "-P", "-n", "--units=M", "-o", "ReqMem").out == "1024M\n"


def test_window_and_filters(run: Runner, fake: FakeController) -> None:
    run("sacct", "-S", "2027-01-01", "-E", "2027-02-01", "-s", "F,CD", "--name", "a", "-r", "p")
    request = fake.of(wire.GetAccounting)[-1]
    assert (request.start_s, request.end_s) == (1798761600.0, 1801440000.0)
    assert request.states == ["FAILED", "COMPLETED"]
    assert (request.names, request.partitions) == (["a"], ["p"])
    run("sacct", "-s", "FAILED", "-S", "2027-01-01")
    request = fake.of(wire.GetAccounting)[-1]
    assert request.start_s == request.end_s  # Slurm's rule for states without an end
    run("sacct")
    assert fake.of(wire.GetAccounting)[-1].start_s % 86400 == 0  # since midnight


@pytest.mark.parametrize(
    ("argv", "err"),
    [
        (["-o", "Bogus"], 'sacct: error: Invalid field requested: "Bogus"\n'),
        (["-j", "abc"], "sacct: fatal: Bad job/step specified: abc\n"),
        (["-s", "BOGUS"], "sacct: fatal: unrecognized job state value 'BOGUS'\n"),
        (["-u", "nosuchuser"], "sacct: error: Invalid user id: nosuchuser\n"),
        (["-S", "garbage"], "Invalid time specification (pos=0): garbage\n"),
        (["--frob"], "sacct: unrecognized option '--frob'\n"),
    ],
)
def test_errors(run: Runner, fake: FakeController, argv: list[str], err: str) -> None:
    assert run("sacct", *argv) == (1, "", err)


def test_help_format(run: Runner) -> None:
    lines = run("sacct", "-e").out.splitlines()
    assert lines[0] == (
        "Account             AdminComment        AllocCPUS           AllocNodes         "
    )
    assert lines[-1] == "WorkDir            "
