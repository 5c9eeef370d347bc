"""Start ranks under plain mpiexec, in tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MPIEXEC = Path(sys.executable).parent / "mpiexec"


def environment(**extra: str) -> dict[str, str]:
    """The environment without what a job or another MPI may have left, plus ``extra``."""
    left_out = ("PMI_", "SLURM_", "NEURON_", "MPI_", "PMIX_")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(left_out)}
    return {**kept, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", **extra}


def command(ranks: int, arguments: Sequence[str]) -> list[str]:
    """``mpiexec -n ranks python arguments``."""
    return [str(MPIEXEC), "-n", str(ranks), sys.executable, *arguments]


def run(
    ranks: int, arguments: Sequence[str], timeout_s: float = 90, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run to the end; standard output and error are captured."""
    return subprocess.run(
        command(ranks, arguments),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment(**extra),
        check=False,
    )
