"""Links to agents on other machines: one SSH connection a node, one channel to its socket.

The agent is started over the connection and does not depend on it.  Host keys are always
checked.  Needs sshd's ``AllowStreamLocalForwarding`` (on by default); no port is opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
from pathlib import Path
from typing import Any

import asyncssh

from scheduler.api.errors import Unavailable
from scheduler.config import ClusterConfig, NodeSpec
from scheduler.transport.stream import StreamLink

#: Until the far side must have started an agent, seconds.
_START_TIMEOUT_S = 60.0

#: Lost keep-alive answers in a row after which a connection is dead.
_KEEPALIVES = 3


class SshLink(StreamLink):
    """A channel to an agent; SSH's errors become the ``ConnectionError`` of the seam."""

    async def send(self, body: bytes) -> None:
        """See :class:`StreamLink`."""
        try:
            await super().send(body)
        except asyncssh.Error as error:
            raise ConnectionResetError(error.reason) from None

    async def receive(self) -> bytes | None:
        """See :class:`StreamLink`."""
        try:
            return await super().receive()
        except asyncssh.Error as error:
            raise ConnectionResetError(error.reason) from None

    async def close(self) -> None:
        """See :class:`StreamLink`."""
        with contextlib.suppress(asyncssh.Error):
            await super().close()


class _Peer:
    """What is held for one node: its connection and where its agent listens."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.connection: Any = None  # asyncssh.SSHClientConnection
        self.socket: str | None = None


class SshTransport:
    """Opens links to remote nodes."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._peers: dict[str, _Peer] = {}
        limits = [s.ssh.max_dials for s in config.specs.values() if s.transport == "ssh"]
        self._dials = asyncio.Semaphore(min(limits, default=10))

    async def open(self, node: str) -> SshLink:
        """A new channel to the agent of ``node``, over the connection that is there if it lives.

        Raises ``Unavailable`` with the reason.
        """
        spec = self._config.specs[node]
        peer = self._peers.setdefault(node, _Peer())
        async with peer.lock:
            try:
                return await self._open(spec, peer)
            except Unavailable:
                await _drop(peer)
                raise
            except (OSError, asyncssh.Error) as error:
                await _drop(peer)
                raise Unavailable(f"{node}: {_text(error)}") from None

    async def close(self) -> None:
        """Drop all connections; the agents stay."""
        peers, self._peers = self._peers, {}
        await asyncio.gather(*(_drop(peer) for peer in peers.values()))

    async def _open(self, spec: NodeSpec, peer: _Peer) -> SshLink:
        if peer.connection is None or peer.connection.is_closed():
            async with self._dials:
                peer.connection = await self._dial(spec)
        if peer.socket is not None:
            link = await self._channel(spec, peer.connection, peer.socket)
            if link is not None:
                return link
        async with self._dials:
            peer.socket = await self._start(spec, peer.connection)
        link = await self._channel(spec, peer.connection, peer.socket)
        if link is None:
            raise Unavailable(f"{spec.name}: the agent does not listen on {peer.socket}")
        return link

    # ------------------------------------------------------------ connection

    async def _dial(self, spec: NodeSpec) -> Any:
        """Log in.  Raises ``Unavailable`` that says what to do."""
        ssh = spec.ssh
        known_hosts = Path(ssh.known_hosts).expanduser()
        where = f"{spec.name}: {spec.address} port {ssh.port}"
        if not known_hosts.is_file():
            raise Unavailable(f"{where}: no known_hosts file {known_hosts}; {_scan(spec)}")
        options: dict[str, Any] = {"username": ssh.user} if ssh.user else {}
        if ssh.identity:
            identity = Path(ssh.identity).expanduser()
            if not identity.is_file():
                raise Unavailable(f"{where}: no identity file {identity}")
            options["client_keys"] = [str(identity)]
        try:
            return await asyncssh.connect(
                spec.address,
                ssh.port,
                config=None,
                known_hosts=str(known_hosts),
                agent_path=None,
                preferred_auth="publickey",
                connect_timeout=ssh.login_timeout_s,
                login_timeout=ssh.login_timeout_s,
                keepalive_interval=ssh.keepalive_s,
                keepalive_count_max=_KEEPALIVES,
                **options,
            )
        except asyncssh.HostKeyNotVerifiable:
            raise Unavailable(
                f"{where}: its host key is not the one in {known_hosts}, or unknown there; "
                f"{_scan(spec)}"
            ) from None
        except asyncssh.PermissionDenied:
            user = ssh.user or "the same user name"
            key = ssh.identity or "the keys in ~/.ssh"
            raise Unavailable(
                f"{where}: login as {user} with {key} refused; add the public key to "
                "~/.ssh/authorized_keys there"
            ) from None
        except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as error:
            raise Unavailable(f"{where}: cannot use identity {ssh.identity}: {error}") from None
        except TimeoutError:
            raise Unavailable(f"{where}: no answer in {ssh.login_timeout_s:g} s") from None
        except (OSError, asyncssh.Error) as error:
            raise Unavailable(f"{where}: {_text(error)}") from None

    async def _channel(self, spec: NodeSpec, connection: Any, socket: str) -> SshLink | None:
        """A channel to ``socket``; None when nobody listens there."""
        try:
            reader, writer = await connection.open_unix_connection(socket, encoding=None)
        except asyncssh.ChannelOpenError as error:
            if error.code == asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED:
                raise Unavailable(
                    f"{spec.name}: its sshd forbids channels to unix sockets; set "
                    "AllowStreamLocalForwarding yes (and no DisableForwarding) in sshd_config"
                ) from None
            return None
        return SshLink(reader, writer)

    # ------------------------------------------------------------ the agent

    async def _start(self, spec: NodeSpec, connection: Any) -> str:
        """Have the node made ready and its agent running; its socket.  Raises ``Unavailable``."""
        request = {
            "remote_dir": spec.ssh.remote_dir,
            "cluster": self._config.cluster,
            "document": remote_document(self._config, spec),
        }
        command = remote_command(spec.ssh.python)
        try:
            done = await connection.run(
                command, input=json.dumps(request), timeout=_START_TIMEOUT_S, check=False
            )
        except asyncssh.TimeoutError:
            raise Unavailable(
                f"{spec.name}: starting the agent took over {_START_TIMEOUT_S:g} s"
            ) from None
        lines = str(done.stdout or "").strip().splitlines()
        try:
            answer = json.loads(lines[-1])  # a login script may print before it
        except (IndexError, ValueError):
            raise Unavailable(_why(spec, done.exit_status, str(done.stderr or ""))) from None
        if "error" in answer:
            raise Unavailable(f"{spec.name}: {answer['error']}")
        return str(answer["socket"])


def remote_document(config: ClusterConfig, spec: NodeSpec) -> dict[str, Any]:
    """``node.json`` of a remote node without what only the far side knows (bin, home, socket)."""
    return {
        "cluster": config.cluster,
        "node": spec.name,
        "cpus": spec.cpus,
        "mem_mib": spec.mem_mib,
        "instance_type": spec.instance_type.name,
        "hosts": config.hosts(),
        "isolate": config.isolate,  # so that node names resolve there too
    }


def remote_command(python: str) -> str:
    """The command line that runs the far end, for whatever login shell the user has there."""
    if python.startswith("~/"):
        program = '"$HOME"/' + shlex.quote(python[2:])
    else:
        program = shlex.quote(python)
    return "exec sh -c " + shlex.quote(f"exec {program} -P -m scheduler.provision.remote")


def _why(spec: NodeSpec, status: int | None, stderr: str) -> str:
    """What went wrong when the far end did not even answer."""
    python = spec.ssh.python
    last = next((line for line in reversed(stderr.splitlines()) if line.strip()), "no message")
    if status in (126, 127):
        return f"{spec.name}: no usable python {python!r} there ({last}); set the key python"
    if "No module named" in stderr:
        return f"{spec.name}: clusterctl is not installed for {python} there ({last})"
    if "option: -P" in stderr:
        return f"{spec.name}: {python} there is older than Python 3.11"
    return f"{spec.name}: {python} there ended with status {status}: {last}"


def _scan(spec: NodeSpec) -> str:
    return (
        f"get it with: ssh-keyscan -p {spec.ssh.port} {spec.address} (compare the fingerprint "
        "with the host's own) and add it to that file"
    )


def _text(error: BaseException) -> str:
    if isinstance(error, asyncssh.Error):
        return str(error.reason)
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno) if error.errno > 0 else str(error.strerror)
    return str(error) or type(error).__name__


async def _drop(peer: _Peer) -> None:
    connection, peer.connection = peer.connection, None
    if connection is not None:
        connection.abort()
        await connection.wait_closed()
