"""``clusterctl down``: end a cluster so that nothing of it is left running."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from clusterctl.app import rpc
from clusterctl.app.screen import Progress, plural
from clusterctl.app.up import admin_lock, start_controller
from scheduler import config as cluster_file
from scheduler.api import wire
from scheduler.api.errors import ClusterError, Unavailable
from scheduler.provision import local, proc, sweep


def down(home: Path, progress: Progress, keep_jobs: bool = False, timeout_s: float = 60.0) -> None:
    """Stop controller and agents of ``home``; with ``keep_jobs`` the controller only.

    Running jobs end as cancelled unless ``keep_jobs``.  Succeeds when nothing runs.  Raises
    ``Unavailable`` when something could not be ended.
    """
    paths = local.HomePaths(home)
    if not home.is_dir():
        progress.result(f"nothing runs in {home}")
        return
    with admin_lock(home, progress):
        before = dict(agents(home))
        stopped = _stop_controller(paths, progress, keep_jobs, bool(before), timeout_s)
        if keep_jobs:
            word = "controller stopped" if stopped else "no controller runs"
            progress.result(f"{word}; {plural(len(before), 'agent')} and their jobs go on")
            return
        left = _end_agents(home, progress, timeout_s)
        if stopped or before or left:
            progress.result(f"cluster stopped ({plural(len(before), 'agent')})")
        else:
            progress.result(f"nothing runs in {home}")


def agents(home: Path) -> Iterator[tuple[str, proc.ProcessId]]:
    """Name and process of every local agent of ``home`` that runs, also of removed nodes."""
    nodes = local.HomePaths(home).nodes
    if not nodes.is_dir():
        return
    for folder in sorted(nodes.iterdir()):
        process = local.agent_process(folder)
        if process is not None:
            yield folder.name, process


def _stop_controller(
    paths: local.HomePaths, progress: Progress, keep_jobs: bool, agents_run: bool, timeout_s: float
) -> bool:
    """Ask the controller to stop (with its agents) and wait; True when there was one."""
    progress.update("stopping the controller")
    process = _controller_process(paths)
    if process is None and agents_run and not keep_jobs:
        # Only a controller can tell the agents to end their jobs and record that they ended.
        process = _revive(paths, progress, timeout_s)
    if process is None:
        return False
    try:
        rpc.call(paths.home, wire.Shutdown(agents=not keep_jobs), wire.Ok, timeout_s)
    except ClusterError as error:
        progress.note(f"the controller did not take the request ({error}); ending it")
        proc.stop(process)
    progress.update("waiting for the controller to end")
    if not proc.wait_gone(process, timeout_s):
        progress.note(f"the controller (pid {process.pid}) does not end; killing it")
        proc.stop(process)
    return True


def _controller_process(paths: local.HomePaths) -> proc.ProcessId | None:
    try:
        pong = rpc.call(paths.home, wire.Ping(), wire.Pong)
    except ClusterError:
        return proc.running(paths.controller_pid)
    return proc.identify(pong.pid)


def _revive(paths: local.HomePaths, progress: Progress, timeout_s: float) -> proc.ProcessId | None:
    progress.update("the controller is gone but agents run: starting it to end their jobs")
    try:
        config = cluster_file.load(paths.config, paths.home)
        return proc.identify(start_controller(config, timeout_s).pid)
    except (ClusterError, OSError) as error:
        progress.note(f"agents run without a controller, and it cannot be started: {error}")
        return None


def _end_agents(home: Path, progress: Progress, timeout_s: float) -> int:
    """Wait for the agents, then end whatever stays; how many processes that were."""
    deadline = time.monotonic() + timeout_s / 4
    for name, process in agents(home):
        progress.update(f"waiting for the agent of {name}")
        if not proc.wait_gone(process, max(0.0, deadline - time.monotonic())):
            proc.stop(process)
    nodes = local.HomePaths(home).nodes
    try:
        return sweep.sweep(sorted(nodes.iterdir())) if nodes.is_dir() else 0
    except OSError as error:
        raise Unavailable(f"cannot end everything: {error}") from None
