"""Builds the message that starts one node's share of a step.

Which SLURM_* variables exist for batch scripts and for steps, and how they are written, follows
what Slurm 22.05 sets.  Variables that differ from task to task are the agent's.
"""

from __future__ import annotations

from itertools import groupby

from scheduler.api import agentwire
from scheduler.api.hostlist import fold
from scheduler.api.records import Job, Node, NodeAlloc, Payload, Step
from scheduler.api.states import STEP_BATCH

#: Array index in file names of jobs that are no array (Slurm's NO_VAL).
_NO_TASK = "4294967294"


class Site:
    """What launches need to know of the cluster: its name, where it is, who shares a machine.

    ``real_hosts`` maps a node to the machine it is on (local nodes share one).
    """

    def __init__(
        self, cluster: str, host: str, nodes: dict[str, Node], real_hosts: dict[str, str]
    ) -> None:
        self.cluster = cluster
        self.host = host
        self.nodes = nodes
        self.real_hosts = real_hosts


def compress(counts: list[int]) -> str:
    """Slurm's form of a list of counts: ``3,1`` and ``16(x2)``."""
    parts = []
    for value, run in groupby(counts):
        length = sum(1 for _ in run)
        parts.append(f"{value}(x{length})" if length > 1 else str(value))
    return ",".join(parts)


def build(
    job: Job, step: Step, node: str, payload: Payload | None, site: Site
) -> agentwire.Launch | None:
    """The launch of ``step`` on ``node``; None when the step has nothing there."""
    if node not in step.layout.nodes:
        return None
    index = step.layout.nodes.index(node)
    share = _share(job, step, node)
    message = agentwire.Launch(
        job_id=job.id,
        step_id=step.step_id,
        attempt=step.attempt,
        uid=job.uid,
        gid=job.gid,
        user=job.user,
        layout=step.layout,
        node_index=index,
        tasks=step.layout.tasks[index],
        names=_names(job, step),
        cpus=share.cpus,
        cpus_per_task=step.cpus_per_task,
        cpu_ids=share.cpu_ids,
        mem_mib=share.mem_mib,
        devices=share.devices,
        cores=share.cores,
        node_hosts={n: site.real_hosts.get(n, n) for n in step.layout.nodes},
    )
    if step.step_id == STEP_BATCH:
        return _batch(message, job, payload, share, site)
    return _step(message, job, step, share, site)


def _share(job: Job, step: Step, node: str) -> NodeAlloc:
    """This node's share: the step's own, for the batch script all that the job has there."""
    for alloc in [*step.allocs, *job.allocs]:
        if alloc.node == node:
            return alloc
    return NodeAlloc(node=node, cpus=step.cpus)


def _batch(
    message: agentwire.Launch, job: Job, payload: Payload | None, share: NodeAlloc, site: Site
) -> agentwire.Launch:
    message.payload = payload or Payload()
    message.argv = message.payload.argv
    message.env = message.payload.env
    message.payload = Payload(script=message.payload.script, argv=message.payload.argv)
    message.vars = job_vars(job, site)
    message.vars |= {
        "SLURM_CPUS_ON_NODE": str(share.cpus),
        "SLURM_NODE_ALIASES": "(null)",
        "SLURM_PRIO_PROCESS": "0",
        "SLURM_TOPOLOGY_ADDR": share.node,
        "SLURM_TOPOLOGY_ADDR_PATTERN": "node",
    }
    message.vars |= _given(job)
    if "SLURM_SUBMIT_DIR" not in message.env:
        message.vars["SLURM_SUBMIT_DIR"] = job.work_dir
    message.work_dir = job.work_dir
    default = "slurm-%A_%a.out" if job.array_job_id else "slurm-%j.out"
    message.std_out = job.std_out or default
    message.std_err = job.std_err
    message.std_in = job.std_in
    message.open_mode = job.open_mode
    message.mpi = "none"
    return message


def _step(
    message: agentwire.Launch, job: Job, step: Step, share: NodeAlloc, site: Site
) -> agentwire.Launch:
    spec = step.spec
    assert spec is not None, f"step {job.id}.{step.step_id} has no specification"
    message.argv = spec.argv
    message.env = spec.env
    message.vars = job_vars(job, site)
    message.vars |= {
        "SLURM_CPUS_ON_NODE": str(share.cpus),
        "SLURM_PRIO_PROCESS": "0",
        "SLURM_TOPOLOGY_ADDR": share.node,
        "SLURM_TOPOLOGY_ADDR_PATTERN": "node",
    }
    message.vars |= step_vars(job, step, site)
    if "SLURM_SUBMIT_DIR" not in spec.env:
        message.vars["SLURM_SUBMIT_DIR"] = job.work_dir
    message.work_dir = spec.work_dir
    message.std_out = spec.std_out
    message.std_err = spec.std_err
    message.std_in = spec.std_in
    message.open_mode = spec.open_mode
    message.mpi = spec.mpi
    message.pty = spec.pty
    message.wait_s = spec.wait_s
    return message


def _names(job: Job, step: Step) -> dict[str, str]:
    """File name pattern letters that are the same for all tasks of the step."""
    task = _NO_TASK if job.array_task_id is None else str(job.array_task_id)
    full = str(job.id) if step.step_id == STEP_BATCH else f"{job.id}.{step.step_id}"
    return {
        "A": str(job.array_job_id or job.id),
        "a": task,
        "J": full,
        "j": str(job.id),
        "s": step.step_id,
        "u": job.user,
        "x": job.name,
    }


def job_vars(job: Job, site: Site) -> dict[str, str]:
    """Variables that every process of the job has."""
    nodes = [a.node for a in job.allocs]
    folded = fold(nodes)
    found = {
        "SLURM_CLUSTER_NAME": site.cluster,
        "SLURM_JOBID": str(job.id),
        "SLURM_JOB_ACCOUNT": job.account,
        "SLURM_JOB_CPUS_PER_NODE": compress([a.cpus for a in job.allocs]),
        "SLURM_JOB_GID": str(job.gid),
        "SLURM_JOB_ID": str(job.id),
        "SLURM_JOB_NODELIST": folded,
        "SLURM_JOB_NUM_NODES": str(len(nodes)),
        "SLURM_JOB_PARTITION": job.partition,
        "SLURM_JOB_QOS": job.qos,
        "SLURM_JOB_UID": str(job.uid),
        "SLURM_JOB_USER": job.user,
        "SLURM_NNODES": str(len(nodes)),
        "SLURM_NODELIST": folded,
        "SLURM_SUBMIT_HOST": job.submit_host,
        "SLURM_TASKS_PER_NODE": compress([a.tasks for a in job.allocs]),
        "SLURM_WORKING_CLUSTER": f"{site.cluster}:{site.host}:0:9728:109",
    }
    # A script from standard input has no name of its own.
    if not (job.batch and job.command is None and job.name == "sbatch"):
        found["SLURM_JOB_NAME"] = job.name
    if job.restarts:
        found["SLURM_RESTART_COUNT"] = str(job.restarts)
    if job.array_job_id and job.array_task_id is not None:
        found |= _array_vars(job)
    return found


def _array_vars(job: Job) -> dict[str, str]:
    found = {
        "SLURM_ARRAY_JOB_ID": str(job.array_job_id),
        "SLURM_ARRAY_TASK_ID": str(job.array_task_id),
    }
    if job.array_all is not None:
        for key, value in zip(("COUNT", "MIN", "MAX", "STEP"), job.array_all, strict=True):
            found[f"SLURM_ARRAY_TASK_{key}"] = str(value)
    return found


def _given(job: Job) -> dict[str, str]:
    """Variables that exist only when the user asked for the thing."""
    res = job.res
    found: dict[str, str] = {}
    tasks = res.ntasks or res.ntasks_per_node * len(job.allocs)
    if tasks:
        found["SLURM_NTASKS"] = found["SLURM_NPROCS"] = str(tasks)
    if res.ntasks_per_node:
        found["SLURM_NTASKS_PER_NODE"] = str(res.ntasks_per_node)
    if res.cpus_per_task:
        found["SLURM_CPUS_PER_TASK"] = str(res.cpus_per_task)
    if res.mem_per_cpu_mib is not None:
        found["SLURM_MEM_PER_CPU"] = str(res.mem_per_cpu_mib)
    if res.mem_per_node_mib is not None:
        found["SLURM_MEM_PER_NODE"] = str(res.mem_per_node_mib)
    return found


def step_vars(job: Job, step: Step, site: Site) -> dict[str, str]:
    """Variables of a numbered step that are the same for all its tasks."""
    spec = step.spec
    assert spec is not None, f"step {job.id}.{step.step_id} has no specification"
    counts = compress([len(t) for t in step.layout.tasks])
    folded = fold(step.layout.nodes)
    inside = "SLURM_JOB_ID" in spec.env
    origin = job.allocs[0].node if inside and job.batch and job.allocs else ""
    address = site.nodes[origin].addr if origin in site.nodes else ""
    address = address or "127.0.0.1"
    found = {
        "SLURM_LAUNCH_NODE_IPADDR": address,
        "SLURM_NNODES": str(len(step.layout.nodes)),
        "SLURM_NODELIST": folded,
        "SLURM_NPROCS": str(step.ntasks),
        "SLURM_NTASKS": str(step.ntasks),
        "SLURM_SRUN_COMM_HOST": address,
        # Commands and agents talk over unix sockets: there is no port.
        "SLURM_SRUN_COMM_PORT": "0",
        "SLURM_STEPID": step.step_id,
        "SLURM_STEP_ID": step.step_id,
        "SLURM_STEP_LAUNCHER_PORT": "0",
        "SLURM_STEP_NODELIST": folded,
        "SLURM_STEP_NUM_NODES": str(len(step.layout.nodes)),
        "SLURM_STEP_NUM_TASKS": str(step.ntasks),
        "SLURM_STEP_TASKS_PER_NODE": counts,
        "SLURM_TASKS_PER_NODE": counts,
    }
    if inside:
        found["SLURM_DISTRIBUTION"] = spec.distribution
        found["SLURM_JOB_CPUS_PER_NODE_PACK_GROUP_0"] = compress([a.cpus for a in job.allocs])
    if spec.ntasks_per_node:
        found["SLURM_NTASKS_PER_NODE"] = str(spec.ntasks_per_node)
    if spec.cpus_per_task:
        found["SLURM_CPUS_PER_TASK"] = str(spec.cpus_per_task)
    if spec.mem_per_cpu_mib is not None:
        found["SLURM_MEM_PER_CPU"] = str(spec.mem_per_cpu_mib)
    if spec.mem_per_node_mib is not None:
        found["SLURM_MEM_PER_NODE"] = str(spec.mem_per_node_mib)
    return found
