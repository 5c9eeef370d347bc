"""Priority of pending jobs."""

from __future__ import annotations

from scheduler.api.records import Job
from scheduler.core.state import State


def priority_of(state: State, job: Job, now_s: float) -> int:
    """Larger starts first; 0 is held.

    partition weight x partition priority / largest + size weight x nodes / all nodes
    + age weight x age / max age (at most 1) - nice, at least 1.  The terms are those of Slurm's
    multifactor plug-in that need no account database.
    """
    if job.held:
        return 0
    if job.admin_priority is not None:
        return job.admin_priority
    s = state.settings
    names = [p for p in job.partitions if p in state.partitions]
    top = max((p.priority for p in state.partitions.values()), default=1) or 1
    part = max((state.partitions[p].priority for p in names), default=1) / top
    size = job.res.min_nodes / max(1, len(state.nodes))
    since = job.eligible_s if job.eligible_s is not None else now_s
    age = min(1.0, max(0.0, now_s - since) / s.priority_max_age_s)
    value = (
        s.priority_weight_partition * part
        + s.priority_weight_size * min(1.0, size)
        + s.priority_weight_age * age
        - job.nice
    )
    return max(1, int(value))
