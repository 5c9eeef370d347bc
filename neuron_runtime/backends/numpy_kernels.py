"""NumPy kernels of elementwise operations.

A kernel is called with the operand arrays and then the result arrays, which it fills. Kernels
named in ``IN_PLACE`` may be given a result array that is exactly one of the operands of the
result's type. Integer rules (division by zero, large shifts) follow XLA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from neuron_runtime.backends.special import erf, erf_inv, erfc
from neuron_runtime.compiler.ir import FLOATS, LOW_FLOATS, Array, TensorType
from neuron_runtime.compiler.opset import BINARY, ELEMENTWISE, UNARY

Kernel = Callable[..., Any]
Types = Sequence[TensorType]

_UFUNCS: dict[str, Kernel] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "atan2": np.arctan2,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "abs": np.absolute,
    "negate": np.negative,
    "not": np.invert,
    "exponential": np.exp,
    "exponential_minus_one": np.expm1,
    "log": np.log,
    "log_plus_one": np.log1p,
    "sqrt": np.sqrt,
    "cbrt": np.cbrt,
    "tanh": np.tanh,
    "sine": np.sin,
    "cosine": np.cos,
    "tan": np.tan,
    "floor": np.floor,
    "ceil": np.ceil,
    "round_nearest_even": np.rint,
    "sign": np.sign,
}
_COMPARE: dict[str, Kernel] = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}
# These read their operands before they write anything, or read and write in step.
IN_PLACE = frozenset(_UFUNCS) | {"divide", "power", "logistic", "rsqrt"}

REDUCE_UFUNC: dict[str, Any] = {
    "add": np.add,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}


def elementwise(name: str, attrs: dict[str, Any], ins: Types, outs: Types) -> Kernel:
    """The kernel of an elementwise operation for these types."""
    if name == "convert":
        return _convert(ins[0].dtype, outs[0].dtype)
    if name == "select":
        return _select
    if name == "compare":
        return _COMPARE[attrs["direction"]]
    if name == "clamp":
        return _clamp if outs[0].dtype not in LOW_FLOATS else _widened(_clamp)
    if name == "is_finite":
        return np.isfinite if ins[0].dtype not in LOW_FLOATS else _is_finite_low
    kernel = _typed(name, ins[0].dtype)
    if ins[0].dtype in LOW_FLOATS and name in UNARY | BINARY:
        return _widened(kernel)
    return kernel


def _typed(name: str, dtype: str) -> Kernel:
    if dtype == "bool":
        return _BOOL.get(name) or _UFUNCS[name]
    if dtype not in FLOATS and name in _INTEGER:
        return _INTEGER[name]
    return _FLOAT.get(name) or _UFUNCS[name]


def is_in_place(name: str, dtype: str) -> bool:
    """Whether the result may take an operand's memory."""
    if dtype in LOW_FLOATS:
        return name in IN_PLACE  # widened first, so nothing is read after the write
    return name in IN_PLACE and (dtype in FLOATS or name not in _INTEGER)


def _widened(kernel: Kernel) -> Kernel:
    """Compute in float32 and round once, as hardware with wide accumulators does."""

    def run(*arrays: Array) -> None:
        wide = [a.astype(np.float32) for a in arrays[:-1]]
        result = np.empty(arrays[-1].shape, np.float32)
        kernel(*wide, result)
        arrays[-1][...] = result

    return run


def _convert(source: str, target: str) -> Kernel:
    if source in FLOATS and target not in FLOATS and target != "bool":
        return _float_to_int
    if target == "bool":
        return _to_bool
    return _copy


def _copy(a: Array, out: Array) -> None:
    np.copyto(out, a, casting="unsafe")


def _to_bool(a: Array, out: Array) -> None:
    np.not_equal(a, np.zeros((), a.dtype), out)


def _float_to_int(a: Array, out: Array) -> None:
    """Towards zero; outside the range the nearest end, NaN to 0 (XLA's rule)."""
    info = np.iinfo(out.dtype)
    wide = a.astype(np.float64)
    low, high = float(info.min), float(info.max)
    inside = np.clip(np.nan_to_num(wide, nan=0.0, posinf=high, neginf=low), low, high)
    result = np.trunc(inside)
    out[...] = np.where(result >= high, 0, result).astype(out.dtype)
    np.copyto(out, out.dtype.type(info.max), where=result >= high)


def _select(predicate: Array, on_true: Array, on_false: Array, out: Array) -> None:
    np.copyto(out, on_false)
    np.copyto(out, on_true, where=predicate)


def _clamp(low: Array, a: Array, high: Array, out: Array) -> None:
    np.maximum(a, low, out)
    np.minimum(out, high, out)


def _is_finite_low(a: Array, out: Array) -> None:
    np.isfinite(a.astype(np.float32), out)


def _rsqrt(a: Array, out: Array) -> None:
    np.sqrt(a, out)
    np.divide(out.dtype.type(1), out, out)


def _logistic(a: Array, out: Array) -> None:
    one = out.dtype.type(1)
    np.negative(a, out)
    np.exp(out, out)
    np.add(out, one, out)
    np.divide(one, out, out)


def _round_away(a: Array, out: Array) -> None:
    whole = np.trunc(a)
    half = np.abs(a - whole) >= 0.5
    np.add(whole, np.where(half, np.copysign(a.dtype.type(1), a), a.dtype.type(0)), out)


_FLOAT: dict[str, Kernel] = {
    "divide": np.divide,
    "power": np.power,
    "remainder": np.fmod,
    "rsqrt": _rsqrt,
    "logistic": _logistic,
    "round_nearest_afz": _round_away,
    "erf": lambda a, out: np.copyto(out, erf(a), casting="unsafe"),
    "erfc": lambda a, out: np.copyto(out, erfc(a), casting="unsafe"),
    "erf_inv": lambda a, out: np.copyto(out, erf_inv(a), casting="unsafe"),
}


# -- integers and bools ------------------------------------------------------------------------


def _int_divide(a: Array, b: Array, out: Array) -> None:
    """Towards zero; by zero gives all ones (-1)."""
    safe = np.where(b == 0, np.ones((), b.dtype), b)
    quotient = np.floor_divide(a, safe)
    inexact = quotient * safe != a
    fix = inexact & ((a < 0) != (safe < 0))
    result = quotient + fix.astype(out.dtype)
    out[...] = np.where(b == 0, np.invert(np.zeros((), out.dtype)), result)


def _int_remainder(a: Array, b: Array, out: Array) -> None:
    """Sign of the dividend; by zero gives the dividend."""
    safe = np.where(b == 0, np.ones((), b.dtype), b)
    out[...] = np.where(b == 0, a, np.fmod(a, safe))


def _int_power(a: Array, b: Array, out: Array) -> None:
    """A negative exponent gives 0, except for the bases 1 and -1."""
    one = np.ones((), out.dtype)
    result = np.power(a, np.maximum(b, 0))
    if np.issubdtype(out.dtype, np.signedinteger):
        odd = (b & 1) == 1
        negative = np.where(a == 1, one, np.where(a == -1, np.where(odd, -one, one), one * 0))
        result = np.where(b < 0, negative, result)
    out[...] = result


def _shift(kind: str) -> Kernel:
    def run(a: Array, b: Array, out: Array) -> None:
        bits = out.dtype.itemsize * 8
        unsigned = np.dtype(f"u{out.dtype.itemsize}")
        amount = np.ascontiguousarray(b).view(unsigned)
        valid = amount < bits
        safe = np.where(valid, amount, unsigned.type(0))
        if kind == "right_arithmetic":
            last = unsigned.type(bits - 1)
            out[...] = np.right_shift(a, np.where(valid, amount, last).astype(a.dtype))
            return
        shift = np.left_shift if kind == "left" else np.right_shift
        result = shift(np.ascontiguousarray(a).view(unsigned), safe)
        out[...] = np.where(valid, result, unsigned.type(0)).view(out.dtype)

    return run


_BIT_COUNT = np.array([bin(i).count("1") for i in range(256)], np.uint8)


def _popcnt(a: Array, out: Array) -> None:
    width = a.dtype.itemsize
    raw = np.ascontiguousarray(a).reshape(-1).view(np.uint8)
    out.reshape(-1)[:] = _BIT_COUNT[raw].reshape(-1, width).sum(axis=1)


_INTEGER: dict[str, Kernel] = {
    "divide": _int_divide,
    "remainder": _int_remainder,
    "power": _int_power,
    "shift_left": _shift("left"),
    "shift_right_logical": _shift("right_logical"),
    "shift_right_arithmetic": _shift("right_arithmetic"),
    "popcnt": _popcnt,
}
_BOOL: dict[str, Kernel] = {
    "add": np.logical_or,
    "multiply": np.logical_and,
    "maximum": np.logical_or,
    "minimum": np.logical_and,
    "subtract": np.logical_xor,
    "not": np.logical_not,
    "abs": _copy,
    "negate": _copy,
    "sign": _copy,
}
_UNSUPPORTED_BOOL = frozenset(_INTEGER) | {"atan2"}


def supported(name: str, ins: Types) -> bool:
    """Whether the kernel exists: bool has no division, shifts and powers."""
    if name not in ELEMENTWISE or not ins:
        return True
    return not (ins[0].dtype == "bool" and name in _UNSUPPORTED_BOOL)
