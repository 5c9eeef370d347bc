"""squeue: text as Slurm prints it for the same queue."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.api import wire
from tests.cli import views
from tests.cli.conftest import Runner
from tests.cli.fake_controller import FakeController

HEADER = "             JOBID PARTITION     NAME     USER ST       TIME  NODES NODELIST(REASON)\n"


@pytest.fixture
def fake(controller: FakeController) -> FakeController:
    def answer(request: wire.GetJobs) -> wire.Jobs:
        jobs = views.queue() + (views.ended() if request.states == ["all"] else [])
        if request.ids:
            wanted = {i.partition("_")[0] for i in request.ids}
            jobs = [j for j in jobs if str(j.get("array_job_id") or j["id"]) in wanted]
        known = {str(j.get("array_job_id") or j["id"]) for j in jobs}
        missing = [i for i in request.ids if i.partition("_")[0] not in known]
        return wire.Jobs(jobs=jobs, now_s=views.NOW_S, missing=missing)

    controller.answers[wire.GetJobs] = answer
    return controller


def test_default_order_and_columns(run: Runner, fake: FakeController) -> None:
    assert run("squeue").out == HEADER + (
        "            700010     debug     dep1     root PD       0:00      1 (Dependency)\n"
        "            700009      main      big     root PD       0:00      4 (Resources)\n"
        "            700011      main    later     root PD       0:00      1 (BeginTime)\n"
        "    700004_[3-6%2]      main      arr     root PD       0:00      1 (JobArrayTaskLimit)\n"
        "            700002      main    held1     root PD       0:00      1 (JobHeldUser)\n"
        "            700001      main     run1     root  R       1:40      1 n001\n"
        "          700004_1      main      arr     root  R       1:40      1 n001\n"
        "            700012 main,debu averyver     root PD       0:00      1 (JobHeldUser)\n"
    )


def test_long(run: Runner, fake: FakeController) -> None:
    lines = run("squeue", "-l").out.splitlines()
    assert lines[1] == (
        "             JOBID PARTITION     NAME     USER    STATE       TIME TIME_LIMI  NODES "
        "NODELIST(REASON)"
    )
    assert lines[5] == (
        "    700004_[3-6%2]      main      arr     root  PENDING       0:00 1-00:00:00      1 "
        "(JobArrayTaskLimit)"
    )


def test_start(run: Runner, fake: FakeController) -> None:
    lines = run("squeue", "--start").out.splitlines()
    assert lines[0] == (
        "             JOBID PARTITION     NAME     USER ST          START_TIME  NODES SCHEDNODES"
        "           NODELIST(REASON)"
    )
    assert lines[1] == (
        "            700011      main    later     root PD 2030-01-02T03:04:05      1 (null)"
        "               (BeginTime)"
    )
    assert all(" R " not in line for line in lines)
    assert fake.of(wire.GetJobs)[-1].states == ["PENDING"]


def test_array_apart(run: Runner, fake: FakeController) -> None:
    ran = run("squeue", "-h", "-r", "-S", "i", "-o", "%i %K %F")
    assert ran.out.splitlines()[2:7] == [
        "700004_1 1 700004",
        "700004_3 3 700004",
        "700004_4 4 700004",
        "700004_5 5 700004",
        "700004_6 6 700004",
    ]


def test_sort(run: Runner, fake: FakeController) -> None:
    assert run("squeue", "-h", "-S", "-i", "-o", "%i").out.split()[:2] == ["700012", "700011"]
    assert run("squeue", "-h", "-S", "t,-p", "-o", "%i").out.split()[0] == "700009"
    assert run("squeue", "-S", "ZZZ") == (1, "", "squeue: error: Invalid sort specification: Z\n")


def test_ended_jobs_say_why_or_where(run: Runner, fake: FakeController) -> None:
    ran = run("squeue", "-h", "-t", "all", "-S", "i", "-o", "%i|%t|%T|%R|%N|")
    assert ran.out.splitlines()[-3:] == [
        "700021|CD|COMPLETED|n001|n001|",
        "700022|F|FAILED|(NonZeroExitCode)|n001|",
        "700023|CA|CANCELLED|||",
    ]


def test_widths(run: Runner, fake: FakeController) -> None:
    one = ("-h", "-j", "700001")
    assert run("squeue", *one, "-o", "[%3i][%.3i][%20j][%.20j][%2j]").out == (
        "[700][700][run1                ][                run1][ru]\n"
    )
    assert run("squeue", *one, "-o", "job %i is %T on %N.").out == (
        "job 700001 is RUNNING on n001.\n"
    )


def test_unknown_letters_stay(run: Runner, fake: FakeController) -> None:
    assert run("squeue", "-j", "700001", "-o", "%i %7 %! x") == (
        0,
        "JOBID %7 %! x\n700001 %7 %! x\n",
        (
            "squeue: error: Invalid job format specification:  \n"
            "squeue: error: Invalid job format specification: !\n"
        ),
    )


@pytest.mark.parametrize(
    ("text", "out"),
    [
        (
            "jobid,name,state",
            (
                "JOBID               NAME                STATE               \n"
                "700001              run1                RUNNING             \n"
            ),
        ),
        ("jobid:10,name:.10,state:5", "JOBID           NAMESTATE\n700001          run1RUNNI\n"),
        ("JobID:|,Name:|,State:", "JOBID|NAME|STATE\n700001|run1|RUNNING\n"),
        (
            "JobArrayID:8,tres-alloc:.40",
            (
                "JOBID                                 TRES_ALLOC\n"
                "700001      cpu=2,node=1,billing=2,gres/neuron=4\n"
            ),
        ),
    ],
)
def test_named_columns(run: Runner, fake: FakeController, text: str, out: str) -> None:
    assert run("squeue", "-j", "700001", "-O", text).out == out


@pytest.mark.parametrize(
    ("fields", "values"),
    [
        ("%b|%c|%C|%d|%h|%m|%y", "gres:neuron:4|1|2|0|OK|0|0"),
        ("%l|%L|%M|%S|%e", "10:00|8:20|1:40|2027-01-15T08:00:00|2027-01-15T08:10:00"),
        ("%a|%u|%U|%g|%G|%q|%k", "root|root|0|root|0|normal|hello"),
        ("%B|%N|%n|%x|%Y|%Z|%o", "n001|n001|||(null)|/w|/w/job.sh"),
        ("%p|%Q|%E|%f|%v|%w|%W", "0.00000236090273|10140|(null)|(null)|(null)|(null)|(null)"),
        ("%A|%F|%K|%z|%X|%O", "700001|700001|N/A|*:*:*|N/A|0"),
    ],
)
def test_letters(run: Runner, fake: FakeController, fields: str, values: str) -> None:
    assert run("squeue", "-h", "-j", "700001", "-o", fields).out == values + "\n"


def test_one_line_of_all(run: Runner, fake: FakeController) -> None:
    head = run("squeue", "-j", "700001", "-o", "%all").out.splitlines()[0]
    assert head.startswith("ACCOUNT|TRES_PER_NODE|MIN_CPUS|MIN_TMP_DISK|END_TIME|")
    assert head.endswith("|SCHEDNODES|WORK_DIR")


def test_ids(run: Runner, fake: FakeController) -> None:
    unknown = run("squeue", "-j", "1")
    assert unknown == (1, "", "slurm_load_jobs error: Invalid job id specified\n")
    assert run("squeue", "-j", "1,700001").status == 0
    assert run("squeue", "-j", "abc") == (1, "", "squeue: error: Invalid job id: abc\n")


def test_one_task_of_an_array(run: Runner, fake: FakeController) -> None:
    def answer(request: wire.GetJobs) -> wire.Jobs:
        assert request.ids == ["700004_5"]
        return wire.Jobs(jobs=[views.queue()[2] | {"array_tasks": [5]}], now_s=views.NOW_S)

    fake.answers[wire.GetJobs] = answer
    assert run("squeue", "-h", "-j", "700004_5", "-o", "%i").out == "700004_5\n"


def test_filters_go_to_the_controller(run: Runner, fake: FakeController) -> None:
    run("squeue", "-u", "root,0", "-p", "main", "-n", "a,b", "-A", "x", "-q", "y", "-t", "R,pd")
    request = fake.of(wire.GetJobs)[-1]
    assert request.users == ["0", "0"]
    assert (request.partitions, request.names) == (["main"], ["a", "b"])
    assert (request.accounts, request.qos) == (["x"], ["y"])
    assert request.states == ["RUNNING", "PENDING"]


def test_wrong_filters(run: Runner, fake: FakeController) -> None:
    user = run("squeue", "-u", "nosuchuser")
    assert (user.status, user.err) == (0, "squeue: error: Invalid user: nosuchuser\n\n")
    state = run("squeue", "-t", "BOGUS")
    assert state.status == 1
    assert state.err.startswith(
        "squeue: error: Invalid job state specified: BOGUS\n"
        "squeue: error: Valid job states include: PENDING,RUNNING,"
    )
    fake.answers[wire.GetNodes] = wire.Nodes(nodes=views.nodes(), partitions=[])
    node = run("squeue", "-w", "nosuch")
    assert node == (1, "", "squeue: error: Invalid node name nosuch\n")


def test_environment(run: Runner, fake: FakeController, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_FORMAT", "%i %j")
    monkeypatch.setenv("SQUEUE_SORT", "-i")
    assert run("squeue", "-h").out.splitlines()[0] == "700012 averyveryverylongjobname"
    assert run("squeue", "-h", "-o", "%i", "-S", "i").out.splitlines()[0] == "700001"


def test_steps(run: Runner, fake: FakeController) -> None:
    step: dict[str, Any] = {
        "job_id": 700001,
        "step_id": "batch",
        "attempt": 1,
        "name": "batch",
        "layout": {"nodes": ["n001"], "tasks": [[0]]},
        "start_s": views.START_S,
    }
    fake.answers[wire.GetJobs] = wire.Jobs(
        jobs=[views.queue()[0] | {"steps": [step]}], now_s=views.NOW_S
    )
    assert run("squeue", "-s", "-j", "700001").out == (
        "         STEPID     NAME PARTITION     USER      TIME NODELIST\n"
        "   700001.batch    batch      main     root      1:40 n001\n"
    )
    assert run("squeue", "-s", "1.0").out.count("\n") == 1


def test_options_that_do_not_exist_or_are_not_built(run: Runner, fake: FakeController) -> None:
    unknown = run("squeue", "--frob")
    assert unknown.status == 1
    assert unknown.err == (
        "squeue: unrecognized option '--frob'\nTry \"squeue --help\" for more information\n"
    )
    assert run("squeue", "-i", "x") == (1, "", "squeue: error: --iterate=x\n\n")
    assert "--json is not built yet" in run("squeue", "--json").err
    assert run("squeue", "foo").err.startswith("squeue: error: Unrecognized option: foo\n")
    assert run("squeue", "-V").out == "slurm-wlm 22.05.8\n"


def test_nobody_answers(run: Runner) -> None:
    ran = run("squeue")
    assert ran.status == 1
    assert ran.err.startswith(
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
    )
