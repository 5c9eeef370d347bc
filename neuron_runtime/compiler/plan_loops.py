"""Memory plan of ``while`` and ``case``: loop-carried values and their copies."""

from __future__ import annotations

from neuron_runtime.backends.numpy_kernels import is_in_place
from neuron_runtime.compiler.ir import Op
from neuron_runtime.compiler.opset import BINARY, UNARY
from neuron_runtime.compiler.plan import Loop, RegionPlanner


def place_while(outer: RegionPlanner, op: Op) -> None:
    """Carried values live where the results live; unchanged ones are the outer value itself."""
    p, plan = outer.p, outer.plan
    condition, body = op.regions
    loop = Loop()
    carried: list[int | None] = []
    for place, result in enumerate(op.results):
        if body.results[place] == body.args[place]:
            p.alias(body.args[place], op.operands[place])
            p.alias(condition.args[place], op.operands[place])
            carried.append(None)
            continue
        if result not in plan.storage:
            p.allocate(result, outer.types[result].nbytes)
        for argument in (body.args[place], condition.args[place]):
            p.alias(argument, result)
        loop.init.append((op.operands[place], result))
        carried.append(result)
    # The loop writes all carried values, so none may be read for another's start afterwards:
    # operands are never carried values of this loop, hence plain copies in order are right.
    inner = RegionPlanner(p, condition, top=False)
    inner.run()
    inner.finish()
    inner = RegionPlanner(p, body, top=False)
    inner.prepare()
    for place, root in enumerate(carried):
        if root is not None:
            _target_carried(inner, body.results[place], root)
    inner.place()
    moves = [
        (body.results[place], root)
        for place, root in enumerate(carried)
        if root is not None and not _is_there(inner, body.results[place], root)
    ]
    loop.step = moves
    inner.finish()
    plan.loops[id(op)] = loop


def _is_there(inner: RegionPlanner, value: int, root: int) -> bool:
    """The body's result already lies in the carried value's place."""
    made = inner.plan.root[value]
    return made in inner.target and inner.target[made] == inner.plan.storage[root]


def _target_carried(inner: RegionPlanner, value: int, carried: int) -> None:
    """Let the body make its result in the carried value's place, if nobody reads that later."""
    root = inner.makes_whole(value)
    if root is None:
        return
    op, made_at = inner.plan.made_by[root], inner.plan.made_at[root]
    last = inner.last_use.get(carried, -1)
    if last > made_at:
        return
    if last == made_at:
        same = [v for v in op.operands if inner.plan.root[v] == carried]
        unary = op.name in UNARY | BINARY and is_in_place(op.name, inner.types[root].dtype)
        update = op.name in ("dynamic_update_slice", "scatter") and same == op.operands[:1]
        fits = all(inner.overwrites(op, v, root) for v in same)
        if not fits or not (unary or update) or len(set(same)) != 1:
            return
    inner.target[root] = inner.plan.storage[carried]


def place_case(outer: RegionPlanner, op: Op) -> None:
    """Branches copy their results to the operation's results."""
    for value in op.results:
        if value not in outer.plan.storage:
            outer.p.allocate(value, outer.types[value].nbytes)
    copies = []
    for region in op.regions:
        inner = RegionPlanner(outer.p, region, top=False)
        inner.run()
        copies.append(list(zip(region.results, op.results, strict=True)))
        inner.finish()
    outer.plan.branches[id(op)] = copies
