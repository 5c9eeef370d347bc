"""Static costs: floating-point operations, bytes moved, collectives.

Conventions: a product of m x k by k x n counts 2mkn operations, an elementwise operation one per
result element, a reduction one per operand element. Bytes are those of all operands and results
of operations that are not views, as if nothing stayed in on-chip memory (an upper bound of HBM
traffic). A loop whose trip count can be read from its condition counts that often, else once.
"""

from __future__ import annotations

import math

from neuron_runtime.backends.numpy_eval import VIEW_OPS
from neuron_runtime.compiler.ir import Op, Program, Region, constant_value
from neuron_runtime.compiler.opset import COLLECTIVES, ELEMENTWISE
from neuron_runtime.compiler.passes.schedule import Node, nodes
from neuron_runtime.manifest import CollectiveInfo

_FREE = VIEW_OPS | {"constant", "optimization_barrier", "partition_id"}
_MOVES = {"convert", "select", "clamp"}


def flops_and_bytes(program: Program) -> tuple[int, int]:
    """Floating-point operations and bytes of one execution on one rank."""
    return _region_cost(program, program.body)


def _region_cost(program: Program, region: Region) -> tuple[int, int]:
    flops = moved = 0
    for op in region.ops:
        if op.name == "while":
            turns = trip_count(program, op) or 1
            parts = [_region_cost(program, r) for r in op.regions]
            flops += turns * sum(p[0] for p in parts)
            moved += turns * sum(p[1] for p in parts)
        elif op.name == "case":
            parts = [_region_cost(program, r) for r in op.regions]
            flops += max(p[0] for p in parts)
            moved += max(p[1] for p in parts)
        elif op.name not in _FREE:
            flops += _op_flops(program, op)
            values = [*op.operands, *op.results]
            moved += sum(program.types[v].nbytes for v in values)
    return flops, moved


def _op_flops(program: Program, op: Op) -> int:
    types = program.types
    if op.name == "dot_general":
        contracted = math.prod(types[op.operands[0]].shape[d] for d in op.attrs["lhs_contract"])
        return 2 * types[op.results[0]].size * contracted
    if op.name in ELEMENTWISE and op.name not in _MOVES:
        return types[op.results[0]].size
    if op.name in ("reduce", "arg_reduce"):
        return types[op.operands[0]].size
    if op.name == "reduce_window":
        return types[op.results[0]].size * math.prod(op.attrs["window"])
    if op.name == "scatter":
        return types[op.operands[2]].size
    return 0


def trip_count(program: Program, op: Op) -> int | None:
    """Turns of a counting loop ``i = a; i < n; i += 1`` with constant a and n, else None."""
    condition, body = op.regions
    made = {v: o for o in program.body.walk() for v in o.results}
    test = made.get(condition.results[0])
    if test is None or test.name != "compare" or test.attrs["direction"] != "LT":
        return None
    counter, limit = test.operands
    if counter not in condition.args:
        return None
    place = condition.args.index(counter)
    start, end = made.get(op.operands[place]), made.get(limit)
    step = made.get(body.results[place])
    if start is None or end is None or start.name != "constant" or end.name != "constant":
        return None
    if step is None or step.name != "add" or body.args[place] not in step.operands:
        return None
    other = made.get(next((v for v in step.operands if v != body.args[place]), -1))
    if other is None or other.name != "constant" or int(constant_value(program, other)) != 1:
        return None
    return max(0, int(constant_value(program, end)) - int(constant_value(program, start)))


def collectives(program: Program) -> tuple[CollectiveInfo, ...]:
    """The collective calls of one execution, in order; those of loops are listed once."""
    found: list[CollectiveInfo] = []
    _collect(program, nodes(program.body), False, found)
    return tuple(found)


def _collect(
    program: Program, schedule: list[Node], in_loop: bool, found: list[CollectiveInfo]
) -> None:
    for node in schedule:
        for inner in node.inner:
            _collect(program, inner, True, found)
        if node.kind not in COLLECTIVES:
            continue
        op = node.ops[0]
        groups = op.attrs.get("groups", op.attrs.get("pairs", []))
        found.append(
            CollectiveInfo(
                kind=node.kind,
                op=op.attrs.get("op", ""),
                dtype=program.types[op.operands[0]].dtype,
                nbytes=sum(program.types[o.operands[0]].nbytes for o in node.ops),
                tensors=len(node.ops),
                groups=tuple(tuple(g) for g in groups),
                level=node.level,
                in_loop=in_loop,
            )
        )
