"""What a command may load: the start of a process is most of what it costs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scheduler.api import wire
from tests.cli.fake_controller import FakeController

#: Modules that would cost more than the command's own work.
DENIED = frozenset(
    [
        "argparse",
        "asyncio",
        "click",
        "collections",
        "concurrent",
        "contextlib",
        "ctypes",
        "dataclasses",
        "datetime",
        "decimal",
        "email",
        "enum",
        "fnmatch",
        "functools",
        "glob",
        "hashlib",
        "inspect",
        "json",
        "logging",
        "msgspec",
        "pathlib",
        "pickle",
        "random",
        "re",
        "selectors",
        "shlex",
        "shutil",
        "signal",
        "socket",
        "sqlite3",
        "string",
        "struct",
        "subprocess",
        "tempfile",
        "textwrap",
        "threading",
        "tokenize",
        "traceback",
        "typer",
        "typing",
        "urllib",
        "uuid",
        "weakref",
    ]
)

_PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from clusterctl.slurm.entry import main
status = main({verb!r}, {argv!r})
sys.stdout.flush()
sys.stderr.write("MODULES " + " ".join(sys.modules) + "\\n")
sys.exit(status)
"""

ROOT = str(Path(__file__).resolve().parents[2])

_DONE = {"state": "COMPLETED"}


def _answers(fake: FakeController) -> None:
    job = {"id": 7, "name": "j", "user": "u", "uid": 0, "gid": 0, "group": "g", "state": "RUNNING"}
    fake.answers |= {
        wire.GetJobs: wire.Jobs(jobs=[job], now_s=1.0),
        wire.GetAccounting: wire.Jobs(jobs=[job], now_s=1.0),
        wire.GetNodes: wire.Nodes(
            nodes=[{"name": "n001", "flags": ["IDLE"]}],
            partitions=[{"name": "main", "nodes": ["n001"], "default": True}],
        ),
        wire.Submit: wire.Submitted(job_id=7),
        wire.Cancel: wire.Results(results=[wire.Result(id="7")]),
        wire.CreateStep: wire.StepCreated(
            step_id="0", attempt=1, layout={"nodes": ["n001"], "tasks": [[0]]}
        ),
        wire.AttachStep: [
            wire.StepEvent(output={"task": 0, "fd": 1, "offset": 0, "data": "hi\n"}),
            wire.StepEvent(exits=[{"task": 0}], node="n001"),
            wire.StepEvent(done=_DONE),
        ],
        wire.StepAck: [],
    }


@pytest.mark.parametrize(
    ("verb", "argv"),
    [
        ("squeue", []),
        ("sinfo", []),
        ("scancel", ["7"]),
        ("sacct", ["-j", "7"]),
        ("scontrol", ["show", "job", "7"]),
        ("scontrol", ["show", "hostnames", "n[1-3]"]),
        ("sbatch", ["--wrap", "true"]),
        ("srun", ["--jobid=7", "true"]),
    ],
)
def test_a_command_loads_little(controller: FakeController, verb: str, argv: list[str]) -> None:
    _answers(controller)
    program = _PROGRAM.format(root=ROOT, verb=verb, argv=argv)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "SLURM_CONF": ""},
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded = done.stderr.rpartition("MODULES ")[2].split()
    assert {m.partition(".")[0] for m in loaded} & DENIED == set()
