"""The controller's state: plain records in dicts, indexes, counters, and what is dirty.

One owner (the core), mutable.  ``touch_*`` marks a record for the next commit; ``take_dirty``
hands the marked records to the store.  Indexes are derived and rebuilt on load.
"""

from __future__ import annotations

import msgspec

from scheduler.api.records import Job, Node, Partition, Step


class Settings(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The cluster file's values that decide the core's behaviour (seconds, counts)."""

    cluster: str = "local"
    enforce_part_limits: str = "ALL"  # ALL: refuse at submit; NO: accept and pend with a reason
    kill_wait_s: float = 30.0
    node_timeout_s: float = 10.0  # silent for so long: node is DOWN, its jobs end
    min_job_age_s: float = 300.0
    requeue_delay_s: float = 1.0
    job_requeue: bool = True
    max_array_size: int = 1001
    max_job_count: int = 100_000
    first_job_id: int = 1
    return_to_service: int = 1  # 0 never, 1 a node DOWN for silence comes back, 2 any DOWN node
    launch_timeout_s: float = 60.0
    priority_weight_age: int = 1000
    priority_max_age_s: float = 7 * 86400.0
    priority_weight_size: int = 1000
    priority_weight_partition: int = 1000
    default_mem_per_cpu_mib: int = 0
    backfill: bool = True


class Dirty(msgspec.Struct):
    """Records changed in this turn, and ids of records to delete."""

    jobs: list[Job]
    steps: list[Step]
    nodes: list[Node]
    meta: dict[str, int]
    forgotten_jobs: list[int]  # leave memory only; their rows stay (accounting)


class State:
    """Everything the core knows."""

    def __init__(
        self,
        settings: Settings,
        nodes: list[Node],
        partitions: list[Partition],
        jobs: list[Job] | None = None,
        steps: list[Step] | None = None,
        meta: dict[str, int] | None = None,
    ) -> None:
        raise NotImplementedError
