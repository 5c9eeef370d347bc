"""Which nodes a job gets: feasible ones first, then the best of them.

``place`` works on any pool, so the same code decides for now, for a plan on a copied pool and
(on an empty pool) whether a request can ever be met.
"""

from __future__ import annotations

from scheduler.api.records import Job, Node, NodeAlloc, Partition, Resources
from scheduler.core.layout import block_counts
from scheduler.core.pool import NodeFree, Pool, bits, lowest
from scheduler.core.state import State


def usable(state: State, node: Node) -> bool:
    """May the scheduler start something there now?"""
    return (
        node.state == "UP"
        and node.responding
        and not node.drain
        and not node.fail
        and not node.spare
        and not state.strays[node.name]
    )


def cpus_per_task(res: Resources) -> int:
    """CPUs of one task, at least 1."""
    return max(1, res.cpus_per_task)


def matches(node: Node, res: Resources) -> bool:
    """Features asked for with -C (joined by &)."""
    if not res.constraint:
        return True
    return all(f.strip() in node.features for f in res.constraint.split("&"))


class Demand:
    """A request worked out: node range, tasks, what one node must have."""

    __slots__ = ("cpt", "job", "max_nodes", "min_nodes", "ntasks", "per_node", "res")

    def __init__(self, job: Job) -> None:
        res = job.res
        self.job = job
        self.res = res
        self.cpt = cpus_per_task(res)
        self.per_node = res.ntasks_per_node
        self.min_nodes = max(1, res.min_nodes, len(res.nodelist))
        if res.nodes_given:
            self.max_nodes = max(res.max_nodes or self.min_nodes, self.min_nodes)
        else:
            self.max_nodes = 0  # as many as the tasks need
        self.ntasks = res.ntasks
        if not self.ntasks and self.per_node:
            self.ntasks = self.per_node * self.min_nodes
        if res.ntasks and self.per_node:
            self.min_nodes = max(self.min_nodes, -(-res.ntasks // self.per_node))
            if self.max_nodes:
                self.max_nodes = max(self.max_nodes, self.min_nodes)

    def mem_on(self, free: NodeFree, cpus: int, default_per_cpu: int) -> int:
        """Memory in MiB that the job takes on a node where it has ``cpus``."""
        if self.res.mem_per_cpu_mib is not None:
            return self.res.mem_per_cpu_mib * cpus
        if self.res.mem_per_node_mib is not None:
            return self.res.mem_per_node_mib or free.total_mem_mib
        return default_per_cpu * cpus

    def room(self, free: NodeFree, default_per_cpu: int) -> int:
        """How many tasks of this job the node could take now; 0 when it cannot be used."""
        res = self.res
        if free.exclusive or (res.exclusive and free.jobs):
            return 0
        if not _gres_fits(free, res):
            return 0
        tasks = free.cpus.bit_count() // self.cpt
        if self.per_node:
            tasks = min(tasks, self.per_node) if tasks >= self.per_node else 0
        if tasks < 1:
            return 0
        if res.mem_per_cpu_mib:
            tasks = min(tasks, free.mem_mib // (res.mem_per_cpu_mib * self.cpt))
        elif self.mem_on(free, self.cpt, default_per_cpu) > free.mem_mib:
            return 0
        return tasks


def _gres_fits(free: NodeFree, res: Resources) -> bool:
    devices = res.gres.get("neuron", 0)
    cores = res.gres.get("neuroncore", 0)
    if not devices and not cores:
        return True
    return free.pick_cores(devices, cores) is not None


def place(
    state: State, pool: Pool, job: Job, candidates: list[str], *, now: bool = True
) -> list[NodeAlloc] | None:
    """Allocations for ``job`` from ``candidates`` (names in preference order), or None.

    ``now`` restricts to nodes that can be used at once.
    """
    demand = Demand(job)
    default_mem = state.settings.default_mem_per_cpu_mib
    rooms: dict[str, int] = {}
    for name in candidates:
        node = state.nodes[name]
        if (now and not usable(state, node)) or not matches(node, job.res):
            continue
        if name in job.res.exclude or name in job.exclude_nodes:
            continue
        room = demand.room(pool.nodes[name], default_mem)
        if room:
            rooms[name] = room
    required = job.res.nodelist
    if any(name not in rooms for name in required):
        return None
    names = _choose(demand, rooms, required)
    if names is None:
        return None
    names.sort(key=lambda n: state.node_order[n])
    counts = _task_counts(demand, names, rooms)
    if counts is None:
        return None
    return [
        _alloc(demand, pool.nodes[n], n, c, default_mem) for n, c in zip(names, counts, strict=True)
    ]


def _choose(demand: Demand, rooms: dict[str, int], required: list[str]) -> list[str] | None:
    """Node names: the required ones, then in order, as few as are asked for and suffice."""
    others = [n for n in rooms if n not in required]
    names = list(required)
    want = demand.max_nodes or demand.min_nodes
    if not demand.max_nodes and not required and demand.min_nodes == 1 and demand.ntasks > 1:
        whole = [n for n in others if rooms[n] >= demand.ntasks]
        if whole:
            return whole[:1]
        others.sort(key=lambda n: -rooms[n])
    if len(names) + len(others) < demand.min_nodes:
        return None
    names += others[: max(0, want - len(names))]
    if demand.ntasks and demand.res.ntasks:
        have = sum(rooms[n] for n in names)
        for n in others:
            if have >= demand.ntasks or demand.max_nodes:
                break
            if n not in names:
                names.append(n)
                have += rooms[n]
        if have < demand.ntasks and demand.max_nodes:
            names = required + sorted(others, key=lambda n: -rooms[n])[: want - len(required)]
        if sum(rooms[n] for n in names) < demand.ntasks:
            return None
        while len(names) > max(demand.min_nodes, demand.ntasks) and names[-1] not in required:
            names.pop()
    return names if len(names) >= demand.min_nodes else None


def _task_counts(demand: Demand, names: list[str], rooms: dict[str, int]) -> list[int] | None:
    if demand.per_node and not demand.res.ntasks:
        return [demand.per_node] * len(names)
    if not demand.ntasks:
        return [1] * len(names)
    ntasks = max(demand.ntasks, len(names))
    return block_counts(ntasks, [rooms[n] for n in names])


def _alloc(demand: Demand, free: NodeFree, name: str, tasks: int, default_mem: int) -> NodeAlloc:
    res = demand.res
    cpu_mask = free.cpus if res.exclusive else lowest(free.cpus, tasks * demand.cpt)
    cpu_ids = bits(cpu_mask)
    if res.exclusive and not res.ntasks and not demand.per_node:
        tasks = max(1, len(cpu_ids) // demand.cpt)
    picked = free.pick_cores(res.gres.get("neuron", 0), res.gres.get("neuroncore", 0))
    if res.exclusive:  # the whole node, devices too
        picked = (free.free_devices(), bits(free.cores))
    assert picked is not None
    return NodeAlloc(
        node=name,
        cpus=len(cpu_ids),
        cpu_ids=cpu_ids,
        mem_mib=demand.mem_on(free, len(cpu_ids), default_mem),
        devices=picked[0],
        cores=picked[1],
        tasks=tasks,
    )


CONFIG = "Requested node configuration is not available"
NODE_COUNT = "Node count specification invalid"
PROCESSORS = "More processors requested than permitted"
FEATURES = "Invalid feature specification"


def size_of(state: State, part: Partition) -> int:
    """How many nodes the partition has in service when all are well.

    A spare that stands in for a lost node adds none.
    """
    return sum(1 for n in part.nodes if n in state.nodes and not state.nodes[n].standby)


def infeasible(state: State, job: Job, partition: str) -> tuple[str, str] | None:
    """Why no state of the partition's nodes could ever satisfy the job; None when one could.

    (Slurm's text, a sentence that names the limit).
    """
    part = state.partitions[partition]
    res = job.res
    demand = Demand(job)
    nodes = [state.nodes[n] for n in part.nodes if n in state.nodes]
    serving = [n for n in nodes if not n.spare]
    for name in res.nodelist:
        if name not in part.nodes:
            return CONFIG, f"node {name} is not in partition {partition}"
    size = size_of(state, part)
    if demand.min_nodes > size:
        return NODE_COUNT, f"{demand.min_nodes} nodes asked for, partition {partition} has {size}"
    fitting = [n for n in nodes if matches(n, res)]
    if res.constraint and not fitting:
        return FEATURES, f"no node of partition {partition} has the features {res.constraint}"
    too_big = _too_big(demand, fitting)
    if too_big:
        return CONFIG, f"{too_big} on one node"
    empty = Pool({n.name: NodeFree(n) for n in nodes})
    names = [n.name for n in serving] + [n.name for n in nodes if n.spare]
    fits = place(state, empty, job, names, now=False)
    if fits is None or len(fits) > size:  # a spare serves only in another's place
        total = sum(n.cpus for n in fitting if not n.spare)
        text = PROCESSORS if demand.ntasks * demand.cpt > total else CONFIG
        return text, (
            f"partition {partition} ({size} nodes, {total} CPUs) cannot hold it, even when empty"
        )
    return None


def _too_big(demand: Demand, nodes: list[Node]) -> str:
    """The first resource of which the job wants more on one node than the largest node has."""
    res = demand.res
    cpus = demand.cpt * max(1, demand.per_node)
    mem = res.mem_per_node_mib or (res.mem_per_cpu_mib or 0) * cpus
    wants = (
        (cpus, max((n.cpus for n in nodes), default=0), "CPUs"),
        (mem, max((n.mem_mib for n in nodes), default=0), "MiB of memory"),
        (
            res.gres.get("neuron", 0),
            max((len(n.devices) for n in nodes), default=0),
            "neuron devices",
        ),
        (
            res.gres.get("neuroncore", 0),
            max((sum(d.cores for d in n.devices) for n in nodes), default=0),
            "neuron cores",
        ),
    )
    for want, most, what in wants:
        if want > most:
            return f"{want} {what} asked for, the most there is is {most}"
    return ""
