"""Bad input on a real cluster: a clear message, Slurm's exit code, and nothing harmed.

(Damaged NEFFs and checkpoints in all their forms: tests/neuron_compiler and tests/jobs.)
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.live import Cluster, live_cluster, own_home

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180), pytest.mark.xdist_group("badinput")]

TRUE = "#!/bin/bash\ntrue\n"
FAILED = "sbatch: error: Batch job submission failed: "
NOT_THERE = "Requested node configuration is not available"

#: name of a script file -> its bytes
SCRIPTS = {
    "ok.sh": TRUE.encode(),
    "empty.sh": b"",
    "blank.sh": b" \n\n",
    "noshebang.sh": b"echo hello\n",
    "crlf.sh": b"#!/bin/bash\r\ntrue\r\n",
    "nul.sh": b"#!/bin/bash\necho \0\n",
    "directive.sh": b"#!/bin/bash\n#SBATCH --frobnicate=1\ntrue\n",
    "big.sh": b"#!/bin/bash\n#" + b"x" * (5 << 20),
}

#: sbatch's arguments, its exit code, and what it says (all of it, or a part of it)
SBATCH = [
    (["nosuch.sh"], 1, "sbatch: error: Unable to open file nosuch.sh\n"),
    (["empty.sh"], 1, "sbatch: error: Batch script is empty!\n"),
    (["blank.sh"], 1, "sbatch: error: Batch script contains only whitespace!\n"),
    (["adir"], 1, "sbatch: error: Batch script is empty!\n"),  # Slurm's words for a directory
    (["noshebang.sh"], 1, "sbatch: error: line must start with #! followed by the path"),
    (["crlf.sh"], 1, "sbatch: error: Batch script contains DOS line breaks (\\r\\n)\n"),
    (["nul.sh"], 1, "contain a NULL character"),
    (["directive.sh"], 255, "sbatch: unrecognized option '--frobnicate=1'\n"),
    (["big.sh"], 1, FAILED + "Job script exceeds maximum size (4194304 bytes)\n"),
    (["--frobnicate", "ok.sh"], 255, "sbatch: unrecognized option '--frobnicate'\n"),
    (["-N", "abc", "ok.sh"], 255, 'sbatch: error: "abc" is not a valid node count\n'),
    (["-n", "abc", "ok.sh"], 1, "abc"),
    (["-c", "-1", "ok.sh"], 1, "-1"),
    (["--mem=lots", "ok.sh"], 255, "sbatch: error: Invalid --mem specification\n"),
    (["-t", "never", "ok.sh"], 255, "sbatch: error: Invalid --time specification\n"),
    (["--begin=never", "ok.sh"], 255, "sbatch: error: Invalid --begin specification\n"),
    (["--signal=NOPE", "ok.sh"], 255, "sbatch: error: Invalid --signal specification\n"),
    (["-a", "1-", "ok.sh"], 1, FAILED + "Invalid job array specification\n"),
    (["-d", "afterok:x", "ok.sh"], 1, FAILED + "Job dependency problem\n"),
    (["-p", "nope", "ok.sh"], 1, FAILED + "Invalid partition name specified\n"),
    (["-w", "nope", "ok.sh"], 1, FAILED + "Invalid node name specified\n"),
    (["--gres=gpu:1", "ok.sh"], 1, "Invalid generic resource (gres) specification\n"),
    (["-N", "99", "ok.sh"], 1, "sbatch: error: 99 nodes asked for, partition main has 4\n"),
    (["-n", "99999", "ok.sh"], 1, "(4 nodes, 512 CPUs) cannot hold it"),
    (["-c", "999", "ok.sh"], 1, "999 CPUs asked for, the most there is is 128 on one node\n"),
    (["--mem=99T", "ok.sh"], 1, "the most there is is 524288 on one node\n" + FAILED + NOT_THERE),
    (["--gres=neuron:17", "ok.sh"], 1, "17 neuron devices asked for, the most there is is 16"),
    (["--gres=neuroncore:33", "ok.sh"], 1, "33 neuron cores asked for, the most there is is 32"),
]

#: a command about a job or node that does not exist, its exit code, and what it says
UNKNOWN = [
    ("scontrol show job 99999", 1, "slurm_load_jobs error: Invalid job id specified"),
    ("squeue -j 99999", 1, "slurm_load_jobs error: Invalid job id specified"),
    ("scancel 99999", 0, ""),
    ("scancel abc", 1, "scancel: error: Invalid job id abc"),
    ("scontrol hold 99999", 1, "Invalid job id specified"),
    ("scontrol release 99999", 1, "Invalid job id specified"),
    ("scontrol requeue 99999", 1, "Invalid job id specified"),
    ("scontrol update jobid=99999 timelimit=5", 1, "Invalid job id specified"),
    ("sacct -n -j 99999", 0, ""),
    ("sacct -j abc", 1, "sacct: fatal: Bad job/step specified: abc"),
    ("srun --jobid=99999 true", 1, "Invalid job id specified"),
    ("clusterctl logs 99999", 1, "clusterctl: error: no job 99999 is known"),
    ("scontrol show node nope", 1, "Node nope not found"),
    ("scontrol update nodename=nope state=drain reason=x", 1, "Invalid node name specified"),
    ("sinfo --frobnicate", 1, "unrecognized option"),
    ("squeue --frobnicate", 1, "unrecognized option"),
]


@pytest.fixture(scope="module")
def scripts(cluster: Cluster) -> Cluster:
    for name, body in SCRIPTS.items():
        (cluster.work / name).write_bytes(body)
    (cluster.work / "adir").mkdir()
    return cluster


@pytest.fixture(autouse=True, scope="module")
def unharmed(cluster: Cluster) -> Iterator[None]:
    """After all of it: the same controller, and no job that should not be there."""
    before = cluster.controller_pid()
    yield
    assert cluster.status()["controller"]["pid"] == before
    assert cluster.run("squeue", "-h").stdout == ""


@pytest.mark.parametrize(("arguments", "code", "text"), SBATCH, ids=lambda v: str(v)[:40])
def test_sbatch_refuses(scripts: Cluster, arguments: list[str], code: int, text: str) -> None:
    jobs = scripts.status()["jobs"]
    done = scripts.run("sbatch", *arguments, rc=code)
    assert text in done.stderr
    assert done.stdout == ""
    assert scripts.status()["jobs"] == jobs  # a refusal leaves nothing behind


@pytest.mark.parametrize(("command", "code", "text"), UNKNOWN, ids=lambda v: str(v)[:40])
def test_what_does_not_exist(cluster: Cluster, command: str, code: int, text: str) -> None:
    argv = command.split()
    run = cluster.ctl if argv[0] == "clusterctl" else cluster.run
    done = run(*(argv[1:] if argv[0] == "clusterctl" else argv), rc=code)
    assert text in done.stdout + done.stderr
    assert text or done.stdout + done.stderr == ""


def test_unwritable_output_is_named(cluster: Cluster) -> None:
    j = cluster.sbatch("-o", "/nonexistent/x.out", script="true\n")
    cluster.wait_state(j, "FAILED")
    shown = cluster.show(j)
    assert "JobState=FAILED Reason=JobLaunchFailure" in shown
    assert "ExitCode=0:53" in shown
    assert "Could not open /nonexistent/x.out: No such file or directory\n" in shown


def test_names_that_are_not_utf8(cluster: Cluster) -> None:
    name, folder = b"n\xff\xfe", os.fsencode(cluster.work) + b"/d\xe9"
    os.mkdir(folder)
    script = folder + b"/s\xff.sh"
    Path(os.fsdecode(script)).write_text("#!/bin/bash\necho there\n")
    argv = [b"sbatch", b"--parsable", b"--wait", b"-J", name, b"-o", b"o\xff.out", script]
    done = subprocess.run(argv, env=cluster.env, cwd=folder, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert Path(os.fsdecode(folder + b"/o\xff.out")).read_text() == "there\n"
    j = done.stdout.strip()
    listed = [b"sacct", b"-nXP", b"-j", j, b"-o", b"JobName,State"]
    done = subprocess.run(listed, env=cluster.env, capture_output=True, timeout=60, check=True)
    assert done.stdout == "n\ufffd\ufffd|COMPLETED\n".encode()


def test_second_controller_is_refused(cluster: Cluster) -> None:
    done = cluster.run(
        sys.executable, "-m", "scheduler", "--home", str(cluster.home), rc=None, timeout_s=30
    )
    assert done.returncode != 0
    assert str(cluster.controller_pid()) in done.stderr
    assert "Traceback" not in done.stderr
    cluster.run("sbatch", "--wait", "-o", "/dev/null", "--wrap", "true")


def test_damaged_neff_is_named(cluster: Cluster) -> None:
    out = cluster.work / "neff"
    out.mkdir()
    for name in ("train.neff", "eval.neff"):
        (out / name).write_bytes(b"not a neff")
    argv = ["srun", "-n2", "--gres=neuron:1", sys.executable, "-m", "jobs.train", "run"]
    done = cluster.run(*argv, "--out", str(out), rc=None)
    assert done.returncode == 1
    assert "train.neff: truncated" in done.stderr
    assert "Traceback" not in done.stderr


# ------------------------------------------------------------ clusters that are harmed


def test_no_partition_limits_enforced(tmp_path: Path) -> None:
    """``enforce_part_limits = "NO"``: Slurm's default, the job waits and says why."""
    config = (
        '[scheduling]\nenforce_part_limits = "NO"\n'
        '[nodes."n[1-2]"]\ninstance_type = "trn1.2xlarge"\n'
    )
    with live_cluster(tmp_path, config=config) as c:
        j = c.sbatch("-N", "99", "--wrap", "true")
        assert c.run("squeue", "-h", "-o", "%t %r", "-j", j).stdout == "PD PartitionConfig\n"
        c.run("scancel", j)


COMMANDS = ["squeue", "sinfo", "scontrol show nodes", "scancel 1", "sacct"]


def test_controller_not_running_and_stale_socket(fresh: Cluster) -> None:
    j = fresh.sbatch("-H", "--wrap", "true")
    fresh.kill_controller()
    for command in COMMANDS:
        said = fresh.run(*command.split(), rc=1).stderr
        assert "Unable to contact slurm controller" in said, command
        assert "stale socket" in said
        assert "clusterctl up" in said
    fresh.ctl("up")
    assert fresh.run("squeue", "-h", "-o", "%i").stdout == f"{j}\n"
    fresh.ctl("down")
    for command in COMMANDS:
        said = fresh.run(*command.split(), rc=1).stderr
        assert "no cluster is running" in said, command
    fresh.ctl("up")
    assert fresh.run("squeue", "-h", "-o", "%i").stdout == f"{j}\n"
    fresh.run("scancel", j)


def test_state_of_a_newer_version(fresh: Cluster) -> None:
    j = fresh.sbatch("-H", "--wrap", "true")
    fresh.ctl("down")
    db = fresh.home / "state.db"
    with sqlite3.connect(db) as conn:
        version = conn.execute("PRAGMA user_version").fetchone()[0]
        conn.execute("PRAGMA user_version = 999")
    done = fresh.ctl("up", rc=1)
    assert "newer version of clusterctl" in done.stderr
    assert "Traceback" not in done.stderr
    assert not fresh.pids("")  # nothing was left half started
    with sqlite3.connect(db) as conn:
        conn.execute(f"PRAGMA user_version = {version}")
    fresh.ctl("up")
    assert fresh.run("squeue", "-h", "-o", "%i").stdout == f"{j}\n"
    fresh.run("scancel", j)


#: Runs in a mount namespace of its own: the state directory is a small disk of its own.
FULL_DISK = """
set -eu
mount -t tmpfs -o size=48m none "$CLUSTERCTL_HOME"
trap 'rm -f "$CLUSTERCTL_HOME/filler"; clusterctl down >&2' EXIT
clusterctl up --nodes 1 --spares 0 >&2
sbatch --parsable -H --wrap true > before
pid=$(clusterctl status --json)
dd if=/dev/zero of="$CLUSTERCTL_HOME/filler" bs=64k >/dev/null 2>&1 || true
dd if=/dev/zero of="$CLUSTERCTL_HOME/filler" bs=1 oflag=append conv=notrunc count=70000 \\
    >/dev/null 2>&1 || true
refused=no
for i in $(seq 50); do
    if ! sbatch --parsable -o /dev/null --wrap true >> accepted 2> said; then
        refused=yes; break
    fi
done
echo $refused > refused
squeue -h -o %i > during
rm "$CLUSTERCTL_HOME/filler"
for i in $(seq 100); do
    if sbatch --parsable --wait -o /dev/null --wrap true > after 2> after.said; then break; fi
    sleep 0.1
done
sacct -nXP -o JobID,State > jobs
echo "$pid" > status.before
clusterctl status --json > status.after
"""


def can_mount() -> bool:
    probe = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return (
        shutil.which("unshare") is not None
        and subprocess.run(probe, capture_output=True, check=False).returncode == 0
    )


def test_full_disk(tmp_path: Path) -> None:
    if not can_mount():
        pytest.skip("no mount namespace here (tests/shell has a full disk without one)")
    with own_home(tmp_path) as c:
        c.run("unshare", "--mount", "bash", "-c", FULL_DISK, timeout_s=120)
        assert not c.pids("")
    work = c.work

    def lines(name: str) -> list[str]:
        return (work / name).read_text().split()

    assert lines("refused") == ["yes"]
    said = (work / "said").read_text()
    assert said.startswith(FAILED)
    assert "No space left on device" in said
    assert "nothing was changed" in said
    held, accepted, after = lines("before"), lines("accepted"), lines("after")
    assert set(held + accepted) >= set(lines("during")) >= set(held)
    assert len(after) == 1
    ended = dict(line.split("|") for line in lines("jobs"))
    assert {j: ended[j] for j in accepted + after} == dict.fromkeys(accepted + after, "COMPLETED")
    assert set(ended) == {*held, *accepted, *after}
    before, now = (
        json.loads((work / f"status.{n}").read_text())["controller"]["pid"]
        for n in ("before", "after")
    )
    assert before == now
