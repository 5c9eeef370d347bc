"""The SSH transport against Debian's real openssh-server."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from scheduler.api.errors import Unavailable
from scheduler.config import ClusterConfig, parse
from scheduler.transport.ssh import SshTransport
from tests.admin.sshd import Sshd, make_key, make_python

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
