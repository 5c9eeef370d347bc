"""``clusterctl up``: from nothing, or from any half-running state, to a cluster that works."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterctl.app import rpc
from clusterctl.app.screen import Progress, plural
from scheduler import config as cluster_file
from scheduler.api import wire
from scheduler.api.errors import ClusterError, Rejected, Unavailable
from scheduler.config import ClusterConfig
from scheduler.provision import local, proc, template

#: After so long the user is told what the wait is for, seconds.
_PATIENCE_S = 10.0

#: Longest pause between two looks at what is starting, seconds.
_POLL_S = 0.2


@dataclass(frozen=True)
class Wish:
    """What the options of ``up`` ask for; None where nothing was said."""

    nodes: int | None = None
    spares: int | None = None
    instance_type: str | None = None
    file: Path | None = None


def up(home: Path, wish: Wish, progress: Progress, timeout_s: float = 60.0) -> None:
    """Start what does not run yet and wait until every node is ready.

    Raises ``ClusterError`` with what is wrong.  Without a controller no agent that was started
    here is left; a cluster of which some nodes do not answer in time goes on running.
    """
    make_home(home)
    with admin_lock(home, progress):
        config = settle_config(home, wish)
        try:
            local.prepare_home(config)
        except OSError as error:
            raise Unavailable(f"cannot prepare {home}: {error}") from None
        running = controller(home)
        if running is None:
            running = start_all(config, progress, timeout_s)
        else:
            start_agents(config, [])
            if config_changed(config):
                progress.note(
                    f"{config.path} changed since the controller started; to apply it: "
                    "clusterctl down --keep-jobs && clusterctl up"
                )
        nodes = wait_nodes(config, progress, timeout_s)
        progress.result(summary(config, running, nodes))


def make_home(home: Path) -> None:
    """Create the state directory (private to the user).  Raises ``Unavailable``."""
    try:
        home.mkdir(mode=0o755 if _is_root() else 0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise Unavailable(f"cannot make {home}: {error.strerror}") from None


def _is_root() -> bool:
    import os

    return os.geteuid() == 0


class admin_lock:  # noqa: N801 - used like a function in a with statement
    """Only one ``up`` or ``down`` works on a home at a time; the other waits and says so."""

    def __init__(self, home: Path, progress: Progress) -> None:
        self._path = local.HomePaths(home).lock
        self._progress = progress

    def __enter__(self) -> None:
        self._context = proc.locked(self._path, wait=False)
        if self._context.__enter__():
            return
        self._context.__exit__(None, None, None)
        self._progress.note("another clusterctl up or down is at work on this cluster; waiting")
        self._context = proc.locked(self._path)
        self._context.__enter__()

    def __exit__(self, *details: Any) -> None:
        self._context.__exit__(None, None, None)


# ---------------------------------------------------------------- the cluster file


def settle_config(home: Path, wish: Wish) -> ClusterConfig:
    """The home's cluster file, written from ``wish`` if there is none; never changed by it."""
    paths = local.HomePaths(home)
    if not paths.config.exists():
        return _write_config(paths, wish)
    config = cluster_file.load(paths.config, home)
    if wish.file is not None and wish.file.resolve() != paths.config.resolve():
        given = _read(wish.file)
        if given != paths.config.read_bytes():
            raise Rejected(
                f"{paths.config} exists and differs from {wish.file}; edit it and restart "
                "(clusterctl down, clusterctl up), or use another CLUSTERCTL_HOME"
            )
    different = _differences(config, wish)
    if different:
        raise Rejected(
            f"the cluster in {home} has {' and '.join(different)}; to change it, edit "
            f"{paths.config} and restart (clusterctl down, clusterctl up), "
            "or use another CLUSTERCTL_HOME"
        )
    return config


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise Rejected(f"{file}: {error.strerror}") from None


def _write_config(paths: local.HomePaths, wish: Wish) -> ClusterConfig:
    if wish.file is not None:
        if (wish.nodes, wish.spares, wish.instance_type) != (None, None, None):
            raise Rejected("--config describes the nodes: leave out --nodes, --spares, ...")
        data = _read(wish.file)
        config = cluster_file.load(wish.file, paths.home)  # messages name the user's file
    else:
        data = template.default_text(
            instance_type=wish.instance_type or template.DEFAULT_TYPE,
            nodes=template.DEFAULT_NODES if wish.nodes is None else wish.nodes,
            spares=template.DEFAULT_SPARES if wish.spares is None else wish.spares,
        ).encode()
        config = cluster_file.parse(data.decode(), paths.config, paths.home)
    proc.write_atomic(paths.config, data)
    return cluster_file.load(paths.config, config.home)


def _differences(config: ClusterConfig, wish: Wish) -> list[str]:
    """What of ``wish`` the cluster is not, in words about how it is."""
    spares = sum(spec.spare for spec in config.specs.values())
    nodes = len(config.specs) - spares
    types = sorted({spec.instance_type.name for spec in config.specs.values()})
    result = []
    if wish.nodes is not None and wish.nodes != nodes:
        result.append(plural(nodes, "node"))
    if wish.spares is not None and wish.spares != spares:
        result.append(plural(spares, "spare"))
    if wish.instance_type is not None and types != [wish.instance_type]:
        result.append(f"instance type {', '.join(types)}")
    return result


def _digest(config: ClusterConfig) -> str:
    return hashlib.sha256(config.path.read_bytes()).hexdigest()


def config_changed(config: ClusterConfig) -> bool:
    """True when the file is not the one the running controller was started with."""
    try:
        record = json.loads(local.HomePaths(config.home).controller_pid.read_bytes())
        return bool(record["config"] != _digest(config))
    except (OSError, ValueError, KeyError, TypeError):
        return False  # started by other means: nothing known


# ---------------------------------------------------------------- the controller


def controller(home: Path) -> wire.Pong | None:
    """Who answers on the controller's socket; None when nobody listens."""
    try:
        return rpc.call(home, wire.Ping(), wire.Pong)
    except rpc.NotRunning:
        return None


def start_controller(config: ClusterConfig, timeout_s: float) -> wire.Pong:
    """Start the controller detached and wait for its first answer.  Raises ``Unavailable``."""
    paths = local.HomePaths(config.home)
    earlier = proc.running(paths.controller_pid)
    if earlier is None:
        command = [sys.executable, "-P", "-m", "scheduler", "--home", str(config.home)]
        try:
            process = proc.spawn_detached(
                command,
                paths.controller_log,
                proc.daemon_environment({"CLUSTERCTL_HOME": str(config.home)}),
            )
        except OSError as error:
            raise Unavailable(f"cannot start the controller: {error}") from None
        record = {"pid": process.pid, "start": process.start, "config": _digest(config)}
        proc.write_atomic(paths.controller_pid, json.dumps(record).encode() + b"\n")
    else:
        process = earlier  # is starting, or has lost its socket
    deadline = time.monotonic() + timeout_s
    pause_s = 0.01
    while True:
        alive = process.alive()
        pong = controller(config.home)
        if pong is not None:
            return pong
        if not alive:
            line = proc.last_line(paths.controller_log)
            raise Unavailable(
                f"the controller ended at its start: {line} (see {paths.controller_log})"
            )
        if time.monotonic() > deadline:
            raise Unavailable(
                f"the controller (pid {process.pid}) does not answer after {timeout_s:g} s; "
                f"see {paths.controller_log}"
            )
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, _POLL_S)


# ---------------------------------------------------------------- the nodes


def start_all(config: ClusterConfig, progress: Progress, timeout_s: float) -> wire.Pong:
    """Agents and controller; all or, with ``Unavailable``, nothing that did not run before."""
    started: list[proc.ProcessId] = []
    try:
        start_agents(config, started)
        progress.update("starting the controller")
        return start_controller(config, timeout_s)
    except Unavailable:
        for agent in started:  # tasks they may have found again live on
            proc.stop(agent)
        raise


def start_agents(config: ClusterConfig, started: list[proc.ProcessId]) -> None:
    """Start the local agents that do not run (all at once; the controller dials them).

    Those that did not run before are added to ``started``.  Raises ``Unavailable``.
    """
    for name, spec in config.specs.items():
        if spec.transport == "local":
            node_dir = config.node_dir(name)
            before = local.agent_process(node_dir)
            try:
                process = local.start_agent(node_dir, local.node_document(config, name))
            except OSError as error:
                raise Unavailable(f"cannot start the agent of {name}: {error}") from None
            if process != before:
                started.append(process)


def wait_nodes(config: ClusterConfig, progress: Progress, timeout_s: float) -> list[dict[str, Any]]:
    """Wait until every node of the file answers; the nodes then.

    Raises ``Unavailable`` that names those that do not after ``timeout_s``.
    """
    start = time.monotonic()
    told = False
    pause_s = 0.02
    total = len(config.specs)
    with rpc.connection(config.home) as sock:
        while True:
            nodes = rpc.ask(sock, wire.GetNodes(), wire.Nodes).nodes
            missing = [node["name"] for node in nodes if not node.get("responding", False)]
            progress.update(f"starting nodes: {total - len(missing)}/{total}")
            if not missing:
                return nodes
            waited_s = time.monotonic() - start
            if (waited_s > min(_PATIENCE_S, timeout_s) and not told) or waited_s > timeout_s:
                status = rpc.ask(sock, wire.GetStatus(), wire.Status).values
                why = _why_missing(config, missing, status, waited_s)
                if waited_s > timeout_s:
                    raise Unavailable(why)
                progress.note(f"still waiting: {why}")
                told = True
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _POLL_S)


def _why_missing(
    config: ClusterConfig, missing: list[str], status: dict[str, Any], waited_s: float
) -> str:
    errors = {node["name"]: node["link_error"] or node["reason"] for node in status["nodes"]}
    lines = [f"{plural(len(missing), 'node')} not up after {waited_s:.0f} s:"]
    for name in missing[:10]:
        why = errors.get(name) or f"{name}: no answer"
        text = why if why.startswith(name) else f"{name}: {why}"
        if name in config.specs and config.specs[name].transport == "local":
            text += f" (log: {config.node_dir(name) / 'agent.out'})"
        lines.append(f"  {text}")
    if len(missing) > 10:
        lines.append(f"  and {len(missing) - 10} more")
    return "\n".join(lines)


def summary(config: ClusterConfig, pong: wire.Pong, nodes: list[dict[str, Any]]) -> str:
    """One line about the running cluster."""
    spares = sum(bool(node.get("spare", False)) for node in nodes)
    text = plural(len(nodes) - spares, "node")
    if spares:
        text += f" and {plural(spares, 'spare')}"
    return f"cluster {config.cluster}: {text} up, controller pid {pong.pid}, home {config.home}"


__all__ = ["ClusterError", "Wish", "controller", "up"]
