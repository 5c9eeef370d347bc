"""Taking a job in: every check that can be made before it waits."""

from __future__ import annotations

from itertools import pairwise

from scheduler.api import wire
from scheduler.api.errors import ClusterError, Infeasible, Rejected
from scheduler.api.records import Job, JobSpec
from scheduler.core import arrays, deps
from scheduler.core.effects import AnyEffect, KeepPayload, Reply
from scheduler.core.events import JobSubmitted
from scheduler.core.lifecycle import check_deps
from scheduler.core.placement import infeasible, size_of
from scheduler.core.priority import priority_of
from scheduler.core.state import State

KNOWN_GRES = ("neuron", "neuroncore")


def on_job_submitted(state: State, event: JobSubmitted) -> list[AnyEffect]:
    """Accept or refuse a submission; ``Submitted`` goes out only after the commit."""
    known = state.by_key.get(event.key) if event.key else None
    if known is not None:
        return [Reply(req=event.req, message=wire.Submitted(job_id=known))]
    try:
        job = build(state, event)
    except Infeasible as error:
        return [
            Reply(
                req=event.req,
                message=wire.Error(
                    code=error.code, message=error.message, warning=_detail(state, event, error)
                ),
            )
        ]
    except ClusterError as error:
        return [Reply(req=event.req, message=wire.Error(code=error.code, message=error.message))]
    job.id = state.new_job_id()
    if job.array_tasks:
        job.array_job_id = job.id
    state.add_job(job)
    state.touch(job)
    if job.begin_s is not None:
        state.at(job.begin_s, "begin", str(job.id))
    effects = _first_reason(state, job, event.now_s)
    state.want_schedule = True
    return [
        *effects,
        KeepPayload(req=event.req, job_id=job.id),
        Reply(req=event.req, message=wire.Submitted(job_id=job.id)),
    ]


def _detail(state: State, event: JobSubmitted, error: Infeasible) -> str:
    """The sentence that names the limit; with EnforcePartLimits=NO only what Slurm says."""
    if state.settings.enforce_part_limits != "NO":
        return error.detail
    wanted = event.spec.resources.cpus_per_task
    too_many = wanted > max((n.cpus for n in state.nodes.values()), default=0)
    return "CPU count per node can not be satisfied" if too_many else ""


def build(state: State, event: JobSubmitted) -> Job:
    """The job record of a submission.  Raises ``Rejected`` or ``Infeasible``."""
    spec, caller, now_s = event.spec, event.caller, event.now_s
    if len(state.jobs) >= state.settings.max_job_count:
        raise Rejected("Slurm temporarily unable to accept job, sleeping and retrying")
    partitions = _partitions(state, spec)
    tasks, throttle = (
        arrays.parse(spec.array, state.settings.max_array_size) if spec.array else ([], 0)
    )
    wanted, any_of = deps.parse(spec.dependency) if spec.dependency else ([], False)
    _check_resources(spec)
    job = Job(
        id=0,
        name=spec.name,
        uid=caller.uid,
        gid=caller.gid,
        user=caller.user,
        group=caller.group,
        account=spec.account or caller.user,
        qos="normal" if spec.qos in ("", "normal") else "",  # no QOS table: others show empty
        partition=partitions[0],
        partitions=partitions,
        batch=spec.batch,
        nice=spec.nice,
        admin_priority=spec.priority if spec.priority else None,
        held="user" if spec.hold or spec.priority == 0 else "",
        res=spec.resources,
        submit_s=now_s,
        begin_s=spec.begin_s if spec.begin_s and spec.begin_s > now_s else None,
        requeue=state.settings.job_requeue if spec.requeue is None else spec.requeue,
        deps=wanted,
        dep_any=any_of,
        kill_on_invalid_dep=bool(spec.kill_on_invalid_dep),
        array_tasks=tasks,
        array_throttle=throttle,
        array_all=_array_facts(tasks),
        signal=spec.signal,
        open_mode=spec.open_mode,
        command=spec.command,
        work_dir=spec.work_dir,
        std_out=spec.std_out,
        std_err=spec.std_err,
        std_in=spec.std_in,
        comment=spec.comment,
        wckey=spec.wckey,
        submit_host=spec.submit_host,
        alloc_sid=spec.alloc_sid,
        kill_on_bad_exit=spec.kill_on_bad_exit,
        request_key=event.key,
    )
    if not spec.batch:
        job.requeue = False
    _known_outcomes(job, event)
    job.dependency = deps.text_of(job)
    job.time_limit_s = _time_limit(state, spec, partitions)
    _check_limits(state, job, spec)
    return job


def _known_outcomes(job: Job, event: JobSubmitted) -> None:
    """Apply what the store knows of dependency targets that left memory."""
    left = []
    for kind, target in job.deps:
        outcome = event.known.get(target)
        if outcome is None or kind == "singleton":
            left.append((kind, target))
            continue
        good = outcome[0] == "COMPLETED"
        if (kind == "afterok" and not good) or (kind == "afternotok" and good):
            left.append(("never", target))
    job.deps = left


def _partitions(state: State, spec: JobSpec) -> list[str]:
    names = [n for n in spec.partitions if n]
    if not names:
        default = [p.name for p in state.partitions.values() if p.default]
        if not default:
            raise Rejected("No partition specified or system default partition")
        return default[:1]
    for name in names:
        if name not in state.partitions:
            raise Rejected("Invalid partition name specified")
    return list(dict.fromkeys(names))


def _array_facts(tasks: list[int]) -> tuple[int, int, int, int] | None:
    if not tasks:
        return None
    steps = {b - a for a, b in pairwise(tasks)}
    step = steps.pop() if len(steps) == 1 else 1
    return len(tasks), tasks[0], tasks[-1], step


def _check_resources(spec: JobSpec) -> None:
    res = spec.resources
    numbers = (res.min_nodes, res.max_nodes, res.ntasks, res.ntasks_per_node, res.cpus_per_task)
    most = res.ntasks_per_node * max(res.max_nodes, res.min_nodes)
    if res.nodes_given and res.ntasks_per_node and res.ntasks > most:
        raise Rejected("Requested node configuration is not available")
    if any(n < 0 or n > 10_000_000 for n in numbers) or (res.nodes_given and res.min_nodes < 1):
        raise Rejected("Node count specification invalid")
    if res.max_nodes and res.max_nodes < res.min_nodes:
        raise Rejected("Node count specification invalid")
    for name, count in res.gres.items():
        if name not in KNOWN_GRES or count < 0:
            raise Rejected("Invalid generic resource (gres) specification")
    for mem in (res.mem_per_cpu_mib, res.mem_per_node_mib):
        if mem is not None and mem < 0:
            raise Rejected("Memory required by task is not available")


def _time_limit(state: State, spec: JobSpec, partitions: list[str]) -> int | None:
    part = state.partitions[partitions[0]]
    if spec.time_limit_s is None:
        return part.default_time_s if part.default_time_s is not None else part.max_time_s
    return None if spec.time_limit_s < 0 else spec.time_limit_s


def _check_limits(state: State, job: Job, spec: JobSpec) -> None:
    """EnforcePartLimits: ALL refuses here; NO accepts what the queue can give a reason for."""
    strict = state.settings.enforce_part_limits != "NO"
    for name in spec.resources.nodelist + spec.resources.exclude:
        if name not in state.nodes:
            raise Rejected("Invalid node name specified")
    for name in job.partitions:
        if state.partitions[name].state in ("INACTIVE", "DRAIN"):
            raise Rejected("Required partition not available (inactive or drain)")
        if state.partitions[name].state == "DOWN":
            continue  # it waits, whatever it asks for
        reason = limit_reason(state, job, name)
        if reason and strict:
            raise _limit_error(state, job, name, reason)
        if not reason or reason == "PartitionConfig" or reason == "PartitionNodeLimit":
            never = infeasible(state, job, name)
            if never is not None and (strict or not _only_too_many(state, job, name)):
                raise Infeasible(*never)


def _only_too_many(state: State, job: Job, partition: str) -> bool:
    """True when the request fails on how many nodes or tasks there are, not on one node's size."""
    part = state.partitions[partition]
    if job.res.min_nodes > size_of(state, part):
        return True
    cpus = sum(state.nodes[n].cpus for n in part.nodes if n in state.nodes)
    return job.res.ntasks * max(1, job.res.cpus_per_task) > cpus


def limit_reason(state: State, job: Job, partition: str) -> str:
    """The pending reason that a partition's limits give, "" when within them."""
    part = state.partitions[partition]
    if part.max_time_s is not None and (
        job.time_limit_s is None or job.time_limit_s > part.max_time_s
    ):
        return "PartitionTimeLimit"
    if part.max_nodes is not None and job.res.min_nodes > part.max_nodes:
        return "PartitionNodeLimit"
    if part.state not in ("UP", "DRAIN"):
        return "PartitionDown" if part.state == "DOWN" else "PartitionInactive"
    nodes = [state.nodes[n] for n in part.nodes if n in state.nodes]
    cpus = max(job.res.ntasks, job.res.min_nodes) * max(1, job.res.cpus_per_task)
    if cpus > sum(n.cpus for n in nodes):
        return "PartitionConfig"
    if job.res.min_nodes > size_of(state, part):
        return "PartitionNodeLimit"
    return ""


def _limit_error(state: State, job: Job, partition: str, reason: str) -> ClusterError:
    part = state.partitions[partition]
    if reason == "PartitionTimeLimit":
        assert part.max_time_s is not None
        asked = "no limit" if job.time_limit_s is None else f"{job.time_limit_s // 60} min"
        return Infeasible(
            "Requested time limit is invalid (missing or exceeds some limit)",
            f"{asked} asked for, partition {partition} allows {part.max_time_s // 60} min",
        )
    if reason == "PartitionNodeLimit" and part.max_nodes is not None:
        return Infeasible(
            "Node count specification invalid",
            f"{job.res.min_nodes} nodes asked for, partition {partition} allows {part.max_nodes}",
        )
    if reason in ("PartitionConfig", "PartitionNodeLimit"):
        never = infeasible(state, job, partition)
        return Infeasible(*(never or ("Node count specification invalid", "")))
    raise AssertionError(f"no error text for {reason}")


def _first_reason(state: State, job: Job, now_s: float) -> list[AnyEffect]:
    """The reason shown until the first scheduling pass looks at the job."""
    effects: list[AnyEffect] = []
    if not job.deps and not job.held and job.begin_s is None:
        job.eligible_s = now_s
    job.priority = priority_of(state, job, now_s)
    if job.held:
        job.reason = "JobHeldUser"
    elif job.begin_s is not None:
        job.reason = "BeginTime"
    elif job.deps:
        effects = check_deps(state, job, now_s)
        if not job.deps and job.begin_s is None:
            job.eligible_s = now_s
            job.priority = priority_of(state, job, now_s)
    else:
        job.reason = limit_reason(state, job, job.partition) or "None"
    return effects
