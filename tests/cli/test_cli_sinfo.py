"""sinfo: text as Slurm prints it for the same nodes."""

from __future__ import annotations

import pytest

from scheduler.api import wire
from tests.cli import views
from tests.cli.conftest import Runner
from tests.cli.fake_controller import FakeController

HEADER = "PARTITION AVAIL  TIMELIMIT  NODES  STATE NODELIST\n"
DEBUG = (
    "debug        up      30:00      1    mix n001\ndebug        up      30:00      1  alloc n002\n"
)


@pytest.fixture(autouse=True)
def fake(controller: FakeController) -> FakeController:
    controller.answers[wire.GetNodes] = wire.Nodes(
        nodes=views.nodes(), partitions=views.partitions(), now_s=views.NOW_S
    )
    return controller


def test_default(run: Runner) -> None:
    assert (
        run("sinfo").out
        == HEADER
        + (
            "main*        up   infinite      1  drain n004\n"
            "main*        up   infinite      1    mix n001\n"
            "main*        up   infinite      1  alloc n002\n"
            "main*        up   infinite      1   idle n003\n"
        )
        + DEBUG
    )


@pytest.mark.parametrize(
    ("argv", "out"),
    [
        (["-p", "debug"], HEADER + DEBUG),
        (["-p", "nosuch"], HEADER),
        (
            ["-t", "idle"],
            HEADER + "main*        up   infinite      1  drain n004\n"
            "main*        up   infinite      1   idle n003\n"
            "debug        up      30:00      0    n/a \n",
        ),
        (
            ["-d"],
            HEADER + "main*        up   infinite      0    n/a \n"
            "debug        up      30:00      0    n/a \n",
        ),
        (
            ["-s"],
            (
                "PARTITION AVAIL  TIMELIMIT   NODES(A/I/O/T) NODELIST\n"
                "main*        up   infinite          2/1/1/4 n[001-004]\n"
                "debug        up      30:00          2/0/0/2 n[001-002]\n"
            ),
        ),
        (
            ["-R"],
            (
                "REASON               USER      TIMESTAMP           NODELIST\n"
                f"bad fan              root      {views.STAMP} n004\n"
            ),
        ),
        (
            ["-N"],
            (
                "NODELIST   NODES PARTITION STATE \n"
                "n001           1     main* mix   \n"
                "n001           1     debug mix   \n"
                "n002           1     main* alloc \n"
                "n002           1     debug alloc \n"
                "n003           1     main* idle  \n"
                "n004           1     main* drain \n"
            ),
        ),
        (["-h", "-p", "main", "-o", "%D %N"], "4 n[001-004]\n"),
        (
            ["-o", "[%5P][%.12N][%.3D]"],
            (
                "[PARTI][    NODELIST][NOD]\n[main*][  n[001-004]][  4]\n"
                "[debug][  n[001-002]][  2]\n"
            ),
        ),
        (["-h", "-N", "-S", "-N", "-o", "%N"], "n004\nn003\nn002\nn002\nn001\nn001\n"),
        (
            ["-h", "-N", "-p", "main", "-O", "NodeList:8,Gres:14,GresUsed:30"],
            (
                "n001    neuron:16     neuron:4                      \n"
                "n002    neuron:16     neuron:16                     \n"
                "n003    neuron:16     neuron:0                      \n"
                "n004    neuron:16     neuron:0                      \n"
            ),
        ),
        (
            ["-h", "-N", "-p", "main", "-o", "%N|%C|%A|%E|%U|%T"],
            (
                "n001|4/12/0/16|1/0|none|Unknown|mixed\n"
                "n002|16/0/0/16|1/0|none|Unknown|allocated\n"
                "n003|0/16/0/16|0/1|none|Unknown|idle\n"
                "n004|0/0/16/16|0/0|bad fan|root(0)|drained\n"
            ),
        ),
        (["-T"], "No reservations in the system\n"),
    ],
)
def test_forms(run: Runner, argv: list[str], out: str) -> None:
    assert run("sinfo", *argv) == (0, out, "")


def test_long(run: Runner) -> None:
    assert run("sinfo", "-l", "-p", "main").out.splitlines()[1:3] == [
        (
            "PARTITION AVAIL  TIMELIMIT   JOB_SIZE ROOT OVERSUBS     GROUPS  NODES       STATE "
            "NODELIST"
        ),
        "main*        up   infinite 1-infinite   no       NO        all      1     drained n004",
    ]
    assert run("sinfo", "-N", "-l").out.splitlines()[1:3] == [
        (
            "NODELIST   NODES PARTITION       STATE CPUS    S:C:T MEMORY TMP_DISK WEIGHT AVAIL_FE "
            "REASON              "
        ),
        (
            "n001           1     main*       mixed 16     16:1:1  65536        0      1   (null) "
            "none                "
        ),
    ]


def test_errors(run: Runner) -> None:
    state = run("sinfo", "-t", "bogus")
    assert state.status == 1
    assert state.err.startswith('sinfo: error: Bad state string: "bogus"\n')
    assert run("sinfo", "-O", "bogus") == (
        0,
        "\n\n",
        "sinfo: error: Invalid job format specification: bogus\n",
    )
    assert run("sinfo", "-h", "-p", "debug", "-o", "%D|%i|") == (
        0,
        "2|%i|\n",
        "Invalid node format specification: i\n",
    )


@pytest.mark.parametrize(
    ("flags", "compact", "full"),
    [
        (["IDLE", "RESERVED"], "resv", "reserved"),
        (["IDLE"], "idle", "idle"),
        (["MIXED", "DRAIN"], "drng", "draining"),
        (["IDLE", "COMPLETING", "DRAIN"], "drng", "draining"),
        (["IDLE", "COMPLETING"], "comp", "completing"),
        (["DOWN", "NOT_RESPONDING"], "down*", "down*"),
        (["DOWN", "DRAIN"], "drain", "drained"),
        (["IDLE", "FAIL"], "fail", "fail"),
        (["ALLOCATED", "FAIL"], "failg", "failing"),
        (["UNKNOWN"], "unk", "unknown"),
    ],
)
def test_state_words(
    run: Runner, fake: FakeController, flags: list[str], compact: str, full: str
) -> None:
    fake.answers[wire.GetNodes] = wire.Nodes(
        nodes=[{"name": "n1", "flags": flags}], partitions=[{"name": "p", "nodes": ["n1"]}]
    )
    assert run("sinfo", "-h", "-o", "%t %T").out == f"{compact} {full}\n"
