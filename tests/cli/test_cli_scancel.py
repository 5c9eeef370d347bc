"""scancel: ids, filters, and what its exit codes tell."""

from __future__ import annotations

import io
import os

import pytest

from scheduler.api import wire
from tests.cli.conftest import Runner
from tests.cli.fake_controller import FakeController


@pytest.fixture
def fake(controller: FakeController) -> FakeController:
    controller.answers[wire.Cancel] = lambda request: wire.Results(
        results=[wire.Result(id=i) for i in request.ids]
    )
    return controller


def _failing(fake: FakeController, code: str, message: str) -> None:
    fake.answers[wire.Cancel] = lambda request: wire.Results(
        results=[wire.Result(id=i, code=code, message=message) for i in request.ids]
    )


@pytest.mark.parametrize(
    ("argv", "ids"),
    [
        (["1"], ["1"]),
        (["1,2", "3"], ["1", "2", "3"]),
        (["4_6"], ["4_6"]),
        (["4_[4-5,7]"], ["4_[4-5,7]"]),
        (["4.0", "4.batch"], ["4.0", "4.batch"]),
    ],
)
def test_ids(run: Runner, fake: FakeController, argv: list[str], ids: list[str]) -> None:
    assert run("scancel", *argv) == (0, "", "")
    assert fake.of(wire.Cancel)[-1].ids == ids


@pytest.mark.parametrize(
    ("argv", "err"),
    [
        (["abc"], "scancel: error: Invalid job id abc\n"),
        (["0"], "scancel: error: Invalid job id 0\n"),
        (["1.x"], "scancel: error: Invalid job id 1.x\n"),
        ([], "scancel: error: No job identification provided\n"),
        (["-u", "nosuchuser"], "scancel: error: Invalid user name: nosuchuser\n"),
        (
            ["-t", "BOGUS"],
            (
                "Invalid job state specified: BOGUS\n"
                "Valid job states are PENDING, RUNNING, and SUSPENDED\n"
            ),
        ),
        (["-s", "0", "1"], "Unknown job signal: 0\n"),
        (["-s", "FOO", "1"], "Unknown job signal: FOO\n"),
        (
            ["--frob"],
            (
                "scancel: unrecognized option '--frob'\n"
                'Try "scancel --help" for more information\n'
            ),
        ),
    ],
)
def test_errors(run: Runner, fake: FakeController, argv: list[str], err: str) -> None:
    assert run("scancel", *argv) == (1, "", err)
    assert fake.of(wire.Cancel) == []


def test_unknown_jobs_are_silent(run: Runner, fake: FakeController) -> None:
    _failing(fake, "not_found", "Invalid job id specified")
    assert run("scancel", "1") == (0, "", "")
    assert run("scancel", "-v", "1") == (
        0,
        "",
        (
            "scancel: Terminating job 1\n"
            "scancel: error: Kill job error on job id 1: Invalid job id specified\n"
        ),
    )
    assert run("scancel", "-s", "USR1", "1").status == 1


def test_other_peoples_jobs(run: Runner, fake: FakeController) -> None:
    _failing(fake, "denied", "Access/permission denied")
    assert run("scancel", "7") == (
        210,
        "",
        "scancel: error: Kill job error on job id 7: Access/permission denied\n",
    )


def test_unknown_step(run: Runner, fake: FakeController) -> None:
    _failing(fake, "not_found", "Invalid job id specified")
    ran = run("scancel", "7.3")
    assert ran.status == 225
    assert "Kill job error on job step id 7: Invalid job id specified" in ran.err


def test_filters_and_signals(run: Runner, fake: FakeController) -> None:
    run("scancel", "--me", "-n", "a", "-p", "main", "-t", "pd", "-s", "SIGUSR1", "-b")
    request = fake.of(wire.Cancel)[-1]
    assert request.users == [str(os.getuid())]
    assert (request.names, request.partitions, request.states) == (["a"], ["main"], ["PENDING"])
    assert (request.signal, request.batch_only, request.ids) == (10, True, [])


def test_verbose_names_the_jobs_that_match(run: Runner, fake: FakeController) -> None:
    fake.answers[wire.GetJobs] = wire.Jobs(jobs=[{"id": 9}])
    assert run("scancel", "-v", "-n", "big").err == "scancel: Terminating job 9\n"
    assert fake.of(wire.Cancel)[-1].ids == ["9"]


@pytest.mark.parametrize(("answers", "cancelled"), [("n\ny\n", ["2"]), ("y\n", ["1"]), ("", [])])
def test_interactive_asks_and_the_end_of_the_input_is_a_no(
    run: Runner,
    fake: FakeController,
    monkeypatch: pytest.MonkeyPatch,
    answers: str,
    cancelled: list[str],
) -> None:
    fake.answers[wire.GetJobs] = lambda request: wire.Jobs(
        jobs=[{"id": int(request.ids[0]), "name": "q", "partition": "main"}], now_s=1.0
    )
    monkeypatch.setattr("sys.stdin", io.StringIO(answers))
    ran = run("scancel", "-i", "1", "2")
    assert ran.status == 0
    assert ran.out == (
        "Cancel job_id=1 name=q partition=main [y/n]? Cancel job_id=2 name=q partition=main [y/n]? "
    )
    assert [i for request in fake.of(wire.Cancel) for i in request.ids] == cancelled
