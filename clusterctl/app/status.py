"""``clusterctl status``: the cluster in one screen, or as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clusterctl.app import rpc
from clusterctl.app.down import agents
from scheduler.api import wire


def collect(home: Path) -> dict[str, Any]:
    """Controller, nodes, agents and queue as plain values.  Raises ``NotRunning``.

    ``controller``: pid, version, host and what the controller adds (uptime_s, ...); ``nodes``:
    one object a node; ``queue``: number of jobs by state.
    """
    with rpc.connection(home) as sock:
        pong = rpc.ask(sock, wire.Ping(), wire.Pong)
        values = rpc.ask(sock, wire.GetStatus(), wire.Status).values
        nodes = rpc.ask(sock, wire.GetNodes(), wire.Nodes)
        jobs = rpc.ask(sock, wire.GetJobs(), wire.Jobs)
    queue: dict[str, int] = {}
    for job in jobs.jobs:
        state = job.get("state", "PENDING")
        tasks = len(job.get("array_tasks", ())) or 1
        queue[state] = queue.get(state, 0) + tasks
    pids = {name: process.pid for name, process in agents(home)}
    return {
        "home": str(home),
        "cluster": pong.cluster,
        "controller": values | {"pid": pong.pid, "version": pong.version, "host": pong.host},
        "nodes": [_node(node, pids) for node in nodes.nodes],
        "queue": dict(sorted(queue.items())),
    }


def _node(node: dict[str, Any], pids: dict[str, int]) -> dict[str, Any]:
    flags = node.get("flags") or [node.get("state", "UNKNOWN")]
    return {
        "name": node["name"],
        "state": "+".join(flags),
        "spare": node.get("spare", False),
        "instance_type": node.get("instance_type", ""),
        "cpus": node.get("cpus", 1),
        "alloc_cpus": node.get("alloc_cpus", 0),
        "cores": sum(device["cores"] for device in node.get("devices", ())),
        "alloc_cores": len(node.get("alloc_cores", ())),
        "jobs": node.get("jobs", 0),
        "agent_pid": pids.get(node["name"]) or node.get("agent_pid", 0),
        "reason": node.get("reason", ""),
    }


def _row(node: dict[str, Any]) -> tuple[str, ...]:
    return (
        node["name"],
        node["state"].lower() + (" (spare)" if node["spare"] else ""),
        node["instance_type"],
        f"{node['alloc_cpus']}/{node['cpus']}",
        f"{node['alloc_cores']}/{node['cores']}",
        str(node["jobs"]),
        str(node["agent_pid"] or "-"),
        node["reason"],
    )


def uptime(seconds: float) -> str:
    """``1-02:03:04``, days left out when there are none."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    text = f"{hours:02}:{minutes:02}:{rest:02}"
    return f"{days}-{text}" if days else text


def render(status: dict[str, Any]) -> str:
    """The status for people."""
    controller = status["controller"]
    head = f"cluster    {status['cluster']} in {status['home']}\n"
    head += f"controller pid {controller['pid']}, version {controller['version']}"
    if "uptime_s" in controller:
        head += f", up {uptime(controller['uptime_s'])}"
    queue = ", ".join(f"{count} {state.lower()}" for state, count in status["queue"].items())
    rows: list[tuple[str, ...]] = [
        ("NODE", "STATE", "TYPE", "CPUS", "NEURONCORES", "JOBS", "AGENT", "REASON")
    ]
    rows.extend(_row(node) for node in status["nodes"])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    table = "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return f"{head}\nqueue      {queue or 'empty'}\n\n{table}"
