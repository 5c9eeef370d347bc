"""Free CPUs, memory and neuron cores of every node; cheap to copy.

CPUs and cores are bit masks, so a copy of the pool (backfill plans on copies) is a few integers
a node.  ``generation`` changes with every allocation and release: plans made for an older
generation are stale.
"""

from __future__ import annotations

from scheduler.api.records import Node, NodeAlloc


def bits(mask: int) -> list[int]:
    """Positions of the ones, ascending."""
    out = []
    while mask:
        low = mask & -mask
        out.append(low.bit_length() - 1)
        mask ^= low
    return out


def lowest(mask: int, count: int) -> int:
    """The ``count`` lowest ones of ``mask`` (fewer when it has fewer)."""
    out = 0
    for _ in range(count):
        low = mask & -mask
        if not low:
            break
        out |= low
        mask ^= low
    return out


def mask_of(ids: list[int]) -> int:
    """The mask with ones at ``ids``."""
    out = 0
    for i in ids:
        out |= 1 << i
    return out


class NodeFree:
    """What is free on one node.  ``core_masks[d]`` are the node-wide core bits of device d."""

    __slots__ = ("core_masks", "cores", "cpus", "exclusive", "jobs", "mem_mib", "total_mem_mib")

    def __init__(self, node: Node) -> None:
        self.cpus = (1 << node.cpus) - 1
        self.mem_mib = node.mem_mib
        self.total_mem_mib = node.mem_mib
        self.cores = 0
        self.core_masks: list[int] = []
        base = 0
        for device in node.devices:
            mask = ((1 << device.cores) - 1) << base
            base += device.cores
            self.core_masks.append(mask if device.healthy else 0)
            self.cores |= mask if device.healthy else 0
        self.jobs = 0
        self.exclusive = False

    def copy(self) -> NodeFree:
        """An independent copy (the device table is shared, it does not change)."""
        new = NodeFree.__new__(NodeFree)
        new.cpus = self.cpus
        new.mem_mib = self.mem_mib
        new.total_mem_mib = self.total_mem_mib
        new.cores = self.cores
        new.core_masks = self.core_masks
        new.jobs = self.jobs
        new.exclusive = self.exclusive
        return new

    def free_devices(self) -> list[int]:
        """Indexes of the healthy devices of which every core is free."""
        return [i for i, m in enumerate(self.core_masks) if m and m & self.cores == m]

    def pick_cores(self, devices: int, cores: int) -> tuple[list[int], list[int]] | None:
        """Whole ``devices`` plus single ``cores``: (device ids, core ids), None if not free.

        Whole devices are the lowest contiguous run where there is one; single cores fill
        devices that are already in part use before they break a free one.
        """
        whole = _run(self.free_devices(), devices)
        if whole is None:
            return None
        taken = 0
        for d in whole:
            taken |= self.core_masks[d]
        rest = self.cores & ~taken
        picked = 0
        if cores:
            parts = [(m & rest, i) for i, m in enumerate(self.core_masks) if m & rest]
            parts.sort(key=lambda p: (p[0] == self.core_masks[p[1]], p[1]))
            for mask, _ in parts:
                picked |= lowest(mask, cores - picked.bit_count())
            if picked.bit_count() < cores:
                return None
        mask = taken | picked
        touched = [i for i, m in enumerate(self.core_masks) if m & mask]
        return touched, bits(mask)


def _run(free: list[int], count: int) -> list[int] | None:
    """``count`` of the ascending ids, contiguous where possible; None when too few."""
    if count > len(free):
        return None
    for start in range(len(free) - count + 1):
        if count == 0 or free[start + count - 1] - free[start] == count - 1:
            return free[start : start + count]
    return free[:count]


class Pool:
    """Free resources of all nodes."""

    __slots__ = ("generation", "nodes")

    def __init__(self, nodes: dict[str, NodeFree]) -> None:
        self.nodes = nodes
        self.generation = 0

    def copy(self) -> Pool:
        """A pool to plan on."""
        new = Pool({name: free.copy() for name, free in self.nodes.items()})
        new.generation = self.generation
        return new

    def take(self, alloc: NodeAlloc, exclusive: bool) -> None:
        """Mark ``alloc`` as used.  AssertionError when any of it is not free."""
        free = self.nodes[alloc.node]
        cpu_mask = mask_of(alloc.cpu_ids)
        core_mask = mask_of(alloc.cores)
        assert cpu_mask & free.cpus == cpu_mask, f"CPUs of {alloc.node} taken twice"
        assert core_mask & free.cores == core_mask, f"neuron cores of {alloc.node} taken twice"
        assert alloc.mem_mib <= free.mem_mib, f"memory of {alloc.node} taken twice"
        free.cpus &= ~cpu_mask
        free.cores &= ~core_mask
        free.mem_mib -= alloc.mem_mib
        free.jobs += 1
        free.exclusive = free.exclusive or exclusive
        self.generation += 1

    def give(self, alloc: NodeAlloc, exclusive: bool) -> None:
        """Mark ``alloc`` as free again."""
        free = self.nodes[alloc.node]
        free.cpus |= mask_of(alloc.cpu_ids)
        core_mask = mask_of(alloc.cores)
        free.cores |= core_mask
        for mask in _unhealthy(free):
            free.cores &= ~mask
        free.mem_mib += alloc.mem_mib
        free.jobs -= 1
        if exclusive or free.jobs == 0:
            free.exclusive = False
        self.generation += 1


def _unhealthy(free: NodeFree) -> list[int]:
    healthy = 0
    for mask in free.core_masks:
        healthy |= mask
    return [] if free.cores & ~healthy == 0 else [free.cores & ~healthy]
