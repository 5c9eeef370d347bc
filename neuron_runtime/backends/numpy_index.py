"""NumPy kernels of gather and scatter.

Gathered slices that would leave the array are moved inside it, scattered ones are dropped, as
StableHLO prescribes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from neuron_runtime.backends.numpy_kernels import REDUCE_UFUNC, Kernel
from neuron_runtime.compiler.ir import LOW_FLOATS, Array, TensorType

Types = Sequence[TensorType]


def _vectors(indices: Array, vector_dim: int) -> Array:
    """Index vectors in the last dimension, int64."""
    if vector_dim == indices.ndim:
        indices = indices[..., np.newaxis]
    else:
        indices = np.moveaxis(indices, vector_dim, -1)
    return indices.astype(np.int64)


def _positions(
    starts: Array, mapped: list[int], batching: list[tuple[int, int]], rank: int
) -> list[Array]:
    """For each operand dimension the start of the slice, over the batch dimensions."""
    batch_shape = starts.shape[:-1]
    found: list[Array] = [np.zeros((1,) * len(batch_shape), np.int64)] * rank
    for place, dim in enumerate(mapped):
        found[dim] = starts[..., place]
    for dim, axis in batching:
        shape = [1] * len(batch_shape)
        shape[axis] = batch_shape[axis]
        found[dim] = np.arange(batch_shape[axis], dtype=np.int64).reshape(shape)
    return found


def _batch_axis(axis: int, vector_dim: int) -> int:
    """Place of an index dimension once the vector dimension is taken out."""
    return axis - 1 if axis > vector_dim else axis


def _full_index(
    starts: list[Array],
    sizes: list[int],
    window_dims: list[int],
    window_axes: list[int],
    rank: int,
) -> list[Array]:
    """Index arrays that broadcast to the result: batch axes and window axes interleaved.

    ``window_dims``: operand dimensions that are windowed; ``window_axes``: their place in the
    result of ``rank`` dimensions.
    """
    batch_axes = [a for a in range(rank) if a not in window_axes]
    index = []
    for dim, start in enumerate(starts):
        shape = [1] * rank
        for axis, size in zip(batch_axes, start.shape, strict=True):
            shape[axis] = size
        full = start.reshape(shape)
        if dim in window_dims:
            shape = [1] * rank
            shape[window_axes[window_dims.index(dim)]] = sizes[dim]
            full = full + np.arange(sizes[dim], dtype=np.int64).reshape(shape)
        index.append(full)
    return index


# -- gather ------------------------------------------------------------------------------------


def gather(attrs: dict[str, Any], ins: Types, outs: Types) -> Kernel:
    """Kernel of gather."""
    shape = ins[0].shape
    sizes, mapped = attrs["slice_sizes"], attrs["start_index_map"]
    vector_dim = attrs["index_vector_dim"]
    dropped = attrs["collapsed_slice_dims"] + attrs["operand_batching_dims"]
    window_dims = [d for d in range(len(shape)) if d not in dropped]
    limits = np.array([shape[d] - sizes[d] for d in mapped], np.int64)
    pairs = [
        (dim, _batch_axis(axis, vector_dim))
        for dim, axis in zip(
            attrs["operand_batching_dims"], attrs["start_indices_batching_dims"], strict=True
        )
    ]
    rows = _is_rows(attrs, shape, len(outs[0].shape))

    def run(a: Array, indices: Array, out: Array) -> None:
        starts = np.clip(_vectors(indices, vector_dim), 0, limits)
        if rows:
            np.take(a, starts[..., 0], axis=0, out=out, mode="clip")
            return
        where = _positions(starts, mapped, pairs, a.ndim)
        index = _full_index(where, sizes, window_dims, attrs["offset_dims"], out.ndim)
        np.copyto(out, a[tuple(index)] if index else a)

    return run


def _is_rows(attrs: dict[str, Any], shape: tuple[int, ...], rank: int) -> bool:
    """Whole rows of the first dimension, the slice's dimensions last (embedding look-up)."""
    return (
        attrs["start_index_map"] == [0]
        and attrs["collapsed_slice_dims"] == [0]
        and not attrs["operand_batching_dims"]
        and list(attrs["slice_sizes"][1:]) == list(shape[1:])
        and attrs["offset_dims"] == list(range(rank - len(shape) + 1, rank))
    )


# -- scatter -----------------------------------------------------------------------------------


def scatter(attrs: dict[str, Any], ins: Types) -> Kernel:
    """Kernel of scatter. Several updates of one place are combined in the order of the indices."""
    shape, updates_type = ins[0].shape, ins[2]
    mapped, vector_dim = attrs["scatter_dims_to_operand_dims"], attrs["index_vector_dim"]
    dropped = attrs["inserted_window_dims"] + attrs["input_batching_dims"]
    window_dims = [d for d in range(len(shape)) if d not in dropped]
    axes = attrs["update_window_dims"]
    sizes = [1] * len(shape)
    for dim, axis in zip(window_dims, axes, strict=True):
        sizes[dim] = updates_type.shape[axis]
    limits = np.array([shape[d] - sizes[d] for d in mapped], np.int64)
    pairs = [
        (dim, _batch_axis(axis, vector_dim))
        for dim, axis in zip(
            attrs["input_batching_dims"], attrs["scatter_indices_batching_dims"], strict=True
        )
    ]
    rank = len(updates_type.shape)
    rows = (
        mapped == [0]
        and attrs["inserted_window_dims"] == [0]
        and not pairs
        and list(sizes[1:]) == list(shape[1:])
        and axes == list(range(rank - len(shape) + 1, rank))
        and attrs["op"] == "add"
    )
    low = ins[0].dtype in LOW_FLOATS

    def run(a: Array, indices: Array, updates: Array, out: Array) -> None:
        if out is not a:
            np.copyto(out, a)
        if updates.size == 0:
            return
        starts = _vectors(indices, vector_dim)
        inside = ((starts >= 0) & (starts <= limits)).all(axis=-1)
        if rows and not low:
            _add_rows(out, starts[..., 0].reshape(-1), updates, inside.reshape(-1))
            return
        where = _positions(starts, mapped, pairs, out.ndim)
        index = _full_index(where, sizes, window_dims, axes, rank)
        keep = _full_index([inside], [1], [], axes, rank)[0]
        _apply(attrs["op"], out, index, updates, keep, low)

    return run


def _add_rows(out: Array, rows: Array, updates: Array, inside: Array) -> None:
    """Sum rows with equal index: sort, add up neighbours, add the sums."""
    flat = updates.reshape((rows.size, *out.shape[1:]))
    if not inside.all():
        rows, flat = rows[inside], flat[inside]
        if rows.size == 0:
            return
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    first = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    out[ordered[first]] += np.add.reduceat(flat[order], first, axis=0)


def _apply(
    op: str, out: Array, index: list[Array], updates: Array, keep: Array, low: bool
) -> None:
    whole = [np.broadcast_to(i, updates.shape) for i in index]
    mask = np.broadcast_to(keep, updates.shape)
    if not index:
        whole, target = [], out.reshape(1)
        values = updates.reshape(-1)[mask.reshape(-1)]
        flat = np.zeros(values.size, np.int64)
    else:
        target = out.reshape(-1)
        picked = tuple(i[mask] for i in whole)
        flat = np.ravel_multi_index(picked, out.shape) if picked[0].size else picked[0]
        values = updates[mask]
    if op == "set":
        target[flat] = values
    elif low:
        wide = target.astype(np.float32)
        REDUCE_UFUNC[op].at(wide, flat, values.astype(np.float32))
        target[...] = wide
    else:
        REDUCE_UFUNC[op].at(target, flat, values)
