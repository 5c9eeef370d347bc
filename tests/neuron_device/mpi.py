"""Start ranks under plain mpiexec, in tests."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
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
    """Run to the end with what the ranks wrote; see ``run_command``."""
    return run_command(command(ranks, arguments), environment(**extra), timeout_s)


def run_command(
    mpiexec: Sequence[str], env: dict[str, str], timeout_s: float = 90
) -> subprocess.CompletedProcess[str]:
    """Run a ``command`` to the end.  Captured is what the ranks wrote, then what mpiexec wrote.

    The ranks write to files of their own: what a rank writes last before it aborts may be lost on
    its way through mpiexec.
    """
    program = mpiexec.index(sys.executable)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("stdout", "stderr")]
        shell = ["/bin/sh", "-c", 'out=$1 err=$2; shift 2; exec "$@" >>"$out" 2>>"$err"', "sh"]
        done = subprocess.run(
            [*mpiexec[:program], *shell, *map(str, files), *mpiexec[program:]],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=env,
            check=False,
        )
        stdout, stderr = (file.read_text() if file.exists() else "" for file in files)
    return subprocess.CompletedProcess(
        done.args, done.returncode, stdout + done.stdout, stderr + done.stderr
    )


def _segments() -> set[Path]:
    return set(Path("/dev/shm").glob("mpich_shm_*"))


def _mapped() -> str:
    maps = []
    for file in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            maps.append(file.read_text())
    return "\n".join(maps)


@contextlib.contextmanager
def no_leftovers() -> Iterator[None]:
    """Remove shared memory that ranks killed in the block left behind.

    A segment is removed only if it is new, this user's, used by no living process and not so young
    that somebody may be about to use it.
    """
    before = _segments()
    yield
    mapped = _mapped()
    for path in _segments() - before:
        with contextlib.suppress(OSError):
            facts = path.stat()
            old = time.time() - facts.st_mtime > 1.0
            if old and facts.st_uid == os.getuid() and str(path) not in mapped:
                path.unlink()
