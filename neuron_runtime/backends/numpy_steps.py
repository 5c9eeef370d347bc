"""Steps of the NumPy executor: one callable per operation that reads and fills value slots.

``env`` is the list of arrays by value number. All views and fixed buffers are in it before the
first step runs, so a step is a kernel call and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from neuron_runtime.backends.base import Collectives, Groups, Request
from neuron_runtime.backends.numpy_kernels import Kernel
from neuron_runtime.compiler.ir import LOW_FLOATS, Array, Op, numpy_dtype

Env = list[Array]
Step = Callable[[Env], Any]


def kernel_step(kernel: Kernel, ins: Sequence[int], outs: Sequence[int]) -> Step:
    """Call the kernel with these slots; the common arities without a loop."""
    slots = (*ins, *outs)
    if len(slots) == 2:
        a, b = slots
        return lambda env: kernel(env[a], env[b])
    if len(slots) == 3:
        a, b, c = slots
        return lambda env: kernel(env[a], env[b], env[c])
    if len(slots) == 4:
        a, b, c, d = slots
        return lambda env: kernel(env[a], env[b], env[c], env[d])
    return lambda env: kernel(*[env[s] for s in slots])


def copy_step(source: int, target: int) -> Step:
    """Copy one slot's content into another's array (shapes may differ by ones and order)."""

    def run(env: Env) -> None:
        to = env[target]
        np.copyto(to, env[source].reshape(to.shape), casting="unsafe")

    return run


def all_reduce_step(
    request: Request,
    copies_in: Sequence[tuple[int, Array]],
    copies_out: Sequence[tuple[Array, int]],
) -> Step:
    """Fill the bucket's parts that are not made in place, reduce, read what has to be copied."""

    def run(env: Env) -> None:
        for source, part in copies_in:
            np.copyto(part.reshape(env[source].shape), env[source], casting="unsafe")
        request.start()
        request.wait()
        for part, target in copies_out:
            np.copyto(env[target], part.reshape(env[target].shape), casting="unsafe")

    return run


def while_step(
    condition: Sequence[Step],
    predicate: int,
    body: Sequence[Step],
    init: Sequence[tuple[int, int]],
    moves: Sequence[tuple[int, int]],
    staged: Sequence[tuple[int, int]],
) -> Step:
    """Run ``body`` while ``condition`` holds. ``staged`` moves read values that moves write."""

    def run(env: Env) -> None:
        for source, target in init:
            np.copyto(env[target], env[source])
        while True:
            for step in condition:
                step(env)
            if not env[predicate]:
                return
            for step in body:
                step(env)
            saved = [env[source].copy() for source, _ in staged]
            for source, target in moves:
                np.copyto(env[target], env[source])
            for (_, target), value in zip(staged, saved, strict=True):
                np.copyto(env[target], value)

    return run


def case_step(
    index: int, branches: Sequence[Sequence[Step]], copies: Sequence[Sequence[tuple[int, int]]]
) -> Step:
    """Run the branch of that number; the last one for numbers out of range (StableHLO)."""

    def run(env: Env) -> None:
        number = int(env[index])
        if not 0 <= number < len(branches):
            number = len(branches) - 1
        for step in branches[number]:
            step(env)
        for source, target in copies[number]:
            np.copyto(env[target], env[source])

    return run


# -- other collectives -------------------------------------------------------------------------


def _split(a: Array, dim: int, parts: int) -> Array:
    """``a`` with dimension ``dim`` cut into ``parts``, the part number first (a view)."""
    shape = (*a.shape[:dim], parts, a.shape[dim] // parts, *a.shape[dim + 1 :])
    return np.moveaxis(a.reshape(shape), dim, 0)


def _groups(op: Op) -> Groups:
    return tuple(tuple(g) for g in op.attrs["groups"])


def collective_step(op: Op, dtype: str, links: Collectives) -> Step:
    """Step of a collective other than all_reduce."""
    source, target = op.operands[0], op.results[0]
    if op.name == "collective_permute":
        pairs: Groups = tuple(tuple(p) for p in op.attrs["pairs"])
        return lambda env: links.permute(
            np.ascontiguousarray(env[source]).reshape(env[source].shape), env[target], pairs
        )
    groups = _groups(op)
    parts = len(groups[0])
    if op.name == "all_gather":
        return _all_gather(source, target, op.attrs["dim"], groups, links)
    if op.name == "reduce_scatter":
        return _reduce_scatter(op, dtype, groups, links)
    split, concat = op.attrs["split_dim"], op.attrs["concat_dim"]

    def all_to_all(env: Env) -> None:
        send = np.ascontiguousarray(_split(env[source], split, parts))
        received = np.empty_like(send)
        links.all_to_all(send, received, groups)
        np.copyto(_split(env[target], concat, parts), received)

    return all_to_all


def _all_gather(source: int, target: int, dim: int, groups: Groups, links: Collectives) -> Step:
    parts = len(groups[0])

    def run(env: Env) -> None:
        send = np.ascontiguousarray(env[source]).reshape(env[source].shape)
        whole = _split(env[target], dim, parts)
        if math.prod(env[target].shape[:dim]) == 1:  # the parts lie one after the other
            links.all_gather(send, env[target].reshape((parts, *send.shape)), groups)
            return
        received = np.empty((parts, *send.shape), send.dtype)
        links.all_gather(send, received, groups)
        np.copyto(whole, received)

    return run


def _reduce_scatter(op: Op, dtype: str, groups: Groups, links: Collectives) -> Step:
    source, target = op.operands[0], op.results[0]
    dim, name, parts = op.attrs["dim"], op.attrs["op"], len(groups[0])
    wire = numpy_dtype("float32" if dtype in LOW_FLOATS else "uint8" if dtype == "bool" else dtype)

    def run(env: Env) -> None:
        send = np.ascontiguousarray(_split(env[source], dim, parts).astype(wire, copy=False))
        out = env[target]
        if out.dtype == wire:
            links.reduce_scatter(send, out, name, groups)
            return
        received = np.empty(out.shape, wire)
        links.reduce_scatter(send, received, name, groups)
        np.copyto(out, received, casting="unsafe")

    return run
