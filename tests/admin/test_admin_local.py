"""Local nodes: directories, agents, links."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from scheduler.api import agentwire
from scheduler.api.errors import Unavailable
from scheduler.api.wire import PROTOCOL
from scheduler.config import ClusterConfig, parse
from scheduler.provision import local, proc
from scheduler.transport.local import LocalTransport
from tests.admin.run import clusterctl

TEXT = '[nodes."n[1-2]"]\ninstance_type = "trn1.2xlarge"\n'


@pytest.fixture
def config(home: Path) -> ClusterConfig:
    """Two local nodes whose directories are made."""
    config = parse(TEXT, home / "cluster.toml", home)
    home.mkdir()
    config.path.write_text(TEXT)
    local.prepare_home(config)
    return config


def test_node_directory_has_what_the_agent_is_told(config: ClusterConfig, home: Path) -> None:
    document = json.loads((home / "nodes/n2/node.json").read_text())
    assert document == {
        "cluster": "local",
        "node": "n2",
        "cpus": 8,
        "mem_mib": 32768,
        "instance_type": "trn1.2xlarge",
        "hosts": config.hosts(),
        "isolate": True,
        "bin": str(home / "bin"),
        "home": str(home),
        "socket": str(home / "controller.sock"),
    }
    assert not local.make_node_dir(home / "nodes/n2", document)
    assert local.make_node_dir(home / "nodes/n2", document | {"cpus": 4})


def test_links_start_one_agent_and_find_it_again(config: ClusterConfig, home: Path) -> None:
    async def register(transport: LocalTransport) -> agentwire.Register:
        link = await transport.open("n1")
        try:
            welcome = agentwire.Welcome(protocol=PROTOCOL, cluster="local", node="n1", epoch=1)
            await link.send(msgspec.json.encode(welcome))
            async with asyncio.timeout(20):
                body = await link.receive()
            assert body is not None
            return msgspec.json.decode(body, type=agentwire.Register)
        finally:
            await link.close()
            await link.close()

    async def scenario() -> list[agentwire.Register]:
        transport = LocalTransport(config)
        links = await asyncio.gather(*(transport.open("n1") for _ in range(4)))
        for link in links:
            await link.close()
        return [await register(transport), await register(transport)]

    first, second = asyncio.run(scenario())
    process = local.agent_process(home / "nodes/n1")
    assert process is not None
    assert first.pid == second.pid == process.pid
    assert first.agent_id == second.agent_id


def test_closed_link_says_so(config: ClusterConfig, home: Path) -> None:
    async def scenario() -> None:
        link = await LocalTransport(config).open("n1")
        process = local.agent_process(home / "nodes/n1")
        assert process is not None
        await asyncio.to_thread(proc.stop, process)
        async with asyncio.timeout(20):
            assert await link.receive() is None
        await link.close()
        with pytest.raises(ConnectionError):
            await link.send(b"{}")

    asyncio.run(scenario())


def refusal(config: ClusterConfig) -> str:
    async def scenario() -> str:
        with pytest.raises(Unavailable) as caught:
            await LocalTransport(config).open("n1")
        return str(caught.value)

    return asyncio.run(scenario())


def test_agent_that_cannot_start_is_explained(config: ClusterConfig, home: Path) -> None:
    (home / "nodes/n1/agent.pid").mkdir()
    text = refusal(config)
    assert text.startswith("n1: the agent ended at its start: ")
    assert "agent.pid" in text


def test_node_directory_that_cannot_be_made_is_explained(config: ClusterConfig, home: Path) -> None:
    local.remove_node_dir(home / "nodes/n1")
    (home / "nodes/n1").write_text("")
    assert refusal(config).startswith("n1: cannot start the agent: ")
    done = clusterctl(home, "up")
    assert done.returncode == 1
    assert f"cannot prepare {home}: " in done.stderr
    assert str(home / "nodes/n1") in done.stderr
