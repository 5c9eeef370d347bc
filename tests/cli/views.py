"""Views of jobs and nodes as a controller sends them: one of each kind."""

from __future__ import annotations

from typing import Any

NOW_S = 1_800_000_100.0
START_S = 1_800_000_000.0
STAMP = "2027-01-15T08:00:00"


def job(job_id: int, name: str, state: str = "PENDING", **more: Any) -> dict[str, Any]:
    """A job of root on partition main."""
    view: dict[str, Any] = {
        "id": job_id,
        "name": name,
        "user": "root",
        "uid": 0,
        "gid": 0,
        "group": "root",
        "account": "root",
        "partition": "main",
        "partitions": ["main"],
        "state": state,
        "submit_s": START_S,
        "num_cpus": 1,
        "num_nodes": 1,
        "num_tasks": 1,
        "work_dir": "/w",
        "command": "/w/job.sh",
        "std_out": "/dev/null",
        "res": {},
        "req_tres": {"cpu": 1, "mem": 65536, "node": 1, "billing": 1},
    }
    if state not in ("PENDING",):
        view |= {"start_s": START_S, "node_list": "n001", "last_nodes": ["n001"]}
    if state == "RUNNING":
        view["allocs"] = [{"node": "n001", "cpus": 1}]
    if state not in ("PENDING", "RUNNING"):
        view["end_s"] = START_S
    return view | more


def queue() -> list[dict[str, Any]]:
    """A queue with a bit of everything."""
    return [
        job(
            700001,
            "run1",
            "RUNNING",
            priority=10140,
            time_limit_s=600,
            num_cpus=2,
            num_tasks=2,
            comment="hello",
            res={"ntasks": 2, "gres": {"neuron": 4}, "min_nodes": 1},
            alloc_tres={"cpu": 2, "node": 1, "billing": 2, "gres/neuron": 4},
        ),
        job(700002, "held1", reason="JobHeldUser", held="user", time_limit_s=5400),
        job(
            700004,
            "arr",
            reason="JobArrayTaskLimit",
            array_job_id=700004,
            array_tasks=[3, 4, 5, 6],
            array_throttle=2,
            priority=10132,
            time_limit_s=86400,
        ),
        job(
            700005,
            "arr",
            "RUNNING",
            array_job_id=700004,
            array_task_id=1,
            priority=10132,
            time_limit_s=86400,
        ),
        job(
            700009,
            "big",
            reason="Resources",
            priority=10531,
            num_nodes=4,
            time_limit_s=300,
            res={"min_nodes": 4, "max_nodes": 4, "nodes_given": True, "exclusive": True},
        ),
        job(
            700010,
            "dep1",
            reason="Dependency",
            dependency="afterok:700001(unfulfilled)",
            partition="debug",
            partitions=["debug"],
            priority=10132,
            time_limit_s=1800,
        ),
        job(700011, "later", reason="BeginTime", begin_s=1893553445.0, priority=10132),
        job(
            700012,
            "averyveryverylongjobname",
            reason="JobHeldUser",
            partitions=["main", "debug"],
            held="user",
        ),
    ]


def ended() -> list[dict[str, Any]]:
    """Jobs that have ended, one for each way."""
    return [
        job(700021, "done1", "COMPLETED"),
        job(700022, "fail1", "FAILED", reason="NonZeroExitCode", code=3),
        job(700023, "canc1", "CANCELLED", cancelled_by=0, node_list="", last_nodes=[]),
    ]


def nodes() -> list[dict[str, Any]]:
    """Four nodes: mixed, allocated, idle, drained."""
    device = {"cores": 0}
    base: dict[str, Any] = {
        "cpus": 16,
        "mem_mib": 65536,
        "devices": [device | {"index": i} for i in range(16)],
        "addr": "127.0.0.1",
    }
    return [
        base
        | {
            "name": "n001",
            "flags": ["MIXED"],
            "alloc_cpus": 4,
            "alloc_devices": [0, 1, 2, 3],
            "partitions": ["main", "debug"],
        },
        base
        | {
            "name": "n002",
            "flags": ["ALLOCATED"],
            "alloc_cpus": 16,
            "alloc_devices": list(range(16)),
            "partitions": ["main", "debug"],
        },
        base | {"name": "n003", "flags": ["IDLE"], "partitions": ["main"]},
        base
        | {
            "name": "n004",
            "flags": ["IDLE", "DRAIN"],
            "reason": "bad fan",
            "reason_s": START_S,
            "partitions": ["main"],
        },
    ]


def partitions() -> list[dict[str, Any]]:
    """``main`` (default, all nodes) and ``debug``."""
    return [
        {"name": "main", "nodes": ["n001", "n002", "n003", "n004"], "default": True},
        {"name": "debug", "nodes": ["n001", "n002"], "max_time_s": 1800},
    ]
