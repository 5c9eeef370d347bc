"""The scheduling pass: pending jobs best first, with EASY backfill.

The first job of a partition that cannot start gets a reservation (``shadow``): the time and the
nodes at which it could start, found by giving back the running jobs' allocations in order of
their ends on a copy of the pool, with the real allocator.  Later jobs may start when they end
before that time or stay off those nodes.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from scheduler.api.records import Job, NodeAlloc
from scheduler.core import arrays
from scheduler.core.effects import AnyEffect
from scheduler.core.lifecycle import check_deps, set_reason, start
from scheduler.core.placement import place, usable
from scheduler.core.priority import priority_of
from scheduler.core.state import State
from scheduler.core.submit import limit_reason

FOREVER = float("inf")


class Shadow:
    """When and where the blocked job of the highest priority will start."""

    __slots__ = ("at_s", "nodes")

    def __init__(self, at_s: float, nodes: frozenset[str]) -> None:
        self.at_s = at_s
        self.nodes = nodes


def schedule(state: State, now_s: float, budget: int) -> Iterator[AnyEffect]:
    """Start what can be started.

    ``budget`` counts decisions, so it is the depth of the queue that one pass looks at; a later
    change of the state (a submission, an end, a node) brings the next pass.  A request that
    could not be met is remembered for the pass: jobs of the same shape need no second look.
    """
    state.want_schedule = False
    order = eligible(state, now_s)
    shadows: dict[str, Shadow] = {}
    hopeless: dict[bytes, None] = {}
    candidates = {name: _candidates(state, name) for name in state.partitions}
    for job in order:
        while True:
            if budget <= 0:
                return
            if not _below_throttle(state, job):
                break
            shape = _shape(job)
            if shape in hopeless:
                set_reason(state, job, "Priority")
                break
            budget -= 1
            started, effects = _try(state, job, now_s, candidates, shadows)
            yield from effects
            if not started:
                hopeless[shape] = None
            if not started or job.state != "PENDING" or not job.array_tasks:
                break


def _shape(job: Job) -> bytes:
    """All that decides whether and where a job fits."""
    return msgspec.json.encode((job.res, job.partitions, job.time_limit_s, job.exclude_nodes))


def _below_throttle(state: State, job: Job) -> bool:
    """False (and the reason set) when an array has as many tasks running as it may.

    A task that was requeued has a record of its own and counts like one that never started.
    """
    if not job.array_throttle or not job.array_job_id:
        return True
    if state.array_running.get(job.array_job_id, 0) < job.array_throttle:
        return True
    set_reason(state, job, "JobArrayTaskLimit")
    return False


def eligible(state: State, now_s: float) -> list[Job]:
    """Pending jobs that nothing but resources keeps from starting, best first.

    Sets the reason of the others.
    """
    out: list[Job] = []
    for job_id in list(state.pending):
        job = state.jobs[job_id]
        if job.held:
            why = "JobHeldAdmin" if job.held == "admin" else "JobHeldUser"
            set_reason(state, job, why, job.detail if job.reason == why else "")
            continue
        if job.begin_s is not None and job.begin_s > now_s:
            set_reason(state, job, "BeginTime")
            continue
        if job.deps:
            check_deps(state, job, now_s)
            if job.deps or job.state != "PENDING":
                continue
            if job.begin_s is not None and job.begin_s > now_s:  # after:ID+MINUTES
                set_reason(state, job, "BeginTime")
                continue
        if job.eligible_s is None:
            job.eligible_s = max(job.begin_s or now_s, job.submit_s)
            state.touch(job)
        job.priority = priority_of(state, job, now_s)
        out.append(job)
    out.sort(key=lambda j: (-j.priority, j.submit_s, j.id))
    return out


def _candidates(state: State, partition: str) -> list[str]:
    names = [n for n in state.partitions[partition].nodes if n in state.nodes]
    names.sort(key=lambda n: (state.nodes[n].weight, state.node_order[n]))
    return [n for n in names if usable(state, state.nodes[n])]


def _try(
    state: State,
    job: Job,
    now_s: float,
    candidates: dict[str, list[str]],
    shadows: dict[str, Shadow],
) -> tuple[bool, list[AnyEffect]]:
    """Start one job or one array task, or note why not."""
    limit = ""
    for partition in job.partitions:
        if partition not in state.partitions:
            continue
        limit = limit_reason(state, job, partition)
        if limit:
            continue
        shadow = shadows.get(partition)
        allocs = _fit(state, job, candidates[partition], now_s, shadow)
        if allocs is not None:
            return True, _begin(state, job, allocs, partition, now_s)
        if shadow is None:
            blocked = _shadow(state, job, partition, now_s)
            for name, part in state.partitions.items():
                if name == partition or set(part.nodes) & set(state.partitions[partition].nodes):
                    shadows.setdefault(name, blocked)
            set_reason(state, job, _why(state, job, partition))
        else:
            set_reason(state, job, "Priority")
        limit = ""
    if limit:
        set_reason(state, job, limit)
    return False, []


def _why(state: State, job: Job, partition: str) -> str:
    """Resources, or that the nodes asked for are not there."""
    wanted = job.res.nodelist
    if wanted and any(not usable(state, state.nodes[n]) for n in wanted):
        return "ReqNodeNotAvail"
    return "Resources"


def _fit(
    state: State, job: Job, names: list[str], now_s: float, shadow: Shadow | None
) -> list[NodeAlloc] | None:
    if shadow is not None:
        if not state.settings.backfill:
            return None
        ends = FOREVER if job.time_limit_s is None else now_s + job.time_limit_s
        if ends > shadow.at_s or ends == FOREVER:
            names = [n for n in names if n not in shadow.nodes]
    return place(state, state.pool, job, names)


def _begin(
    state: State, job: Job, allocs: list[NodeAlloc], partition: str, now_s: float
) -> list[AnyEffect]:
    if not arrays.is_array_head(job):
        return start(state, job, allocs, partition, now_s)
    last = len(job.array_tasks) == 1
    task = arrays.split(job, job.array_tasks[0], 0 if last else state.new_job_id())
    if task is not job:
        state.jobs[task.id] = task
        state.by_array[job.array_job_id][task.id] = None
        state.touch(job)
    return start(state, task, allocs, partition, now_s)


def _shadow(state: State, job: Job, partition: str, now_s: float) -> Shadow:
    """Plan the start of a blocked job on a copy of the pool."""
    pool = state.pool.copy()
    part = state.partitions[partition]
    names = [n for n in part.nodes if n in state.nodes and not state.nodes[n].spare]
    names.sort(key=lambda n: (state.nodes[n].weight, state.node_order[n]))
    names = [n for n in names if _may_come_back(state, n)]
    ends: list[tuple[float, int]] = []
    for job_id in {i: None for n in names for i in state.on_node[n]}:
        other = state.jobs[job_id]
        if other.completing:
            ends.append((now_s, job_id))
        elif other.time_limit_s is not None and other.start_s is not None:
            ends.append((max(now_s, other.start_s + other.time_limit_s), job_id))
    ends.sort()
    for at_s, job_id in ends:
        other = state.jobs[job_id]
        for alloc in other.allocs:
            if not alloc.cleaned:
                pool.give(alloc, other.res.exclusive)
        allocs = place(state, pool, job, names, now=False)
        if allocs is not None:
            return Shadow(at_s, frozenset(a.node for a in allocs))
    # No end in sight: keep the nodes it could use free of anything new.
    return Shadow(FOREVER, frozenset(_largest(state, job, names)))


def _may_come_back(state: State, name: str) -> bool:
    node = state.nodes[name]
    return node.state == "UP" and not node.drain and not node.fail


def _largest(state: State, job: Job, names: list[str]) -> list[str]:
    """The nodes a job without a foreseeable start waits for: as many as it needs, first ones."""
    need = max(job.res.min_nodes, len(job.res.nodelist))
    wanted = job.res.nodelist + [n for n in names if n not in job.res.nodelist]
    return wanted[:need]
