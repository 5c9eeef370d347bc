"""What a ``module:function`` hands to the compiler. Importing this needs no jax."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class JaxProgram:
    """A JAX function with example arguments.

    ``fn``: the function. With ``mesh`` it is the step of one rank and is wrapped by
    ``jax.shard_map(fn, mesh=..., in_specs=in_specs, out_specs=out_specs)``; without, it is
    compiled as it is (it may itself be made by shard_map over ``jax.devices()``).
    ``args``: one entry a parameter: arrays, ``jax.ShapeDtypeStruct``, or trees of them, with the
    shapes over all ranks. Only shapes and types matter.
    ``mesh``: axis names and sizes in rank order, last axis fastest; their product is the number
    of ranks.
    ``donate``: parameters whose memory a result of the same type takes over (state).
    ``arg_names``, ``result_names``: names of the parameters and of the entries of the returned
    tuple; default: the function's own parameter names, and ``result``. A leaf of a tree is named
    by its path: ``params.layers.0.w``.
    """

    fn: Callable[..., Any]
    args: Sequence[Any]
    mesh: Mapping[str, int] | None = None
    in_specs: Any = None
    out_specs: Any = None
    donate: Sequence[int] = ()
    arg_names: Sequence[str] | None = None
    result_names: Sequence[str] | None = None
    name: str | None = None
