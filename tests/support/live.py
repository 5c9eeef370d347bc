"""A real cluster for end-to-end tests: own home, own nodes, ended with the test.

Everything a user would do goes through the commands on PATH; only killing is done by pid, and
only pids of this home's own processes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]


class Cluster:
    """Commands against one home."""

    def __init__(self, home: Path, work: Path) -> None:
        self.home = home
        self.work = work
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "CLUSTERCTL_"))}
        path = f"{home / 'bin'}:{os.path.dirname(sys.executable)}:{keep['PATH']}"
        self.env = keep | {
            "CLUSTERCTL_HOME": str(home),
            "PATH": path,
            "PYTHONPATH": str(REPO),
            "CLUSTERCTL_PYTHON": sys.executable,
        }

    def run(
        self, *argv: str, rc: int | None = 0, timeout_s: float = 60, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the work folder; ``rc`` is the exit code it must have (None: any)."""
        done = subprocess.run(
            argv,
            env=self.env | more.pop("env", {}),
            cwd=more.pop("cwd", self.work),
            text=True,
            capture_output=True,
            timeout=timeout_s,
            stdin=None if "input" in more else subprocess.DEVNULL,
            **more,
        )
        if rc is not None:
            said = f"{argv}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
            assert done.returncode == rc, said
        return done

    def ctl(self, *argv: str, **more: Any) -> subprocess.CompletedProcess[str]:
        """``clusterctl ARGV``."""
        return self.run(sys.executable, "-m", "clusterctl.main", *argv, **more)

    def sbatch(self, *argv: str, script: str | None = None) -> str:
        """Submit; ``script`` is the body after ``#!/bin/bash``.  Returns the job id."""
        extra: list[str] = []
        if script is not None:
            file = self.work / f"job{time.monotonic_ns()}.sh"
            file.write_text("#!/bin/bash\n" + script)
            extra = [str(file)]
        return self.run("sbatch", "--parsable", *argv, *extra).stdout.strip()

    def state(self, job: str) -> str:
        """What sacct says of the job."""
        out = self.run("sacct", "-nXP", "-j", job, "-o", "State").stdout.split("\n")
        return out[0].split(" ")[0]

    def wait_state(self, job: str, *states: str, timeout_s: float = 60) -> str:
        """Until the job is in one of ``states``; any ended state ends the wait, too."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        seen = ""

        def there() -> bool:
            nonlocal seen
            seen = self.state(job)
            return seen in states or seen in over

        wait_for(there, timeout_s, lambda: f"job {job} is {seen}, not {states}\n{self.logs()}")
        assert seen in states, f"job {job} is {seen}, not {states}: {self.show(job)}"
        return seen

    def show(self, job: str) -> str:
        return self.run("scontrol", "show", "job", job, rc=None).stdout

    def logs(self) -> str:
        """The last lines of the daemons' logs, for messages of failed tests."""
        texts = {f: f.read_text(errors="replace") for f in sorted(self.home.rglob("*.log"))}
        return "\n".join(f"--- {f}\n" + "\n".join(t.split("\n")[-15:]) for f, t in texts.items())

    def status(self) -> dict[str, Any]:
        text = self.ctl("status", "--json").stdout
        found: dict[str, Any] = json.loads(text)
        return found

    def controller_pid(self) -> int:
        return int(json.loads((self.home / "controller.json").read_text())["pid"])

    def agent_pid(self, node: str) -> int:
        return int(json.loads((self.home / "nodes" / node / "agent.pid").read_text())["pid"])

    def pids(self, needle: str) -> list[int]:
        """Processes of this home whose environment or command line holds ``needle``."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal() or int(entry.name) == os.getpid():
                continue
            try:
                text = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(self.home).encode() in text and needle.encode() in text:
                found.append(int(entry.name))
        return found

    def kill_controller(self) -> None:
        """kill -9, as a crash would."""
        os.kill(self.controller_pid(), signal.SIGKILL)

    def kill_node(self, node: str) -> None:
        """kill -9 of the agent, its fork server, supervisors and tasks: a machine that died."""
        node_dir = str(self.home / "nodes" / node)
        for _ in range(20):
            pids = self.pids(node_dir)
            if not pids:
                return
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.01)


def wait_for(
    condition: Callable[[], object], timeout_s: float, say: Callable[[], str] | str = "timed out"
) -> None:
    """Poll until true; the test fails with ``say`` when it takes too long."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, say if isinstance(say, str) else say()
        time.sleep(0.02)


@contextmanager
def own_home(tmp: Path) -> Iterator[Cluster]:
    """A home in which nothing runs yet; afterwards nothing of it may be left."""
    home, work = tmp / "home", tmp / "work"
    home.mkdir(parents=True)
    work.mkdir()
    cluster = Cluster(home, work)
    try:
        yield cluster
    finally:
        cluster.ctl("down", rc=None, timeout_s=60)
        left = cluster.pids("")
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(home, ignore_errors=True)
        assert not left, f"processes left behind: {left}"


@contextmanager
def live_cluster(tmp: Path, *up: str, config: str = "") -> Iterator[Cluster]:
    """A running cluster; afterwards all is ended and nothing of it may be left."""
    with own_home(tmp) as cluster:
        if config:
            (cluster.home / "cluster.toml").write_text(config)
        cluster.ctl("up", *up, timeout_s=90)
        yield cluster
