"""Ranks: PMI-1 wire-up on one node and over two agents, death of ranks."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent import procs
from scheduler.api import agentwire as aw
from scheduler.api.records import TaskLayout
from tests.agent.rig import Controller, Node, attach, running

pytest.importorskip("mpi4py")

HELLO = """
from mpi4py import MPI
comm = MPI.COMM_WORLD
total = comm.allreduce(comm.rank)
comm.Barrier()
print(f"{comm.rank}/{comm.size} {total}", flush=True)
"""


def segments() -> set[str]:
    """MPICH segments of this machine that no process uses."""
    found = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if name.startswith("mpich_shm")}
    for one in procs.all_stats():
        found -= procs.segments_in_use(one.pid)
    return found


class Fabric(threading.Thread):
    """The controller's part for a step over several nodes: relays barriers."""

    def __init__(self, links: dict[str, Controller]) -> None:
        super().__init__(daemon=True)
        self.links = links
        self.waiting: dict[int, dict[str, dict[str, str]]] = {}
        self.lock = threading.Lock()
        self.barriers = 0

    def barrier(self, node: str, message: aw.PmiBarrierIn) -> None:
        with self.lock:
            entered = self.waiting.setdefault(message.seq, {})
            entered[node] = message.kvs
            if len(entered) < len(self.links):
                return
            self.barriers += 1
            kvs = {key: value for pairs in entered.values() for key, value in pairs.items()}
            for link in self.links.values():
                out = aw.PmiBarrierOut(
                    job_id=message.job_id,
                    step_id=message.step_id,
                    attempt=message.attempt,
                    seq=message.seq,
                    kvs=kvs,
                )
                link.send(out)
                link.send(out)  # a repeated answer does no harm


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[Node]]:
    with running(tmp_path / "n1", "n1") as first, running(tmp_path / "n2", "n2") as second:
        yield [first, second]


def start_pair(
    pair: list[Node], job: int, program: str, ranks: list[list[int]], hosts: dict[str, str]
) -> tuple[dict[str, Controller], Fabric]:
    links = {node.name: node.link() for node in pair}
    layout = TaskLayout(nodes=["n1", "n2"], tasks=ranks)
    for index, node in enumerate(pair):
        launch = node.launch(
            job,
            sys.executable,
            "-c",
            program,
            tasks=ranks[index],
            layout=layout,
            node_index=index,
            node_hosts=hosts,
            mpi="pmi1",
        )
        links[node.name].send(launch)
        attach(links[node.name], job)
    return links, Fabric(links)


def relay(fabric: Fabric, node: str, link: Controller, streams: int, out: dict[str, bytes]) -> None:
    """Read a link: barriers go to the fabric, output is kept and acknowledged."""
    ended = 0
    while ended < streams:
        message = link.read()
        if isinstance(message, aw.PmiBarrierIn):
            fabric.barrier(node, message)
        elif isinstance(message, aw.Output):
            name = f"{message.task}:{message.fd}"
            out[name] = out.get(name, b"") + message.data.encode()
            ended += message.eof
            with fabric.lock:
                link.send(
                    aw.OutputAck(
                        job_id=message.job_id,
                        step_id=message.step_id,
                        attempt=1,
                        offsets={name: len(out[name])},
                    )
                )


def run_pair(fabric: Fabric, links: dict[str, Controller], counts: list[int]) -> dict[str, bytes]:
    out: dict[str, bytes] = {}
    threads = [
        threading.Thread(target=relay, args=(fabric, node, link, 2 * count, out), daemon=True)
        for (node, link), count in zip(links.items(), counts, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), f"ranks hang; output so far: {out}"
    return out


@pytest.mark.parametrize("hosts", [{"n1": "m", "n2": "m"}, {"n1": "a", "n2": "b"}])
def test_four_ranks_on_two_nodes(pair: list[Node], hosts: dict[str, str]) -> None:
    """With unequal task counts; as one shared machine and as two."""
    before = segments()
    links, fabric = start_pair(pair, 70, HELLO, [[0, 1, 2], [3]], hosts)
    out = run_pair(fabric, links, [3, 1])
    assert {f"{rank}:1": out[f"{rank}:1"] for rank in range(4)} == {
        f"{rank}:1": b"%d/4 6\n" % rank for rank in range(4)
    }
    assert fabric.barriers >= 1
    for link in links.values():
        ended = next(iter(link.all(aw.StepEnded)), None) or link.until(aw.StepEnded)
        assert [(one.code, one.signal, one.in_mpi) for one in ended.exits] == [(0, 0, False)] * len(
            ended.exits
        )
    assert segments() <= before


def test_cyclic_ranks(pair: list[Node]) -> None:
    links, fabric = start_pair(pair, 71, HELLO, [[0, 2], [1, 3]], {"n1": "m", "n2": "m"})
    out = run_pair(fabric, links, [2, 2])
    assert out["3:1"] == b"3/4 6\n"


def test_death_of_a_rank_ends_the_step(node: Node, link: Controller) -> None:
    """The others wait in a barrier for ever; they are ended and the first failure is told."""
    before = segments()
    program = (
        "from mpi4py import MPI\nimport os, signal\n"
        "if MPI.COMM_WORLD.rank == 1:\n    print('dying', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "MPI.COMM_WORLD.Barrier()\n"
    )
    link.send(node.launch(72, sys.executable, "-c", program, ntasks=3, mpi="pmi1"))
    attach(link, 72)
    # The news of the death may come before the last output: nothing else is waited for first.
    first = link.until(aw.TasksExited).exits[0]
    assert (first.task, first.signal, first.in_mpi) == (1, signal.SIGKILL, True)
    ended = link.until(aw.StepEnded)
    order = sorted(ended.exits, key=lambda one: one.at_s)
    assert order[0].task == 1
    assert all(one.signal == signal.SIGKILL for one in order)
    assert segments() <= before


def test_abort_keeps_the_code(node: Node, link: Controller) -> None:
    program = (
        "from mpi4py import MPI\n"
        "if MPI.COMM_WORLD.rank == 0:\n    MPI.COMM_WORLD.Abort(7)\nMPI.COMM_WORLD.Barrier()\n"
    )
    link.send(node.launch(73, sys.executable, "-c", program, ntasks=2, mpi="pmi1"))
    ended = link.until(aw.StepEnded)
    exits = {one.task: one for one in ended.exits}
    assert (exits[0].code, exits[0].in_mpi) == (7, True)
    assert exits[1].signal == signal.SIGKILL
    assert exits[0].at_s <= exits[1].at_s


def test_a_rank_that_never_enters_mpi(node: Node, link: Controller) -> None:
    """The world can never be complete: the others are not left waiting."""
    program = (
        "import os, sys\nif os.environ['PMI_RANK'] == '0':\n    sys.exit(3)\n"
        "from mpi4py import MPI\n"
    )
    link.send(node.launch(74, sys.executable, "-c", program, ntasks=2, mpi="pmi1"))
    ended = link.until(aw.StepEnded)
    exits = {one.task: (one.code, one.signal) for one in ended.exits}
    assert exits == {0: (3, 0), 1: (0, signal.SIGKILL)}


def test_agent_killed_during_wire_up(pair: list[Node]) -> None:
    """The barrier is said again by the supervisor to the new agent and answered."""
    hosts = {"n1": "m", "n2": "m"}
    links, fabric = start_pair(pair, 75, HELLO, [[0], [1]], hosts)
    links["n1"].until(aw.PmiBarrierIn)
    pair[0].kill()
    pair[0].start()
    links["n1"] = pair[0].link()
    attach(links["n1"], 75)
    out = run_pair(fabric, links, [1, 1])
    assert out["0:1"] == b"0/2 1\n"
    assert out["1:1"] == b"1/2 1\n"
