"""Checked reading of an operation's attributes, for type inference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from neuron_runtime.compiler.ir import DTYPES, TensorType

Types = Sequence[TensorType]
Attrs = dict[str, Any]

REDUCTIONS = frozenset({"add", "multiply", "maximum", "minimum", "and", "or"})
SCATTER_OPS = REDUCTIONS | {"set"}


class VerifyError(ValueError):
    """A program breaks a rule of the intermediate representation."""


def require(condition: bool, message: str) -> None:
    """Raise VerifyError unless the condition holds."""
    if not condition:
        raise VerifyError(message)


def operand_count(operands: Types, n: int) -> None:
    require(len(operands) == n, f"takes {n} operands, has {len(operands)}")


def ints_attr(attrs: Attrs, key: str, length: int | None = None) -> list[int]:
    value = attrs.get(key)
    ok = isinstance(value, list) and all(type(v) is int and abs(v) < 2**48 for v in value)
    require(ok, f"attribute {key} is not a list of integers")
    assert isinstance(value, list)
    require(length is None or len(value) == length, f"attribute {key} has the wrong length")
    return value


def int_attr(attrs: Attrs, key: str, below: int) -> int:
    value = attrs.get(key)
    require(type(value) is int and 0 <= value < below, f"attribute {key} is out of range")
    assert isinstance(value, int)
    return value


def dims_attr(attrs: Attrs, key: str, rank: int, unique: bool = True) -> list[int]:
    value = ints_attr(attrs, key)
    require(all(0 <= v < rank for v in value), f"attribute {key} names a dimension out of range")
    require(not unique or len(set(value)) == len(value), f"attribute {key} repeats a dimension")
    return value


def word_attr(attrs: Attrs, key: str, allowed: frozenset[str]) -> str:
    value = attrs.get(key)
    require(isinstance(value, str) and value in allowed, f"attribute {key} is {value!r:.40}")
    assert isinstance(value, str)
    return value


def dtype_attr(attrs: Attrs) -> str:
    return word_attr(attrs, "dtype", DTYPES)


def shape_attr(attrs: Attrs) -> tuple[int, ...]:
    shape = ints_attr(attrs, "shape")
    require(all(s >= 0 for s in shape) and len(shape) <= 32, "attribute shape is malformed")
    require(math.prod(shape) < 2**48, "result has more than 2**48 elements")
    return tuple(shape)


def groups_attr(attrs: Attrs) -> list[list[int]]:
    groups = attrs.get("groups")
    require(isinstance(groups, list) and len(groups) > 0, "replica groups are missing")
    assert isinstance(groups, list)
    require(all(isinstance(g, list) and g for g in groups), "replica groups are malformed")
    ranks = [r for g in groups for r in g]
    require(all(type(r) is int and r >= 0 for r in ranks), "replica groups are malformed")
    require(sorted(ranks) == list(range(len(ranks))), "replica groups must cover each rank once")
    require(len({len(g) for g in groups}) == 1, "replica groups of several sizes")
    return groups
