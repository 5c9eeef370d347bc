"""Local nodes that look like hosts; relay of commands; refusals."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from nodeagent import isolate
from nodeagent.taskenv import NodeConfig
from scheduler.api import agentwire as aw
from scheduler.api.frames import recv_frame, send_frame
from tests.agent.rig import ROOT, Controller, Node, attach, collect, connect, running, wait_for


def namespaces_allowed() -> bool:
    flags = ["--uts", "--mount"] if os.getuid() == 0 else ["--user", "--uts", "--mount"]
    try:
        return subprocess.run(["unshare", *flags, "true"], check=False).returncode == 0
    except FileNotFoundError:
        return False


needs_namespaces = pytest.mark.skipif(not namespaces_allowed(), reason="no namespaces here")


@needs_namespaces
def test_a_node_has_its_own_name_and_hosts(tmp_path: Path) -> None:
    hosts = {"n1": "127.77.0.1"}
    with running(tmp_path / "n1", isolate=True, hosts=hosts) as node:
        link = node.link(hosts={**hosts, "n2": "127.77.0.2"})
        program = (
            "import socket; print(socket.gethostname());"
            "print(socket.gethostbyname('n1'), socket.gethostbyname('n2'))"
        )
        link.send(node.launch(80, sys.executable, "-c", program))
        attach(link, 80)
        text = collect(link, 80, 2)["0:1"].decode().split()
        assert text == ["n1", "127.77.0.1", "127.77.0.2"]
        assert socket.gethostname() != "n1"
        second = node.link(hosts={"n1": "127.77.0.9"})
        second.send(node.launch(81, "cat", "/etc/hosts"))
        attach(second, 81)
        assert b"127.77.0.9\tn1\n" in collect(second, 81, 2)["0:1"]


@needs_namespaces
@pytest.mark.skipif(os.getuid() != 0, reason="drops root's rights to test an ordinary user")
def test_isolation_of_an_ordinary_user() -> None:
    """Through a user namespace: the uid stays, name and hosts are the node's."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        (Path(folder) / "hosts").write_text("127.77.0.3\tn7\n")
        program = (
            "import os, socket\n"
            "from nodeagent import isolate, procs\nfrom nodeagent.taskenv import NodeConfig\n"
            "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            "procs.prctl(4, 1)\n"  # PR_SET_DUMPABLE, as after an exec: /proc/self is ours
            f"print(isolate.enter(NodeConfig(dir={folder!r}, cluster='c', node='n7')))\n"
            "print(os.getuid(), socket.gethostname(), open('/etc/hosts').read(), end='')\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith("unshare: "):
        pytest.skip(f"user namespaces are not allowed: {done.stdout}")
    assert done.stdout == "\n65534 n7 127.77.0.3\tn7\n"


def test_where_it_is_not_allowed_the_reason_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(result: int, what: str) -> None:
        raise PermissionError(1, f"{what}: Operation not permitted")

    monkeypatch.setattr(isolate, "_check", refused)

    class NoLibrary:
        def unshare(self, flags: int) -> int:
            return -1

    monkeypatch.setattr(isolate, "_libc", NoLibrary())
    config = NodeConfig(dir=str(tmp_path), cluster="c", node="n1")
    assert isolate.enter(config) == "unshare: Operation not permitted"


def test_hosts_keep_the_machines_lines() -> None:
    machine = "127.0.0.1 localhost vm\n# comment\n10.0.0.5\tgateway n1\n::1 localhost\n"
    text = isolate.hosts_text({"n1": "127.77.0.1"}, machine)
    lines = text.splitlines()
    assert "127.0.0.1\tvm" in lines
    assert "10.0.0.5\tgateway" in lines
    assert lines[-1] == "127.77.0.1\tn1"


def ask(node: Node, message: dict[str, object]) -> socket.socket:
    sock = connect(node.dir / "agent.sock")
    sock.settimeout(20)
    send_frame(sock, json.dumps(message).encode())
    return sock


def answer(sock: socket.socket) -> dict[str, object]:
    body = recv_frame(sock)
    assert body is not None
    value = json.loads(body)
    assert isinstance(value, dict)
    return value


def test_command_is_relayed_with_its_uid(node: Node, link: Controller) -> None:
    link.until(aw.Register)
    sock = ask(node, {"type": "Ping"})
    request = link.until(aw.RelayRequest)
    assert json.loads(request.data) == {"type": "Ping"}
    assert (request.uid, request.gid) == (os.getuid(), os.getgid())
    link.send(aw.RelayFrame(conn=request.conn, data='{"type": "Pong"}'))
    assert answer(sock) == {"type": "Pong"}
    send_frame(sock, b'{"type": "GetNodes"}')
    assert link.until(aw.RelayRequest).conn == request.conn
    link.send(aw.RelayFrame(conn=request.conn, data='{"type": "Ok"}', close=True))
    assert answer(sock) == {"type": "Ok"}
    assert recv_frame(sock) is None
    other = ask(node, {"type": "Ping"})
    number = link.until(aw.RelayRequest).conn
    other.close()
    closed = link.until(aw.RelayRequest, conn=number)
    assert closed.close


def test_command_without_controller(node: Node) -> None:
    sock = ask(node, {"type": "Ping"})
    assert answer(sock) == {
        "type": "Error",
        "code": "unavailable",
        "message": "Unable to contact slurm controller (connect failure)",
    }
    assert recv_frame(sock) is None


def test_commands_hear_of_a_lost_controller(node: Node, link: Controller) -> None:
    sock = ask(node, {"type": "Ping"})
    link.until(aw.RelayRequest)
    link.close()
    assert answer(sock)["code"] == "unavailable"


@pytest.mark.parametrize("body", [b"not json", b"[1]", b"\xff", b'{"type": "Welcome"}'])
def test_nonsense_does_no_harm(node: Node, body: bytes) -> None:
    sock = connect(node.dir / "agent.sock")
    sock.settimeout(20)
    send_frame(sock, body)
    sock.recv(1000)
    sock.close()
    huge = connect(node.dir / "agent.sock")
    huge.settimeout(20)
    huge.sendall(b"\xff\xff\xff\xff")
    assert huge.recv(10) == b""
    link = node.link()
    link.until(aw.Register)


def test_register_tells_the_node(node: Node) -> None:
    link = node.link()
    register = link.until(aw.Register)
    assert (register.node, register.cpus, register.mem_mib) == ("n1", 2, 1000)
    assert node.process is not None
    assert register.pid == node.process.pid
    assert register.device_cores == []
    assert link.until(aw.Heartbeat).free_mem_mib > 0


def test_devices_are_made(tmp_path: Path) -> None:
    pytest.importorskip("neuron_runtime.devicedir")
    with running(tmp_path / "n1", instance_type="trn1.2xlarge") as node:
        assert node.link().until(aw.Register).device_cores == [2]
        assert (node.dir / "devices").is_dir()


def test_wrong_node_is_refused(node: Node) -> None:
    with pytest.raises((EOFError, ConnectionError)):
        Controller(node.dir, "n9").until(aw.Register)
    wait_for("log", lambda: "this is node n1 of cluster test, not n9 of test" in node.log())


def test_node_json_with_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "node.json").write_text('{"cluster": "c", "node": "n", "cpu": 1}')
    done = subprocess.run(
        [sys.executable, "-m", "nodeagent", "--dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 1
    assert "node.json" in done.stderr
    assert "'cpu'" in done.stderr
