"""Warm process of the agent that forks one supervisor per step.

Run as ``python -m nodeagent.forkserver NODE_DIR GENERATION FD``.  FD is a socket to the agent:
frames with a ``Launch`` come down; ``Ready``, ``ForkFailed`` and ``Exited`` (a supervisor that
ended badly) go up.  When the agent closes it (or dies) the fork server ends; supervisors go on.

It is the subreaper of its supervisors: when one is killed, what it ran falls to the fork
server, which ends it - the only way to find a process that has changed session and
environment.  Single-threaded, so that fork is safe; few imports, so that fork is cheap.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from typing import Any

from nodeagent import isolate, procs
from nodeagent.agentlink import AgentLink
from nodeagent.journal import SCRIPT, Journal
from nodeagent.order import Key, Order, parse_order
from nodeagent.stepd import Supervisor
from nodeagent.taskenv import NodeConfig
from scheduler.api.frames import recv_frame, send_frame
from scheduler.api.text import unpack

SUPERVISOR_SOCKET = "steps.sock"


def load_config(node_dir: str) -> NodeConfig:
    """NODE_DIR/node.json.  Raises ``ValueError`` naming the file and what is wrong with it."""
    path = os.path.join(node_dir, "node.json")
    try:
        with open(path, "rb") as file:
            raw = json.load(file)
        return NodeConfig(dir=node_dir, **raw)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None


def supervise(body: bytes, config: NodeConfig, generation: str) -> None:
    """Be the supervisor of one step (in the forked child)."""
    order = parse_order(body)
    os.setsid()
    procs.prctl(procs.PR_SET_CHILD_SUBREAPER, 1)
    procs.prctl(procs.PR_SET_NAME, f"stepd {order.step_name}".encode()[:15])
    # Handlers, not "ignore": tasks would inherit that.
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(signum, lambda number, frame: None)
    journal = Journal(config.dir)
    link = AgentLink(os.path.join(config.dir, SUPERVISOR_SOCKET))
    supervisor = Supervisor(order, config, journal, link)
    own = procs.stat(os.getpid())
    assert own is not None
    identity = {
        "pid": own.pid,
        "start": own.start,
        "boot_id": procs.boot_id(),
        "tasks": order.tasks,
    }
    files: dict[str, tuple[bytes, int]] = {
        "launch.json": (body, 0o600),
        "stepd.json": (json.dumps(identity).encode(), 0o600),
    }
    if order.script is not None:
        files[SCRIPT] = (unpack(order.script), 0o700)
    other_user = (order.uid, order.gid) if order.uid != os.geteuid() else None
    try:
        owner = other_user if os.geteuid() == 0 else None
        if not journal.claim(order.key, files, generation=generation, owner=owner):
            return
    except OSError as error:
        if journal.generation() != generation:
            return  # a new agent has cleared the spool: it is not ours to start any more
        text = os.strerror(error.errno or 0)
        link.connect(time.monotonic())
        link.queue(supervisor.message("Hello", pid=own.pid))
        supervisor.launch_failed(f"spool folder {journal.spool}", text)
        link.flush()
        return
    supervisor.run()


def describe(status: int) -> str:
    """A wait status in words."""
    if os.WIFSIGNALED(status):
        return f"ended by signal {os.WTERMSIG(status)}"
    return f"ended with exit code {os.WEXITSTATUS(status)}"


class ForkServer:
    """Takes orders one after the other."""

    def __init__(self, config: NodeConfig, generation: str, agent: socket.socket) -> None:
        self.config = config
        self.generation = generation
        self.agent = agent
        self.children: dict[int, Key] = {}
        self.selector = selectors.DefaultSelector()

    def _tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            send_frame(self.agent, json.dumps(message).encode())

    def _order(self) -> bool:
        """Handle one frame; False when the agent is gone."""
        try:
            body = recv_frame(self.agent)
        except (OSError, EOFError):
            return False
        if body is None:
            return False
        order: Order | None = None
        try:
            order = parse_order(body)
            pid = os.fork()
        except (OSError, ValueError, KeyError, TypeError) as error:
            if order is None:
                print(f"forkserver: order not understood: {error!r}", file=sys.stderr)
                return True
            self._tell({"type": "ForkFailed", "key": list(order.key), "reason": str(error)})
            return True
        if pid == 0:
            self._child(body)
        self.children[pid] = order.key
        return True

    def _child(self, body: bytes) -> None:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            self.selector.close()
            self.agent.close()
            supervise(body, self.config, self.generation)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        broken = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                break
            key = self.children.pop(pid, None)
            if key is not None and status != 0:
                self._tell({"type": "Exited", "key": list(key), "reason": describe(status)})
                broken = True
        if broken:
            self._end_orphans()

    def _end_orphans(self) -> None:
        """SIGKILL what fell to us from a supervisor that died: all that we did not fork."""
        stats = procs.all_stats()
        own = os.getpid()
        orphans = {one.pid for one in stats if one.ppid == own and one.pid not in self.children}
        if orphans:
            below = procs.descendants(orphans, stats=stats)
            procs.kill_all([one for one in stats if one.pid in orphans] + below)
            signal.setitimer(signal.ITIMER_REAL, 0.02)  # they, too, may just have forked

    def run(self) -> None:
        procs.prctl(procs.PR_SET_CHILD_SUBREAPER, 1)
        procs.prctl(procs.PR_SET_NAME, b"stepd-fork")
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        for signum in (signal.SIGCHLD, signal.SIGALRM):
            signal.signal(signum, lambda number, frame: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self.selector.register(reader, selectors.EVENT_READ)
        self.selector.register(self.agent, selectors.EVENT_READ)
        gc.collect()
        gc.freeze()  # the collector would touch, and so copy, every page after a fork
        while True:
            for key, _ in self.selector.select():
                if key.fd == reader:
                    woken = os.read(reader, 4096)
                    self._reap()
                    if signal.SIGALRM in woken:
                        self._end_orphans()
                elif not self._order():
                    return


def main() -> None:
    node_dir, generation, descriptor = sys.argv[1:]
    config = load_config(node_dir)
    agent = socket.socket(fileno=int(descriptor))
    trouble = isolate.enter(config) if config.isolate else ""
    server = ForkServer(config, generation, agent)
    send_frame(
        agent, json.dumps({"type": "Ready", "pid": os.getpid(), "trouble": trouble}).encode()
    )
    server.run()


if __name__ == "__main__":
    main()
