"""Local nodes: a directory and an agent process each, on this machine.

``NODE_DIR`` (``HOME/nodes/NAME``) holds ``node.json`` (what the agent is told), ``agent.sock``
(its socket), ``agent.pid`` (its identity), ``agent.log`` and whatever the agent keeps there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler.api.frames import unix_address
from scheduler.config import ClusterConfig
from scheduler.provision import dropins, proc


@dataclass(frozen=True)
class HomePaths:
    """The files of a cluster's home that more than one process knows."""

    home: Path

    @property
    def config(self) -> Path:
        """The cluster file."""
        return self.home / "cluster.toml"

    @property
    def socket(self) -> Path:
        """The controller's socket."""
        return self.home / "controller.sock"

    @property
    def controller_log(self) -> Path:
        """What the controller prints (its log proper is ``log/controller.log``)."""
        return self.home / "log" / "controller.out"

    @property
    def controller_pid(self) -> Path:
        """The identity of the controller that ``clusterctl up`` started last."""
        return self.home / "controller.pid"

    @property
    def bin(self) -> Path:
        """The drop-in commands."""
        return self.home / "bin"

    @property
    def nodes(self) -> Path:
        """The directories of the local nodes."""
        return self.home / "nodes"

    @property
    def lock(self) -> Path:
        """Held by ``clusterctl up`` and ``clusterctl down`` while they work."""
        return self.home / "admin.lock"


def node_document(config: ClusterConfig, name: str) -> dict[str, Any]:
    """The content of a local node's ``node.json``."""
    spec, paths = config.specs[name], HomePaths(config.home)
    return {
        "cluster": config.cluster,
        "node": name,
        "cpus": spec.cpus,
        "mem_mib": spec.mem_mib,
        "instance_type": spec.instance_type.name,
        "hosts": config.hosts(),
        "isolate": config.isolate,
        "bin": str(paths.bin),
        "home": str(config.home),
        "socket": str(paths.socket),
    }


def make_node_dir(node_dir: Path, document: dict[str, Any]) -> bool:
    """Create ``node_dir`` with its ``node.json``; True when the file changed.

    A running agent reads the file only at its start.
    """
    node_dir.mkdir(parents=True, exist_ok=True)
    file = node_dir / "node.json"
    data = json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"
    with contextlib.suppress(OSError):
        if file.read_bytes() == data:
            return False
    proc.write_atomic(file, data)
    return True


def agent_command(node_dir: Path, python: str = "") -> list[str]:
    """The command line of the agent of ``node_dir``."""
    return [python or sys.executable, "-P", "-m", "nodeagent", "--dir", str(node_dir)]


def agent_process(node_dir: Path) -> proc.ProcessId | None:
    """The running agent of ``node_dir``, None when there is none."""
    return proc.running(node_dir / "agent.pid")


def accepts(path: Path, timeout_s: float = 2.0) -> bool:
    """True when somebody listens on the unix socket at ``path``."""
    fd: int | None = None
    try:
        address, fd = unix_address(str(path))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(timeout_s)
            sock.connect(address)
            return True
    except OSError:
        return False
    finally:
        if fd is not None:
            os.close(fd)


def start_agent(node_dir: Path, document: dict[str, Any]) -> proc.ProcessId:
    """Start the agent of ``node_dir`` unless it runs; the process that runs afterwards.

    Safe against two callers at once (the controller and ``clusterctl up``).  Raises
    ``OSError`` when it cannot be started.
    """
    node_dir.mkdir(parents=True, exist_ok=True)
    with proc.locked(node_dir / "start.lock"):
        process = agent_process(node_dir)
        if process is not None:
            return process
        make_node_dir(node_dir, document)
        environment = proc.daemon_environment({"CLUSTERCTL_HOME": str(document["home"])})
        process = proc.spawn_detached(agent_command(node_dir), node_dir / "agent.log", environment)
        proc.write_pid_file(node_dir / "agent.pid", process)
        return process


def write_dropins(paths: HomePaths) -> None:
    """The drop-in commands of the cluster at ``paths``; both variables, so that a job of one
    cluster can call another one's by path."""
    dropins.write(
        paths.bin, {"CLUSTERCTL_HOME": str(paths.home), "CLUSTERCTL_SOCKET": str(paths.socket)}
    )


def prepare_home(config: ClusterConfig) -> None:
    """Everything of a home that must be there before jobs run: drop-ins, node directories."""
    paths = HomePaths(config.home)
    paths.nodes.mkdir(parents=True, exist_ok=True)
    paths.controller_log.parent.mkdir(exist_ok=True)
    write_dropins(paths)
    for name, spec in config.specs.items():
        if spec.transport == "local":
            make_node_dir(config.node_dir(name), node_document(config, name))


def remove_node_dir(node_dir: Path) -> None:
    """Delete a stopped node's directory.  Raises ``OSError`` while its agent runs."""
    if agent_process(node_dir) is not None:
        raise OSError(f"the agent of {node_dir.name} still runs")
    shutil.rmtree(node_dir)
