"""Result types of gather and scatter, by StableHLO's dimension numbers.

Attributes of ``gather``: offset_dims, collapsed_slice_dims, operand_batching_dims,
start_indices_batching_dims, start_index_map, index_vector_dim, slice_sizes. Of ``scatter``:
update_window_dims, inserted_window_dims, input_batching_dims, scatter_indices_batching_dims,
scatter_dims_to_operand_dims, index_vector_dim, op.
"""

from __future__ import annotations

from neuron_runtime.compiler.attrs import (
    SCATTER_OPS,
    Attrs,
    Types,
    dims_attr,
    int_attr,
    ints_attr,
    operand_count,
    require,
    word_attr,
)
from neuron_runtime.compiler.ir import FLOATS, TensorType


def _index_shape(indices: TensorType, vector_dim: int, components: int) -> tuple[int, ...]:
    """Shape of the indices without the vector dimension, which must have ``components``."""
    shape = indices.shape
    require(indices.dtype not in FLOATS and indices.dtype != "bool", f"indices are {indices}")
    size = shape[vector_dim] if vector_dim < len(shape) else 1
    require(size == components, f"index vectors have {size} components, {components} are mapped")
    return shape[:vector_dim] + shape[vector_dim + 1 :]


def _batch_pairs(
    operand: TensorType, indices: TensorType, operand_dims: list[int], index_dims: list[int]
) -> None:
    require(len(operand_dims) == len(index_dims), "batching dimension lists differ in length")
    for a, b in zip(operand_dims, index_dims, strict=True):
        require(operand.shape[a] == indices.shape[b], "batching dimensions differ in size")


def infer_gather(operands: Types, attrs: Attrs) -> TensorType:
    """Type of the gathered array. Raises VerifyError."""
    operand_count(operands, 2)
    operand, indices = operands
    rank = len(operand.shape)
    sizes = ints_attr(attrs, "slice_sizes", rank)
    collapsed = dims_attr(attrs, "collapsed_slice_dims", rank)
    batching = dims_attr(attrs, "operand_batching_dims", rank)
    mapped = dims_attr(attrs, "start_index_map", rank)
    vector_dim = int_attr(attrs, "index_vector_dim", len(indices.shape) + 1)
    index_batching = dims_attr(attrs, "start_indices_batching_dims", len(indices.shape))
    require(vector_dim not in index_batching, "the index vector dimension is batched")
    require(not set(collapsed) & set(batching), "a dimension is collapsed and batched")
    require(not set(mapped) & set(batching), "a dimension is indexed and batched")
    for dim, (size, whole) in enumerate(zip(sizes, operand.shape, strict=True)):
        require(0 <= size <= whole, f"slice of {size} of a dimension of {whole}")
        require(dim not in collapsed + batching or size == 1, "collapsed slice is not of size 1")
    _batch_pairs(operand, indices, batching, index_batching)
    batch = list(_index_shape(indices, vector_dim, len(mapped)))
    window = [s for d, s in enumerate(sizes) if d not in collapsed and d not in batching]
    result_rank = len(batch) + len(window)
    offset = dims_attr(attrs, "offset_dims", result_rank)
    require(len(offset) == len(window), "offset_dims does not match the slice")
    require(offset == sorted(offset), "offset_dims is not sorted")
    shape = [window.pop(0) if d in offset else batch.pop(0) for d in range(result_rank)]
    return TensorType(operand.dtype, tuple(shape))


def infer_scatter(operands: Types, attrs: Attrs) -> TensorType:
    """Type of the updated array. Raises VerifyError."""
    operand_count(operands, 3)
    operand, indices, updates = operands
    rank = len(operand.shape)
    word_attr(attrs, "op", SCATTER_OPS)
    inserted = dims_attr(attrs, "inserted_window_dims", rank)
    batching = dims_attr(attrs, "input_batching_dims", rank)
    mapped = dims_attr(attrs, "scatter_dims_to_operand_dims", rank)
    vector_dim = int_attr(attrs, "index_vector_dim", len(indices.shape) + 1)
    index_batching = dims_attr(attrs, "scatter_indices_batching_dims", len(indices.shape))
    require(vector_dim not in index_batching, "the index vector dimension is batched")
    require(not set(inserted) & set(batching), "a dimension is inserted and batched")
    require(not set(mapped) & set(batching), "a dimension is indexed and batched")
    _batch_pairs(operand, indices, batching, index_batching)
    require(updates.dtype == operand.dtype, f"updates are {updates}, operand {operand}")
    batch = list(_index_shape(indices, vector_dim, len(mapped)))
    window_dims = dims_attr(attrs, "update_window_dims", len(updates.shape))
    require(window_dims == sorted(window_dims), "update_window_dims is not sorted")
    window = [s for d, s in enumerate(operand.shape) if d not in inserted and d not in batching]
    require(len(window) == len(window_dims), "update_window_dims does not match the operand")
    scattered = [s for d, s in enumerate(updates.shape) if d not in window_dims]
    require(scattered == batch, f"updates {updates} do not match indices {indices}")
    for dim, whole in zip(window_dims, window, strict=True):
        require(updates.shape[dim] <= whole, f"updates {updates} are larger than {operand}")
    return operand
