"""Fixtures of the administration tests: homes that are cleaned up, SSH servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.provision import local, proc, sweep
from tests.admin.sshd import Sshd, find_sshd, make_key, make_sshd


def end_all(folder: Path) -> None:
    """End every agent and controller whose identity is recorded below ``folder``."""
    for name in ("controller.pid", "agent.pid"):
        for file in folder.rglob(name):
            process = proc.running(file)
            if process is not None:
                proc.stop(process)
    sweep.sweep([file.parent for file in folder.rglob("node.json")])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A private home; what runs in it at the end of the test is ended."""
    folder = tmp_path / "home"
    monkeypatch.setenv("CLUSTERCTL_HOME", str(folder))
    yield folder
    end_all(tmp_path)
    assert not [f for f in tmp_path.rglob("agent.pid") if local.agent_process(f.parent)]


@pytest.fixture
def two_sshd(tmp_path: Path) -> Iterator[tuple[Sshd, Sshd]]:
    """Two started servers on two loopback addresses: two hosts."""
    if find_sshd() is None:
        pytest.skip("openssh-server is not installed")
    key = make_key(tmp_path / "client_key")
    servers = [make_sshd(tmp_path / f"sshd{i}", f"127.0.0.{i}", key) for i in (1, 2)]
    try:
        for server in servers:
            server.start()
        yield servers[0], servers[1]
    finally:
        end_all(tmp_path)
        for server in servers:
            server.stop()
