"""One real cluster for the tests of a module that do no harm to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.live import Cluster, live_cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with live_cluster(tmp_path_factory.mktemp("cluster"), "--nodes", "4", "--spares", "1") as c:
        yield c


@pytest.fixture
def fresh(tmp_path: object) -> Iterator[Cluster]:
    """A cluster of the test's own, to be harmed."""
    from pathlib import Path

    with live_cluster(Path(str(tmp_path)), "--nodes", "2", "--spares", "1") as c:
        yield c
