"""Order of execution: dependency levels, late placement, buckets of collectives.

The level of an operation is the number of collectives on the longest path to it. All operations
of a level form one segment, its collectives follow together, and independent all_reduces of one
level with equal type, reduction and groups share a bucket: one flat buffer, one call.
"""

from __future__ import annotations

from dataclasses import dataclass

from neuron_runtime.compiler.ir import Op, Program, Region, op_uses
from neuron_runtime.compiler.opset import COLLECTIVES


def schedule(program: Program) -> None:
    """Reorder the operations of every region in place and number the buckets."""
    _schedule_region(program, program.body)


def _schedule_region(program: Program, region: Region) -> None:
    for op in region.ops:
        for inner in op.regions:
            _schedule_region(program, inner)
    levels = _levels(region)
    _order(program, region, levels, _sink(region, levels))


def _levels(region: Region) -> dict[int, int]:
    """Level of each operation, by position."""
    of_value: dict[int, int] = {}
    levels: dict[int, int] = {}
    for index, op in enumerate(region.ops):
        level = max((of_value.get(v, 0) for v in op_uses(op)), default=0)
        levels[index] = level
        after = level + (op.name in COLLECTIVES)
        for value in op.results:
            of_value[value] = after
    return levels


def _sink(region: Region, levels: dict[int, int]) -> dict[int, float]:
    """Positions for the order inside a level; moves operations to just before their first user.

    Only where that holds no more memory: every operand is there anyway (a program input, a
    constant) or is itself moved. Adam's decayed moments, for instance, wait for the gradients.
    """
    position = {index: float(index) for index in range(len(region.ops))}
    producer = {v: i for i, op in enumerate(region.ops) for v in op.results}
    users: dict[int, list[int]] = {}
    free: set[int] = set()  # operations whose operands are all there anyway
    for index, op in enumerate(region.ops):
        for value in op_uses(op):
            if value in producer:
                users.setdefault(producer[value], []).append(index)
        movable = not op.regions and op.name not in COLLECTIVES
        if movable and all(v not in producer or producer[v] in free for v in op.operands):
            free.add(index)
    results = set(region.results)
    for index in reversed(range(len(region.ops))):
        if index not in free or index not in users or results & set(region.ops[index].results):
            continue
        first = min(users[index], key=lambda user: (levels[user], position[user]))
        levels[index] = max(levels[index], levels[first])
        position[index] = position[first] - 1e-6
    return position


def _order(
    program: Program, region: Region, levels: dict[int, int], position: dict[int, float]
) -> None:
    """Sort by level; within a level ordinary operations first, then collectives by bucket."""
    bucket_of: dict[str, int] = {}

    def key(index: int) -> tuple[int, int, int, float, int]:
        op = region.ops[index]
        if op.name not in COLLECTIVES:
            return (levels[index], 0, 0, position[index], index)
        if op.name != "all_reduce":
            return (levels[index], 2, 0, position[index], index)
        dtype = program.types[op.operands[0]].dtype
        name = f"{levels[index]} {op.attrs['op']} {dtype} {op.attrs['groups']}"
        op.attrs["bucket"] = bucket_of.setdefault(name, len(bucket_of))
        return (levels[index], 1, op.attrs["bucket"], position[index], index)

    order = sorted(range(len(region.ops)), key=key)
    region.ops = [region.ops[i] for i in order]


# -- reading a schedule ------------------------------------------------------------------------


@dataclass(slots=True)
class Node:
    """A step of the schedule.

    ``kind``: segment (operations without communication), all_reduce (the members of one bucket),
    another collective's name, or loop (a while whose body communicates; ``inner`` holds the nodes
    of its condition and its body).
    """

    kind: str
    ops: list[Op]
    level: int
    inner: list[list[Node]]


def nodes(region: Region) -> list[Node]:
    """The schedule of a region, in order."""
    found: list[Node] = []
    level = 0
    for op in region.ops:
        previous = found[-1] if found else None
        if op.name == "while" and any(o.name in COLLECTIVES for r in op.regions for o in r.walk()):
            found.append(Node("loop", [op], level, [nodes(r) for r in op.regions]))
        elif op.name not in COLLECTIVES:
            if previous is None or previous.kind != "segment":
                if previous is not None and previous.kind in COLLECTIVES:
                    level += 1
                found.append(Node("segment", [], level, []))
            found[-1].ops.append(op)
        elif previous is not None and _same_bucket(previous, op):
            previous.ops.append(op)
        else:
            found.append(Node(op.name, [op], level, []))
    return found


def _same_bucket(node: Node, op: Op) -> bool:
    bucket = op.attrs.get("bucket")
    return node.kind == op.name and bucket is not None and node.ops[0].attrs["bucket"] == bucket
