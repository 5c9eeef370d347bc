"""``clusterctl status``: the controller, the nodes and the queue in numbers."""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scheduler.core.state import State
from scheduler.query import node_view


def rss_mib() -> float:
    """Resident memory of this process, MiB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def status_values(
    state: State,
    *,
    started_s: float,
    now_s: float,
    version: str,
    epoch: int,
    home: str,
    trouble: str,
    link_errors: dict[str, str],
    finished: Callable[[], int],
) -> dict[str, Any]:
    """Plain values for JSON.  ``trouble`` says why nothing can be written now, "" normally."""
    jobs: Counter[str] = Counter()
    for job in state.jobs.values():
        word = "COMPLETING" if job.completing else job.state
        jobs[word] += max(1, len(job.array_tasks))
    try:
        kept = finished()
    except sqlite3.Error:
        kept = -1
    nodes = []
    for node in state.nodes.values():
        view = node_view(node, state, [])
        nodes.append(
            {
                "name": node.name,
                "state": "+".join(f for f in view["flags"] if f != "RESERVED"),
                "spare": node.spare,
                "agent_pid": node.agent_pid if node.responding else 0,
                "instance_type": node.instance_type,
                "jobs": view["jobs"],
                "reason": node.reason,
                "link_error": link_errors.get(node.name, ""),
            }
        )
    return {
        "cluster": state.settings.cluster,
        "home": home,
        "controller": {
            "pid": os.getpid(),
            "uptime_s": round(now_s - started_s, 3),
            "version": version,
            "rss_mib": rss_mib(),
            "starts": epoch,
            "trouble": trouble,
        },
        "nodes": nodes,
        "spares": sum(1 for n in state.nodes.values() if n.spare),
        "jobs": dict(sorted(jobs.items())),
        "finished_jobs": kept,
        "steps": len(state.steps),
    }
