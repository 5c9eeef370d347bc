"""Speed and memory of a cluster, measured through whatever commands come first on PATH.

    python benchmarks/cluster.py [--own] [--only start,array,...] [--label TEXT] [--json FILE]

Without ``--own`` it drives ``sbatch``, ``squeue``, ``srun`` ... of PATH, so the same file measures
a real Slurm and this project; the cluster must be up, idle and have four nodes.  ``--own`` adds
what only this project has: the socket API, MPI start, the controller's memory, idle CPU (it
starts a private cluster of its own and ends it).  Latencies are milliseconds.
Figures vary with the machine; compare ratios within one run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent


def run(*argv: str, check: bool = True, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a command, output captured."""
    done = subprocess.run(argv, text=True, capture_output=True, stdin=subprocess.DEVNULL, **more)
    if check and done.returncode:
        raise RuntimeError(f"{argv}: exit {done.returncode}: {done.stdout}{done.stderr}")
    return done


def spread(samples: list[float]) -> dict[str, float]:
    """min, median, p90 and max of seconds, in milliseconds."""
    s = sorted(samples)
    ms = [
        round(x * 1000, 1) for x in (s[0], statistics.median(s), s[int(0.9 * (len(s) - 1))], s[-1])
    ]
    return dict(zip(("min", "median", "p90", "max"), ms, strict=True)) | {"n": len(s)}


def timed(count: int, *argv: str) -> dict[str, float]:
    """Wall time of a command, ``count`` times."""
    samples = []
    for _ in range(count):
        begin = time.perf_counter()
        run(*argv)
        samples.append(time.perf_counter() - begin)
    return spread(samples)


def empty_queue(limit_s: float = 600) -> None:
    """Wait until nothing is queued or running."""
    end = time.monotonic() + limit_s
    while run("squeue", "-h", "-o", "%i").stdout.strip():
        if time.monotonic() > end:
            raise RuntimeError("the queue did not become empty")
        time.sleep(0.02)


def bench_floor(work: Path) -> dict[str, Any]:
    """What the machine alone can do."""
    begin = time.perf_counter()
    for _ in range(200):
        subprocess.run(["bash", "-c", "true"], check=True)
    return {
        "python3 -I -c pass": timed(30, sys.executable, "-I", "-c", "pass"),
        "bash_true_per_s": round(200 / (time.perf_counter() - begin)),
    }


def bench_start(work: Path) -> dict[str, Any]:
    """sbatch called -> first line of the script has run, idle cluster."""
    samples = []
    for i in range(20):
        stamp = work / f"start.{i}"
        begin = time.time()
        run("sbatch", "-o", "/dev/null", "--wrap", f"date +%s.%N > {stamp}.t; mv {stamp}.t {stamp}")
        while not stamp.exists():
            time.sleep(0.002)
        samples.append(float(stamp.read_text()) - begin)
        empty_queue()
        time.sleep(0.1)
    return {"submit_to_first_line": spread(samples)}


def bench_array(work: Path) -> dict[str, Any]:
    """An array of 1,000 jobs that run ``true``."""
    begin = time.perf_counter()
    run("sbatch", "--array=1-1000", "-o", "/dev/null", "--wrap", "true")
    empty_queue()
    wall = time.perf_counter() - begin
    return {"jobs_per_s": round(1000 / wall, 1), "wall_s": round(wall, 2)}


def bench_commands(work: Path) -> dict[str, Any]:
    """Whole-process time of the commands beside an interpreter that does nothing."""
    out: dict[str, Any] = {"python3 -I -c pass": [], "squeue": [], "sbatch --hold": [], "sinfo": []}
    calls = {
        "python3 -I -c pass": (sys.executable, "-I", "-c", "pass"),
        "squeue": ("squeue",),
        "sinfo": ("sinfo",),
        "sbatch --hold": ("sbatch", "--hold", "-o", "/dev/null", "--wrap", "true"),
    }
    for _ in range(30):  # interleaved, so that a slow moment hits all alike
        for name, argv in calls.items():
            begin = time.perf_counter()
            run(*argv)
            out[name].append(time.perf_counter() - begin)
    run("scancel", "-u", os.environ.get("USER") or run("id", "-un").stdout.strip(), check=False)
    empty_queue()
    base = statistics.median(out["python3 -I -c pass"])
    ratios = {k: round(statistics.median(v) / base, 2) for k, v in out.items()}
    return {k: spread(v) for k, v in out.items()} | {"ratio_to_python": ratios}


def bench_srun(work: Path) -> dict[str, Any]:
    """srun inside allocations of one and of four nodes."""
    out: dict[str, Any] = {}
    for name, nodes, argv in (
        ("1_task", "-N1", "srun -n1 true"),
        ("4_tasks_4_nodes", "-N4", "srun -N4 -n4 --ntasks-per-node=1 true"),
    ):
        result = work / f"srun.{name}"
        script = work / f"srun.{name}.sh"
        loop = (
            "import subprocess,sys,time,json\n"
            "xs=[]\n"
            "for _ in range(20):\n"
            "    t=time.perf_counter(); subprocess.run(sys.argv[2].split(),check=True)\n"
            "    xs.append(time.perf_counter()-t)\n"
            "json.dump(xs,open(sys.argv[1],'w'))\n"
        )
        script.write_text(
            f"#!/bin/bash\nPATH={os.environ['PATH']} "
            f"{sys.executable} -c \"{loop}\" {result} '{argv}'\n"
        )
        per = ["--ntasks-per-node=1"] if nodes == "-N4" else []
        run("sbatch", nodes, *per, "-W", "-o", str(work / f"srun.{name}.log"), str(script))
        out[name] = spread(json.loads(result.read_text()))
    return out


def bench_submit_socket(work: Path) -> dict[str, Any]:
    """Durable submissions by one client over the socket, one after the other."""
    import socket

    from scheduler.api.frames import recv_frame, send_frame, unix_address

    address, fd = unix_address(os.path.join(os.environ["CLUSTERCTL_HOME"], "controller.sock"))
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(address)
    if fd is not None:
        os.close(fd)
    spec = {"name": "x", "hold": True, "std_out": "/dev/null"}
    body = {"type": "Submit", "spec": spec, "payload": {"script": "#!/bin/sh\ntrue\n"}}
    samples = []
    ids = []
    begin = time.perf_counter()
    for i in range(2000):
        one = time.perf_counter()
        send_frame(sock, json.dumps(body | {"key": f"bench-{os.getpid()}-{i}"}).encode())
        reply = json.loads(recv_frame(sock) or b"{}")
        ids.append(reply["job_id"])
        samples.append(time.perf_counter() - one)
    wall = time.perf_counter() - begin
    for low in range(0, len(ids), 500):
        batch = [str(i) for i in ids[low : low + 500]]
        send_frame(sock, json.dumps({"type": "Cancel", "ids": batch}).encode())
        recv_frame(sock)
    sock.close()
    return {"submissions_per_s": round(2000 / wall), "latency": spread(samples)}


def bench_mpi(work: Path) -> dict[str, Any]:
    """8 mpi4py ranks on 2 nodes: srun called -> the last rank is through MPI_Init."""
    program = work / "init.py"
    program.write_text(
        "from mpi4py import MPI\nimport time\n"
        "t = MPI.COMM_WORLD.allreduce(time.time(), op=MPI.MAX)\n"
        "if MPI.COMM_WORLD.rank == 0: print(t, MPI.COMM_WORLD.size)\n"
    )
    script = work / "init.sh"
    script.write_text(
        "#!/bin/bash\nfor i in 1 2 3 4 5; do\n"
        "echo start $(date +%s.%N)\n"
        f"srun -N2 --ntasks-per-node=4 {sys.executable} {program}\ndone\n"
    )
    log = work / "init.log"
    run("sbatch", "-N2", "--ntasks-per-node=4", "-W", "-o", str(log), str(script))
    lines = log.read_text().split("\n")
    samples = []
    for first, second in zip(lines[::2], lines[1::2], strict=False):
        if first.startswith("start"):
            assert second.split()[1] == "8", second
            samples.append(float(second.split()[0]) - float(first.split()[1]))
    return {"8_ranks_2_nodes_to_init": spread(samples)}


def rss_mib(pid: int) -> float:
    """Resident memory of a process, MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return round(int(line.split()[1]) / 1024, 1)
    raise RuntimeError("no VmRSS")


def controller_pid() -> int:
    """Of the cluster in CLUSTERCTL_HOME."""
    text = Path(os.environ["CLUSTERCTL_HOME"], "controller.json").read_text()
    return int(json.loads(text)["pid"])


def bench_memory(work: Path) -> dict[str, Any]:
    """The controller's memory with 10,000 finished and 1,000 pending jobs."""
    begin = rss_mib(controller_pid())
    for _ in range(10):
        run("sbatch", "--array=1-1000", "-o", "/dev/null", "--wrap", "true")
        empty_queue()
    held = [
        run("sbatch", "--parsable", "--hold", "--wrap", "true").stdout.strip() for _ in range(1000)
    ]
    full = rss_mib(controller_pid())
    run("scancel", *held)
    return {"idle_MiB": begin, "10000_finished_1000_pending_MiB": full}


def cpu_seconds(pids: list[int]) -> float:
    """User and system time of processes."""
    tick = os.sysconf("SC_CLK_TCK")
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / tick


def cluster_pids() -> list[int]:
    """Controller, agents and fork servers: every process that names this home."""
    home = os.environ["CLUSTERCTL_HOME"]
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if home.encode() in words:
                pids.append(int(entry.name))
    return pids


def bench_idle(work: Path) -> dict[str, Any]:
    """CPU of the whole idle cluster over 60 s, percent of one core."""
    time.sleep(3)
    pids = cluster_pids()
    before = cpu_seconds(pids)
    begin = time.monotonic()
    time.sleep(60)
    used = cpu_seconds(pids) - before
    return {
        "processes": len(pids),
        "percent_of_one_core": round(100 * used / (time.monotonic() - begin), 2),
        "resident_MiB": round(sum(rss_mib(p) for p in pids), 1),
    }


COMMON: dict[str, Callable[[Path], dict[str, Any]]] = {
    "floor": bench_floor,
    "start": bench_start,
    "commands": bench_commands,
    "srun": bench_srun,
    "array": bench_array,
}
OWN: dict[str, Callable[[Path], dict[str, Any]]] = {
    "submit": bench_submit_socket,
    "mpi": bench_mpi,
    "idle": bench_idle,
    "memory": bench_memory,
}


def main() -> int:
    """Run the chosen parts and print one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--own", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--label", default="")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    parts = COMMON | (OWN if options.own else {})
    wanted = [p for p in options.only.split(",") if p] or list(parts)
    work = Path(tempfile.mkdtemp(prefix="bench."))
    control = [sys.executable, "-m", "clusterctl.main"]
    if options.own:
        sys.path.insert(0, str(REPO))
        home = work / "home"
        os.environ["CLUSTERCTL_HOME"] = str(home)
        run(*control, "up", "--nodes", "4", "--spares", "1", cwd=REPO)
        os.environ["PATH"] = f"{home / 'bin'}:{os.environ['PATH']}"
    result: dict[str, Any] = {"label": options.label, "sbatch": shutil.which("sbatch")}
    try:
        for name in wanted:
            result[name] = parts[name](work)
            print(name, json.dumps(result[name]), file=sys.stderr, flush=True)
    finally:
        if options.own:
            run(*control, "down", check=False, cwd=REPO)
        shutil.rmtree(work, ignore_errors=True)
    text = json.dumps(result, indent=1)
    if options.json:
        Path(options.json).write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
