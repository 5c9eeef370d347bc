"""``clusterctl --host``: commands for a cluster behind a real sshd."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterctl.app.up import start_controller
from scheduler import config as cluster_file
from scheduler.provision import local, template
from tests.admin.run import TIMEOUT_S, command, environment
from tests.admin.sshd import ROOT, Sshd

pytestmark = pytest.mark.ssh


class Laptop:
    """A user's machine: its own home directory, and the far cluster's server."""

    def __init__(self, folder: Path, server: Sshd, far_home: Path) -> None:
        self.folder = folder
        self.server = server
        self.far_home = far_home
        (folder / ".ssh").mkdir(parents=True)
        self.known_hosts = folder / ".ssh/known_hosts"
        self.known_hosts.write_text(server.known_hosts_line())
        self.config("lab", server.client_key)
        self.far_command = folder / "far-clusterctl"
        self.far_command.write_text(
            f'#!/bin/sh\nexport CLUSTERCTL_HOME="{far_home}" PYTHONPATH="{ROOT}"\n'
            f'exec "{sys.executable}" -P -m clusterctl "$@"\n'
        )
        self.far_command.chmod(0o755)

    def config(self, name: str, key: Path) -> None:
        (self.folder / ".ssh/config").write_text(
            f"Host {name}\n  HostName {self.server.address}\n  Port {self.server.port}\n"
            f"  IdentityFile {key}\n  UserKnownHostsFile {self.known_hosts}\n"
        )

    def run(self, *arguments: str, far: str = "") -> subprocess.CompletedProcess[str]:
        values = environment(self.folder / "none") | {
            "HOME": str(self.folder),
            "CLUSTERCTL_REMOTE_COMMAND": far or str(self.far_command),
        }
        values.pop("SSH_AUTH_SOCK", None)
        done = subprocess.run(
            command(*arguments),
            env=values,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done


@pytest.fixture
def laptop(tmp_path: Path, two_sshd: tuple[Sshd, Sshd]) -> Iterator[Laptop]:
    """A laptop, and a far machine on which nothing runs yet."""
    return Laptop(tmp_path / "laptop", two_sshd[0], tmp_path / "home")


def start_far(laptop: Laptop) -> int:
    """Start the far controller (ended by the fixture of the servers); its pid."""
    home = laptop.far_home
    home.mkdir()
    (home / "cluster.toml").write_text(template.default_text(nodes=1, spares=0))
    config = cluster_file.load(home)
    local.prepare_home(config)
    return start_controller(config, 60).pid


def test_status_of_a_far_cluster(laptop: Laptop) -> None:
    pid = start_far(laptop)
    done = laptop.run("--host", "lab", "status", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["controller"]["pid"] == pid
    assert laptop.run("--host=lab", "status").stdout.startswith("cluster     local in ")


def test_slurm_commands_of_a_far_cluster(laptop: Laptop, tmp_path: Path) -> None:
    start_far(laptop)
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\ntrue\n")
    done = laptop.run("--host", "lab", "sbatch", "--hold", str(script))
    assert (done.returncode, done.stdout) == (0, "Submitted batch job 1\n"), done.stderr
    shown = laptop.run("--host", "lab", "squeue", "-h", "-o", "%i %r")
    assert shown.stdout == "1 JobHeldUser\n", shown.stderr


def test_no_cluster_there(laptop: Laptop) -> None:
    done = laptop.run("--host", "lab", "status")
    assert done.returncode == 1
    assert "lab: no cluster runs there" in done.stderr


def test_no_clusterctl_there(laptop: Laptop) -> None:
    done = laptop.run("--host", "lab", "status", far="/no/such/clusterctl")
    assert done.returncode == 1
    assert "set CLUSTERCTL_REMOTE_COMMAND" in done.stderr


def test_unknown_host_key_is_refused(laptop: Laptop) -> None:
    laptop.known_hosts.write_text("")
    done = laptop.run("--host", "lab", "status")
    assert done.returncode == 1
    assert "not found in known_hosts; log in once with ssh lab" in done.stderr


def test_refused_login(laptop: Laptop, two_sshd: tuple[Sshd, Sshd]) -> None:
    laptop.config("lab", two_sshd[1].host_key)
    done = laptop.run("--host", "lab", "status")
    assert done.returncode == 1
    assert "login refused" in done.stderr
