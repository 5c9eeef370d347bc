"""``clusterctl --host [USER@]HOST[:PORT] VERB ...``: commands for a cluster on another machine.

A private unix socket here stands for the controller's socket there: each connection to it is an
SSH channel that runs ``clusterctl relay`` on HOST.  So the commands are the same, scripts are read
here, and the far controller sees the user who logged in.  Host keys are always checked;
``~/.ssh/config`` is read for HostName, User, Port, IdentityFile and UserKnownHostsFile.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paramiko

from scheduler.api.errors import ClusterError, Rejected, Unavailable

#: The far clusterctl where it is not on the login shell's PATH.
COMMAND_VARIABLE = "CLUSTERCTL_REMOTE_COMMAND"

_CHUNK = 1 << 16
_TIMEOUT_S = 15.0


def parse_host(text: str) -> tuple[str, str, int]:
    """User ("" when not given), host and port (0 when not given) of ``[USER@]HOST[:PORT]``."""
    user, at, rest = text.rpartition("@")
    host, colon, port = rest.partition(":")
    if not host or (at and not user) or (colon and not port.isdecimal()):
        raise Rejected(f"--host: {text!r} is not [USER@]HOST[:PORT]")
    return user, host, int(port or 0)


def _connect(text: str) -> paramiko.SSHClient:
    """Log in.  Raises ``Unavailable`` that says what to do."""
    user, host, port = parse_host(text)
    settings: dict[str, Any] = {}
    file = Path.home() / ".ssh/config"
    if file.is_file():
        settings = dict(paramiko.SSHConfig.from_path(str(file)).lookup(host))
    known = settings.get("userknownhostsfile", str(Path.home() / ".ssh/known_hosts")).split()
    client = paramiko.SSHClient()
    for name in known:
        if os.path.isfile(os.path.expanduser(name)):
            client.load_host_keys(os.path.expanduser(name))
    client.set_missing_host_key_policy(paramiko.RejectPolicy())
    name = settings.get("hostname", host)
    number = port or int(settings.get("port", 22))
    try:
        client.connect(
            name,
            number,
            user or settings.get("user") or None,
            key_filename=[os.path.expanduser(p) for p in settings.get("identityfile", [])] or None,
            timeout=_TIMEOUT_S,
            banner_timeout=_TIMEOUT_S,
            auth_timeout=_TIMEOUT_S,
        )
    except paramiko.AuthenticationException:
        raise Unavailable(f"{host}: login refused (no key of yours is accepted)") from None
    except paramiko.BadHostKeyException:
        raise Unavailable(f"{host}: its host key is not the one in {known[0]}") from None
    except paramiko.SSHException as error:
        hint = f"; log in once with ssh {text}" if "not found in known_hosts" in str(error) else ""
        raise Unavailable(f"{host}: {error}{hint}") from None
    except OSError as error:
        raise Unavailable(f"{host} port {number}: {error.strerror or error}") from None
    return client


def _relay_command() -> str:
    command = os.environ.get(COMMAND_VARIABLE) or "clusterctl"
    program = '"$HOME"/' + shlex.quote(command[2:]) if command[:2] == "~/" else shlex.quote(command)
    return "exec sh -lc " + shlex.quote(f"exec {program} relay")


class _Tunnel:
    """Serves the private socket: one thread accepts, two copy for each connection."""

    def __init__(self, client: paramiko.SSHClient, listener: socket.socket) -> None:
        self._transport = client.get_transport()
        self._listener = listener

    def serve(self) -> None:
        """Accept until the listener is closed."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._carry, args=(connection,), daemon=True).start()

    def open(self) -> paramiko.Channel:
        """A channel that runs the relay.  Raises ``Unavailable``."""
        if self._transport is None:
            raise Unavailable("the SSH connection is gone")
        try:
            channel = self._transport.open_session(timeout=_TIMEOUT_S)
            channel.exec_command(_relay_command())
        except (paramiko.SSHException, OSError) as error:
            raise Unavailable(f"cannot run clusterctl there: {error}") from None
        return channel

    def _carry(self, connection: socket.socket) -> None:
        with connection:
            try:
                channel = self.open()
            except ClusterError:
                return  # the command sees a closed connection
            with channel:
                threading.Thread(target=_upload, args=(connection, channel), daemon=True).start()
                with contextlib.suppress(OSError):
                    while data := channel.recv(_CHUNK):
                        connection.sendall(data)


def _upload(connection: socket.socket, channel: paramiko.Channel) -> None:
    with contextlib.suppress(OSError, paramiko.SSHException):
        while data := connection.recv(_CHUNK):
            channel.sendall(data)
        channel.shutdown_write()


def _check(tunnel: _Tunnel, host: str) -> None:
    """Find out before the command runs whether the far side works.  Raises ``Unavailable``."""
    import msgspec

    from scheduler.api import wire
    from scheduler.api.frames import recv_frame, send_frame

    with tunnel.open() as channel:
        channel.settimeout(_TIMEOUT_S)
        try:
            with contextlib.suppress(OSError):  # the relay may have ended: its stderr says why
                send_frame(channel, msgspec.json.encode(wire.Ping()))
            body = recv_frame(channel)
        except (TimeoutError, EOFError):
            raise Unavailable(f"{host}: the cluster there does not answer") from None
        if body is not None:
            return
        error = channel.makefile_stderr("r").read()
        text = (error.decode("utf-8", "replace") if isinstance(error, bytes) else error).strip()
        status = channel.recv_exit_status()
    if status == 127:
        text += f"; set {COMMAND_VARIABLE} to the path of clusterctl there"
    raise Unavailable(f"{host}: {text or f'clusterctl there ended with status {status}'}")


@contextlib.contextmanager
def tunnel(host: str) -> Iterator[Path]:
    """A socket that stands for the controller's on ``host``.  Raises ``ClusterError``."""
    client = _connect(host)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="clusterctl-") as folder,
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
        ):
            path = Path(folder) / "s"
            listener.bind(str(path))
            listener.listen(16)
            carrier = _Tunnel(client, listener)
            _check(carrier, host)
            threading.Thread(target=carrier.serve, daemon=True).start()
            yield path
            listener.close()
    finally:
        client.close()
