"""Batch steps through agent, fork server and supervisor."""

from __future__ import annotations

import os
import signal

import pytest

from scheduler.api import agentwire as aw
from tests.agent.rig import Controller, Node

HEAD = "#!/bin/sh\n"


def test_batch_script_runs_and_reports(node: Node, link: Controller) -> None:
    link.send(
        node.launch(7, "a", "b c", script=HEAD + 'basename "$0"; pwd; echo "$#:$2"; exit 3\n')
    )
    started = link.until(aw.StepStarted)
    assert started.pids["0"] > 0
    ended = link.until(aw.StepEnded)
    assert (ended.job_id, ended.step_id, ended.attempt) == (7, "batch", 1)
    assert [(one.task, one.code, one.signal) for one in ended.exits] == [(0, 3, 0)]
    assert ended.clean
    assert not ended.lost
    assert ended.usage.max_rss_mib > 0
    text = (node.work / "slurm-7.out").read_text()
    assert text == f"slurm_script\n{node.work}\n2:b c\n"


@pytest.mark.parametrize(
    ("body", "code", "signum"),
    [
        ("exit 0", 0, 0),
        ("exit 255", 255, 0),
        ("exit 256", 0, 0),
        ("kill -9 $$", 0, signal.SIGKILL),
        ("kill -TERM $$", 0, signal.SIGTERM),
        ("kill -SEGV $$", 0, signal.SIGSEGV),
        ("sh -c 'kill -9 $$'", 137, 0),
    ],
)
def test_exit_codes_and_signals_are_kept_apart(
    node: Node, link: Controller, body: str, code: int, signum: int
) -> None:
    link.send(node.launch(8, script=f"{HEAD}{body}\n"))
    (exit_record,) = link.until(aw.StepEnded).exits
    assert (exit_record.code, exit_record.signal) == (code, signum)


def test_script_and_environment_that_are_not_utf8(node: Node, link: Controller) -> None:
    script = b"#!/bin/sh\necho \xff\xfe$ODD\n"
    env = {"PATH": os.environ["PATH"], "ODD": "\0" + "gIE="}  # base64 of 80 81
    link.send(node.launch(9, script=script, env=env))
    link.until(aw.StepEnded)
    assert (node.work / "slurm-9.out").read_bytes() == b"\xff\xfe\x80\x81\n"
