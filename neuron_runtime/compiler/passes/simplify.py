"""Clean-up passes: identities, constant folding, common subexpressions, dead code."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from neuron_runtime.backends.numpy_eval import evaluate
from neuron_runtime.compiler.ir import (
    Array,
    Op,
    Program,
    Region,
    constant_attrs,
    constant_value,
    op_uses,
)
from neuron_runtime.compiler.opset import COLLECTIVES, REGION_OPS

# Values above this many bytes are computed at run time rather than kept in the file.
FOLD_LIMIT_BYTES = 256 * 1024
_NOT_FOLDED = COLLECTIVES | REGION_OPS | {"constant", "partition_id", "optimization_barrier"}


def simplify(program: Program) -> None:
    """Run the clean-up passes in place until nothing changes (at most a few rounds)."""
    for _ in range(8):
        before = _count(program)
        _Folder(program).run()
        merge_common(program)
        remove_dead(program)
        if _count(program) == before:
            return


def _count(program: Program) -> tuple[int, int]:
    ops = list(program.body.walk())
    return len(ops), sum(op.name == "constant" for op in ops)


def _rewrite(values: list[int], replace: dict[int, int]) -> None:
    for i, value in enumerate(values):
        values[i] = replace.get(value, value)


# -- identities and folding --------------------------------------------------------------------


class _Folder:
    """One forward walk: drops operations that change nothing and evaluates constant ones."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.replace: dict[int, int] = {}
        self.known: dict[int, Op] = {}  # value -> the constant operation that makes it

    def run(self) -> None:
        self.region(self.program.body)
        self._drop_unused_arrays()

    def region(self, region: Region) -> None:
        kept: list[Op] = []
        for op in region.ops:
            _rewrite(op.operands, self.replace)
            for inner in op.regions:
                self.region(inner)
            same = self._identity(op)
            if same is not None:
                self.replace[op.results[0]] = same
                continue
            self._fold(op)
            if op.name == "constant":
                self.known[op.results[0]] = op
            kept.append(op)
        region.ops = kept
        _rewrite(region.results, self.replace)

    def _identity(self, op: Op) -> int | None:
        """The operand that the operation returns unchanged, if it does."""
        types = self.program.types
        if op.name in ("convert", "reshape", "broadcast_in_dim", "slice"):
            if types[op.operands[0]] == types[op.results[0]]:
                return op.operands[0]
        elif op.name == "transpose":
            if op.attrs["permutation"] == sorted(op.attrs["permutation"]):
                return op.operands[0]
        elif op.name in COLLECTIVES and "groups" in op.attrs and len(op.attrs["groups"][0]) == 1:
            return op.operands[0]
        elif op.name in ("add", "multiply", "subtract", "divide"):
            return self._neutral(op)
        return None

    def _neutral(self, op: Op) -> int | None:
        """x*1, x/1, x-0 are x for every x; x+0 is x for integers only (-0.0 + 0.0 is 0.0)."""
        left, right = op.operands
        is_float = self.program.types[left].dtype.lstrip("b").startswith("float")
        wanted = 1 if op.name in ("multiply", "divide") else 0
        if op.name == "add" and is_float:
            return None
        if self.program.types[left].dtype == "bool":
            return None
        if self._splat(right) == wanted:
            return left
        if op.name in ("add", "multiply") and self._splat(left) == wanted:
            return right
        return None

    def _splat(self, value: int) -> Any:
        op = self.known.get(value)
        if op is None or "splat" not in op.attrs:
            return None
        if self.program.types[value].size == 0:
            return None
        return constant_value(self.program, op).reshape(-1)[0]

    def _fold(self, op: Op) -> None:
        """Turn an operation on constants into a constant."""
        if op.name in _NOT_FOLDED or len(op.results) != 1:
            return
        if any(v not in self.known for v in op.operands):
            return
        type_ = self.program.types[op.results[0]]
        if op.name == "broadcast_in_dim" and "splat" in self.known[op.operands[0]].attrs:
            splat = self.known[op.operands[0]].attrs["splat"]
            self._become(op, {"splat": splat})
            return
        if op.name == "iota" or type_.nbytes > FOLD_LIMIT_BYTES:
            if op.name != "iota" or type_.nbytes > FOLD_LIMIT_BYTES:
                return
        if any(self.program.types[v].nbytes > FOLD_LIMIT_BYTES for v in op.operands):
            return
        arrays = [constant_value(self.program, self.known[v]) for v in op.operands]
        result = evaluate(op, arrays, [self.program.types[v] for v in op.operands], [type_])[0]
        self._become(op, constant_attrs(self.program, np.ascontiguousarray(result)))

    def _become(self, op: Op, attrs: dict[str, Any]) -> None:
        type_ = self.program.types[op.results[0]]
        op.name = "constant"
        op.operands = []
        op.attrs = {"dtype": type_.dtype, "shape": list(type_.shape), **attrs}

    def _drop_unused_arrays(self) -> None:
        used = {op.attrs["ref"] for op in self.program.body.walk() if "ref" in op.attrs}
        kept: dict[str, Array] = {k: v for k, v in self.program.constants.items() if k in used}
        self.program.constants = kept


# -- common subexpressions ---------------------------------------------------------------------


def merge_common(program: Program) -> None:
    """Compute equal expressions once; a region sees what the regions around it have computed."""
    _merge_region(program, program.body, {}, {})


def _merge_region(
    program: Program, region: Region, outer: dict[str, list[int]], replace: dict[int, int]
) -> None:
    seen = dict(outer)
    kept: list[Op] = []
    for op in region.ops:
        _rewrite(op.operands, replace)
        for inner in op.regions:
            _merge_region(program, inner, seen, replace)
        if op.regions or op.name in COLLECTIVES or op.name == "optimization_barrier":
            kept.append(op)
            continue
        result = program.types[op.results[0]]
        key = json.dumps([op.name, op.operands, op.attrs, str(result)], sort_keys=True)
        if key in seen:
            replace.update(zip(op.results, seen[key], strict=True))
            continue
        seen[key] = op.results
        kept.append(op)
    region.ops = kept
    _rewrite(region.results, replace)


# -- dead code ---------------------------------------------------------------------------------


def remove_dead(program: Program) -> None:
    """Drop operations whose results nobody uses, and loop values that only feed themselves."""
    outside: dict[int, int] = {}
    for op in program.body.walk():
        if op.name == "while":
            _drop_loop_values(op, outside)
    for value in outside:
        while outside[value] in outside:
            outside[value] = outside[outside[value]]
    _replace_everywhere(program.body, outside)
    _remove_dead_region(program.body)


def _remove_dead_region(region: Region) -> None:
    live = set(region.results)
    kept: list[Op] = []
    for op in reversed(region.ops):
        if op.name == "while":
            _drop_unused_results(op, live)
        if not any(v in live for v in op.results):
            continue
        for inner in op.regions:
            _remove_dead_region(inner)
        live.update(op_uses(op))
        kept.append(op)
    region.ops = kept[::-1]


def _drop_unused_results(op: Op, live: set[int]) -> None:
    """Remove loop values that neither the condition, nor later code, nor other values need."""
    condition, body = op.regions
    needed = {i for i, v in enumerate(op.results) if v in live}
    needed |= _arguments_used(condition, condition.results)
    while True:
        more = needed | _arguments_used(body, [body.results[i] for i in needed])
        if more == needed:
            break
        needed = more
    if len(needed) < len(op.results):
        keep = sorted(needed)
        for values in (op.operands, op.results, condition.args, body.args, body.results):
            values[:] = [values[i] for i in keep]


def _arguments_used(region: Region, results: list[int]) -> set[int]:
    """Positions of the arguments that the given results depend on (collectives always count)."""
    live = set(results)
    for op in reversed(region.ops):
        if op.regions or op.name in COLLECTIVES or any(v in live for v in op.results):
            live.update(op_uses(op))
    return {i for i, value in enumerate(region.args) if value in live}


def _drop_loop_values(op: Op, outside: dict[int, int]) -> None:
    """A loop value that the body hands on unchanged is the outer value itself."""
    condition, body = op.regions
    for i, (argument, result) in enumerate(zip(body.args, body.results, strict=True)):
        if argument == result:
            outside[argument] = outside[condition.args[i]] = op.operands[i]
            outside[op.results[i]] = op.operands[i]


def _replace_everywhere(region: Region, replace: dict[int, int]) -> None:
    for op in region.walk():
        _rewrite(op.operands, replace)
        for inner in op.regions:
            _rewrite(inner.results, replace)
    _rewrite(region.results, replace)
