"""The SSH transport against Debian's real openssh-server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import msgspec
import pytest

from scheduler.api import agentwire
from scheduler.api.errors import Unavailable
from scheduler.api.wire import PROTOCOL
from scheduler.config import ClusterConfig, parse
from scheduler.provision import local, proc
from scheduler.transport.ssh import SshLink, SshTransport
from tests.admin.run import good
from tests.admin.sshd import Sshd, make_key, make_python
from tests.support.live import wait_for

pytestmark = pytest.mark.ssh


def cluster(tmp_path: Path, servers: tuple[Sshd, ...], **ssh: str) -> ClusterConfig:
    """Nodes n1, n2, ... on the servers, each with a remote directory of its own."""
    known = tmp_path / "known_hosts"
    known.write_text("".join(server.known_hosts_line() for server in servers))
    keys = {
        "identity": str(servers[0].client_key),
        "known_hosts": str(known),
        "python": str(make_python(tmp_path / "python")),
    } | ssh
    text = '[cluster]\nname = "far"\n[timeouts]\nheartbeat_s = 0.5\n[ssh]\n'
    text += "".join(f'{key} = "{value}"\n' for key, value in keys.items())
    for number, server in enumerate(servers, 1):
        text += (
            f'[nodes.n{number}]\ninstance_type = "trn1.2xlarge"\ntransport = "ssh"\n'
            f'address = "{server.address}"\nport = {server.port}\n'
            f'remote_dir = "{tmp_path}/r{number}"\n'
        )
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    (home / "cluster.toml").write_text(text)
    return parse(text, home / "cluster.toml", home)


def refusal(config: ClusterConfig, node: str = "n1") -> str:
    """The text of the error that opening ``node`` ends with."""

    async def scenario() -> str:
        transport = SshTransport(config)
        try:
            with pytest.raises(Unavailable) as caught:
                await transport.open(node)
        finally:
            await transport.close()
        return str(caught.value)

    return asyncio.run(scenario())


def test_unknown_host_key_is_refused(tmp_path: Path, two_sshd: tuple[Sshd, Sshd]) -> None:
    config = cluster(tmp_path, two_sshd)
    Path(config.specs["n1"].ssh.known_hosts).write_text(two_sshd[1].known_hosts_line())
    text = refusal(config)
    assert "host key" in text
    assert f"ssh-keyscan -p {two_sshd[0].port} 127.0.0.1" in text


def test_changed_host_key_is_refused(tmp_path: Path, two_sshd: tuple[Sshd, Sshd]) -> None:
    config = cluster(tmp_path, two_sshd)
    known = Path(config.specs["n1"].ssh.known_hosts)
    key = two_sshd[1].known_hosts_line().split(" ", 1)[1]
    known.write_text(f"[127.0.0.1]:{two_sshd[0].port} {key}")
    assert "host key" in refusal(config)


def test_missing_known_hosts_is_named(tmp_path: Path, two_sshd: tuple[Sshd, Sshd]) -> None:
    config = cluster(tmp_path, two_sshd, known_hosts=str(tmp_path / "nowhere"))
    assert f"no known_hosts file {tmp_path}/nowhere" in refusal(config)


def test_refused_key_is_named(tmp_path: Path, two_sshd: tuple[Sshd, Sshd]) -> None:
    other = make_key(tmp_path / "other")
    text = refusal(cluster(tmp_path, two_sshd, identity=str(other)))
    assert f"with {other} refused" in text
    assert "authorized_keys" in text


def test_missing_identity_is_named(tmp_path: Path, two_sshd: tuple[Sshd, Sshd]) -> None:
    text = refusal(cluster(tmp_path, two_sshd, identity="/no/such/key"))
    assert "no identity file /no/such/key" in text


def test_unusable_identity_is_named(tmp_path: Path, two_sshd: tuple[Sshd, Sshd]) -> None:
    broken = tmp_path / "broken"
    broken.write_text("not a key\n")
    assert f"cannot use identity {broken}" in refusal(
        cluster(tmp_path, two_sshd, identity=str(broken))
    )


def test_missing_python_is_named(tmp_path: Path, two_sshd: tuple[Sshd, Sshd]) -> None:
    text = refusal(cluster(tmp_path, two_sshd, python="/no/such/python"))
    assert "no usable python '/no/such/python'" in text


def test_python_without_clusterctl_is_named(tmp_path: Path, two_sshd: tuple[Sshd, Sshd]) -> None:
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    assert "clusterctl is not installed" in refusal(cluster(tmp_path, two_sshd, python=str(bare)))


def test_nobody_listens(tmp_path: Path, two_sshd: tuple[Sshd, Sshd]) -> None:
    config = cluster(tmp_path, two_sshd)
    two_sshd[0].stop()
    assert "refused" in refusal(config)


def test_too_long_remote_dir(tmp_path: Path, two_sshd: tuple[Sshd, Sshd]) -> None:
    config = cluster(tmp_path, two_sshd)
    text = config.path.read_text().replace(f"{tmp_path}/r1", f"{tmp_path}/{'x' * 100}")
    assert "remote_dir is too long" in refusal(parse(text, config.path, config.home))


async def greet(config: ClusterConfig, node: str, link: SshLink) -> agentwire.Register:
    """Introduce ourselves as the controller; what the agent says of itself."""
    welcome = agentwire.Welcome(
        protocol=PROTOCOL,
        cluster=config.cluster,
        node=node,
        epoch=1,
        hosts=config.hosts(),
        heartbeat_s=0.2,
    )
    await link.send(msgspec.json.encode(welcome))
    async with asyncio.timeout(20):
        body = await link.receive()
    assert body is not None
    return msgspec.json.decode(body, type=agentwire.Register)


async def until_closed(link: SshLink) -> None:
    """Read until the link is gone."""
    async with asyncio.timeout(20):
        try:
            while await link.receive() is not None:
                pass
        except (ConnectionError, EOFError):
            return


def test_agents_are_started_survive_and_are_found_again(
    tmp_path: Path, two_sshd: tuple[Sshd, Sshd]
) -> None:
    config = cluster(tmp_path, two_sshd)

    async def visit() -> list[agentwire.Register]:
        transport = SshTransport(config)
        try:
            links = await asyncio.gather(transport.open("n1"), transport.open("n2"))
            return [
                await greet(config, node, link)
                for node, link in zip(("n1", "n2"), links, strict=True)
            ]
        finally:
            await transport.close()

    first = asyncio.run(visit())
    assert [r.node for r in first] == ["n1", "n2"]
    assert first[0].device_cores == [2]
    for number, register in enumerate(first, 1):
        node_dir = tmp_path / f"r{number}/far/n{number}"
        process = local.agent_process(node_dir)
        assert process is not None
        assert process.pid == register.pid
        assert os.getsid(process.pid) == process.pid
        document = json.loads((node_dir / "node.json").read_text())
        assert document["socket"] == str(node_dir / "agent.sock")
        assert document["hosts"] == {"n1": "127.0.0.1", "n2": "127.0.0.2"}
        assert (node_dir / "bin/srun").exists()
    second = asyncio.run(visit())  # another controller
    assert [r.agent_id for r in second] == [r.agent_id for r in first]


def test_agent_is_reached_again_after_a_cut(tmp_path: Path, two_sshd: tuple[Sshd, Sshd]) -> None:
    config = cluster(tmp_path, two_sshd)

    async def scenario() -> None:
        transport = SshTransport(config)
        try:
            link = await transport.open("n1")
            before = await greet(config, "n1", link)
            two_sshd[0].cut()
            await until_closed(link)
            with pytest.raises(ConnectionError):
                await link.send(b"{}")
            await link.close()
            again = await transport.open("n1")
            assert (await greet(config, "n1", again)).agent_id == before.agent_id
        finally:
            await transport.close()

    asyncio.run(scenario())


def test_silent_peer_is_noticed_by_keepalive(tmp_path: Path, two_sshd: tuple[Sshd, Sshd]) -> None:
    config = cluster(tmp_path, two_sshd)
    text = config.path.read_text().replace("[ssh]\n", "[ssh]\nkeepalive_s = 0.2\n")
    config = parse(text, config.path, config.home)

    async def scenario() -> None:
        transport = SshTransport(config)
        try:
            link = await transport.open("n1")
            await greet(config, "n1", link)
            for pid in two_sshd[0].sessions():
                os.kill(pid, signal.SIGSTOP)
            await until_closed(link)
        finally:
            await transport.close()

    asyncio.run(scenario())


def test_dead_agent_is_started_again_over_the_same_connection(
    tmp_path: Path, two_sshd: tuple[Sshd, Sshd]
) -> None:
    config = cluster(tmp_path, two_sshd)

    async def scenario() -> None:
        transport = SshTransport(config)
        try:
            link = await transport.open("n1")
            before = await greet(config, "n1", link)
            sessions = two_sshd[0].sessions()
            agent = proc.identify(before.pid)
            assert agent is not None
            proc.send_signal(agent, signal.SIGKILL)
            await until_closed(link)
            assert await asyncio.to_thread(proc.wait_gone, agent, 10)
            again = await transport.open("n1")
            assert (await greet(config, "n1", again)).pid != before.pid
            assert two_sshd[0].sessions() == sessions
        finally:
            await transport.close()

    asyncio.run(scenario())


def test_forbidden_forwarding_is_named(tmp_path: Path, two_sshd: tuple[Sshd, Sshd]) -> None:
    config = cluster(tmp_path, two_sshd)
    two_sshd[0].stop()
    two_sshd[0].start("AllowStreamLocalForwarding no")
    assert "AllowStreamLocalForwarding yes" in refusal(config)


def agent_pids(home: Path) -> list[int]:
    return [node["agent_pid"] for node in json.loads(good(home, "status", "--json"))["nodes"]]


@pytest.mark.e2e
def test_cluster_over_ssh_goes_up_and_down(tmp_path: Path, two_sshd: tuple[Sshd, Sshd]) -> None:
    home = cluster(tmp_path, two_sshd).home
    try:
        assert "2 nodes up" in good(home, "up")
        agents = agent_pids(home)
        assert all(agents)
        good(home, "down", "--keep-jobs")
        good(home, "up")
        assert agent_pids(home) == agents
    finally:
        good(home, "down")
    assert [local.agent_process(tmp_path / f"r{i}/far/n{i}") for i in (1, 2)] == [None, None]


@pytest.mark.e2e
def test_job_runs_on_both_ssh_nodes(tmp_path: Path, two_sshd: tuple[Sshd, Sshd]) -> None:
    home = cluster(tmp_path, two_sshd).home
    script = tmp_path / "job.sh"
    script.write_text(
        '#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=1\nsqueue -h -j "$SLURM_JOB_ID" -o "%i %N"\n'
        "srun sh -c 'echo \"$SLURM_PROCID $SLURMD_NODENAME\"' | sort\n"
    )
    try:
        good(home, "up")
        good(home, "sbatch", "--wait", "-o", str(tmp_path / "out"), str(script), cwd=tmp_path)
        assert (tmp_path / "out").read_text() == "1 n[1-2]\n0 n1\n1 n2\n"
    finally:
        good(home, "down")


@pytest.mark.e2e
def test_mpi_job_over_both_ssh_nodes_survives_a_cut(
    tmp_path: Path, two_sshd: tuple[Sshd, Sshd]
) -> None:
    home = cluster(tmp_path, two_sshd).home
    (tmp_path / "sum.py").write_text(
        "import os, time\nfrom mpi4py import MPI\nc = MPI.COMM_WORLD\n"
        "if c.rank == 0: open('there', 'w').close()\n"
        "while not os.path.exists('cut'): time.sleep(0.05)\n"
        "print('rank', c.rank, c.allreduce(c.rank), 'x' * 100_000, flush=True)\n"
    )
    script = tmp_path / "job.sh"
    script.write_text('#!/bin/bash\nsrun -l "$CLUSTERCTL_PYTHON" sum.py | cut -c1-11 | sort\n')
    try:
        good(home, "up")
        out = good(
            home,
            "sbatch",
            "--parsable",
            "-N2",
            "--ntasks-per-node=2",
            "-o",
            "out",
            str(script),
            cwd=tmp_path,
        )
        wait_for((tmp_path / "there").exists, 60)
        two_sshd[1].cut()
        (tmp_path / "cut").touch()
        state = ["sacct", "-nXP", "-j", out.strip(), "-o", "State"]
        wait_for(lambda: good(home, *state).strip() not in ("RUNNING", "PENDING"), 60)
        assert good(home, *state).strip() == "COMPLETED"
        text = (tmp_path / "out").read_text()
        assert text == "".join(f"{i}: rank {i} 6\n" for i in range(4))
    finally:
        good(home, "down")
