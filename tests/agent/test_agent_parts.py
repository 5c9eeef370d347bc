"""Small parts: order, environment, PMI server, journal, streams."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from nodeagent import tasks
from nodeagent.journal import Journal
from nodeagent.order import Key, Order, parse_key, parse_order
from nodeagent.pmi import PmiServer, process_mapping
from nodeagent.stepio import BUFFER_MAX, WINDOW, OutStream, Stdin
from nodeagent.taskenv import NodeConfig, common, cores_of_task, of_task, ranges
from scheduler.api import agentwire as aw
from scheduler.api.records import Payload, TaskLayout
from tests.agent.rig import ROOT


def test_order_has_the_fields_of_launch() -> None:
    """So that nothing the controller sends is lost on the way to the supervisor."""
    defaults = {
        field.name: field.default_factory()
        if field.default_factory is not msgspec.NODEFAULT
        else field.default
        for field in msgspec.structs.fields(aw.Launch)
        if not field.required
    }
    del defaults["payload"]
    body = msgspec.json.encode(
        aw.Launch(
            job_id=1,
            step_id="batch",
            attempt=2,
            uid=3,
            gid=4,
            layout=TaskLayout(nodes=["a"], tasks=[[0]]),
            node_index=0,
            tasks=[0],
            payload=Payload(script="x", argv=["y"]),
        )
    )
    order = parse_order(body)
    assert {name: getattr(order, name) for name in defaults} == defaults
    assert (order.nodes, order.node_tasks) == (["a"], [[0]])
    assert (order.script, order.script_args) == ("x", ["y"])
    assert str(order.key) == "1.batch.2"
    assert parse_key("1.batch.2") == Key(1, "batch", 2)


def test_fork_server_stays_light() -> None:
    """What it imports is copied page by page in every fork."""
    program = (
        "import sys, nodeagent.forkserver\n"
        "heavy = {'asyncio', 'msgspec', 'subprocess', 'logging', 'psutil', 'numpy', 'threading'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def make_order(**fields: object) -> Order:
    values: dict[str, object] = {
        "job_id": 1,
        "step_id": "0",
        "attempt": 1,
        "uid": os.getuid(),
        "gid": os.getgid(),
        "node_index": 0,
        "tasks": [0],
        "nodes": ["n1"],
        "node_tasks": [[0]],
        **fields,
    }
    return Order(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([3], "3"), ([0, 1, 2, 6], "0-2,6"), ([5, 4, 9, 10], "4-5,9-10")],
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


@pytest.mark.parametrize(
    ("cores", "tasks", "shares"),
    [
        ([0, 1, 2, 3], 2, [[0, 1], [2, 3]]),
        ([4, 5, 6], 2, [[4, 5, 6], [4, 5, 6]]),
        ([7], 2, [[7], [7]]),
        ([], 2, [[], []]),
    ],
)
def test_cores_are_split_evenly_or_shared(
    cores: list[int], tasks: int, shares: list[list[int]]
) -> None:
    assert [cores_of_task(cores, rank, tasks) for rank in range(tasks)] == shares


def test_environment_of_nested_steps() -> None:
    """What an outer step set for itself does not pass for the user's wish in an inner one."""
    config = NodeConfig(dir="/n", cluster="c", node="n1", bin="/n/bin", home="/h", socket="/s")
    outer = common(make_order(script="x", cpus_per_task=1), config)
    inner = common(make_order(env=outer, cpus_per_task=2), config)
    assert outer["OMP_NUM_THREADS"] == "1"
    assert inner["OMP_NUM_THREADS"] == str(min(2, os.cpu_count() or 1))
    assert outer["PATH"].startswith("/n/bin:/usr/local/bin")
    assert inner["PATH"] == outer["PATH"]
    assert (inner["CLUSTERCTL_HOME"], inner["CLUSTERCTL_SOCKET"]) == ("/h", "/s")
    theirs = common(make_order(env={**outer, "OMP_NUM_THREADS": "5"}), config)
    assert theirs["OMP_NUM_THREADS"] == "5"
    assert b"A=B" not in of_task({"A=B": "x", "C": "y"}, make_order(), 0)


def test_heavy_yield_when_ranks_outnumber_cpus() -> None:
    many = (os.cpu_count() or 1) + 1
    order = make_order(
        nodes=["n1", "n2"],
        node_tasks=[[0], list(range(1, many))],
        node_hosts={"n1": "m", "n2": "m"},
    )
    config = NodeConfig(dir="/n", cluster="c", node="n1")
    assert common(order, config)["MPIR_CVAR_ENABLE_HEAVY_YIELD"] == "1"
    order.node_hosts = {"n1": "a", "n2": "b"}
    assert "MPIR_CVAR_ENABLE_HEAVY_YIELD" not in common(order, config)


@pytest.mark.parametrize(
    ("tasks", "hosts", "mapping"),
    [
        ([[0, 1, 2], [3]], {}, "(vector,(0,1,3),(1,1,1))"),
        ([[0, 1], [2, 3]], {}, "(vector,(0,2,2))"),
        ([[0, 1], [2, 3]], {"a": "m", "b": "m"}, "(vector,(0,1,4))"),
        ([[0, 2], [1, 3]], {}, "(vector,(0,2,1))"),
        ([[0, 3], [1], [2]], {}, "(vector,(0,3,1),(0,1,1))"),
        ([[0, 1], [2, 3], [4, 5]], {"b": "a"}, "(vector,(0,1,4),(1,1,2))"),
    ],
)
def test_process_mapping(tasks: list[list[int]], hosts: dict[str, str], mapping: str) -> None:
    nodes = ["a", "b", "c"][: len(tasks)]
    assert process_mapping(nodes, tasks, hosts) == mapping


class Client:
    """A rank that speaks by hand."""

    def __init__(self, server: PmiServer, rank: int) -> None:
        mine, theirs = socket.socketpair()
        self.sock = mine
        self.sock.settimeout(5)
        self.server = server
        self.rank = server.add(rank, theirs)

    def ask(self, line: str) -> str:
        self.sock.sendall(line.encode() + b"\n")
        self.server.readable(self.rank)
        return self.sock.recv(4096).decode().rstrip("\n")


def make_server(size: int, *, one_node: bool) -> tuple[PmiServer, list[tuple[int, dict[str, str]]]]:
    exchanged: list[tuple[int, dict[str, str]]] = []
    server = PmiServer(
        kvsname="kvs",
        size=size,
        mapping="(vector,(0,1,2))",
        one_node=one_node,
        exchange=lambda seq, puts: exchanged.append((seq, puts)),
        on_abort=lambda rank, code: exchanged.append((-rank - 1, {"abort": str(code)})),
    )
    return server, exchanged


def test_pmi_conversation() -> None:
    server, exchanged = make_server(2, one_node=False)
    one, two = Client(server, 0), Client(server, 1)
    assert one.ask("cmd=init pmi_version=1 pmi_subversion=1").endswith("rc=0")
    assert one.ask("cmd=init pmi_version=2 pmi_subversion=0").endswith("rc=-1")
    assert "kvsname_max=256" in one.ask("cmd=get_maxes")
    assert one.ask("cmd=get_my_kvsname").endswith("kvsname=kvs")
    assert one.ask("cmd=get_appnum") == "cmd=appnum rc=0 appnum=0"
    assert one.ask("cmd=get_universe_size").endswith("size=2")
    got = one.ask("cmd=get kvsname=kvs key=PMI_process_mapping")
    assert got == "cmd=get_result rc=0 msg=success value=(vector,(0,1,2))"
    assert "rc=0" in one.ask("cmd=put kvsname=kvs key=k value=a b")
    assert "rc=-1" in one.ask("cmd=put kvsname=other key=k value=x")
    assert "rc=-1" in one.ask("cmd=put kvsname=kvs key=k value=" + "x" * 2000)
    assert "rc=-1" in one.ask("cmd=get kvsname=kvs key=nosuch")
    assert "rc=-1 msg=unknown_command" in one.ask("cmd=dance")
    assert "rc=-1" in one.ask("mcmd=spawn\nnprocs=1\nexecname=x\nendcmd")
    assert "rc=-1 msg=no_name_service" in one.ask("cmd=publish_name service=s port=p")
    one.sock.sendall(b"cmd=barrier_in\n")
    server.readable(one.rank)
    assert exchanged == []
    two.sock.sendall(b"cmd=barrier_in\n")
    server.readable(two.rank)
    assert exchanged == [(0, {"k": "a b"})]
    server.barrier_out(1, {})  # another barrier's answer
    server.barrier_out(0, {"k": "a b", "other": "far"})
    assert one.sock.recv(100) == two.sock.recv(100) == b"cmd=barrier_out rc=0\n"
    server.barrier_out(0, {})  # repeated
    assert two.ask("cmd=get kvsname=kvs key=other").endswith("value=far")
    assert one.ask("cmd=finalize") == "cmd=finalize_ack rc=0"
    assert not one.rank.active
    two.sock.sendall(b"cmd=abort exitcode=3\n")
    server.readable(two.rank)
    assert exchanged[-1] == (-2, {"abort": "3"})
    assert two.rank.aborted == 3
    server.close()


def test_pmi_names_on_one_node_and_nonsense() -> None:
    server, _ = make_server(1, one_node=True)
    one = Client(server, 0)
    assert "rc=-1" in one.ask("cmd=lookup_name service=s")
    assert "rc=0" in one.ask("cmd=publish_name service=s port=p1")
    assert one.ask("cmd=lookup_name service=s").endswith("port=p1")
    assert "rc=0" in one.ask("cmd=unpublish_name service=s")
    assert one.ask("cmd=barrier_in") == "cmd=barrier_out rc=0"
    one.sock.sendall(b"x" * 40_000)
    for _ in range(3):
        server.readable(one.rank)
        one.sock.setblocking(False)
        try:
            one.sock.sendall(b"x" * 40_000)
        except OSError:
            break
    assert one.rank.sock is None


def test_journal_claim(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    journal.begin("g1", others_enter=False)
    key = Key(4, "batch", 1)
    files = {"stepd.json": (b'{"pid": 1}', 0o600)}
    assert journal.claim(key, files, generation="g1", owner=None)
    assert not journal.claim(key, files, generation="g1", owner=None)
    journal.begin("g2", others_enter=False)
    late = Key(5, "batch", 1)
    assert not journal.claim(late, files, generation="g1", owner=None)
    assert not journal.has(late)
    (tmp_path / "spool" / "rubbish").mkdir()
    assert list(journal.steps()) == [(key, {"pid": 1})]
    journal.write_exit(key, b'{"half')
    assert journal.read(key, "exit.json") is None
    journal.drop(key)
    journal.drop(key)
    assert not journal.has(key)


def test_stream_keeps_its_place() -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    stream = OutStream(0, 1, reader)
    os.write(writer, b"x" * 60_000)
    while stream.read():
        pass
    for _ in range(BUFFER_MAX // 60_000 + 1):
        stream.write(b"y" * 60_000)
    assert stream.full
    total = 0
    while (message := stream.next_message()) is not None:
        assert message["offset"] == total
        total += len(message["data"])
    assert total == WINDOW
    stream.acknowledge(1000)
    assert stream.next_message() == {
        "type": "Output",
        "task": 0,
        "fd": 1,
        "offset": WINDOW,
        "data": "y" * 1000,
    }
    stream.restart(500)  # less than acknowledged: that is gone
    first = stream.next_message()
    assert first is not None
    assert first["offset"] == 1000
    stream.acknowledge(10**9)
    assert stream.base == stream.end
    os.close(writer)
    assert stream.read() is None
    stream.close()
    assert not stream.delivered
    assert stream.next_message() == {
        "type": "Output",
        "task": 0,
        "fd": 1,
        "offset": stream.end,
        "data": "",
        "eof": True,
    }
    assert stream.delivered


def test_stdin_drops_repeated_parts_and_waits_for_lost_ones() -> None:
    stdin = Stdin()
    stdin.take({"data": "ab", "offset": 0})
    stdin.take({"data": "bc", "offset": 1})
    stdin.take({"data": "zz", "offset": 9})
    assert stdin._next == {None: 3}


def test_a_task_ignores_and_blocks_nothing_its_daemon_did(tmp_path: Path) -> None:
    """``nohup clusterctl up &``: the daemons inherit ignored SIGHUP and SIGINT, tasks do not."""
    seen = tmp_path / "seen"
    old = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGINT)}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    null = os.open(os.devnull, os.O_RDWR)
    fd = os.open(seen, os.O_WRONLY | os.O_CREAT)
    try:
        for number in old:
            signal.signal(number, signal.SIG_IGN)
        argv = [b"grep", b"^Sig[IB]", b"/proc/self/status"]
        spec = tasks.TaskSpec(rank=0, path=b"/bin/grep", argv=argv, env={}, files=(null, fd, fd))
        assert os.waitpid(tasks.start(spec, null, "n1"), 0)[1] == 0
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.close(fd)
        os.close(null)
    masks = [int(line.split()[1], 16) for line in seen.read_text().splitlines()]
    assert masks == [0, 0]
