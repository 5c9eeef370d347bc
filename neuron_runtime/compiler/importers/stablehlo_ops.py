"""Conversion of single StableHLO and CHLO operations (those without calls and control flow)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from neuron_runtime.compiler.importers.builder import Builder, dense_array
from neuron_runtime.compiler.importers.mlir_text import Dense, RawOp, RawRegion
from neuron_runtime.compiler.ir import TensorType
from neuron_runtime.compiler.opset import BINARY, REDUCTIONS, UNARY
from neuron_runtime.errors import CompileError

Handler = Callable[[Builder, RawOp, list[int]], list[int]]

SHARD_MAP_RECIPE = (
    "write the per-rank step with explicit collectives and compile "
    "jax.jit(jax.shard_map(step, mesh=mesh, in_specs=..., out_specs=...)): the body of shard_map "
    "becomes the program of one rank"
)


def unsupported(op: RawOp, why: str = "") -> NoReturn:
    """Raise CompileError EUOC001 naming operator, line and what to do."""
    detail = f" {why}" if why else ""
    raise CompileError(
        "EUOC001",
        f"line {op.line}: operator {op.name}{detail} is not supported; rewrite the function "
        "without it (python -m neuron_runtime.compile --list-operators prints the supported ones)",
    )


def _attr(op: RawOp, *names: str) -> Any:
    for name in names:
        if name in op.attrs:
            return op.attrs[name]
    raise CompileError("EIMP005", f"line {op.line}: {op.name} has no attribute {names[0]}")


def _ints(op: RawOp, *names: str) -> list[int]:
    value = _attr(op, *names)
    if isinstance(value, Dense):
        return [int(v) for v in dense_array(value, op.line).reshape(-1)]
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    if isinstance(value, list) and all(type(v) is int for v in value):
        return value
    raise CompileError("EIMP005", f"line {op.line}: {op.name}: {names[0]} is not a list of numbers")


def _int(op: RawOp, *names: str) -> int:
    values = _ints(op, *names)
    if len(values) != 1:
        raise CompileError("EIMP005", f"line {op.line}: {op.name}: {names[0]} is not a number")
    return values[0]


def _matrix(op: RawOp, name: str) -> list[list[int]]:
    value = _attr(op, name)
    array = dense_array(value, op.line) if isinstance(value, Dense) else None
    if array is None or array.ndim != 2:
        raise CompileError("EIMP005", f"line {op.line}: {op.name}: {name} is not a matrix")
    return [[int(v) for v in row] for row in array]


def _out(op: RawOp) -> TensorType:
    if not op.out_types:
        raise CompileError("EIMP005", f"line {op.line}: {op.name} has no result type")
    return op.out_types[0]


def reducer(op: RawOp, region: RawRegion) -> str:
    """The binary operation of a reducer region, or ``set`` when it returns the second value."""
    names = [name for name, _ in region.args]
    body = region.ops
    if body and body[-1].name == "stablehlo.return" and len(names) == 2:
        if len(body) == 1 and body[0].operands == [names[1]]:
            return "set"
        if len(body) == 2:
            name = body[0].name.removeprefix("stablehlo.")
            used = sorted(body[0].operands) == sorted(names)
            returned = body[1].operands == [r for r, _ in body[0].results]
            if used and returned and name in REDUCTIONS:
                return name
    return unsupported(op, "with a reducer other than add, multiply, maximum, minimum, and, or")


# -- shape -------------------------------------------------------------------------------------


def _shaped(name: str) -> Handler:
    def convert(b: Builder, op: RawOp, operands: list[int]) -> list[int]:
        return b.emit(name, operands, {"shape": list(_out(op).shape)}, op.line)

    return convert


def _typed(name: str) -> Handler:
    def convert(b: Builder, op: RawOp, operands: list[int]) -> list[int]:
        return b.emit(name, operands, {"dtype": _out(op).dtype}, op.line)

    return convert


def _constant(b: Builder, op: RawOp, operands: list[int]) -> list[int]:
    return [b.constant(dense_array(_attr(op, "value"), op.line), op.line)]


def _iota(b: Builder, op: RawOp, operands: list[int]) -> list[int]:
    type_ = _out(op)
    attrs = {
        "dtype": type_.dtype,
        "shape": list(type_.shape),
        "dim": _int(op, "dim", "iota_dimension"),
    }
    return b.emit("iota", [], attrs, op.line)


def _broadcast(b: Builder, op: RawOp, operands: list[int]) -> list[int]:
    attrs = {
        "shape": list(_out(op).shape),
        "dims": _ints(op, "dims", "broadcast_dimensions"),
    }
    return b.emit("broadcast_in_dim", operands, attrs, op.line)


def _transpose(b: Builder, op: RawOp, operands: list[int]) -> list[int]:
    return b.emit("transpose", operands, {"permutation": _ints(op, "dims", "permutation")}, op.line)


def _slice(b: Builder, op: RawOp, operands: list[int]) -> list[int]:
    if "slice" in op.attrs:
        bounds = op.attrs["slice"]
        start, limit, stride = ([t[i] for t in bounds] for i in range(3))
    else:
        keys = ("start_indices", "limit_indices", "strides")
        start, limit, stride = (_ints(op, k) for k in keys)
    return b.emit("slice", operands, {"start": start, "limit": limit, "stride": stride}, op.line)


def _reverse(b: Builder, op: RawOp, operands: list[int]) -> list[int]:
    return b.emit("reverse", operands, {"dims": _ints(op, "dims", "dimensions")}, op.line)


def _concatenate(b: Builder, op: RawOp, operands: list[int]) -> list[int]:
    return b.emit("concatenate", operands, {"dim": _int(op, "dim", "dimension")}, op.line)


def _pad(b: Builder, op: RawOp, operands: list[int]) -> list[int]:
    attrs = {
        "low": _ints(op, "low", "edge_padding_low"),
        "high": _ints(op, "high", "edge_padding_high"),
        "interior": _ints(op, "interior", "interior_padding"),
    }
    return b.emit("pad", operands, attrs, op.line)


def _dynamic_slice(b: Builder, op: RawOp, operands: list[int]) -> list[int]:
    return b.emit("dynamic_slice", operands, {"sizes": _ints(op, "sizes", "slice_sizes")}, op.line)


# -- arithmetic --------------------------------------------------------------------------------


def _select(b: Builder, op: RawOp, operands: list[int]) -> list[int]:
    op.out_types = op.out_types[-1:]  # the short form lists predicate and result
    return b.emit("select", operands, {}, op.line)


def _compare(b: Builder, op: RawOp, operands: list[int]) -> list[int]:
    if op.words:
        direction, kind = op.words[0], (op.words[1] if len(op.words) > 1 else "")
    else:
        direction = str(_attr(op, "comparison_direction")).split()[-1]
        kind = str(op.attrs.get("compare_type", "")).split(" ")[-1]
    if kind == "TOTALORDER":
        unsupported(op, "in total order")
    return b.emit("compare", operands, {"direction": direction}, op.line)


def _reduce(b: Builder, op: RawOp, operands: list[int]) -> list[int]:
    dims = _ints(op, "dimensions")
    if len(operands) == 4 and op.regions:
        return _arg_reduce(b, op, operands, dims)
    if "applies" in op.attrs:
        name = str(op.attrs["applies"]).removeprefix("stablehlo.")
        if name not in REDUCTIONS:
            unsupported(op, f"of {name}")
    elif len(operands) == 2 and op.regions:
        name = reducer(op, op.regions[0])
    else:
        unsupported(op, "of several arrays")
    return b.emit("reduce", operands, {"op": name, "dims": dims}, op.line)


def _arg_reduce(b: Builder, op: RawOp, operands: list[int], dims: list[int]) -> list[int]:
    """JAX's argmax and argmin: a reduction of (value, iota) with a comparing reducer."""
    compares = [r for r in op.regions[0].ops if r.name == "stablehlo.compare"]
    selects = [r for r in op.regions[0].ops if r.name == "stablehlo.select"]
    direction = compares[0].words[0] if compares and compares[0].words else ""
    iota = next((o for o in b.ops if operands[1] in o.results), None)
    plain = iota is not None and iota.name == "iota" and iota.attrs["dim"] == dims[0]
    shape_ok = len(dims) == 1 and len(compares) == 4 and len(selects) == 2
    if direction not in ("GT", "LT") or not plain or not shape_ok:
        unsupported(op, "of several arrays (other than argmax and argmin)")
    attrs = {
        "op": "maximum" if direction == "GT" else "minimum",
        "dim": dims[0],
        "dtype": b.type(operands[1]).dtype,
    }
    return b.emit("arg_reduce", operands[:1], attrs, op.line)


def _reduce_window(b: Builder, op: RawOp, operands: list[int]) -> list[int]:
    if len(operands) != 2:
        unsupported(op, "of several arrays")
    rank = len(b.type(operands[0]).shape)
    ones = [1] * rank
    if "base_dilations" in op.attrs and _ints(op, "base_dilations") != ones:
        unsupported(op, "with base dilation")
    padding = _matrix(op, "padding") if "padding" in op.attrs else [[0, 0]] * rank
    attrs = {
        "op": reducer(op, op.regions[0]) if op.regions else unsupported(op),
        "window": _ints(op, "window_dimensions"),
        "strides": _ints(op, "window_strides") if "window_strides" in op.attrs else ones,
        "dilation": _ints(op, "window_dilations") if "window_dilations" in op.attrs else ones,
        "low": [p[0] for p in padding],
        "high": [p[1] for p in padding],
    }
    return b.emit("reduce_window", operands, attrs, op.line)


def _dot_general(b: Builder, op: RawOp, operands: list[int]) -> list[int]:
    numbers = op.attrs.get("dot_dimension_numbers")
    if isinstance(numbers, dict):
        lists = [
            numbers.get(f"{side}_{kind}_dimensions", [])
            for kind in ("batching", "contracting")
            for side in ("lhs", "rhs")
        ]
    else:
        empty: tuple[list[int], list[int]] = ([], [])
        lists = [
            part
            for key in ("batching_dims", "contracting_dims")
            for part in op.attrs.get(key, empty)
        ]
    if len(lists) != 4:
        raise CompileError("EIMP005", f"line {op.line}: dot_general's dimensions are malformed")
    keys = ("lhs_batch", "rhs_batch", "lhs_contract", "rhs_contract")
    attrs: dict[str, Any] = dict(zip(keys, lists, strict=True))
    return b.emit("dot_general", operands, attrs | {"dtype": _out(op).dtype}, op.line)


def _dot(b: Builder, op: RawOp, operands: list[int]) -> list[int]:
    attrs = {
        "lhs_batch": [],
        "rhs_batch": [],
        "lhs_contract": [len(b.type(operands[0]).shape) - 1],
        "rhs_contract": [0],
        "dtype": _out(op).dtype,
    }
    return b.emit("dot_general", operands, attrs, op.line)


_GATHER = (
    "offset_dims collapsed_slice_dims operand_batching_dims start_indices_batching_dims "
    "start_index_map"
).split()
_SCATTER = (
    "update_window_dims inserted_window_dims input_batching_dims scatter_indices_batching_dims "
    "scatter_dims_to_operand_dims"
).split()


def _gather(b: Builder, op: RawOp, operands: list[int]) -> list[int]:
    numbers = _attr(op, "dimension_numbers")
    if not isinstance(numbers, dict):
        raise CompileError("EIMP005", f"line {op.line}: gather's dimension numbers are malformed")
    attrs = {key: numbers.get(key, []) for key in _GATHER}
    attrs["index_vector_dim"] = numbers.get("index_vector_dim", 0)
    attrs["slice_sizes"] = _ints(op, "slice_sizes")
    return b.emit("gather", operands, attrs, op.line)


def _scatter(b: Builder, op: RawOp, operands: list[int]) -> list[int]:
    numbers = _attr(op, "scatter_dimension_numbers")
    if not isinstance(numbers, dict) or not op.regions:
        raise CompileError("EIMP005", f"line {op.line}: scatter is malformed")
    if len(operands) != 3:
        unsupported(op, "of several arrays")
    attrs = {key: numbers.get(key, []) for key in _SCATTER}
    attrs["index_vector_dim"] = numbers.get("index_vector_dim", 0)
    attrs["op"] = reducer(op, op.regions[0])
    return b.emit("scatter", operands, attrs, op.line)


# -- collectives -------------------------------------------------------------------------------


def _all_reduce(b: Builder, op: RawOp, operands: list[int]) -> list[int]:
    name = reducer(op, op.regions[0]) if op.regions else unsupported(op)
    groups = _matrix(op, "replica_groups")
    attrs = {"op": name, "groups": groups}
    return [b.emit("all_reduce", [v], dict(attrs), op.line)[0] for v in operands]


def _all_gather(b: Builder, op: RawOp, operands: list[int]) -> list[int]:
    attrs = {"dim": _int(op, "all_gather_dim"), "groups": _matrix(op, "replica_groups")}
    return [b.emit("all_gather", [v], dict(attrs), op.line)[0] for v in operands]


def _reduce_scatter(b: Builder, op: RawOp, operands: list[int]) -> list[int]:
    attrs = {
        "op": reducer(op, op.regions[0]) if op.regions else unsupported(op),
        "dim": _int(op, "scatter_dimension"),
        "groups": _matrix(op, "replica_groups"),
    }
    return b.emit("reduce_scatter", operands, attrs, op.line)


def _all_to_all(b: Builder, op: RawOp, operands: list[int]) -> list[int]:
    attrs = {
        "split_dim": _int(op, "split_dimension"),
        "concat_dim": _int(op, "concat_dimension"),
        "groups": _matrix(op, "replica_groups"),
    }
    return [b.emit("all_to_all", [v], dict(attrs), op.line)[0] for v in operands]


def _collective_permute(b: Builder, op: RawOp, operands: list[int]) -> list[int]:
    return b.emit("collective_permute", operands, {"pairs": _matrix(op, "source_target_pairs")},
                  op.line)


def _partition_id(b: Builder, op: RawOp, operands: list[int]) -> list[int]:
    return b.emit("partition_id", [], {}, op.line)


def _custom_call(b: Builder, op: RawOp, operands: list[int]) -> list[int]:
    target = op.symbol.removeprefix("@").strip('"') or str(op.attrs.get("call_target_name", ""))
    if target in ("mhlo.erf", "erf"):
        return b.emit("erf", operands, {}, op.line)
    if target in ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"):
        raise CompileError(
            "EVRF010", f"line {op.line}: the module is sharded automatically; {SHARD_MAP_RECIPE}"
        )
    return unsupported(op, f"to {target!r}")


def _plain(name: str) -> Handler:
    def convert(b: Builder, op: RawOp, operands: list[int]) -> list[int]:
        return b.emit(name, operands, {}, op.line)

    return convert


HANDLERS: dict[str, Handler] = {
    **{f"stablehlo.{name}": _plain(name) for name in UNARY | BINARY},
    **{
        f"stablehlo.{name}": _plain(name)
        for name in ("clamp", "is_finite", "dynamic_update_slice", "optimization_barrier")
    },
    **{f"chlo.{name}": _plain(name) for name in ("erf", "erfc", "erf_inv", "tan")},
    "stablehlo.constant": _constant,
    "arith.constant": _constant,
    "stablehlo.iota": _iota,
    "stablehlo.broadcast_in_dim": _broadcast,
    "stablehlo.reshape": _shaped("reshape"),
    "stablehlo.transpose": _transpose,
    "stablehlo.slice": _slice,
    "stablehlo.reverse": _reverse,
    "stablehlo.concatenate": _concatenate,
    "stablehlo.pad": _pad,
    "stablehlo.dynamic_slice": _dynamic_slice,
    "stablehlo.convert": _typed("convert"),
    "stablehlo.bitcast_convert": _typed("bitcast_convert"),
    "stablehlo.select": _select,
    "stablehlo.compare": _compare,
    "stablehlo.reduce": _reduce,
    "stablehlo.reduce_window": _reduce_window,
    "stablehlo.dot_general": _dot_general,
    "stablehlo.dot": _dot,
    "stablehlo.gather": _gather,
    "stablehlo.scatter": _scatter,
    "stablehlo.all_reduce": _all_reduce,
    "stablehlo.all_gather": _all_gather,
    "stablehlo.reduce_scatter": _reduce_scatter,
    "stablehlo.all_to_all": _all_to_all,
    "stablehlo.collective_permute": _collective_permute,
    "stablehlo.partition_id": _partition_id,
    "stablehlo.replica_id": _partition_id,
    "stablehlo.custom_call": _custom_call,
}
CONTROL_FLOW = ("stablehlo.while", "stablehlo.case", "stablehlo.if", "call", "func.call",
                "stablehlo.composite", "sdy.manual_computation")
