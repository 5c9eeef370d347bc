"""The kernel of any operation without regions or communication, and its evaluation on arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from neuron_runtime.backends.numpy_index import gather, scatter
from neuron_runtime.backends.numpy_kernels import Kernel, elementwise
from neuron_runtime.backends.numpy_shape import kernel as shape_kernel
from neuron_runtime.backends.numpy_shape import view
from neuron_runtime.compiler.ir import Array, Op, TensorType, numpy_dtype
from neuron_runtime.compiler.opset import ELEMENTWISE

VIEW_OPS = frozenset(
    {"reshape", "transpose", "slice", "reverse", "broadcast_in_dim", "bitcast_convert"}
)
Types = Sequence[TensorType]


def make_kernel(name: str, attrs: dict[str, Any], ins: Types, outs: Types) -> Kernel:
    """A callable taking operand arrays, then result arrays. KeyError for an unknown operation."""
    if name in ELEMENTWISE:
        return elementwise(name, attrs, ins, outs)
    if name == "gather":
        return gather(attrs, ins, outs)
    if name == "scatter":
        return scatter(attrs, ins)
    found = shape_kernel(name, attrs, ins, outs)
    if found is None:
        raise KeyError(name)
    return found


def evaluate(op: Op, arrays: Sequence[Array], ins: Types, outs: Types) -> list[Array]:
    """Results of one operation on these arrays, as new arrays or read-only views."""
    if op.name in VIEW_OPS:
        return [view(op.name, op.attrs, ins[0])(arrays[0])]
    results = [np.empty(t.shape, numpy_dtype(t.dtype)) for t in outs]
    with np.errstate(all="ignore"):
        make_kernel(op.name, op.attrs, ins, outs)(*arrays, *results)
    return results
