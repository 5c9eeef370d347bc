"""Products followed by a transposition: let the product make the transposed result itself.

JAX writes a weight's gradient as transpose(dot_general(dy, x)). Swapping the operands gives the
same matrix in row-major order, so it can be made in a bucket and is read without strides.
"""

from __future__ import annotations

from neuron_runtime.compiler.ir import Op, Program, Region, op_uses


def swap_transposed_products(program: Program) -> None:
    """Rewrite in place; the old products are left for dead-code removal."""
    _region(program, program.body)


def _region(program: Program, region: Region) -> None:
    uses: dict[int, int] = {}
    for op in region.ops:
        for value in op_uses(op):
            uses[value] = uses.get(value, 0) + 1
    for value in region.results:
        uses[value] = uses.get(value, 0) + 1
    products = {op.results[0]: op for op in region.ops if op.name == "dot_general"}
    for op in region.ops:
        for inner in op.regions:
            _region(program, inner)
        if op.name != "transpose":
            continue
        product = products.get(op.operands[0])
        if product is not None and uses[op.operands[0]] == 1:
            _swap(program, op, product)


def _swap(program: Program, op: Op, product: Op) -> None:
    attrs = product.attrs
    batch = len(attrs["lhs_batch"])
    lhs_rank = len(program.types[product.operands[0]].shape)
    left = lhs_rank - batch - len(attrs["lhs_contract"])
    total = len(program.types[product.results[0]].shape)
    swapped = [
        *range(batch),
        *range(batch + left, total),
        *range(batch, batch + left),
    ]
    if op.attrs["permutation"] != swapped:
        return
    op.name = "dot_general"
    op.operands = product.operands[::-1]
    op.attrs = {
        "lhs_batch": attrs["rhs_batch"],
        "rhs_batch": attrs["lhs_batch"],
        "lhs_contract": attrs["rhs_contract"],
        "rhs_contract": attrs["lhs_contract"],
        "dtype": attrs["dtype"],
    }
