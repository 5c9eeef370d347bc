"""What the controller's loop is made of: its set-up, its core's functions, small records."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from scheduler.api.records import Node, Partition, Payload
from scheduler.core import effects as fx
from scheduler.core import events
from scheduler.core.state import Settings, State
from scheduler.session import Session
from scheduler.store import Loaded, TurnRows
from scheduler.transport.base import Transport


class Pass(msgspec.Struct, kw_only=True, tag_field="type", tag=True):
    """A scheduling pass in the journal, so that a replay runs it at the same place."""

    now_s: float
    budget: int


class Core(Protocol):
    """The functions of ``scheduler.core.machine`` (tests put in others)."""

    def handle(self, state: State, event: events.AnyEvent, /) -> list[fx.AnyEffect]: ...
    def schedule(self, state: State, now_s: float, budget: int, /) -> Iterator[fx.AnyEffect]: ...
    def wake(self, state: State, /) -> list[fx.AnyEffect]: ...


@dataclass
class Setup:
    """What the cluster file says, as the controller needs it."""

    home: Path
    config_path: Path
    settings: Callable[[], Settings]
    nodes: Callable[[], list[Node]]
    partitions: Callable[[], list[Partition]]
    transports: Mapping[str, Transport]
    hosts: dict[str, str]
    real_hosts: dict[str, str]
    heartbeat_s: float
    host: str
    version: str


@dataclass
class Waiting:
    """Who waits for the outcome of an event."""

    session: Session
    payload: Payload | None
    job_id: int


class CoreFailed(Exception):
    """The core raised on an event."""

    def __init__(self, event: events.AnyEvent | None, error: Exception) -> None:
        super().__init__(str(error))
        self.event = event
        self.error = error


def disk_text(error: sqlite3.Error) -> str:
    """What SQLite says, in the words of the operating system where there are some."""
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        return "No space left on device"
    return str(error)


def merge_node(node: Node, row: Node | None) -> Node:
    """The cluster file says how large a node is, the row what became of it."""
    if row is None:
        return node
    same = [(d.index, d.cores) for d in node.devices] == [(d.index, d.cores) for d in row.devices]
    return msgspec.structs.replace(
        row,
        addr=node.addr,
        standby=node.standby,
        cpus=node.cpus,
        mem_mib=node.mem_mib,
        devices=row.devices if same else node.devices,
        features=node.features,
        instance_type=node.instance_type,
    )


def state_of(
    loaded: Loaded, settings: Settings, nodes: list[Node], partitions: list[Partition]
) -> State:
    """The core's state from the rows; ``nodes`` and ``partitions`` as the cluster file has them."""
    rows = {n.name: n for n in loaded.nodes}
    merged = [merge_node(n, rows.get(n.name)) for n in nodes]
    return State(settings, merged, partitions, loaded.jobs, loaded.steps, loaded.meta)


def turn_rows(
    state: State, effects: list[fx.AnyEffect], payload_of: Callable[[int], Payload | None]
) -> TurnRows:
    """What a turn must write: the changed records, and the payloads of the accepted requests."""
    dirty = state.take_dirty()
    rows = TurnRows(
        jobs=dirty.jobs,
        steps=dirty.steps,
        nodes=dirty.nodes,
        meta=dirty.meta,
        forgotten_jobs=dirty.forgotten_jobs,
    )
    for effect in effects:
        if isinstance(effect, fx.KeepPayload):
            payload = payload_of(effect.req) or Payload()
            rows.payloads[effect.job_id] = msgspec.json.encode(payload)
    return rows
