"""What happened, as an onlooker writes it down: requests, commits, processes, losses."""

from __future__ import annotations

from dataclasses import dataclass, field

from nodeagent.order import Key
from scheduler.api import agentwire, wire
from scheduler.api.records import Job, Step, TaskExit
from scheduler.api.states import STEP_BATCH, TERMINAL
from scheduler.sim.loop import Loop

#: A request may wait this long before the core sees it.
SLACK_S = 2.0


@dataclass
class Row:
    """A job's row as last committed, and what was true of it at some time."""

    id: int
    name: str = ""
    state: str = ""
    completing: bool = False
    attempt: int = 0
    started_s: float = 0.0  # when the present attempt was committed
    nodes: list[str] = field(default_factory=list)
    batch: bool = True
    requeue: bool = True
    held: str = ""
    reason: str = ""
    array: int = 0
    task: int | None = None
    throttle: int = 0
    limit_s: int | None = None
    least_limit_s: float = float("inf")
    kill_on_bad_dep: bool = False
    code: int = 0
    signal: int = 0
    ever_started: bool = False
    ever_over: bool = False
    ever_good: bool = False
    ever_bad: bool = False

    @property
    def over(self) -> bool:
        """Ended, and nothing of it is left anywhere."""
        return self.state in TERMINAL and not self.completing

    @property
    def runs(self) -> bool:
        return self.state == "RUNNING" and not self.completing

    def update(self, job: Job, now_s: float) -> None:
        """Take over what was committed."""
        if job.attempt > self.attempt:
            self.started_s = now_s
            self.nodes = [a.node for a in job.allocs]
            self.ever_started = True
        self.name, self.state, self.completing = job.name, job.state, job.completing
        self.attempt, self.batch, self.requeue = job.attempt, job.batch, job.requeue
        self.held, self.reason = job.held, job.reason
        self.array, self.task = job.array_job_id, job.array_task_id
        self.throttle, self.limit_s = job.array_throttle, job.time_limit_s
        if job.time_limit_s is not None:
            self.least_limit_s = min(self.least_limit_s, job.time_limit_s)
        self.kill_on_bad_dep = job.kill_on_invalid_dep
        self.code, self.signal = job.code, job.signal_code
        if self.over:
            self.ever_over = True
            self.ever_good = self.ever_good or job.state == "COMPLETED"
            self.ever_bad = self.ever_bad or job.state != "COMPLETED"


@dataclass
class Live:
    """One node's share of a step with processes."""

    launch: agentwire.Launch
    since_s: float


class Facts:
    """The notebook."""

    def __init__(self, loop: Loop, node_timeout_s: float) -> None:
        self.loop = loop
        self.node_timeout_s = node_timeout_s
        self.rows: dict[int, Row] = {}
        self.arrays: dict[int, list[int]] = {}
        self.step_rows: dict[Key, Step] = {}
        self.live: dict[tuple[str, Key], Live] = {}
        self.ever: dict[tuple[str, Key], None] = {}
        self.newest: dict[int, int] = {}  # job -> newest attempt that ever had a process
        self.began: dict[tuple[int, int], float] = {}  # (job, attempt) -> when committed
        self.exits: dict[Key, list[TaskExit]] = {}
        self.gone_at: dict[Key, float] = {}
        self.no_launch: dict[Key, None] = {}
        self.troubles: dict[str, list[float]] = {}
        self.died: dict[str, None] = {}  # and the controller has not noticed
        self.silences: dict[str, list[float]] = {}
        self.down_since: dict[str, float | None] = {}
        self.drained: dict[str, None] = {}
        self.requests: list[tuple[float, wire.Message]] = []
        self.cancelled: dict[int, float] = {}  # acknowledged
        self.by_key: dict[str, int] = {}
        self.wanted: dict[str, str] = {}  # name -> dependency

    # ------------------------------------------------------------ nodes

    def trouble(self, node: str, since_s: float) -> bool:
        """Was there a reason since then to give up what ran on the node?"""
        times = self.troubles.get(node, [])
        return (bool(times) and times[-1] >= since_s - SLACK_S) or self.silent(node, since_s)

    def silent(self, node: str, since_s: float) -> bool:
        """Could the controller, since then, not reach the node for longer than the timeout?"""
        down_s = self.down_since.get(node)
        if down_s is not None and self.loop.now >= down_s + self.node_timeout_s - 0.001:
            return True
        times = self.silences.get(node, [])
        return bool(times) and times[-1] >= since_s

    # ------------------------------------------------------------ requests

    def asked_for(self, row: Row, kind: type[wire.Message], since_s: float) -> bool:
        """Was this asked for the job (or all of its array, or its task) since then?"""
        names = self.names(row)
        for at_s, request in reversed(self.requests):
            if at_s < since_s - SLACK_S:
                return False
            if not isinstance(request, kind):
                continue
            if isinstance(request, wire.EndAllocation):
                if request.job_id == row.id:
                    return True
            elif isinstance(request, wire.Cancel):
                if any(text in names for text in request.ids):
                    return True
            elif (
                isinstance(request, wire.Control)
                and "requeue" in request.op
                and any(text in names for text in request.ids)
            ):
                return True
        return False

    def step_end_asked(self, key: Key) -> bool:
        """Did somebody cancel or kill this step (in any attempt)?"""
        texts = [f"{name}.{key.step_id}" for name in self.names(self.rows[key.job_id])]
        for _, request in self.requests:
            if isinstance(request, wire.Cancel) and any(t in texts for t in request.ids):
                return True
            if isinstance(request, wire.StepSignal) and (
                (request.job_id, request.step_id) == (key.job_id, key.step_id)
            ):
                return True
        return False

    def since(self, request: wire.Message) -> list[wire.Message]:
        """What was asked after ``request``."""
        later: list[wire.Message] = []
        for _, other in reversed(self.requests):
            if other is request:
                break
            later.append(other)
        return later

    @staticmethod
    def names(row: Row) -> list[str]:
        """Ids by which a request can mean the job."""
        names = [str(row.id)]
        if row.array:
            names.append(str(row.array))
            # A head stands for any of its tasks; one that was split off has its own.
            tasks = range(32) if row.task is None else (row.task,)
            names += [f"{row.array}_{t}" for t in tasks]
        return names

    def members(self, job_id: int) -> list[Row]:
        """The rows that an id stands for."""
        return [self.rows[i] for i in self.arrays.get(job_id, [job_id]) if i in self.rows]

    def batch_exit(self, row: Row) -> TaskExit | None:
        """How the batch script of the present attempt ended."""
        exits = self.exits.get(Key(row.id, STEP_BATCH, row.attempt))
        return exits[0] if exits else None
