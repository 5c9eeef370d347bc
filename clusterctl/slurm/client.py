"""The connection to the controller: one unix socket, frames of JSON.

``_socket`` is used directly: the ``socket`` module loads ``selectors`` and ``enum``, which costs a
command more than its own work does.
"""

from __future__ import annotations

import _socket
import os
import sys

from clusterctl.slurm import jsonlite
from clusterctl.slurm.errors import CommandError, ControllerError, NoController
from scheduler.api.errors import ProtocolError
from scheduler.api.frames import recv_frame, send_frame, unix_address

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: Environment that names the controller's socket or the state directory of the cluster.
ENV_SOCKET = "CLUSTERCTL_SOCKET"
ENV_HOME = "CLUSTERCTL_HOME"

#: Slurm's text when nobody answers.
NO_CONTACT = "Unable to contact slurm controller (connect failure)"

#: Patience of those who wait for a job, however long its controller is away.
FOREVER_S = 10 * 365 * 86400.0


def home() -> str:
    """The state directory of the cluster that the environment names."""
    named = os.environ.get(ENV_HOME)
    if named:
        return os.path.abspath(named)
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(state, "clusterctl")


def socket_path() -> str:
    """The socket on which the controller (or, on a node, the agent's relay) answers."""
    return os.environ.get(ENV_SOCKET) or os.path.join(home(), "controller.sock")


def _hint(path: str, error: OSError) -> str:
    if isinstance(error, PermissionError):
        return f"no permission to use {path}"
    if isinstance(error, FileNotFoundError):
        return f"no cluster is running at {os.path.dirname(path)}: start one with `clusterctl up`"
    return f"nobody answers on {path} (stale socket): start the cluster with `clusterctl up`"


class Connection:
    """One connection; usable as ``with Connection() as link: link.call({...})``."""

    def __init__(self, path: str | None = None) -> None:
        """Raises ``NoController`` when nobody answers."""
        self.path = path or socket_path()
        self.sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
        try:
            address, fd = unix_address(self.path)
            try:
                self.sock.connect(address)
            finally:
                if fd is not None:
                    os.close(fd)
        except OSError as error:
            self.sock.close()
            raise NoController(self.path, _hint(self.path, error)) from None

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        self.sock.close()

    def send(self, message: dict[str, Any]) -> None:
        """Send one message.  Raises ``OSError`` when the connection broke."""
        try:
            send_frame(self.sock, jsonlite.dumps(message))
        except ProtocolError as error:
            raise ControllerError("rejected", str(error)) from None

    def receive(self) -> dict[str, Any]:
        """The next message.  Raises ``EOFError`` or ``OSError`` when the connection broke."""
        body = recv_frame(self.sock)
        if body is None:
            raise EOFError("the controller closed the connection")
        reply: dict[str, Any] = jsonlite.loads(body)
        return reply

    def call(self, message: dict[str, Any]) -> dict[str, Any]:
        """One request, one reply.  Raises ``ControllerError`` for an ``Error`` reply."""
        self.send(message)
        reply = self.receive()
        if reply.get("type") == "Error":
            raise ControllerError(
                reply.get("code", "error"), reply.get("message", ""), reply.get("warning", "")
            )
        return reply


def call(message: dict[str, Any], path: str | None = None) -> dict[str, Any]:
    """One request on a connection of its own.

    Raises ``NoController`` and ``ControllerError``; a connection that breaks counts as
    ``NoController``.
    """
    with Connection(path) as link:
        try:
            return link.call(message)
        except (OSError, EOFError) as error:
            raise NoController(link.path, f"the connection broke ({error})") from None


def call_again(message: dict[str, Any], patience_s: float = 30.0) -> dict[str, Any]:
    """A request that is safe to repeat: sent again while the controller restarts.

    The first connection must succeed (``NoController`` otherwise); after that a broken
    connection is answered by trying again for ``patience_s``.
    """
    import time

    link = Connection()
    end_s: float | None = None
    pause_s = 0.05
    while True:
        try:
            with link:
                return link.call(message)
        except (OSError, EOFError, NoController) as error:
            now_s = time.monotonic()
            end_s = end_s if end_s is not None else now_s + patience_s
            if now_s >= end_s:
                raise NoController(socket_path(), f"the connection broke ({error})") from None
        link = _reconnect(end_s, pause_s)


def _reconnect(end_s: float, pause_s: float) -> Connection:
    """A new connection, tried until ``end_s`` (monotonic).  Raises ``NoController``."""
    import time

    while True:
        try:
            return Connection()
        except NoController:
            if time.monotonic() >= end_s:
                raise
            time.sleep(pause_s)  # a controller that starts offers nothing to wait on
            pause_s = min(pause_s * 2, 1.0)


def reconnect(patience_s: float) -> Connection:
    """A connection to a controller that may be starting.  Raises ``NoController``."""
    import time

    return _reconnect(time.monotonic() + patience_s, 0.02)


def never_started() -> bool:
    """No cluster was ever started in this state directory, and we are in no job."""
    if os.environ.get(ENV_SOCKET) or os.environ.get("SLURM_JOB_ID"):
        return False
    try:
        return not os.listdir(home())
    except FileNotFoundError:
        return True
    except OSError:
        return False


def ensure_cluster(command: str) -> None:
    """Start the local cluster when none was ever started here, saying so in one line.

    Does nothing when a controller answers or when one was started before (then the error of the
    connection tells what to do).  Raises ``CommandError`` when ``clusterctl up`` fails.
    """
    try:
        Connection().close()
        return
    except NoController:
        if not never_started():
            return
    sys.stderr.write(f"{command}: no cluster is running; starting a local one (4 nodes)...\n")
    sys.stderr.flush()
    status = run_up()
    if status != 0:
        raise CommandError(f"{command}: error: `clusterctl up` failed with status {status}")


def run_up() -> int:
    """``clusterctl up --quiet`` in a process of its own; its exit status.

    Its output goes to stderr, so that ``sbatch --parsable`` still prints nothing but the id.
    """
    argv = [sys.executable, "-m", "clusterctl.main", "up", "--quiet"]
    actions = [(os.POSIX_SPAWN_DUP2, 2, 1)]
    pid = os.posix_spawn(sys.executable, argv, os.environ, file_actions=actions)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)
