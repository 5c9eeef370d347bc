"""srun against a controller that plays a step: output, exits, signals, lost connections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scheduler.api import wire
from tests.cli.conftest import Runner
from tests.cli.fake_controller import FakeController

DONE = wire.StepEvent(done={"state": "COMPLETED"})


def _output(task: int, data: str, offset: int = 0, fd: int = 1) -> wire.StepEvent:
    return wire.StepEvent(output={"task": task, "fd": fd, "offset": offset, "data": data})


def _exits(*ends: tuple[int, int, int], node: str = "n001") -> wire.StepEvent:
    return wire.StepEvent(
        exits=[{"task": t, "code": c, "signal": s} for t, c, s in ends], node=node
    )


class Step:
    """What the controller plays."""

    def __init__(self, fake: FakeController) -> None:
        self.fake = fake
        self.tasks = 1
        self.events: list[Any] = [_exits((0, 0, 0)), DONE]
        fake.answers |= {
            wire.CreateStep: lambda _: wire.StepCreated(
                step_id="0",
                attempt=1,
                layout={"nodes": ["n001"], "tasks": [list(range(self.tasks))]},
            ),
            wire.AttachStep: lambda _: self.events,
            wire.StepAck: [],
            wire.StepInput: [],
        }


@pytest.fixture
def step(controller: FakeController, monkeypatch: pytest.MonkeyPatch) -> Step:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return Step(controller)


def test_output_by_lines(run: Runner, step: Step) -> None:
    step.tasks = 2
    step.events = [
        _output(0, "a"),
        _output(1, "b\n"),
        _output(0, "c\nd", 1),
        _exits((0, 0, 0), (1, 0, 0)),
        DONE,
    ]
    assert run("srun", "-n2", "prog") == (0, "b\nac\nd", "")
    spec = step.fake.of(wire.CreateStep)[-1].spec
    assert (spec.ntasks, spec.ntasks_given, spec.argv) == (2, True, ["prog"])


def test_labels_are_as_wide_as_the_largest_task(run: Runner, step: Step) -> None:
    step.tasks = 12
    step.events = [_output(3, "x\ny\n"), _output(11, "z\n", fd=2), DONE]
    ran = run("srun", "-l", "prog")
    assert (ran.out, ran.err) == (" 3: x\n 3: y\n", "11: z\n")


def test_output_that_comes_twice_is_written_once(run: Runner, step: Step) -> None:
    step.events = [_output(0, "abc\n"), _output(0, "abc\ndef\n"), _exits((0, 0, 0)), DONE]
    assert run("srun", "prog").out == "abc\ndef\n"


@pytest.mark.parametrize(
    ("ends", "status", "err"),
    [
        ([(0, 7, 0)], 7, "srun: error: n001: task 0: Exited with exit code 7\n"),
        ([(0, 0, 0)], 0, ""),
        (
            [(0, 3, 0), (1, 3, 0), (2, 1, 0)],
            3,
            (
                "srun: error: n001: tasks 0-1: Exited with exit code 3\n"
                "srun: error: n001: task 2: Exited with exit code 1\n"
            ),
        ),
        (
            [(0, 0, 15)],
            143,
            "srun: error: n001: task 0: Terminated\nsrun: Force Terminated StepId=7.0\n",
        ),
        ([(0, 0, 11)], 139, "srun: error: n001: task 0: Segmentation fault\n"),
        ([(0, 0, 6)], 134, "srun: error: n001: task 0: Aborted\n"),
    ],
)
def test_exits(
    run: Runner, step: Step, ends: list[tuple[int, int, int]], status: int, err: str
) -> None:
    step.tasks = len(ends)
    step.events = [_exits(*ends), DONE]
    assert run("srun", "prog") == (status, "", err)


def test_a_lost_connection_goes_on_where_it_stopped(run: Runner, step: Step) -> None:
    plays = iter([None, [_output(0, "two\n", 4), _exits((0, 0, 0)), DONE]])
    attached: list[dict[str, int]] = []

    def attach(request: wire.AttachStep) -> Any:
        attached.append(request.offsets)
        if len(attached) == 1:
            return [_output(0, "one\n")]
        return next(plays)

    step.fake.answers[wire.AttachStep] = attach
    step.fake.answers[wire.StepAck] = None  # the controller is killed at the first ack
    assert run("srun", "-i", "none", "prog").out == "one\ntwo\n"
    assert attached == [{}, {"0:1": 4}, {"0:1": 4}]


def test_files_that_srun_writes(run: Runner, step: Step) -> None:
    step.events = [_output(0, "out\n"), _output(0, "err\n", fd=2), _exits((0, 0, 0)), DONE]
    assert run("srun", "-o", "f_%j_%s.txt", "prog") == (0, "", "")
    assert Path("f_7_0.txt").read_text() == "out\nerr\n"
    run("srun", "-o", "a.txt", "-e", "b.txt", "prog")
    assert (Path("a.txt").read_text(), Path("b.txt").read_text()) == ("out\n", "err\n")
    assert step.fake.of(wire.CreateStep)[-1].spec.std_out == ""


def test_files_of_each_task_are_the_nodes_business(run: Runner, step: Step) -> None:
    run("srun", "-o", "o_%t.txt", "prog")
    assert step.fake.of(wire.CreateStep)[-1].spec.std_out == "o_%t.txt"


def test_input_for_one_task(run: Runner, step: Step) -> None:
    run("srun", "-i", "1", "prog")
    assert step.fake.of(wire.CreateStep)[-1].spec.std_in == "1"
    missing = run("srun", "-i", "nosuch.txt", "prog")
    assert missing == (
        1,
        "",
        "srun: error: Could not open stdin file: No such file or directory\n",
    )


def test_step_that_waits_for_resources(run: Runner, step: Step) -> None:
    busy = wire.Error(code="busy", message="Requested nodes are busy")
    created = step.fake.answers[wire.CreateStep]
    answers = iter([busy, busy, created(None)])
    step.fake.answers[wire.CreateStep] = lambda _: next(answers)
    assert run("srun", "prog") == (
        0,
        "",
        (
            "srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)\n"
            "srun: Step created for job 7\n"
        ),
    )


@pytest.mark.parametrize(
    ("argv", "error", "status", "err"),
    [
        (
            ["-n3", "prog"],
            ("rejected", "More processors requested than permitted"),
            1,
            (
                "srun: error: Unable to create step for job 7: "
                "More processors requested than permitted\n"
            ),
        ),
        (
            ["--jobid=1", "prog"],
            ("not_found", "Invalid job id specified"),
            1,
            (
                "srun: error: Unable to confirm allocation for job 1: Invalid job id specified\n"
                "srun: Check SLURM_JOB_ID environment variable. Expired or invalid job 1\n"
            ),
        ),
        ([], ("rejected", ""), 1, "srun: fatal: No command given to execute.\n"),
        (
            ["-t", "abc", "prog"],
            ("rejected", ""),
            255,
            "srun: error: Invalid --time specification\n",
        ),
        (
            ["--mpi=foo", "prog"],
            ("rejected", ""),
            1,
            "srun: error: mpi/foo: invalid MPI type 'foo', --mpi=list for acceptable types\n",
        ),
    ],
)
def test_errors(
    run: Runner, step: Step, argv: list[str], error: tuple[str, str], status: int, err: str
) -> None:
    step.fake.answers[wire.CreateStep] = wire.Error(code=error[0], message=error[1])
    assert run("srun", *argv) == (status, "", err)


def test_alone_it_gets_an_allocation(
    run: Runner, controller: FakeController, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step(controller)
    step.events = [_exits((0, 7, 0)), DONE]
    job = {"id": 9, "state": "RUNNING", "name": "prog"}
    controller.answers |= {
        wire.Submit: wire.Submitted(job_id=9),
        wire.WaitJob: wire.Jobs(jobs=[job]),
        wire.EndAllocation: wire.Ok(),
    }
    assert run("srun", "-N2", "prog").status == 7
    assert not controller.of(wire.Submit)[-1].spec.batch
    assert controller.of(wire.CreateStep)[-1].job_id == 9
    ended = controller.of(wire.EndAllocation)[-1]
    assert (ended.job_id, ended.code) == (9, 7)


def test_cancelled_while_it_waits(run: Runner, controller: FakeController) -> None:
    controller.answers |= {
        wire.Submit: wire.Submitted(job_id=9),
        wire.WaitJob: wire.Jobs(jobs=[{"id": 9, "state": "CANCELLED"}]),
        wire.EndAllocation: wire.Ok(),
    }
    assert run("srun", "prog") == (
        1,
        "",
        (
            "srun: Job has been cancelled\n"
            "srun: error: Unable to allocate resources: "
            "Job/step already completing or completed\n"
        ),
    )


def test_prolog_and_epilog_run_here_around_the_step(run: Runner, step: Step) -> None:
    for name in ("pr", "ep"):
        Path(name).write_text(f'#!/bin/sh\necho {name} "$@" $SLURM_JOB_ID\n')
        Path(name).chmod(0o755)
    step.events = [_output(0, "main\n"), _exits((0, 0, 0)), DONE]
    ran = run("srun", "--prolog=./pr", "--epilog", "ep", "prog", "x")
    assert ran == (0, "pr prog x 7\nmain\nep prog x 7\n", "")


def test_a_prolog_that_cannot_run_is_said_and_the_step_goes_on(run: Runner, step: Step) -> None:
    ran = run("srun", "--prolog=nosuch", "prog")
    assert ran == (
        0,
        "",
        "srun: error: prolog nosuch cannot be run: No such file or directory\n",
    )


@pytest.mark.parametrize(("code", "signum", "status"), [(1, 0, 1), (0, 11, 139)])
def test_ranks_killed_because_another_died_in_mpi_do_not_count(
    run: Runner, step: Step, code: int, signum: int, status: int
) -> None:
    step.tasks = 2
    first = {"task": 0, "code": code, "signal": signum, "in_mpi": True}
    killed = {"task": 1, "code": 0, "signal": 9, "in_mpi": True}
    step.events = [
        wire.StepEvent(exits=[first], node="n001"),
        wire.StepEvent(exits=[killed], node="n001"),
        wire.StepEvent(done={"state": "FAILED", "code": code, "signal": signum}),
    ]
    assert run("srun", "-n2", "prog").status == status
