"""Jobs on a real cluster of local nodes, through the commands."""

from __future__ import annotations

import pytest

from tests.support.live import Cluster, wait_for

pytestmark = pytest.mark.e2e


def test_output_where_slurm_puts_it(cluster: Cluster) -> None:
    j = cluster.sbatch("--wait", script='echo "hello $SLURM_JOB_ID"; echo err >&2; exit 0\n')

    assert (cluster.work / f"slurm-{j}.out").read_text() == f"hello {j}\nerr\n"
    assert cluster.state(j) == "COMPLETED"


@pytest.mark.parametrize(
    ("body", "state", "code"),
    [
        ("exit 3\n", "FAILED", "3:0"),
        ("kill -9 $$\n", "FAILED", "0:9"),
        ("true\n", "COMPLETED", "0:0"),
    ],
)
def test_exit_codes(cluster: Cluster, body: str, state: str, code: str) -> None:
    j = cluster.sbatch("-o", "/dev/null", script=body)
    cluster.wait_state(j, state)

    out = cluster.run("sacct", "-nXP", "-j", j, "-o", "State,ExitCode").stdout.strip()
    assert out == f"{state}|{code}"


def test_srun_prints_node_names_and_master_addr_resolves(cluster: Cluster) -> None:
    body = (
        "srun -N2 hostname | sort\n"
        'addr=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)\n'
        'getent hosts "$addr" | cut -c1-4\n'
    )
    j = cluster.sbatch("--wait", "-N2", script=body)

    assert (cluster.work / f"slurm-{j}.out").read_text() == "trn1-001\ntrn1-002\n127.\n"


def test_rendezvous_over_master_addr(cluster: Cluster) -> None:
    (cluster.work / "rdzv.py").write_text(
        "import os, socket\n"
        "rank, addr = int(os.environ['SLURM_PROCID']), os.environ['MASTER_ADDR']\n"
        "if rank == 0:\n"
        "    s = socket.create_server((addr, int(os.environ['MASTER_PORT'])))\n"
        "    c, _ = s.accept(); print(c.recv(99).decode(), flush=True)\n"
        "else:\n"
        "    while True:\n"
        "        try:\n"
        "            c = socket.create_connection((addr, int(os.environ['MASTER_PORT']))); break\n"
        "        except ConnectionRefusedError: pass\n"
        "    c.sendall(f'rank {rank} here'.encode())\n"
    )
    body = (
        'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)\n'
        "export MASTER_PORT=29511\nsrun python3 rdzv.py\n"
    )
    j = cluster.sbatch("--wait", "-N2", "-t", "1", script=body)

    assert (cluster.work / f"slurm-{j}.out").read_text() == "rank 1 here\n"


def test_mpi_ranks_over_two_nodes(cluster: Cluster) -> None:
    (cluster.work / "sum.py").write_text(
        "from mpi4py import MPI\nc = MPI.COMM_WORLD\n"
        "t = c.allreduce(c.rank)\nif c.rank == 0: print(c.size, t)\n"
    )
    j = cluster.sbatch(
        "--wait", "-N2", "--ntasks-per-node=2", script="srun $CLUSTERCTL_PYTHON sum.py\n"
    )

    assert (cluster.work / f"slurm-{j}.out").read_text() == "4 6\n"


def test_a_dead_rank_ends_the_step_and_is_named(cluster: Cluster) -> None:
    (cluster.work / "die.py").write_text(
        "import os, signal, time\nfrom mpi4py import MPI\nc = MPI.COMM_WORLD\nc.Barrier()\n"
        "if c.rank == 3: os.kill(os.getpid(), signal.SIGSEGV)\nc.Barrier()\ntime.sleep(600)\n"
    )
    body = "date +%s.%N\nsrun $CLUSTERCTL_PYTHON die.py\necho rc=$?\ndate +%s.%N\n"
    j = cluster.sbatch("--wait", "-N2", "--ntasks-per-node=2", "-t", "2", script=body)

    lines = (cluster.work / f"slurm-{j}.out").read_text().split("\n")
    assert any(line == "rc=139" for line in lines), lines
    assert any("trn1-002: task 3: Segmentation fault" in line for line in lines), lines
    assert float(lines[-2]) - float(lines[0]) < 10
    out = cluster.run("sacct", "-nP", "-j", f"{j}.0", "-o", "State,ExitCode").stdout
    assert out.strip() == "FAILED|0:11"


def test_devices_are_given_to_tasks(cluster: Cluster) -> None:
    body = "srun -l bash -c 'echo $NEURON_RT_VISIBLE_CORES' | sort\n"
    j = cluster.sbatch("--wait", "-N2", "--ntasks-per-node=2", "--gres=neuron:2", script=body)

    text = (cluster.work / f"slurm-{j}.out").read_text()
    assert text == "0: 0-1\n1: 2-3\n2: 0-1\n3: 2-3\n"


def test_everything_a_script_leaves_is_ended(cluster: Cluster) -> None:
    body = "setsid sh -c 'sleep 987 & sleep 987' & disown\nsleep 0.2\nexit 0\n"
    j = cluster.sbatch("-o", "/dev/null", script=body)
    cluster.wait_state(j, "COMPLETED")

    wait_for(lambda: not cluster.pids("987"), 5, "a process survived its job")


def test_time_limit_and_cancel(cluster: Cluster) -> None:
    j = cluster.sbatch("-o", "/dev/null", script="sleep 100\n")
    cluster.wait_state(j, "RUNNING")
    cluster.run("scancel", j)
    cluster.wait_state(j, "CANCELLED")

    wait_for(lambda: j not in cluster.run("squeue", "-h", "-o", "%i").stdout.split(), 10)


def test_memory_limit_is_enforced(cluster: Cluster) -> None:
    body = 'python3 -c "x = bytearray(300 << 20); import time; time.sleep(60)"\n'
    j = cluster.sbatch("--mem=100M", "-o", "oom.out", script=body)
    cluster.wait_state(j, "OUT_OF_MEMORY")


def test_array_of_jobs(cluster: Cluster) -> None:
    cluster.sbatch(
        "--wait", "--array=0-9%3", "-o", "arr-%A_%a.out", script="echo $SLURM_ARRAY_TASK_ID\n"
    )

    texts = sorted(p.read_text() for p in cluster.work.glob("arr-*.out"))
    assert texts == sorted(f"{i}\n" for i in range(10))


def test_a_spare_is_shown_as_reserved(cluster: Cluster) -> None:
    assert cluster.run("sinfo", "-h", "-t", "resv", "-o", "%N %t").stdout == "trn1-005 resv\n"
    assert cluster.run("sinfo", "-h", "-t", "idle", "-o", "%N").stdout == "trn1-[001-004]\n"
    assert "State=IDLE+RESERVED " in cluster.run("scontrol", "show", "node", "trn1-005").stdout
