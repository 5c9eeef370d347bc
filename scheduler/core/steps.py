"""Steps: what srun asks for inside an allocation."""

from __future__ import annotations

from scheduler.api import agentwire, wire
from scheduler.api.errors import Busy, Denied, NotFound, Rejected
from scheduler.api.records import Job, NodeAlloc, Step, StepSpec
from scheduler.api.states import STEP_BATCH, STEP_INTERACTIVE
from scheduler.core.effects import AnyEffect, Launch, Reply, Send
from scheduler.core.events import Asked, Caller
from scheduler.core.layout import block_counts, place_tasks
from scheduler.core.pool import bits, lowest, mask_of
from scheduler.core.state import State

SIGCONT, SIGTERM = 18, 15
BUSY = "Requested nodes are busy"
NOT_AVAILABLE = "Requested node configuration is not available"


def on_create_step(state: State, event: Asked, request: wire.CreateStep) -> list[AnyEffect]:
    """Give a part of the job's allocation to a new step and launch it; ``Busy`` when in use."""
    job = state.jobs.get(request.job_id)
    if job is None or job.state != "RUNNING" or job.completing:
        raise NotFound(
            "Job/step already completing or completed" if job else "Invalid job id specified"
        )
    if not may_control(event.caller, job):
        raise Denied("Access/permission denied")
    known = _known_step(state, job, request.key)
    if known is None:
        step = _build(state, job, request, event.now_s)
        state.add_step(step)
        state.touch_step(step)
        if step.time_limit_s is not None:
            state.at(event.now_s + step.time_limit_s, "step_limit", step_timer_key(step))
        effects: list[AnyEffect] = [
            Launch(node=n, job_id=job.id, step_id=step.step_id, attempt=job.attempt)
            for n in step.layout.nodes
        ]
    else:
        step, effects = known, []
    reply = wire.StepCreated(step_id=step.step_id, attempt=step.attempt, layout=step.layout)
    return [Reply(req=event.req, message=reply), *effects]


def may_control(caller: Caller, job: Job) -> bool:
    """The job's owner or an administrator."""
    return caller.admin or caller.uid == job.uid


def step_timer_key(step: Step) -> str:
    """Names the step in a timer."""
    return f"{step.job_id} {step.step_id} {step.attempt}"


def _known_step(state: State, job: Job, key: str) -> Step | None:
    if not key:
        return None
    return next((s for s in state.active_steps(job) if s.key == key), None)


def _build(state: State, job: Job, request: wire.CreateStep, now_s: float) -> Step:
    spec = request.spec
    usable = _free_shares(state, job, spec)
    allocs, counts = _choose_nodes(job, spec, usable)
    layout = place_tasks([a.node for a in allocs], counts, spec.distribution)
    step_id = str(job.next_step)
    job.next_step += 1
    state.touch(job)
    cpt = max(1, spec.cpus_per_task)
    shares = [
        _share(job, spec, a, usable[a.node], c * cpt) for a, c in zip(allocs, counts, strict=True)
    ]
    return Step(
        job_id=job.id,
        step_id=step_id,
        attempt=job.attempt,
        name=spec.name,
        layout=layout,
        ntasks=sum(counts),
        cpus=sum(s.cpus for s in shares),
        cpus_per_task=cpt,
        mem_mib=max(s.mem_mib for s in shares),
        allocs=shares,
        overlap=spec.overlap,
        kill_on_bad_exit=job.kill_on_bad_exit
        if spec.kill_on_bad_exit is None
        else spec.kill_on_bad_exit,
        start_s=now_s,
        time_limit_s=spec.time_limit_s if spec.time_limit_s and spec.time_limit_s > 0 else None,
        spec=spec,
        key=request.key,
    )


class _Free:
    """What other steps leave of the job's share of one node."""

    __slots__ = ("cores", "cpus")

    def __init__(self, alloc: NodeAlloc) -> None:
        self.cpus = mask_of(alloc.cpu_ids)
        self.cores = mask_of(alloc.cores)


def _free_shares(state: State, job: Job, spec: StepSpec) -> dict[str, _Free]:
    free = {a.node: _Free(a) for a in job.allocs}
    if spec.overlap:
        return free
    for step in state.active_steps(job):
        if step.overlap or step.step_id in (STEP_BATCH, STEP_INTERACTIVE):
            continue
        for share in step.allocs:
            if share.node in free and share.node not in step.ended:
                free[share.node].cpus &= ~mask_of(share.cpu_ids)
                if step.spec is not None and step.spec.gres:
                    free[share.node].cores &= ~mask_of(share.cores)
    return free


def _choose_nodes(
    job: Job, spec: StepSpec, free: dict[str, _Free]
) -> tuple[list[NodeAlloc], list[int]]:
    """Nodes of the step and tasks on each, in the order of the allocation.

    Raises ``Rejected`` when the allocation is too small, ``Busy`` when other steps use it.
    """
    for name in [*spec.nodelist, *spec.exclude]:
        if all(a.node != name for a in job.allocs) and name in spec.nodelist:
            raise Rejected("Requested node configuration is not available")
    pool = [a for a in job.allocs if a.node not in spec.exclude]
    if spec.relative:
        pool = pool[spec.relative :]
    pool.sort(key=lambda a: a.node not in spec.nodelist)
    ntasks, nodes = _wanted(job, spec, len(pool))
    cpt = max(1, spec.cpus_per_task)
    for attempt_free in (False, True):  # first: could it ever fit; then: does it fit now
        rooms = [_room(a, spec, cpt, free[a.node] if attempt_free else None) for a in pool]
        picked = [(a, r) for a, r in zip(pool, rooms, strict=True) if r > 0]
        chosen = _pick(picked, spec, ntasks, nodes)
        if chosen is None:
            if attempt_free:
                raise Busy(BUSY)
            raise Rejected(_too_small(job, spec, ntasks, nodes, len(pool)))
    assert chosen is not None
    chosen_names = {a.node for a, _ in chosen[0]}
    order = [a for a in job.allocs if a.node in chosen_names]
    count_of = {a.node: c for (a, _), c in zip(chosen[0], chosen[1], strict=True)}
    return order, [count_of[a.node] for a in order]


def _too_small(job: Job, spec: StepSpec, ntasks: int, nodes: int, have: int) -> str:
    if nodes > have:
        return NOT_AVAILABLE if spec.exclude else "Requested node configuration is not available"
    if spec.nodes or ntasks > sum(a.cpus for a in job.allocs):
        return "More processors requested than permitted"
    return NOT_AVAILABLE


def _wanted(job: Job, spec: StepSpec, have: int) -> tuple[int, int]:
    """(tasks, nodes) of the step: what srun asked for, else what the job was given."""
    nodes = spec.nodes or len(spec.nodelist)
    per_node = spec.ntasks_per_node or (0 if spec.ntasks_given else job.res.ntasks_per_node)
    if spec.ntasks_given:
        return spec.ntasks, nodes
    if per_node:
        nodes = nodes or have
        return per_node * nodes, nodes
    if nodes:
        if job.res.ntasks and nodes == len(job.allocs):
            return max(job.res.ntasks, nodes), nodes
        return nodes, nodes
    if job.res.ntasks:
        return max(job.res.ntasks, 1), 0
    return have, have


def _room(alloc: NodeAlloc, spec: StepSpec, cpt: int, free: _Free | None) -> int:
    """Tasks of the step that fit on the node; with ``free``, right now."""
    cpus = alloc.cpus if free is None else free.cpus.bit_count()
    if free is not None and not _exact(spec) and not spec.overlap and cpus < alloc.cpus:
        return 0  # a step that is not --exact takes all CPUs of its nodes
    cores = len(alloc.cores) if free is None else free.cores.bit_count()
    want_cores = spec.gres.get("neuroncore", 0)
    want_devices = spec.gres.get("neuron", 0)
    if want_cores > cores or want_devices > len(alloc.devices):
        return 0
    if want_devices and free is not None and len(_whole_devices(alloc, free)) < want_devices:
        return 0
    room = cpus // cpt
    if spec.ntasks_per_node:
        room = min(room, spec.ntasks_per_node)
    if spec.mem_per_node_mib and alloc.mem_mib and spec.mem_per_node_mib > alloc.mem_mib:
        return 0
    return room


def _exact(spec: StepSpec) -> bool:
    return spec.exact or spec.cpus_per_task > 0


def _whole_devices(alloc: NodeAlloc, free: _Free) -> list[int]:
    """Devices of the share with all their (share's) cores free; cores are split evenly."""
    per = max(1, len(alloc.cores) // max(1, len(alloc.devices)))
    groups = [alloc.cores[i : i + per] for i in range(0, len(alloc.cores), per)]
    return [
        d
        for d, group in zip(alloc.devices, groups, strict=False)
        if mask_of(group) & free.cores == mask_of(group)
    ]


def _pick(
    picked: list[tuple[NodeAlloc, int]], spec: StepSpec, ntasks: int, nodes: int
) -> tuple[list[tuple[NodeAlloc, int]], list[int]] | None:
    if ntasks < 1:
        return None
    if nodes:
        if len(picked) < nodes or ntasks < nodes:
            return None
        tries = [picked[:nodes]]
        if not spec.nodelist:
            tries.append(sorted(picked, key=lambda p: -p[1])[:nodes])
    else:
        tries = [picked[:n] for n in range(1, min(len(picked), ntasks) + 1)]
    for chosen in tries:
        if spec.ntasks_per_node:
            counts = _per_node_counts(ntasks, spec.ntasks_per_node, [r for _, r in chosen])
        else:
            counts = block_counts(ntasks, [r for _, r in chosen])
        if counts is not None:
            return chosen, counts
    return None


def _per_node_counts(ntasks: int, per_node: int, rooms: list[int]) -> list[int] | None:
    counts = []
    for room in rooms:
        count = min(per_node, ntasks)
        if room < count or count < 1:
            return None
        counts.append(count)
        ntasks -= count
    return counts if ntasks == 0 else None


def _share(job: Job, spec: StepSpec, alloc: NodeAlloc, free: _Free, need: int) -> NodeAlloc:
    cpu_mask = lowest(free.cpus, need) if _exact(spec) else free.cpus
    cores, devices = alloc.cores, alloc.devices
    if "neuron" in spec.gres:
        per = max(1, len(alloc.cores) // max(1, len(alloc.devices)))
        devices = _whole_devices(alloc, free)[: spec.gres["neuron"]]
        cores = [
            c
            for i, d in enumerate(alloc.devices)
            if d in devices
            for c in alloc.cores[i * per : i * per + per]
        ]
    elif "neuroncore" in spec.gres:
        cores = bits(lowest(free.cores, spec.gres["neuroncore"]))
    elif "none" in spec.gres:
        cores, devices = [], []
    mem = alloc.mem_mib
    if spec.mem_per_node_mib:
        mem = spec.mem_per_node_mib
    elif spec.mem_per_cpu_mib:
        mem = spec.mem_per_cpu_mib * cpu_mask.bit_count()
    return NodeAlloc(
        node=alloc.node,
        cpus=cpu_mask.bit_count(),
        cpu_ids=bits(cpu_mask),
        mem_mib=mem,
        devices=list(devices),
        cores=list(cores),
    )


def on_step_signal(state: State, event: Asked, request: wire.StepSignal) -> list[AnyEffect]:
    """srun passes a signal on; SIGKILL ends the step."""
    job = state.jobs.get(request.job_id)
    step = state.steps.get((request.job_id, request.step_id))
    if job is None or step is None:
        raise NotFound("Invalid job id specified")
    if not may_control(event.caller, job):
        raise Denied("Access/permission denied")
    done = Reply(req=event.req, message=wire.Ok())
    if request.signum == 9:
        return [done, *end_step(state, step, "CANCELLED")]
    return [done, *signal_step(step, request.signum)]


def signal_step(step: Step, signum: int, *, batch_shell: bool = False) -> list[AnyEffect]:
    """Signal the tasks of the step on all nodes where it runs."""
    return [
        Send(
            node=n,
            message=agentwire.Signal(
                job_id=step.job_id,
                step_id=step.step_id,
                attempt=step.attempt,
                signum=signum,
                batch_shell=batch_shell,
            ),
        )
        for n in step.layout.nodes
        if n not in step.ended
    ]


def terminate_step(state: State, step: Step, now_s: float) -> list[AnyEffect]:
    """TERM, and KILL after KillWait: srun's --kill-on-bad-exit."""
    if step.killed:
        return []
    step.killed = True
    step.kill_at_s = now_s + state.settings.kill_wait_s
    state.at(step.kill_at_s, "step_kill", step_timer_key(step))
    state.touch_step(step)
    return [*signal_step(step, SIGCONT), *signal_step(step, SIGTERM)]


def end_step(state: State, step: Step, why: str) -> list[AnyEffect]:
    """KILL the step on all nodes where it may still run."""
    if not step.killed:
        step.killed = True
        step.reason = step.reason or why
        state.touch_step(step)
    return [
        Send(
            node=n,
            message=agentwire.EndStep(
                job_id=step.job_id, step_id=step.step_id, attempt=step.attempt
            ),
        )
        for n in step.layout.nodes
        if n not in step.ended
    ]
