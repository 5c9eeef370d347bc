"""Fixtures: a running agent and a link to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.rig import Controller, Node, running


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with running(tmp_path / "n1") as started:
        yield started


@pytest.fixture
def link(node: Node) -> Controller:
    return node.link()
