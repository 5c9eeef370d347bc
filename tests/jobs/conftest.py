"""Tests here start MPI ranks, and kill some of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.neuron_device import mpi


@pytest.fixture(autouse=True, scope="module")
def _no_leftovers() -> Iterator[None]:
    with mpi.no_leftovers():
        yield
