"""What a supervisor is told to run, and the name of a step on this node.

Standard library only: the fork server and every supervisor carry this module.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple


class Key(NamedTuple):
    """Identity of one launch of a step on this node (the fencing token is part of it)."""

    job_id: int
    step_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.job_id}.{self.step_id}.{self.attempt}"


def parse_key(text: str) -> Key:
    """The key a spool folder or marker is named by.  Raises ``ValueError``."""
    job, step, attempt = text.split(".")
    if not step or "/" in step:
        raise ValueError(f"{text!r} does not name a step")
    return Key(int(job), step, int(attempt))


@dataclass(slots=True, kw_only=True)
class Order:
    """The fields of ``scheduler.api.agentwire.Launch`` (same names and defaults).

    ``nodes``/``node_tasks`` are its ``layout``; ``script``/``script_args`` its ``payload``.
    """

    job_id: int
    step_id: str
    attempt: int
    uid: int
    gid: int
    node_index: int
    tasks: list[int]
    nodes: list[str]
    node_tasks: list[list[int]]
    user: str = ""
    argv: list[str] = field(default_factory=list)
    script: str | None = None
    script_args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    vars: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    work_dir: str = "/"
    std_out: str = ""
    std_err: str = ""
    std_in: str = ""
    open_mode: str = ""
    cpus: int = 1
    cpus_per_task: int = 1
    cpu_ids: list[int] = field(default_factory=list)
    mem_mib: int = 0
    devices: list[int] = field(default_factory=list)
    cores: list[int] = field(default_factory=list)
    mpi: str = "pmi1"
    node_hosts: dict[str, str] = field(default_factory=dict)
    pty: bool = False
    wait_s: int = 0

    @property
    def key(self) -> Key:
        return Key(self.job_id, self.step_id, self.attempt)

    @property
    def batch(self) -> bool:
        return self.script is not None

    @property
    def step_name(self) -> str:
        """As Slurm prints it: ``StepId=12.0``, and the bare job for its batch step."""
        return f"{self.job_id}.{self.step_id}"


_KNOWN = {f.name for f in fields(Order)}


def parse_order(body: bytes) -> Order:
    """The order in a ``Launch`` message.  Raises ``ValueError``/``KeyError`` when it is none."""
    raw: dict[str, Any] = json.loads(body)
    values = {name: value for name, value in raw.items() if name in _KNOWN}
    layout = raw["layout"]
    values["nodes"] = layout["nodes"]
    values["node_tasks"] = layout["tasks"]
    payload = raw.get("payload")
    if payload is not None:
        values["script"] = payload.get("script")
        values["script_args"] = payload.get("argv", [])
    return Order(**values)
