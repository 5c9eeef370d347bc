"""The controller's state: plain records in dicts, indexes, counters, and what is dirty.

One owner (the core), mutable.  ``touch`` marks a record for the next commit; ``take_dirty``
hands the marked records to the store.  Indexes are derived and rebuilt on load.
"""

from __future__ import annotations

from heapq import heappush

import msgspec

from scheduler.api.records import Job, Node, NodeAlloc, Partition, Step
from scheduler.api.states import TERMINAL
from scheduler.core.pool import NodeFree, Pool


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
    priority_weight_size: int = 0
    priority_weight_partition: int = 1000
    default_mem_per_cpu_mib: int = 0
    backfill: bool = True


#: States of a partition, in the order of their numbers in the store.
PARTITION_STATES = ("UP", "DOWN", "DRAIN", "INACTIVE")


class Dirty(msgspec.Struct):
    """Records changed in this turn, and ids of jobs that left memory (their rows stay)."""

    jobs: list[Job]
    steps: list[Step]
    nodes: list[Node]
    meta: dict[str, int]
    forgotten_jobs: list[int]


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
        self.settings = settings
        self.nodes: dict[str, Node] = {n.name: n for n in nodes}
        self.node_order: dict[str, int] = {n.name: i for i, n in enumerate(nodes)}
        self.partitions: dict[str, Partition] = {p.name: p for p in partitions}
        self.jobs: dict[int, Job] = {}
        self.steps: dict[tuple[int, str], Step] = {}
        self.meta: dict[str, int] = {"next_job_id": settings.first_job_id, **(meta or {})}
        for part in partitions:  # what scontrol changed outlives a restart
            code = self.meta.get(f"partition_state {part.name}")
            if code is not None:
                part.state = PARTITION_STATES[code]
        # Derived.
        self.pending: dict[int, None] = {}
        self.by_array: dict[int, dict[int, None]] = {}
        self.array_running: dict[int, int] = {}
        self.dependents: dict[int, dict[int, None]] = {}
        self.by_key: dict[str, int] = {}
        self.on_node: dict[str, dict[int, None]] = {n.name: {} for n in nodes}
        self.job_steps: dict[int, dict[str, None]] = {}
        #: (job, attempt) that an agent still has to clean although no allocation says so
        self.strays: dict[str, dict[tuple[int, int], None]] = {n.name: {} for n in nodes}
        self.pool = Pool({n.name: NodeFree(n) for n in nodes})
        self.timers: list[tuple[float, int, str, str]] = []
        self.timer_seq = 0
        self.wake_s: float | None = None
        self.want_schedule = True
        # Changed since the last commit.
        self._dirty_jobs: dict[int, Job] = {}
        self._dirty_steps: dict[tuple[int, str, int], Step] = {}
        self._dirty_nodes: dict[str, Node] = {}
        self._dirty_meta = True
        self._forgotten: list[int] = []
        for job in jobs or []:
            self.add_job(job)
        for step in steps or []:
            if step.end_s is None:
                self.add_step(step)

    # ------------------------------------------------------------------ jobs

    def new_job_id(self) -> int:
        """The next id; never given out twice, also over restarts."""
        job_id = self.meta["next_job_id"]
        self.meta["next_job_id"] = job_id + 1
        self._dirty_meta = True
        return job_id

    def add_job(self, job: Job) -> None:
        """Put a record in and derive the indexes from it."""
        self.jobs[job.id] = job
        if job.array_job_id:
            self.by_array.setdefault(job.array_job_id, {})[job.id] = None
        if job.request_key:
            self.by_key[job.request_key] = job.id
        if job.state == "PENDING":
            self.pending[job.id] = None
        for _, target in job.deps:
            self.depend(job, target)
        for alloc in job.allocs:
            if not alloc.cleaned and alloc.node in self.nodes:
                self.hold_alloc(job, alloc)
        if job.array_job_id and job.state == "RUNNING":
            self.count_array(job, +1)

    def depend(self, job: Job, target: str) -> None:
        """Note that ``job`` wants to hear of the end of ``target``."""
        if target:
            self.dependents.setdefault(int(target.partition("+")[0].partition("_")[0]), {})[
                job.id
            ] = None

    def count_array(self, job: Job, change: int) -> None:
        """Running tasks of an array, for the %throttle."""
        count = self.array_running.get(job.array_job_id, 0) + change
        self.array_running[job.array_job_id] = count
        self.want_schedule = True

    def hold_alloc(self, job: Job, alloc: NodeAlloc) -> None:
        """Take an allocation out of the pool."""
        self.pool.take(alloc, job.res.exclusive)
        self.on_node[alloc.node][job.id] = None

    def release_alloc(self, job: Job, alloc: NodeAlloc, now_s: float) -> None:
        """Give one node's share back (once)."""
        if alloc.cleaned:
            return
        alloc.cleaned = True
        self.touch(job)
        if alloc.node not in self.nodes:
            return
        self.pool.give(alloc, job.res.exclusive)
        self.on_node[alloc.node].pop(job.id, None)
        node = self.nodes[alloc.node]
        node.last_busy_s = now_s
        self.want_schedule = True

    def forget_job(self, job: Job) -> None:
        """Drop an ended job from memory; its row stays in the store."""
        del self.jobs[job.id]
        self.pending.pop(job.id, None)
        self.dependents.pop(job.id, None)
        if job.request_key:
            self.by_key.pop(job.request_key, None)
        if job.array_job_id:
            members = self.by_array[job.array_job_id]
            members.pop(job.id, None)
            if not members:
                del self.by_array[job.array_job_id]
                self.array_running.pop(job.array_job_id, None)
        self._forgotten.append(job.id)

    def active_steps(self, job: Job) -> list[Step]:
        """Steps of the job that have not ended, in order of creation."""
        return [self.steps[(job.id, s)] for s in self.job_steps.get(job.id, {})]

    # ------------------------------------------------------------------ steps

    def add_step(self, step: Step) -> None:
        """Put a running step in."""
        self.steps[(step.job_id, step.step_id)] = step
        self.job_steps.setdefault(step.job_id, {})[step.step_id] = None

    def drop_step(self, step: Step) -> None:
        """An ended step leaves memory; its row stays."""
        self.touch_step(step)
        self.steps.pop((step.job_id, step.step_id), None)
        of_job = self.job_steps.get(step.job_id)
        if of_job is not None:
            of_job.pop(step.step_id, None)
            if not of_job:
                del self.job_steps[step.job_id]

    # ------------------------------------------------------------------ timers

    def at(self, at_s: float, kind: str, key: str) -> None:
        """Have ``kind`` looked at when the time is ``at_s``."""
        self.timer_seq += 1
        heappush(self.timers, (at_s, self.timer_seq, kind, key))

    # ------------------------------------------------------------------ dirty

    def touch(self, job: Job) -> None:
        """The job's row must be written."""
        self._dirty_jobs[job.id] = job

    def touch_step(self, step: Step) -> None:
        """The step's row must be written."""
        self._dirty_steps[(step.job_id, step.step_id, step.attempt)] = step

    def touch_node(self, node: Node) -> None:
        """The node's row must be written."""
        self._dirty_nodes[node.name] = node

    def take_dirty(self) -> Dirty:
        """What changed since the last call."""
        dirty = Dirty(
            jobs=list(self._dirty_jobs.values()),
            steps=list(self._dirty_steps.values()),
            nodes=list(self._dirty_nodes.values()),
            meta=dict(self.meta) if self._dirty_meta else {},
            forgotten_jobs=self._forgotten,
        )
        self._dirty_jobs = {}
        self._dirty_steps = {}
        self._dirty_nodes = {}
        self._dirty_meta = False
        self._forgotten = []
        return dirty

    def set_meta(self, key: str, value: int) -> None:
        """A counter that survives restarts."""
        self.meta[key] = value
        self._dirty_meta = True


def ended(job: Job) -> bool:
    """True when the job is over and its nodes are clean."""
    return job.state in TERMINAL and not job.completing
