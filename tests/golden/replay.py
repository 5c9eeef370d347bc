"""Runs a group of records in order on a cluster like the recorded one."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.golden.compare import Answer, Place
from tests.golden.records import Record
from tests.support.live import Cluster, live_cluster

CONFIG = """
[cluster]
name = "peer"
isolate = false

[nodes."n[001-004]"]
instance_type = "trn1.32xlarge"
cpus = 16
mem_mib = 65536

[partitions.main]
nodes = "ALL"
default = true

[partitions.debug]
nodes = "n[001-002]"
default = false
max_time = "30"

[priority]
weight_age = 0
weight_size = 532
weight_partition = 10000

[timeouts]
heartbeat_s = 1

[scheduling]
enforce_part_limits = "NO"
first_job_id = 700001
return_to_service = 2
"""

_FUNCTIONS = """
sub() { sbatch --parsable -o /dev/null "$@"; }
w() {
  for _ in $(seq 300); do
    s=$(squeue -h -t all -j "$1" -o %T)
    for want in $2; do
      for is in $s; do [ "$is" = "$want" ] && return; done
    done
    sleep 0.05
  done
  echo "job $1 is $s, not $2" >&2
  exit 1
}
"""
_TELL_JOBS = '\nfor v in ${!J*}; do echo "$v ${!v}" >&3; done\n'

#: Seconds after which a command is given up that was still running after 60 in the recording.
_STILL_S = 4.0
_LIMIT_S = 45.0
_STARTS_JOBS = ("sbatch", "srun", "salloc")
_KEEP_JOBS = ("scancel", "scontrol", "squeue", "squeue_formats", "sinfo", "sacct")
#: The recorded waits are for a scheduler that looks every three seconds.
_WAITS = (("sleep 3.3", "sleep 0.7"), ("sleep 3.5", "sleep 0.7"), ("sleep 4\n", "sleep 0.5\n"))


@contextmanager
def cluster_like_recorded(tmp: Path) -> Iterator[Cluster]:
    with live_cluster(tmp, config=CONFIG) as cluster:
        for key in ("TMPDIR", "LC_ALL", "LANG", "SLURM_CONF"):
            cluster.env.pop(key, None)
        yield cluster


class Replay:
    """One group on one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.cwd = cluster.work
        self.place = Place({}, str(self.cwd), "/tmp", _host(), "none")

    def set_up(self, script: str) -> None:
        """Run the group's setup and note the ids of its jobs."""
        told = self.cwd.parent / "jobs"
        script = _paced(script + "\n")
        with told.open("w") as file:
            done = subprocess.run(
                ["bash", "-c", f"exec 3>&{file.fileno()}\n{_FUNCTIONS}{script}{_TELL_JOBS}"],
                env=self.cluster.env,
                cwd=self.cwd,
                text=True,
                capture_output=True,
                stdin=subprocess.DEVNULL,
                timeout=150,
                pass_fds=[file.fileno()],
            )
        assert done.returncode == 0, f"setup failed: {done.stdout}\n{done.stderr}"
        pairs = re.findall(r"^J(\d+) (\d+)$", told.read_text(), re.MULTILINE)
        self.place.jobs.update({f"J{int(number):03d}": job for number, job in pairs})

    def run(self, record: Record) -> Answer:
        """Run one record's command; afterwards jobs of its own are gone (where recorded so)."""
        argv = [_paced(self._with_ids(word)) for word in record.argv]
        if "second, unprivileged user" in record.note:
            argv = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *argv]
        limit_s = _LIMIT_S if record.rc is not None or record.withheld else _STILL_S
        answer = self._command(argv, record, limit_s)
        if record.family not in _KEEP_JOBS and any(v in " ".join(argv) for v in _STARTS_JOBS):
            self._clear()
        return answer

    def _command(self, argv: list[str], record: Record, limit_s: float) -> Answer:
        out, err = self.cwd.parent / "out", self.cwd.parent / "err"
        rc: int | None = None
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                argv,
                env=self.cluster.env | dict(record.env),
                cwd=self.cwd,
                stdin=subprocess.PIPE if record.stdin else subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
            if process.stdin is not None:
                process.stdin.write(record.stdin.encode())
                process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                rc = process.wait(limit_s)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return Answer(rc, out.read_text(errors="replace"), err.read_text(errors="replace"))

    def _with_ids(self, word: str) -> str:
        return re.sub(r"<(J\d{3})>", lambda m: self.place.jobs[m[1]], word)

    def _clear(self) -> None:
        """Cancel what the case left, as the recorder did."""
        mine = set(self.place.jobs.values())
        end = time.monotonic() + 20
        while True:
            rows = self.cluster.run("squeue", "-h", "-o", "%F %t").stdout.split("\n")
            left = {row.split()[0] for row in rows if row} - mine
            if not left:
                return
            assert time.monotonic() < end, f"jobs do not go away: {rows}"
            self.cluster.run("scancel", *sorted(left), rc=None)
            time.sleep(0.05)


def _paced(text: str) -> str:
    for recorded, ours in _WAITS:
        text = text.replace(recorded, ours)
    return text


def _host() -> str:
    return socket.gethostname().split(".")[0]
