"""The far end of provisioning over SSH: ``python -m scheduler.provision.remote``.

Reads one JSON object from stdin, makes the node's directory, starts the agent there unless it
runs, waits until it listens, and answers with one JSON object on stdout:
``{"socket", "pid", "started"}`` or ``{"error"}``.  Exit status 0 when an answer was written.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from scheduler.provision import dropins, local, proc

#: Longest path a unix socket address takes; sshd connects by the plain path.
_SOCKET_PATH_BYTES = 107

#: Until the agent must listen, seconds.
_START_TIMEOUT_S = 30.0


def provision(request: dict[str, Any]) -> dict[str, Any]:
    """Carry out a request: ``remote_dir``, ``cluster`` and ``node.json``'s ``document``.

    Raises ``OSError``.
    """
    document = dict(request["document"])
    folder = Path(os.path.expanduser(request["remote_dir"]))
    node_dir = Path(os.path.abspath(folder)) / request["cluster"] / document["node"]
    socket = node_dir / "agent.sock"
    if len(os.fsencode(socket)) > _SOCKET_PATH_BYTES:
        raise OSError(f"remote_dir is too long: {socket} is over {_SOCKET_PATH_BYTES} bytes")
    document |= {"bin": str(node_dir / "bin"), "home": str(node_dir), "socket": str(socket)}
    node_dir.mkdir(mode=0o755 if os.geteuid() == 0 else 0o700, parents=True, exist_ok=True)
    dropins.write(
        node_dir / "bin", {"CLUSTERCTL_HOME": str(node_dir), "CLUSTERCTL_SOCKET": str(socket)}
    )
    before = local.agent_process(node_dir)
    process = local.start_agent(node_dir, document)
    _wait(node_dir, process)
    return {"socket": str(socket), "pid": process.pid, "started": process != before}


def _wait(node_dir: Path, process: proc.ProcessId) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    pause_s = 0.01
    while True:
        alive = process.alive()
        if local.accepts(node_dir / "agent.sock"):
            return
        if not alive:
            line = proc.last_line(node_dir / "agent.log")
            raise OSError(f"the agent ended at its start: {line}")
        if time.monotonic() > deadline:
            raise OSError(f"the agent (pid {process.pid}) does not listen: {node_dir}/agent.log")
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.2)


def main() -> int:
    """Entry point; see the module."""
    try:
        answer = provision(json.load(sys.stdin))
    except (OSError, ValueError, KeyError) as error:
        answer = {"error": f"{error}"}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
