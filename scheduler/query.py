"""Read-only answers: pure functions from state (and store rows) to replies.

What the views hold beside the records is said in :mod:`scheduler.api.wire`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from scheduler.api import wire
from scheduler.api.hostlist import fold
from scheduler.api.records import Job, Node, Step
from scheduler.api.states import TERMINAL
from scheduler.core.state import State
from scheduler.store.reader import parse_id

View = dict[str, Any]


def _plain(record: Job | Step | Node | msgspec.Struct) -> View:
    view: View = msgspec.to_builtins(record, str_keys=True)
    return view


# ---------------------------------------------------------------------- jobs


def num_tasks(job: Job) -> int:
    """Tasks of the job: placed ones, else what is asked for (at least one a node)."""
    if job.allocs:
        return job.res.ntasks or sum(a.tasks for a in job.allocs)
    res = job.res
    nodes = max(1, res.min_nodes, len(res.nodelist))
    return max(res.ntasks or res.ntasks_per_node * nodes, nodes)


def req_tres(job: Job, state: State) -> dict[str, int]:
    """What the job asks for in all.  Memory not asked for is the nodes' whole memory."""
    res = job.res
    nodes = max(1, res.min_nodes, len(res.nodelist))
    cpus = num_tasks(job) * max(1, res.cpus_per_task)
    nodes = max(nodes, -(-cpus // max(1, _largest(job, state, "cpus") or cpus)))
    tres = {"cpu": cpus}
    if res.mem_per_cpu_mib:
        tres["mem"] = res.mem_per_cpu_mib * cpus
    elif res.mem_per_node_mib:
        tres["mem"] = res.mem_per_node_mib * nodes
    elif state.settings.default_mem_per_cpu_mib:
        tres["mem"] = state.settings.default_mem_per_cpu_mib * cpus
    else:
        tres["mem"] = _largest(job, state, "mem_mib") * nodes
    tres["node"] = nodes
    tres["billing"] = cpus
    for kind, count in res.gres.items():
        if count:
            tres[f"gres/{kind}"] = count * nodes
    return tres


def _largest(job: Job, state: State, field: str) -> int:
    """The most of ``cpus`` or ``mem_mib`` on one node of the job's (first) partition."""
    part = state.partitions.get(job.partition)
    names = part.nodes if part is not None else []
    return max((getattr(state.nodes[n], field) for n in names if n in state.nodes), default=0)


def alloc_tres(job: Job) -> dict[str, int]:
    """What the job holds or held; empty when it never started.  Zero memory is left out."""
    if not job.allocs:
        return {}
    cpus = sum(a.cpus for a in job.allocs)
    tres = {"cpu": cpus}
    mem = sum(a.mem_mib for a in job.allocs)
    if mem:
        tres["mem"] = mem
    tres["node"] = len(job.allocs)
    tres["billing"] = cpus
    for kind, count in job.res.gres.items():
        if count:
            tres[f"gres/{kind}"] = count * len(job.allocs)
    return tres


def job_view(job: Job, state: State, steps: Iterable[Step] | None = None) -> View:
    """The record with what is derived from it."""
    view = _plain(job)
    if job.completing and job.requeue_after:
        view["state"] = "REQUEUED"  # not over: clients must not take the end for final
    nodes = [a.node for a in job.allocs] or (job.last_nodes if job.state in TERMINAL else [])
    view["node_list"] = fold(nodes)
    tres = alloc_tres(job)
    wanted = req_tres(job, state)
    view["num_nodes"] = len(nodes) or wanted["node"]
    view["num_cpus"] = tres.get("cpu") or wanted["cpu"]
    view["num_tasks"] = num_tasks(job)
    view["req_tres"] = wanted
    if tres:
        view["alloc_tres"] = tres
    if steps is not None:
        view["steps"] = [step_view(s) for s in steps]
    return view


def step_view(step: Step) -> View:
    """A step without its specification (command and environment)."""
    view = _plain(step)
    view.pop("spec", None)
    return view


class _Ids:
    """Id filter: whole jobs and arrays, and single tasks of arrays."""

    def __init__(self, texts: list[str]) -> None:
        self.whole: set[int] = set()
        self.tasks: dict[int, set[int]] = {}
        self.texts = texts
        for text in texts:
            parsed = parse_id(text)
            if parsed is None:
                continue
            job_id, task, _ = parsed
            if task is None:
                self.whole.add(job_id)
            else:
                self.tasks.setdefault(job_id, set()).add(task)

    def pick(self, job: Job) -> Job | None:
        """The job when it is meant; an array's record cut down to the tasks meant."""
        if job.id in self.whole or job.array_job_id in self.whole:
            return job
        tasks = self.tasks.get(job.array_job_id)
        if not tasks:
            return None
        if job.array_task_id in tasks:
            return job
        left = [t for t in job.array_tasks if t in tasks]
        return msgspec.structs.replace(job, array_tasks=left) if left else None

    def missing(self, found: list[Job]) -> list[str]:
        """Ids of the filter that none of ``found`` (before other filters) stands for."""
        ids = {j.id for j in found} | {j.array_job_id for j in found}
        tasks = {(j.array_job_id, t) for j in found for t in [*j.array_tasks, j.array_task_id]}
        out = []
        for text in self.texts:
            parsed = parse_id(text)
            if parsed is None:
                out.append(text)
            elif parsed[1] is None:
                if parsed[0] not in ids:
                    out.append(text)
            elif (parsed[0], parsed[1]) not in tasks:
                out.append(text)
        return out


def _in_state(job: Job, states: list[str]) -> bool:
    if not states:
        return job.state not in TERMINAL or job.completing
    wanted = {s.upper() for s in states}
    if "ALL" in wanted:
        return True
    return job.state in wanted or (job.completing and "COMPLETING" in wanted)


def _any(given: list[str], *values: str) -> bool:
    return not given or any(v in given for v in values)


def _on_nodes(job: Job, nodes: list[str]) -> bool:
    if not nodes:
        return True
    return any(a.node in nodes for a in job.allocs)


def _candidates(request: wire.GetJobs, ids: _Ids, state: State) -> Iterable[Job]:
    """All jobs, or only those that the ids can mean (a lookup, not a walk over the queue)."""
    if not request.ids:
        return state.jobs.values()
    found: dict[int, Job] = {}
    for job_id in [*ids.whole, *ids.tasks]:
        for member in [job_id, *state.by_array.get(job_id, {})]:
            job = state.jobs.get(member)
            if job is not None:
                found[member] = job
    return [found[i] for i in sorted(found)]


def get_jobs(request: wire.GetJobs, state: State, now_s: float) -> wire.Jobs:
    """``GetJobs`` from memory: active jobs and those that ended within MinJobAge."""
    ids = _Ids(request.ids)
    meant: list[Job] = []
    for job in _candidates(request, ids, state):
        picked = ids.pick(job) if request.ids else job
        if picked is not None:
            meant.append(picked)
    views = []
    for job in meant:
        if not _in_state(job, request.states) or not _matches(request, job):
            continue
        steps = state.active_steps(state.jobs[job.id]) if request.steps else None
        views.append(job_view(job, state, steps))
    return wire.Jobs(jobs=views, now_s=now_s, missing=ids.missing(meant))


def _matches(request: wire.GetJobs, job: Job) -> bool:
    pending = job.state == "PENDING"  # then it may start in any of the partitions it names
    return (
        _any(request.users, job.user, str(job.uid))
        and _any(request.partitions, *(job.partitions if pending else [job.partition]))
        and _any(request.names, job.name)
        and _any(request.accounts, job.account)
        and _any(request.qos, job.qos)
        and _on_nodes(job, request.nodes)
    )


# ---------------------------------------------------------------------- accounting


def accounting(
    request: wire.GetAccounting, rows: list[tuple[Job, list[Step]]], state: State, now_s: float
) -> wire.Jobs:
    """``GetAccounting`` from the rows that the store found for it."""
    ids = _Ids(request.ids)
    meant: list[Job] = []
    views = []
    for row, steps in rows:
        job = ids.pick(row) if request.ids else row
        if job is None:
            continue
        meant.append(job)
        if not _any(request.partitions, *job.partition.split(",")):
            continue
        if request.states and not _was_in_state(job, request, now_s):
            continue
        wanted_steps = _wanted_steps(request.ids, job)
        shown = [] if job.state == "PENDING" else steps
        if wanted_steps:
            shown = [s for s in shown if s.step_id in wanted_steps]
        views.append(job_view(job, state, shown))
    return wire.Jobs(jobs=views, now_s=now_s, missing=ids.missing(meant))


def _wanted_steps(texts: list[str], job: Job) -> set[str]:
    """Steps named for this job (``12.0``); empty when the whole job is meant."""
    steps: set[str] = set()
    for text in texts:
        parsed = parse_id(text)
        if parsed is None or parsed[0] not in (job.id, job.array_job_id):
            continue
        if parsed[2] is None:
            return set()
        steps.add(parsed[2])
    return steps


def _was_in_state(job: Job, request: wire.GetAccounting, now_s: float) -> bool:
    """Was the job in one of the states within the window?

    A job is PENDING from submission to start, RUNNING from start to end, and is counted in its
    end state at the time of the end.
    """
    start = request.start_s if request.start_s is not None else float("-inf")
    end = request.end_s if request.end_s is not None else float("inf")
    over = job.end_s if job.end_s is not None else now_s
    for state in (s.upper() for s in request.states):
        if state == "PENDING":
            began, ended = job.submit_s, job.start_s if job.start_s is not None else over
        elif state in ("RUNNING", "SUSPENDED"):
            if job.start_s is None or (state == "SUSPENDED" and job.state != state):
                continue
            began, ended = job.start_s, over
        elif job.state == state and job.end_s is not None:
            began = ended = job.end_s
        else:
            continue
        if began <= end and ended >= start:
            return True
    return False


# ---------------------------------------------------------------------- nodes


def get_nodes(state: State, now_s: float) -> wire.Nodes:
    """``GetNodes``: nodes with what is allocated on them, and the partitions."""
    parts_of: dict[str, list[str]] = {}
    for part in state.partitions.values():
        for name in part.nodes:
            parts_of.setdefault(name, []).append(part.name)
    return wire.Nodes(
        nodes=[node_view(n, state, parts_of.get(n.name, [])) for n in state.nodes.values()],
        partitions=[_plain(p) for p in state.partitions.values()],
        now_s=now_s,
        cluster=state.settings.cluster,
    )


def node_view(node: Node, state: State, partitions: list[str]) -> View:
    """The record with its allocation and its state in Slurm's words."""
    view = _plain(node)
    cpus = mem = 0
    cores: list[int] = []
    devices: set[int] = set()
    completing = False
    jobs = 0
    for job_id in state.on_node.get(node.name, {}):
        job = state.jobs[job_id]
        for alloc in job.allocs:
            if alloc.node != node.name or alloc.cleaned:
                continue
            jobs += 1
            cpus += alloc.cpus
            mem += alloc.mem_mib
            cores += alloc.cores
            devices |= set(alloc.devices)
            completing = completing or job.completing
    view["alloc_cpus"] = cpus
    view["alloc_mem_mib"] = mem
    view["alloc_cores"] = sorted(cores)
    view["alloc_devices"] = sorted(devices)
    view["jobs"] = jobs
    view["partitions"] = partitions
    view["flags"] = node_flags(node, cpus, completing)
    return view


def node_flags(node: Node, alloc_cpus: int, completing: bool) -> list[str]:
    """Base state first, then flags."""
    if node.state != "UP":
        base = node.state
    elif alloc_cpus == 0:
        base = "IDLE"
    else:
        base = "ALLOCATED" if alloc_cpus >= node.cpus else "MIXED"
    flags = [base]
    if completing:
        flags.append("COMPLETING")
    if node.drain:
        flags.append("DRAIN")
    if node.fail:
        flags.append("FAIL")
    if node.spare and base == "IDLE" and not node.drain and not node.fail:
        flags.append("RESERVED")  # no job gets it while it is a spare
    if not node.responding:
        flags.append("NOT_RESPONDING")
    return flags
