"""A real agent process and a controller played by the test."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from nodeagent import procs
from scheduler.api import agentwire as aw
from scheduler.api.frames import recv_frame, send_frame, unix_address
from scheduler.api.records import Payload, TaskLayout
from scheduler.api.text import pack, unpack
from scheduler.api.wire import PROTOCOL

ROOT = Path(__file__).resolve().parents[2]
T = TypeVar("T")
_decoder = msgspec.json.Decoder(aw.FromAgent)
WAIT_S = 20.0


def wait_for(what: str, test: Callable[[], T], timeout_s: float = WAIT_S) -> T:
    """Poll a condition that no message announces; fails by name."""
    end = time.monotonic() + timeout_s
    while not (value := test()):
        assert time.monotonic() < end, f"no {what} within {timeout_s} s"
        time.sleep(0.01)
    return value


class Controller:
    """One link to an agent."""

    def __init__(self, node_dir: Path, node: str, epoch: int = 1, **welcome: Any) -> None:
        self.sock = connect(node_dir / "agent.sock")
        self.sock.settimeout(WAIT_S)
        self.seen: list[Any] = []
        self.send(
            aw.Welcome(
                protocol=PROTOCOL, cluster="test", node=node, epoch=epoch, heartbeat_s=60, **welcome
            )
        )

    def send(self, message: aw.ToAgent) -> None:
        send_frame(self.sock, msgspec.json.encode(message))

    def read(self) -> Any:
        """The next message; EOFError when the agent closed."""
        body = recv_frame(self.sock)
        if body is None:
            raise EOFError
        message = _decoder.decode(body)
        self.seen.append(message)
        return message

    def until(self, kind: type[T], **fields: Any) -> T:
        """The next message of a kind with these field values, reading past others."""
        while True:
            message = self.read()
            if isinstance(message, kind) and all(
                getattr(message, name) == value for name, value in fields.items()
            ):
                return message

    def all(self, kind: type[T]) -> list[T]:
        return [one for one in self.seen if isinstance(one, kind)]

    def close(self) -> None:
        self.sock.close()


def connect(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    address, folder = unix_address(str(path))
    try:
        sock.connect(address)
    finally:
        if folder is not None:
            os.close(folder)
    return sock


class Node:
    """An agent in a directory of its own."""

    def __init__(self, folder: Path, name: str = "n1", **config: Any) -> None:
        self.dir = folder
        self.name = name
        self.work = folder / "work"
        self.work.mkdir(parents=True)
        values = {"cluster": "test", "node": name, "cpus": 2, "mem_mib": 1000, **config}
        (folder / "node.json").write_text(json.dumps(values))
        self.process: subprocess.Popen[bytes] | None = None
        self.links: list[Controller] = []

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nodeagent", "--dir", str(self.dir)], cwd=ROOT
        )

        def up() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.log()
            with contextlib.suppress(OSError):
                connect(self.dir / "agent.sock").close()
                return True
            return False

        wait_for("agent socket", up)

    def log(self) -> str:
        path = self.dir / "agent.log"
        return path.read_text() if path.exists() else ""

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def link(self, epoch: int = 1, **welcome: Any) -> Controller:
        link = Controller(self.dir, self.name, epoch, **welcome)
        self.links.append(link)
        return link

    def supervisors(self) -> list[tuple[str, int]]:
        """Living supervisors by step."""
        found = []
        for path in sorted((self.dir / "spool").glob("*/stepd.json")):
            identity = json.loads(path.read_text())
            if procs.alive(identity["pid"], identity["start"]):
                found.append((path.parent.name, identity["pid"]))
        return found

    def close(self) -> None:
        """Stop the agent and everything that carries this node's mark."""
        for link in self.links:
            link.close()
        for _, pid in self.supervisors():
            procs.send(pid, signal.SIGKILL)
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        mark = f"@{self.dir}".encode()
        for one in procs.all_stats():
            for entry in procs.environment(one.pid).split(b"\0"):
                if entry.startswith(procs.MARKER) and entry.endswith(mark):
                    procs.send(one.pid, signal.SIGKILL)

    def launch(
        self,
        job: int,
        *command: str | bytes,
        script: str | bytes | None = None,
        step: str = "",
        attempt: int = 1,
        ntasks: int = 1,
        **fields: Any,
    ) -> aw.Launch:
        """A launch message for this node alone (``layout`` may be given)."""
        argv = [pack(one if isinstance(one, bytes) else one.encode()) for one in command]
        payload = None
        if script is not None:
            raw = script if isinstance(script, bytes) else script.encode()
            payload = Payload(script=pack(raw), argv=argv)
            argv = []
        tasks = fields.pop("tasks", list(range(ntasks)))
        values: dict[str, Any] = {
            "layout": TaskLayout(nodes=[self.name], tasks=[tasks]),
            "node_index": 0,
            "env": {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"},
            "work_dir": str(self.work),
            "uid": os.getuid(),
            "gid": os.getgid(),
            "mpi": "none",
            **fields,
        }
        return aw.Launch(
            job_id=job,
            step_id=step or ("0" if script is None else "batch"),
            attempt=attempt,
            tasks=tasks,
            argv=argv,
            payload=payload,
            **values,
        )


def attach(link: Controller, job: int, step: str = "0", **offsets: int) -> None:
    """srun attaches; offsets like ``t0_1=5`` for task 0, stdout."""
    marks = {name[1:].replace("_", ":"): value for name, value in offsets.items()}
    link.send(aw.OutputAck(job_id=job, step_id=step, attempt=1, offsets=marks, attach=True))


def collect(link: Controller, job: int, streams: int, step: str = "0") -> dict[str, bytes]:
    """Read output, acknowledging it, until ``streams`` streams are at their end."""
    texts: dict[str, bytes] = {}
    ended: set[str] = set()
    while len(ended) < streams:
        message = link.until(aw.Output)
        name = f"{message.task}:{message.fd}"
        have = texts.setdefault(name, b"")
        assert message.offset <= len(have), "a gap in the output"
        texts[name] = have[: message.offset] + unpack(message.data)
        if message.eof:
            ended.add(name)
        link.send(
            aw.OutputAck(job_id=job, step_id=step, attempt=1, offsets={name: len(texts[name])})
        )
    return texts


@contextlib.contextmanager
def running(folder: Path, name: str = "n1", **config: Any) -> Iterator[Node]:
    """A started node, cleaned up whatever happens."""
    node = Node(folder, name, **config)
    try:
        node.start()
        yield node
    finally:
        node.close()
