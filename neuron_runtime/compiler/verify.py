"""Verifier: single assignment, known operations, right types, sane regions and buckets."""

from __future__ import annotations

from neuron_runtime.compiler.ir import Op, Program, Region, TensorType
from neuron_runtime.compiler.opset import COLLECTIVES, REGION_OPS, VerifyError, infer, require
from neuron_runtime.manifest import Manifest

__all__ = ["VerifyError", "verify_against_manifest", "verify_program"]


def verify_program(program: Program) -> None:
    """Raise VerifyError naming the operation when the program breaks a rule."""
    defined: set[int] = set()
    _verify_region(program, program.body, set(), defined, "program")


def _define(program: Program, value: int, scope: set[int], defined: set[int]) -> None:
    require(value < len(program.types), f"value {value} has no type")
    require(value not in defined, f"value {value} is defined twice")
    defined.add(value)
    scope.add(value)


def _verify_region(
    program: Program, region: Region, outer: set[int], defined: set[int], where: str
) -> None:
    scope = set(outer)
    for value in region.args:
        _define(program, value, scope, defined)
    for index, op in enumerate(region.ops):
        try:
            _verify_op(program, op, scope, defined)
        except VerifyError as error:
            text = str(error)
            if not text.startswith("in "):
                text = f"in {where}, operation {index}, {op.where()}: {text}"
            raise VerifyError(text) from None
    for value in region.results:
        require(value in scope, f"in {where}: result {value} is not defined")
    _verify_buckets(program, region, where)


def _verify_op(program: Program, op: Op, scope: set[int], defined: set[int]) -> None:
    for value in op.operands:
        require(value in scope, f"operand {value} is not defined")
    operands = [program.types[v] for v in op.operands]
    if op.name in REGION_OPS:
        expected = _region_op_types(program, op, operands)
        for number, region in enumerate(op.regions):
            _verify_region(program, region, scope, defined, f"{op.where()} region {number}")
    else:
        require(not op.regions, "has regions")
        expected = infer(op.name, operands, op.attrs)
        if op.name == "constant" and "ref" in op.attrs:
            _verify_reference(program, op, expected[0])
    require(len(op.results) == len(expected), f"has {len(op.results)} results")
    for value, type_ in zip(op.results, expected, strict=True):
        _define(program, value, scope, defined)
        declared = program.types[value]
        require(declared == type_, f"result is declared {declared}, but is {type_}")


def _verify_reference(program: Program, op: Op, type_: TensorType) -> None:
    array = program.constants.get(op.attrs["ref"])
    require(array is not None, f"constant {op.attrs['ref']!r:.60} does not exist")
    assert array is not None
    found = TensorType(array.dtype.name, array.shape)
    require(found == type_, f"constant is {found}, not {type_}")


def _types(program: Program, values: list[int]) -> list[TensorType]:
    require(all(v < len(program.types) for v in values), "a value has no type")
    return [program.types[v] for v in values]


def _region_op_types(program: Program, op: Op, operands: list[TensorType]) -> list[TensorType]:
    if op.name == "while":
        require(len(op.regions) == 2, "needs a condition and a body")
        condition, body = op.regions
        for region in (condition, body):
            require(_types(program, region.args) == operands, "region arguments do not fit")
        ok = _types(program, condition.results) == [TensorType("bool", ())]
        require(ok, "the condition is not a bool scalar")
        require(_types(program, body.results) == operands, "the body's results do not fit")
        return operands
    require(len(op.regions) > 0, "needs branches")
    ok = len(operands) == 1 and operands[0].shape == () and operands[0].dtype in ("int32", "bool")
    require(ok, "the branch index is not an int32 scalar")
    first = _types(program, op.regions[0].results)
    for region in op.regions:
        require(not region.args, "branches take no arguments")
        require(_types(program, region.results) == first, "branches differ in type")
        found = [inner.name for inner in region.walk() if inner.name in COLLECTIVES]
        require(not found, f"{found[0] if found else ''} inside a branch: ranks could disagree")
    return first


def _verify_buckets(program: Program, region: Region, where: str) -> None:
    """Members of a bucket are neighbours, alike, and independent of each other."""
    seen: set[int] = set()
    previous: Op | None = None
    results: set[int] = set()
    for op in region.ops:
        bucket = op.attrs.get("bucket") if op.name == "all_reduce" else None
        if bucket is None:
            previous = None
            continue
        if previous is not None and previous.attrs["bucket"] == bucket:
            alike = all(previous.attrs[k] == op.attrs[k] for k in ("op", "groups")) and (
                program.types[previous.operands[0]].dtype == program.types[op.operands[0]].dtype
            )
            require(alike, f"in {where}: bucket {bucket} joins collectives that differ")
            independent = op.operands[0] not in results
            require(independent, f"in {where}: bucket {bucket} joins dependent collectives")
        else:
            require(bucket not in seen, f"in {where}: bucket {bucket} is in two places")
            seen.add(bucket)
            results = set()
        results.update(op.results)
        previous = op


def verify_against_manifest(program: Program, manifest: Manifest) -> None:
    """The manifest tells the truth about inputs, outputs, ranks and memory. Raises VerifyError."""
    from neuron_runtime.compiler.plan import hbm_need

    for what, tensors, values in (
        ("inputs", manifest.inputs, program.body.args),
        ("outputs", manifest.outputs, program.body.results),
    ):
        require(len(tensors) == len(values), f"the manifest has {len(tensors)} {what}")
        for tensor, value in zip(tensors, values, strict=True):
            type_ = program.types[value]
            ok = (tensor.dtype, tensor.shape) == (type_.dtype, type_.shape)
            require(ok, f"{tensor.name!r:.60} is {type_}, the manifest says otherwise")
    for op in program.body.walk():
        if op.name in COLLECTIVES:
            ranks = [r for g in op.attrs.get("groups", op.attrs.get("pairs", [])) for r in g]
            if op.name == "collective_permute":
                ok = all(r < manifest.world_size for r in ranks)
            else:
                ok = len(ranks) == manifest.world_size
            require(ok, f"{op.where()}: groups do not fit a world of {manifest.world_size}")
    need = hbm_need(program)
    for part in ("constants", "scratch", "inputs", "outputs"):
        found, stated = getattr(need, part), getattr(manifest.hbm, part)
        require(found == stated, f"memory for {part} is {found} bytes, the manifest says {stated}")
