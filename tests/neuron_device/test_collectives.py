"""Collectives over MPI, with real ranks under plain mpiexec."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from neuron_runtime.collectives import normal_groups
from neuron_runtime.errors import NRT_STATUS, NrtError
from tests.neuron_device import mpi

HERE = Path(__file__).parent


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_collective_gives_the_computed_answer(ranks: int) -> None:
    done = mpi.run(ranks, [str(HERE / "collective_ranks.py"), str(ranks)])
    assert done.returncode == 0, done.stderr
    # Two ranks may write the pieces of a line between each other's.
    assert sorted(re.findall(r"rank \d ok", done.stdout)) == [f"rank {r} ok" for r in range(ranks)]


def test_peer_that_never_joins_ends_in_1200() -> None:
    done = mpi.run(2, [str(HERE / "missing_peer_rank.py")])
    assert done.returncode == 7, done.stderr
    assert "NRT_EXEC_HW_ERR_COLLECTIVES(1200): suspected hang in collectives" in done.stdout
    assert "all_reduce add of 16 bytes" in done.stdout
    assert "ERROR  TDRV:wait_collectives" in done.stderr


def test_groups_must_cover_every_rank_once() -> None:
    assert normal_groups((), 3) == ((0, 1, 2),)
    assert normal_groups([[2, 0], [1]], 3) == ((2, 0), (1,))
    for bad in ([[0, 1]], [[0, 1], [1, 2]], [[0, 1, 3]]):
        with pytest.raises(NrtError) as caught:
            normal_groups(bad, 3)
        assert caught.value.status is NRT_STATUS.NRT_INVALID


def test_import_starts_no_mpi() -> None:
    program = (
        "import sys, neuron_runtime.collectives, neuron_runtime.nrt;"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('mpi4py', 'jax', 'jaxlib')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=mpi.ROOT, timeout=20)


def test_time_in_which_a_rank_was_stopped_does_not_count() -> None:
    done = mpi.run(2, [str(HERE / "stopped_rank.py")])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ok 2.0") == 2
