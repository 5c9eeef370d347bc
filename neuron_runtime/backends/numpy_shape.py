"""NumPy kernels of data movement, products and reductions, and the views that cost nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided, sliding_window_view

from neuron_runtime.backends.numpy_kernels import REDUCE_UFUNC, Kernel
from neuron_runtime.compiler.ir import FLOATS, LOW_FLOATS, Array, TensorType, numpy_dtype

Types = Sequence[TensorType]
View = Callable[[Array], Array]


def view(name: str, attrs: dict[str, Any], in_type: TensorType) -> View:
    """The function that makes a view operation's result from its operand."""
    if name == "reshape":
        shape = tuple(attrs["shape"])
        return lambda a: a.reshape(shape)
    if name == "transpose":
        permutation = tuple(attrs["permutation"])
        return lambda a: a.transpose(permutation)
    if name == "slice":
        bounds = zip(attrs["start"], attrs["limit"], attrs["stride"], strict=True)
        index = (*(slice(*b) for b in bounds), ...)  # the ellipsis keeps a 0-d result an array
        return lambda a: a[index]
    if name == "reverse":
        flipped = (
            *(slice(None, None, -1 if d in attrs["dims"] else 1)
              for d in range(len(in_type.shape))),
            ...,
        )
        return lambda a: a[flipped]
    if name == "broadcast_in_dim":
        return _broadcast(tuple(attrs["shape"]), attrs["dims"])
    if name == "bitcast_convert":
        dtype = numpy_dtype(attrs["dtype"])
        return lambda a: a.view(dtype)
    if name == "optimization_barrier":
        return lambda a: a
    raise KeyError(name)


def _broadcast(shape: tuple[int, ...], dims: list[int]) -> View:
    def run(a: Array) -> Array:
        strides = [0] * len(shape)
        for size, stride, dim in zip(a.shape, a.strides, dims, strict=True):
            strides[dim] = stride if size == shape[dim] and size != 1 else 0
        return as_strided(a, shape, strides, writeable=False)

    return run


# -- copies ------------------------------------------------------------------------------------


def _reshape_copy(a: Array, out: Array) -> None:
    np.copyto(out.reshape(a.shape), a)


def _concatenate(dim: int) -> Kernel:
    def run(*arrays: Array) -> None:
        np.concatenate(arrays[:-1], axis=dim, out=arrays[-1])

    return run


def _pad(attrs: dict[str, Any], ins: Types) -> Kernel:
    """Negative padding crops; interior padding spreads."""
    target, source = [], []
    for size, low, high, gap in zip(
        ins[0].shape, attrs["low"], attrs["high"], attrs["interior"], strict=True
    ):
        step = gap + 1
        total = size + low + high + max(size - 1, 0) * gap
        first = max(0, -(low // step)) if low < 0 else 0
        while low + first * step < 0:
            first += 1
        last = size
        while last > first and low + (last - 1) * step >= total:
            last -= 1
        source.append(slice(first, last))
        begin = low + first * step
        end = low + (last - 1) * step + 1 if last > first else begin
        target.append(slice(begin, max(end, begin), step))
    to, of = (*target, ...), (*source, ...)

    def run(a: Array, value: Array, out: Array) -> None:
        out[...] = value
        out[to] = a[of]

    return run


def _starts(indices: Sequence[Array], shape: tuple[int, ...], sizes: Sequence[int]) -> Any:
    """Slices at the start indices, moved inside the array as StableHLO prescribes."""
    found: list[Any] = []
    for index, whole, size in zip(indices, shape, sizes, strict=True):
        start = min(max(int(index), 0), whole - size)
        found.append(slice(start, start + size))
    return (*found, ...)


def _dynamic_slice(sizes: list[int]) -> Kernel:
    def run(a: Array, *rest: Array) -> None:
        np.copyto(rest[-1], a[_starts(rest[:-1], a.shape, sizes)])

    return run


def _dynamic_update_slice(a: Array, update: Array, *rest: Array) -> None:
    out = rest[-1]
    if out is not a:
        np.copyto(out, a)
    out[_starts(rest[:-1], out.shape, update.shape)] = update


def _iota(attrs: dict[str, Any]) -> Kernel:
    dim, shape = attrs["dim"], attrs["shape"]
    column = [1] * len(shape)
    column[dim] = shape[dim]
    line = np.arange(shape[dim]).reshape(column)

    def run(out: Array) -> None:
        out[...] = line.astype(out.dtype)

    return run


# -- reductions --------------------------------------------------------------------------------


def _identity(op: str, dtype: np.dtype[Any]) -> Any:
    """The neutral element, as a scalar of the type."""
    if op in ("add", "or"):
        return dtype.type(0)
    if op == "multiply":
        return dtype.type(1)
    if op == "and":
        return np.invert(dtype.type(0)) if dtype != np.bool_ else np.bool_(True)
    if dtype == np.bool_:
        return np.bool_(op == "minimum")
    if np.issubdtype(dtype, np.integer):
        info = np.iinfo(dtype)
        return dtype.type(info.min if op == "maximum" else info.max)
    return dtype.type(-np.inf if op == "maximum" else np.inf)


def _reduce(attrs: dict[str, Any], ins: Types) -> Kernel:
    ufunc = REDUCE_UFUNC[attrs["op"]]
    axes = tuple(attrs["dims"])
    low = ins[0].dtype in LOW_FLOATS
    neutral = _identity(attrs["op"], np.dtype(np.float32) if low else numpy_dtype(ins[0].dtype))

    def run(a: Array, init: Array, out: Array) -> None:
        if low:
            total = ufunc.reduce(a.astype(np.float32), axis=axes, initial=neutral)
            out[...] = ufunc(total, init.astype(np.float32))
            return
        if a.dtype == np.bool_:
            logical = np.logical_or if ufunc in (np.add, np.maximum) else ufunc
            logical = np.logical_and if ufunc in (np.multiply, np.minimum) else logical
            out[...] = logical(logical.reduce(a, axis=axes), init)
            return
        ufunc.reduce(a, axis=axes, out=out, initial=neutral)
        if init[()] != neutral:
            ufunc(out, init, out)

    return run


def _arg_reduce(attrs: dict[str, Any], ins: Types) -> Kernel:
    """First position of the extreme value; NaN counts as extreme (JAX's rule)."""
    dim = attrs["dim"]
    find = np.argmax if attrs["op"] == "maximum" else np.argmin
    low = ins[0].dtype in LOW_FLOATS

    def run(a: Array, values: Array, positions: Array) -> None:
        found = find(a.astype(np.float32) if low else a, axis=dim)
        np.copyto(positions, found, casting="unsafe")
        np.copyto(values, np.take_along_axis(a, np.expand_dims(found, dim), dim).squeeze(dim))

    return run


def _reduce_window(attrs: dict[str, Any], ins: Types) -> Kernel:
    ufunc = REDUCE_UFUNC[attrs["op"]]
    scan = _scan_dim(attrs, ins[0].shape)
    widths = list(zip(attrs["low"], attrs["high"], strict=True))
    span = [(w - 1) * d + 1 for w, d in zip(attrs["window"], attrs["dilation"], strict=True)]
    rank = len(span)
    picks = (
        *(slice(None, None, s) for s in attrs["strides"]),
        *(slice(None, None, d) for d in attrs["dilation"]),
    )
    low = ins[0].dtype in LOW_FLOATS
    dtype = np.dtype(np.float32) if low else numpy_dtype(ins[0].dtype)
    neutral = _identity(attrs["op"], dtype)

    def run(a: Array, init: Array, out: Array) -> None:
        a, init = a.astype(dtype, copy=False), init.astype(dtype, copy=False)
        if scan is not None and init[()] == neutral:
            out[...] = ufunc.accumulate(a, axis=scan)
            return
        if out.size == 0:
            return
        padded = np.pad(a, widths, constant_values=init[()])
        windows = sliding_window_view(padded, span)[picks]
        out[...] = ufunc(ufunc.reduce(windows, axis=tuple(range(rank, 2 * rank))), init)

    return run


def _scan_dim(attrs: dict[str, Any], shape: tuple[int, ...]) -> int | None:
    """The dimension when the window is a running reduction (cumsum and its kin)."""
    wide = [d for d, w in enumerate(attrs["window"]) if w != 1]
    if len(wide) != 1 or any(s != 1 for s in attrs["strides"] + attrs["dilation"]):
        return None
    dim = wide[0]
    pads = [(0, 0)] * len(shape)
    pads[dim] = (shape[dim] - 1, 0)
    fits = attrs["window"][dim] == shape[dim]
    return dim if fits and list(zip(attrs["low"], attrs["high"], strict=True)) == pads else None


# -- products ----------------------------------------------------------------------------------


def _blas_ready(a: Array) -> Array:
    """A matrix (stack) that BLAS takes as it is: one of the last two strides is the item size."""
    rows, columns = a.strides[-2], a.strides[-1]
    item = a.itemsize
    ready = (columns == item and rows >= a.shape[-1] * item) or (
        rows == item and columns >= a.shape[-2] * item
    )
    return a if ready or a.size == 0 else np.ascontiguousarray(a)


def _dot_general(attrs: dict[str, Any], ins: Types, outs: Types) -> Kernel:
    lhs_free = _free(ins[0], attrs["lhs_batch"], attrs["lhs_contract"])
    rhs_free = _free(ins[1], attrs["rhs_batch"], attrs["rhs_contract"])
    lhs_order = (*attrs["lhs_batch"], *lhs_free, *attrs["lhs_contract"])
    rhs_order = (*attrs["rhs_batch"], *attrs["rhs_contract"], *rhs_free)
    batch = tuple(ins[0].shape[d] for d in attrs["lhs_batch"])
    m = math.prod(ins[0].shape[d] for d in lhs_free)
    n = math.prod(ins[1].shape[d] for d in rhs_free)
    k = math.prod(ins[0].shape[d] for d in attrs["lhs_contract"])
    wide = _product_dtype(ins, outs)

    def run(a: Array, b: Array, out: Array) -> None:
        left = a.transpose(lhs_order).reshape((*batch, m, k)).astype(wide, copy=False)
        right = b.transpose(rhs_order).reshape((*batch, k, n)).astype(wide, copy=False)
        left, right = _blas_ready(left), _blas_ready(right)
        if out.dtype == wide:
            np.matmul(left, right, out=out.reshape((*batch, m, n)))
        else:
            product = np.matmul(left, right).reshape(out.shape)
            np.copyto(out, product, casting="unsafe")

    return run


def _product_dtype(ins: Types, outs: Types) -> np.dtype[Any]:
    """float32 for narrower floats, otherwise the result's type."""
    narrow = all(t.dtype in LOW_FLOATS | {"float32"} for t in (*ins, *outs))
    if narrow:
        return np.dtype(np.float32)
    if outs[0].dtype in FLOATS:
        return np.dtype(np.float64)
    return numpy_dtype(outs[0].dtype)


def _free(type_: TensorType, batch: list[int], contract: list[int]) -> list[int]:
    return [d for d in range(len(type_.shape)) if d not in batch and d not in contract]


def kernel(name: str, attrs: dict[str, Any], ins: Types, outs: Types) -> Kernel | None:
    """The kernel of an operation of this module, else None."""
    if name == "reshape":
        return _reshape_copy
    if name == "concatenate":
        return _concatenate(attrs["dim"])
    if name == "pad":
        return _pad(attrs, ins)
    if name == "dynamic_slice":
        return _dynamic_slice(attrs["sizes"])
    if name == "dynamic_update_slice":
        return _dynamic_update_slice
    if name == "iota":
        return _iota(attrs)
    if name == "reduce":
        return _reduce(attrs, ins)
    if name == "arg_reduce":
        return _arg_reduce(attrs, ins)
    if name == "reduce_window":
        return _reduce_window(attrs, ins)
    if name == "dot_general":
        return _dot_general(attrs, ins, outs)
    return None
