"""Operations of the intermediate representation and the types of their results.

The set is StableHLO's, with JSON attributes. ``infer`` computes result types from operand types
and attributes by StableHLO's rules and raises VerifyError where an operation breaks one; the
importer, the passes and the NEFF reader all use it, so a program that passed can be executed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from neuron_runtime.compiler.attrs import (
    REDUCTIONS,
    Attrs,
    Types,
    VerifyError,
    dims_attr,
    dtype_attr,
    groups_attr,
    int_attr,
    ints_attr,
    operand_count,
    require,
    shape_attr,
    word_attr,
)
from neuron_runtime.compiler.indexing import infer_gather, infer_scatter
from neuron_runtime.compiler.ir import FLOATS, TensorType, numpy_dtype

FLOAT_UNARY = frozenset(
    [
        "exponential",
        "exponential_minus_one",
        "log",
        "log_plus_one",
        "logistic",
        "rsqrt",
        "sqrt",
        "cbrt",
        "tanh",
        "sine",
        "cosine",
        "tan",
        "floor",
        "ceil",
        "round_nearest_afz",
        "round_nearest_even",
        "erf",
        "erfc",
        "erf_inv",
    ]
)
ANY_UNARY = frozenset({"abs", "negate", "sign", "not", "popcnt"})
UNARY = FLOAT_UNARY | ANY_UNARY
FLOAT_BINARY = frozenset({"atan2"})
INT_BINARY = frozenset(
    {"and", "or", "xor", "shift_left", "shift_right_logical", "shift_right_arithmetic"}
)
ANY_BINARY = frozenset(
    {"add", "subtract", "multiply", "divide", "maximum", "minimum", "power", "remainder"}
)
BINARY = FLOAT_BINARY | INT_BINARY | ANY_BINARY
# Result element i depends on element i of each operand only (scalar operands of clamp aside).
ELEMENTWISE = UNARY | BINARY | frozenset({"compare", "select", "clamp", "convert", "is_finite"})
COMPARISONS = frozenset({"EQ", "NE", "LT", "LE", "GT", "GE"})
COLLECTIVES = frozenset(
    {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute"}
)
REGION_OPS = frozenset({"while", "case"})


# -- elementwise -------------------------------------------------------------------------------


def _unary(name: str, operands: Types) -> TensorType:
    operand_count(operands, 1)
    if name in FLOAT_UNARY:
        require(operands[0].dtype in FLOATS, f"needs a float, not {operands[0]}")
    if name in ("not", "popcnt"):
        require(operands[0].dtype not in FLOATS, f"needs an integer or bool, not {operands[0]}")
    return operands[0]


def _binary(name: str, operands: Types) -> TensorType:
    operand_count(operands, 2)
    require(operands[0] == operands[1], f"operands differ: {operands[0]} and {operands[1]}")
    if name in INT_BINARY:
        require(operands[0].dtype not in FLOATS, f"needs integers or bools, not {operands[0]}")
    if name in FLOAT_BINARY:
        require(operands[0].dtype in FLOATS, f"needs floats, not {operands[0]}")
    return operands[0]


def _compare(operands: Types, attrs: Attrs) -> TensorType:
    operand_count(operands, 2)
    word_attr(attrs, "direction", COMPARISONS)
    require(operands[0] == operands[1], f"operands differ: {operands[0]} and {operands[1]}")
    return TensorType("bool", operands[0].shape)


def _select(operands: Types) -> TensorType:
    operand_count(operands, 3)
    predicate, on_true, on_false = operands
    require(predicate.dtype == "bool", f"predicate is {predicate}")
    require(on_true == on_false, f"branches differ: {on_true} and {on_false}")
    require(predicate.shape in ((), on_true.shape), f"predicate {predicate} against {on_true}")
    return on_true


def _clamp(operands: Types) -> TensorType:
    operand_count(operands, 3)
    low, value, high = operands
    for bound in (low, high):
        ok = bound.dtype == value.dtype and bound.shape in ((), value.shape)
        require(ok, f"bound {bound} against {value}")
    return value


def _convert(operands: Types, attrs: Attrs) -> TensorType:
    operand_count(operands, 1)
    return TensorType(dtype_attr(attrs), operands[0].shape)


def _bitcast(operands: Types, attrs: Attrs) -> TensorType:
    operand_count(operands, 1)
    dtype = dtype_attr(attrs)
    same = numpy_dtype(dtype).itemsize == numpy_dtype(operands[0].dtype).itemsize
    require(same, f"from {operands[0].dtype} to {dtype}: only equal widths are supported")
    return TensorType(dtype, operands[0].shape)


def _is_finite(operands: Types) -> TensorType:
    operand_count(operands, 1)
    require(operands[0].dtype in FLOATS, f"needs a float, not {operands[0]}")
    return TensorType("bool", operands[0].shape)


# -- creation and shape ------------------------------------------------------------------------


def _constant(operands: Types, attrs: Attrs) -> TensorType:
    operand_count(operands, 0)
    type_ = TensorType(dtype_attr(attrs), shape_attr(attrs))
    form = [key for key in ("splat", "dense", "ref") if key in attrs]
    require(len(form) == 1, "needs one of splat, dense, ref")
    text = attrs[form[0]]
    require(isinstance(text, str), f"attribute {form[0]} is not text")
    if form[0] != "ref":
        width = numpy_dtype(type_.dtype).itemsize if form[0] == "splat" else type_.nbytes
        ok = len(text) == 2 * width and not set(text) - set("0123456789abcdef")
        require(ok, f"attribute {form[0]} does not fit {type_}")
    return type_


def _iota(operands: Types, attrs: Attrs) -> TensorType:
    operand_count(operands, 0)
    type_ = TensorType(dtype_attr(attrs), shape_attr(attrs))
    int_attr(attrs, "dim", len(type_.shape))
    require(type_.dtype != "bool", "of bool")
    return type_


def _broadcast_in_dim(operands: Types, attrs: Attrs) -> TensorType:
    operand_count(operands, 1)
    shape = shape_attr(attrs)
    dims = dims_attr(attrs, "dims", len(shape))
    require(len(dims) == len(operands[0].shape), "dims does not match the operand's rank")
    for size, dim in zip(operands[0].shape, dims, strict=True):
        require(size in (1, shape[dim]), f"dimension of {size} cannot become {shape[dim]}")
    return TensorType(operands[0].dtype, shape)


def _reshape(operands: Types, attrs: Attrs) -> TensorType:
    operand_count(operands, 1)
    result = TensorType(operands[0].dtype, shape_attr(attrs))
    require(result.size == operands[0].size, f"from {operands[0]} to {result}")
    return result


def _transpose(operands: Types, attrs: Attrs) -> TensorType:
    operand_count(operands, 1)
    shape = operands[0].shape
    perm = dims_attr(attrs, "permutation", len(shape))
    require(len(perm) == len(shape), "permutation has the wrong length")
    return TensorType(operands[0].dtype, tuple(shape[p] for p in perm))


def _slice(operands: Types, attrs: Attrs) -> TensorType:
    operand_count(operands, 1)
    shape = operands[0].shape
    start, limit, stride = (ints_attr(attrs, k, len(shape)) for k in ("start", "limit", "stride"))
    result = []
    for size, a, b, s in zip(shape, start, limit, stride, strict=True):
        require(0 <= a <= b <= size and s > 0, f"[{a}:{b}:{s}] of a dimension of {size}")
        result.append((b - a + s - 1) // s)
    return TensorType(operands[0].dtype, tuple(result))


def _reverse(operands: Types, attrs: Attrs) -> TensorType:
    operand_count(operands, 1)
    dims_attr(attrs, "dims", len(operands[0].shape))
    return operands[0]


def _concatenate(operands: Types, attrs: Attrs) -> TensorType:
    require(len(operands) > 0, "takes operands")
    first = operands[0]
    dim = int_attr(attrs, "dim", len(first.shape))
    total = 0
    for other in operands:
        require(len(other.shape) == len(first.shape), "operands of several ranks")
        same = other.shape[:dim] + other.shape[dim + 1 :]
        ok = same == first.shape[:dim] + first.shape[dim + 1 :] and other.dtype == first.dtype
        require(ok, f"operands do not fit: {first} and {other}")
        total += other.shape[dim]
    return TensorType(first.dtype, (*first.shape[:dim], total, *first.shape[dim + 1 :]))


def _pad(operands: Types, attrs: Attrs) -> TensorType:
    operand_count(operands, 2)
    operand, value = operands
    require(value == TensorType(operand.dtype, ()), f"padding value is {value}")
    rank = len(operand.shape)
    low, high, interior = (ints_attr(attrs, k, rank) for k in ("low", "high", "interior"))
    shape = []
    for size, a, b, i in zip(operand.shape, low, high, interior, strict=True):
        require(i >= 0, "negative interior padding")
        new = size + a + b + max(size - 1, 0) * i
        require(new >= 0, "negative size")
        shape.append(new)
    require(math.prod(shape) < 2**48, "result has more than 2**48 elements")
    return TensorType(operand.dtype, tuple(shape))


def _dynamic_slice(operands: Types, attrs: Attrs) -> TensorType:
    require(len(operands) > 0, "takes an operand")
    operand = operands[0]
    _indices(operands[1:], len(operand.shape))
    sizes = ints_attr(attrs, "sizes", len(operand.shape))
    for size, n in zip(operand.shape, sizes, strict=True):
        require(0 <= n <= size, f"slice of {n} of a dimension of {size}")
    return TensorType(operand.dtype, tuple(sizes))


def _dynamic_update_slice(operands: Types) -> TensorType:
    require(len(operands) >= 2, "takes an operand and an update")
    operand, update = operands[:2]
    _indices(operands[2:], len(operand.shape))
    ok = update.dtype == operand.dtype and len(update.shape) == len(operand.shape)
    require(ok, f"update {update} of {operand}")
    pairs = zip(update.shape, operand.shape, strict=True)
    require(all(u <= o for u, o in pairs), f"update {update} is larger than {operand}")
    return operand


def _indices(indices: Types, rank: int) -> None:
    require(len(indices) == rank, f"takes {rank} start indices, has {len(indices)}")
    for index in indices:
        require(index.shape == () and index.dtype not in FLOATS, f"start index is {index}")


# -- reductions, products ----------------------------------------------------------------------


def _without(shape: tuple[int, ...], dims: list[int]) -> tuple[int, ...]:
    return tuple(size for i, size in enumerate(shape) if i not in dims)


def _reduce(operands: Types, attrs: Attrs) -> TensorType:
    operand_count(operands, 2)
    operand, init = operands
    word_attr(attrs, "op", REDUCTIONS)
    dims = dims_attr(attrs, "dims", len(operand.shape))
    require(init == TensorType(operand.dtype, ()), f"initial value is {init}")
    return TensorType(operand.dtype, _without(operand.shape, dims))


def _arg_reduce(operands: Types, attrs: Attrs) -> list[TensorType]:
    operand_count(operands, 1)
    word_attr(attrs, "op", frozenset({"maximum", "minimum"}))
    dim = int_attr(attrs, "dim", len(operands[0].shape))
    require(operands[0].shape[dim] > 0, "over an empty dimension")
    dtype = dtype_attr(attrs)
    require(dtype not in FLOATS and dtype != "bool", f"index type is {dtype}")
    shape = _without(operands[0].shape, [dim])
    return [TensorType(operands[0].dtype, shape), TensorType(dtype, shape)]


def _reduce_window(operands: Types, attrs: Attrs) -> TensorType:
    operand_count(operands, 2)
    operand, init = operands
    word_attr(attrs, "op", REDUCTIONS)
    require(init == TensorType(operand.dtype, ()), f"initial value is {init}")
    rank = len(operand.shape)
    window, strides, dilation, low, high = (
        ints_attr(attrs, k, rank) for k in ("window", "strides", "dilation", "low", "high")
    )
    shape = []
    for i, size in enumerate(operand.shape):
        ok = window[i] > 0 and strides[i] > 0 and dilation[i] > 0 and low[i] >= 0 and high[i] >= 0
        require(ok, "window parameters out of range")
        extent = (window[i] - 1) * dilation[i] + 1
        padded = size + low[i] + high[i]
        shape.append(0 if padded < extent else (padded - extent) // strides[i] + 1)
    require(math.prod(shape) < 2**48, "result has more than 2**48 elements")
    return TensorType(operand.dtype, tuple(shape))


def _dot_general(operands: Types, attrs: Attrs) -> TensorType:
    operand_count(operands, 2)
    lhs, rhs = operands
    dtype = dtype_attr(attrs)
    require(lhs.dtype != "bool" and rhs.dtype != "bool" and dtype != "bool", "of bool")
    mixed = len({t in FLOATS for t in (lhs.dtype, rhs.dtype, dtype)})
    require(mixed == 1, f"{lhs} and {rhs} to {dtype}")
    lb, lc = (
        dims_attr(attrs, "lhs_batch", len(lhs.shape)),
        dims_attr(attrs, "lhs_contract", len(lhs.shape)),
    )
    rb, rc = (
        dims_attr(attrs, "rhs_batch", len(rhs.shape)),
        dims_attr(attrs, "rhs_contract", len(rhs.shape)),
    )
    require(not set(lb) & set(lc) and not set(rb) & set(rc), "a dimension is batched and summed")
    require(len(lb) == len(rb) and len(lc) == len(rc), "dimension lists differ in length")
    for a, b in zip(lb + lc, rb + rc, strict=True):
        require(lhs.shape[a] == rhs.shape[b], f"sizes differ: {lhs} dim {a}, {rhs} dim {b}")
    free = _without(lhs.shape, lb + lc) + _without(rhs.shape, rb + rc)
    shape = tuple(lhs.shape[d] for d in lb) + free
    require(math.prod(shape) < 2**48, "result has more than 2**48 elements")
    return TensorType(dtype, shape)


# -- collectives -------------------------------------------------------------------------------


def _all_reduce(operands: Types, attrs: Attrs) -> TensorType:
    operand_count(operands, 1)
    word_attr(attrs, "op", REDUCTIONS)
    groups_attr(attrs)
    if "bucket" in attrs:
        int_attr(attrs, "bucket", 2**31)
    return operands[0]


def _all_gather(operands: Types, attrs: Attrs) -> TensorType:
    operand_count(operands, 1)
    shape = list(operands[0].shape)
    dim = int_attr(attrs, "dim", len(shape))
    shape[dim] *= len(groups_attr(attrs)[0])
    return TensorType(operands[0].dtype, tuple(shape))


def _reduce_scatter(operands: Types, attrs: Attrs) -> TensorType:
    operand_count(operands, 1)
    word_attr(attrs, "op", REDUCTIONS)
    shape = list(operands[0].shape)
    dim, n = int_attr(attrs, "dim", len(shape)), len(groups_attr(attrs)[0])
    require(shape[dim] % n == 0, f"dimension of {shape[dim]} over {n} ranks")
    shape[dim] //= n
    return TensorType(operands[0].dtype, tuple(shape))


def _all_to_all(operands: Types, attrs: Attrs) -> TensorType:
    operand_count(operands, 1)
    shape = list(operands[0].shape)
    n = len(groups_attr(attrs)[0])
    split, concat = (
        int_attr(attrs, "split_dim", len(shape)),
        int_attr(attrs, "concat_dim", len(shape)),
    )
    require(shape[split] % n == 0, f"dimension of {shape[split]} over {n} ranks")
    shape[split] //= n
    shape[concat] *= n
    return TensorType(operands[0].dtype, tuple(shape))


def _collective_permute(operands: Types, attrs: Attrs) -> TensorType:
    operand_count(operands, 1)
    pairs = attrs.get("pairs")
    ok = isinstance(pairs, list) and all(
        isinstance(p, list) and len(p) == 2 and all(type(r) is int and r >= 0 for r in p)
        for p in pairs
    )
    require(ok, "source-target pairs are malformed")
    assert isinstance(pairs, list)
    for side in (0, 1):
        require(len({p[side] for p in pairs}) == len(pairs), "a rank is twice in the pairs")
    return operands[0]


def _partition_id(operands: Types) -> TensorType:
    operand_count(operands, 0)
    return TensorType("uint32", ())


_NO_ATTRS: dict[str, Callable[[Types], TensorType]] = {
    "select": _select,
    "clamp": _clamp,
    "is_finite": _is_finite,
    "dynamic_update_slice": _dynamic_update_slice,
    "partition_id": _partition_id,
}
_WITH_ATTRS: dict[str, Callable[[Types, Attrs], TensorType]] = {
    "compare": _compare,
    "convert": _convert,
    "bitcast_convert": _bitcast,
    "constant": _constant,
    "iota": _iota,
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "transpose": _transpose,
    "slice": _slice,
    "reverse": _reverse,
    "concatenate": _concatenate,
    "pad": _pad,
    "dynamic_slice": _dynamic_slice,
    "reduce": _reduce,
    "reduce_window": _reduce_window,
    "dot_general": _dot_general,
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "collective_permute": _collective_permute,
}


def infer(name: str, operands: Types, attrs: Attrs) -> list[TensorType]:
    """Result types of an operation without regions. Raises VerifyError, also when it is unknown."""
    if name in UNARY:
        return [_unary(name, operands)]
    if name in BINARY:
        return [_binary(name, operands)]
    if name in _NO_ATTRS:
        return [_NO_ATTRS[name](operands)]
    if name in _WITH_ATTRS:
        return [_WITH_ATTRS[name](operands, attrs)]
    if name == "arg_reduce":
        return _arg_reduce(operands, attrs)
    if name == "optimization_barrier":
        return list(operands)
    if name == "gather":
        return [infer_gather(operands, attrs)]
    if name == "scatter":
        return [infer_scatter(operands, attrs)]
    raise VerifyError(f"unknown operation {name!r:.60}")


KNOWN_OPS = (
    UNARY
    | BINARY
    | frozenset(_NO_ATTRS)
    | frozenset(_WITH_ATTRS)
    | REGION_OPS
    | frozenset({"arg_reduce", "optimization_barrier", "gather", "scatter"})
)
