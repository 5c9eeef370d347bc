"""``sbatch --test-only``: when and where a job could start, without taking it in."""

from __future__ import annotations

from scheduler.api import wire
from scheduler.api.errors import ClusterError, Infeasible
from scheduler.api.hostlist import fold
from scheduler.api.records import Job, NodeAlloc
from scheduler.core.effects import AnyEffect, Reply
from scheduler.core.events import JobSubmitted
from scheduler.core.placement import place
from scheduler.core.pool import Pool
from scheduler.core.state import State
from scheduler.core.submit import build, limit_reason

#: A running job without a time limit is taken to end a year after its start, as Slurm does.
UNLIMITED_S = 365 * 86400


def on_job_tried(state: State, event: JobSubmitted) -> list[AnyEffect]:
    """Answer with the earliest start among the job's partitions, or why there is none."""
    try:
        job = build(state, event)
        found = [plan for name in job.partitions if (plan := _plan(state, job, name, event.now_s))]
        if not found:
            raise Infeasible("Requested node configuration is not available")
    except ClusterError as error:
        return [Reply(req=event.req, message=wire.Error(code=error.code, message=error.message))]
    start_s, partition, allocs = min(found, key=lambda plan: plan[0])
    answer = wire.Submitted(
        job_id=state.meta["next_job_id"],
        start_s=max(start_s, job.begin_s or start_s),
        num_cpus=sum(a.cpus for a in allocs),
        node_list=fold([a.node for a in allocs]),
        partition=partition,
    )
    return [Reply(req=event.req, message=answer)]


def _plan(
    state: State, job: Job, partition: str, now_s: float
) -> tuple[float, str, list[NodeAlloc]] | None:
    """(start, partition, allocations) with the running jobs alone in mind; None for never."""
    if limit_reason(state, job, partition):
        return None
    names = [n for n in state.partitions[partition].nodes if n in state.nodes]
    names = [n for n in names if not state.nodes[n].spare]
    names.sort(key=lambda n: (state.nodes[n].weight, state.node_order[n]))
    allocs = place(state, state.pool, job, names)
    if allocs is not None:
        return now_s, partition, allocs
    names = [n for n in names if not (state.nodes[n].drain or state.nodes[n].fail)]
    pool = state.pool.copy()
    for end_s, other in _ends(state, names, now_s):
        _give_back(pool, other)
        allocs = place(state, pool, job, names, now=False)
        if allocs is not None:
            return end_s, partition, allocs
    return None


def _ends(state: State, names: list[str], now_s: float) -> list[tuple[float, Job]]:
    """The jobs on the nodes with their expected ends, earliest first."""
    ends = []
    for job_id in {i: None for n in names for i in state.on_node[n]}:
        job = state.jobs[job_id]
        limit_s = UNLIMITED_S if job.time_limit_s is None else job.time_limit_s
        began_s = job.start_s if job.start_s is not None else now_s
        ends.append((now_s if job.completing else max(now_s, began_s + limit_s), job))
    return sorted(ends, key=lambda end: (end[0], end[1].id))


def _give_back(pool: Pool, job: Job) -> None:
    for alloc in job.allocs:
        if not alloc.cleaned:
            pool.give(alloc, job.res.exclusive)
