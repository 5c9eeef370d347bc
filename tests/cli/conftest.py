"""A command run in this process against a small fake controller."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from clusterctl.slurm import entry
from tests.cli.fake_controller import FakeController


class Ran(NamedTuple):
    """What a command did."""

    status: int
    out: str
    err: str


class Runner:
    """``run("squeue", "-h")``."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd

    def __call__(self, verb: str, *argv: str) -> Ran:
        self._capfd.readouterr()
        status = entry.main(verb, list(argv))
        captured = self._capfd.readouterr()
        return Ran(status, captured.out, captured.err)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Runner:
    return Runner(capfd)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """UTC, an empty folder to work in, and nothing of a surrounding job or cluster."""
    for name in list(os.environ):
        if name.startswith(("SLURM", "SBATCH_", "SQUEUE_", "SINFO_", "SACCT_", "CLUSTERCTL_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[FakeController]:
    (tmp_path / "home").mkdir()
    fake = FakeController(tmp_path / "home" / "controller.sock")
    yield fake
    fake.stop()
    assert fake.errors == []
