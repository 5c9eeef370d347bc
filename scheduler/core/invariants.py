"""What must hold between any two events."""

from __future__ import annotations

from scheduler.api.records import NodeAlloc
from scheduler.api.states import TERMINAL
from scheduler.core.pool import mask_of
from scheduler.core.state import State


def check(state: State) -> None:
    """AssertionError when the state contradicts itself."""
    _check_jobs(state)
    _check_pool(state)
    for key, step in state.steps.items():
        assert key == (step.job_id, step.step_id)
        job = state.jobs.get(step.job_id)
        assert job is not None, f"step {key} of a job that is gone"
        assert step.end_s is None, f"ended step {key} in memory"
        assert job.attempt == step.attempt, f"step {key} of attempt {step.attempt}"


def _check_jobs(state: State) -> None:
    for job in state.jobs.values():
        assert job.id < state.meta["next_job_id"]
        pending = job.state == "PENDING"
        assert pending == (job.id in state.pending), f"job {job.id} {job.state}: index"
        if pending:
            assert not job.allocs, f"pending job {job.id} holds nodes"
            assert not job.completing
        if job.state == "RUNNING":
            assert job.allocs, f"running job {job.id} holds nothing"
            assert all(not a.cleaned for a in job.allocs), f"job {job.id} lost a share"
            assert job.attempt > 0
            assert not job.array_tasks
        if job.state in TERMINAL and not job.completing:
            assert all(a.cleaned for a in job.allocs), f"ended job {job.id} holds nodes"
            assert job.end_s is not None
            assert not state.active_steps(job), f"ended job {job.id} has steps"
        if job.array_job_id:
            assert job.id in state.by_array[job.array_job_id]
    running: dict[int, int] = {}
    for job in state.jobs.values():
        if job.array_job_id and job.state == "RUNNING":
            running[job.array_job_id] = running.get(job.array_job_id, 0) + 1
    for array, count in state.array_running.items():
        assert count == running.get(array, 0), f"array {array} counts {count}"


def _check_pool(state: State) -> None:
    """Every CPU, MiB and neuron core is either free or held by exactly one job."""
    held: dict[str, list[NodeAlloc]] = {name: [] for name in state.nodes}
    for job in state.jobs.values():
        for alloc in job.allocs:
            if not alloc.cleaned and alloc.node in held:
                held[alloc.node].append(alloc)
                assert job.id in state.on_node[alloc.node]
    for name, node in state.nodes.items():
        free = state.pool.nodes[name]
        cpus, cores, mem = free.cpus, free.cores, free.mem_mib
        for alloc in held[name]:
            for taken, mask in ((cpus, mask_of(alloc.cpu_ids)), (cores, mask_of(alloc.cores))):
                assert taken & mask == 0, f"{name}: used twice or free while held"
            cpus |= mask_of(alloc.cpu_ids)
            cores |= mask_of(alloc.cores)
            mem += alloc.mem_mib
        assert cpus == (1 << node.cpus) - 1, f"{name}: CPUs leaked"
        assert mem == node.mem_mib, f"{name}: memory leaked"
        healthy = 0
        for mask in free.core_masks:
            healthy |= mask
        assert cores & healthy == healthy, f"{name}: neuron cores leaked"
        assert free.jobs == len(held[name])
