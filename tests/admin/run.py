"""Runs the ``clusterctl`` command as a user would: a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from tests.admin.sshd import ROOT

TIMEOUT_S = 100


def environment(home: Path) -> dict[str, str]:
    """The environment of a user outside any job whose cluster is at ``home``."""
    values = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("SLURM_", "SBATCH_", "CLUSTERCTL_"))
    }
    return values | {"CLUSTERCTL_HOME": str(home), "PYTHONPATH": str(ROOT)}


def command(*arguments: str) -> list[str]:
    """The command line of ``clusterctl ARGUMENTS``."""
    return [sys.executable, "-P", "-m", "clusterctl", *arguments]


def clusterctl(
    home: Path, *arguments: str, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run to the end; the result must not hold a traceback."""
    done = subprocess.run(
        command(*arguments),
        env=environment(home),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def good(home: Path, *arguments: str, cwd: Path | None = None) -> str:
    """Run; it must succeed.  Its stdout."""
    done = clusterctl(home, *arguments, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wait_for_text(log: Path, text: str) -> None:
    """Poll a log that another process writes (at most 10 s)."""
    for _ in range(1000):
        if log.exists() and text in log.read_text():
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"{text!r} did not come to {log}")
