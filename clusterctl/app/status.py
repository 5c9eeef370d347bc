"""``clusterctl status``: the cluster in one screen, or as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clusterctl.app import rpc
from clusterctl.app.down import agents
from scheduler.api import wire


def collect(home: Path) -> dict[str, Any]:
    """What the controller says of itself, its nodes and its jobs, as plain values.

    A node's ``agent_pid`` is that of the local agent process also when it has no link.  Raises
    ``NotRunning``.
    """
    values = rpc.call(home, wire.GetStatus(), wire.Status).values
    running = {name: process.pid for name, process in agents(home)}
    for node in values["nodes"]:
        node["agent_pid"] = node["agent_pid"] or running.get(node["name"], 0)
    return values


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
    age, size = uptime(controller["uptime_s"]), f"{controller['rss_mib']:.0f} MiB"
    lines = [
        f"cluster     {status['cluster']} in {status['home']}",
        f"controller  pid {controller['pid']}, version {controller['version']}, up {age}, {size}",
    ]
    if controller["trouble"]:
        lines.append(f"trouble     the state cannot be written: {controller['trouble']}")
    jobs = [f"{count} {state.lower()}" for state, count in status["jobs"].items()]
    lines.append(
        f"jobs        {', '.join(jobs) or 'none'}; {status['finished_jobs']} older in accounting"
    )
    rows: list[tuple[str, ...]] = [("NODE", "STATE", "TYPE", "JOBS", "AGENT", "REASON")]
    rows.extend(_row(node) for node in status["nodes"])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    table = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return "\n".join([*lines, "", *table])


def _row(node: dict[str, Any]) -> tuple[str, ...]:
    return (
        node["name"],
        node["state"].lower() + (" (spare)" if node["spare"] else ""),
        node["instance_type"],
        str(node["jobs"]),
        str(node["agent_pid"] or "-"),
        node["reason"] or node["link_error"].removeprefix(f"{node['name']}: "),
    )
