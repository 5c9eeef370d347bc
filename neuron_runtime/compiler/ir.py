"""Intermediate representation: a plain list of operations in SSA form.

A ``Program`` owns a table of values (their types; a value's number is its index) and one
``Region``. Operations are StableHLO's, with attributes turned into JSON values. Regions of
``while`` and ``case`` may use values of the regions around them. The whole program can be
written as JSON; constants that are not a splat are kept beside it as raw arrays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

IR_VERSION = 1

# MLIR's name of an element type -> name used in this package (NumPy's, or ml_dtypes').
MLIR_DTYPES = {
    "f32": "float32",
    "f64": "float64",
    "f16": "float16",
    "bf16": "bfloat16",
    "f8E4M3FN": "float8_e4m3fn",
    "f8E5M2": "float8_e5m2",
    "i1": "bool",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "ui8": "uint8",
    "ui16": "uint16",
    "ui32": "uint32",
    "ui64": "uint64",
}
_NUMPY: dict[str, np.dtype[Any]] = {
    name: np.dtype(getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else name)
    for name in MLIR_DTYPES.values()
}
DTYPES = frozenset(_NUMPY)
LOW_FLOATS = frozenset({"bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"})
FLOATS = LOW_FLOATS | {"float32", "float64"}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype object of an element type name; KeyError when it is unknown."""
    return _NUMPY[name]


@dataclass(frozen=True, slots=True)
class TensorType:
    """Element type (``DTYPES``) and shape of a value."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes of a dense array of this type."""
        return self.size * _NUMPY[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(slots=True)
class Op:
    """One operation: ``results = name(operands) {attrs} (regions)``. ``line``: in the source."""

    name: str
    operands: list[int]
    results: list[int]
    attrs: dict[str, Any] = field(default_factory=dict)
    regions: list[Region] = field(default_factory=list)
    line: int = 0

    def where(self) -> str:
        """Name and source line, for messages."""
        return f"{self.name} (line {self.line})" if self.line else self.name


@dataclass(slots=True)
class Region:
    """Straight-line code: arguments, operations in order, results."""

    args: list[int]
    ops: list[Op]
    results: list[int]

    def walk(self) -> Iterator[Op]:
        """All operations, those in nested regions after their parent."""
        for op in self.ops:
            yield op
            for region in op.regions:
                yield from region.walk()


@dataclass(slots=True)
class Program:
    """A per-rank program. ``constants`` holds arrays that ``constant`` operations name."""

    types: list[TensorType]
    body: Region
    constants: dict[str, Array] = field(default_factory=dict)

    def new_value(self, type_: TensorType) -> int:
        """Add a value of this type; return its number."""
        self.types.append(type_)
        return len(self.types) - 1


def free_values(region: Region) -> list[int]:
    """Values of outer regions that ``region`` uses, in order of first use."""
    inner: set[int] = set(region.args)
    found: dict[int, None] = {}
    for op in region.ops:
        for value in op_uses(op):
            if value not in inner:
                found.setdefault(value)
        inner.update(op.results)
    for value in region.results:
        if value not in inner:
            found.setdefault(value)
    return list(found)


def op_uses(op: Op) -> list[int]:
    """Operands and the outer values that the operation's regions capture."""
    if not op.regions:
        return op.operands
    uses = list(op.operands)
    for region in op.regions:
        uses.extend(free_values(region))
    return uses


# -- constants ---------------------------------------------------------------------------------

_INLINE_LIMIT = 64  # bytes of a constant that is written into the program text itself


def constant_attrs(program: Program, value: Array) -> dict[str, Any]:
    """Attributes of a ``constant`` operation for ``value``; adds large arrays to the program."""
    flat = np.ascontiguousarray(value).reshape(-1)
    raw = flat.view(np.uint8).tobytes() if flat.size else b""
    item = value.dtype.itemsize
    if flat.size and raw == raw[:item] * flat.size:
        return {"splat": raw[:item].hex()}
    if len(raw) <= _INLINE_LIMIT:
        return {"dense": raw.hex()}
    for name, other in program.constants.items():
        same = other.dtype == value.dtype and other.shape == value.shape
        if same and other.tobytes() == raw:
            return {"ref": name}
    number = len(program.constants)
    while f"c{number}" in program.constants:
        number += 1
    name = f"c{number}"
    program.constants[name] = np.ascontiguousarray(value)
    return {"ref": name}


def constant_value(program: Program, op: Op) -> Array:
    """The array of a ``constant`` operation; a splat is a read-only broadcast view."""
    type_ = program.types[op.results[0]]
    dtype = numpy_dtype(type_.dtype)
    if "splat" in op.attrs:
        element = np.frombuffer(bytes.fromhex(op.attrs["splat"]), dtype=dtype)
        return np.broadcast_to(element.reshape(()), type_.shape)
    if "dense" in op.attrs:
        return np.frombuffer(bytes.fromhex(op.attrs["dense"]), dtype=dtype).reshape(type_.shape)
    return program.constants[op.attrs["ref"]]


# -- JSON --------------------------------------------------------------------------------------


def program_to_json(program: Program) -> dict[str, Any]:
    """JSON value of a program, without the data of ``constants``."""
    return {
        "ir_version": IR_VERSION,
        "types": [[t.dtype, list(t.shape)] for t in program.types],
        "constants": {
            name: [array.dtype.name, list(array.shape)] for name, array in program.constants.items()
        },
        "body": _region_to_json(program.body),
    }


def _region_to_json(region: Region) -> dict[str, Any]:
    return {
        "args": region.args,
        "ops": [
            [
                op.name,
                op.operands,
                op.results,
                op.attrs,
                [_region_to_json(r) for r in op.regions],
                op.line,
            ]
            for op in region.ops
        ],
        "results": region.results,
    }


class ProgramFormatError(ValueError):
    """The JSON is not a program; the message names the place."""


def program_from_json(data: Any, constants: dict[str, Array]) -> Program:
    """Rebuild a program; only its form is checked here (see ``verify`` for the meaning).

    Raises ProgramFormatError.
    """
    _need(isinstance(data, dict), "program is not an object")
    _need(data.get("ir_version") == IR_VERSION, f"ir_version is {data.get('ir_version')!r:.40}")
    raw_types = data.get("types")
    _need(isinstance(raw_types, list), "types is not a list")
    types = [type_from_json(entry, f"types[{i}]") for i, entry in enumerate(raw_types)]
    return Program(types, _region_from_json(data.get("body"), "body"), constants)


def type_from_json(entry: Any, where: str) -> TensorType:
    """A ``[dtype, shape]`` pair as a type; raises ProgramFormatError."""
    _need(isinstance(entry, list) and len(entry) == 2, f"{where} is not [dtype, shape]")
    dtype, shape = entry
    _need(
        isinstance(dtype, str) and dtype in DTYPES, f"{where}: unknown element type {dtype!r:.40}"
    )
    _need(_is_naturals(shape) and len(shape) <= 32, f"{where}: bad shape")
    _need(math.prod(shape) < 2**48, f"{where}: more than 2**48 elements")
    return TensorType(dtype, tuple(shape))


def _region_from_json(data: Any, where: str, depth: int = 0) -> Region:
    _need(depth < 32, f"{where}: regions nested more than 32 deep")
    _need(isinstance(data, dict), f"{where} is not an object")
    for key in ("args", "results"):
        _need(_is_naturals(data.get(key)), f"{where}.{key} is not a list of value numbers")
    _need(isinstance(data.get("ops"), list), f"{where}.ops is not a list")
    ops = []
    for i, entry in enumerate(data["ops"]):
        at = f"{where}.ops[{i}]"
        _need(isinstance(entry, list) and len(entry) == 6, f"{at} is not an operation")
        name, operands, results, attrs, regions, line = entry
        _need(isinstance(name, str) and len(name) < 64, f"{at}: bad name")
        _need(_is_naturals(operands) and _is_naturals(results), f"{at}: bad value numbers")
        _need(isinstance(attrs, dict) and isinstance(regions, list), f"{at}: bad attributes")
        _need(type(line) is int, f"{at}: bad line")
        inner = [
            _region_from_json(r, f"{at}.regions[{k}]", depth + 1) for k, r in enumerate(regions)
        ]
        ops.append(Op(name, operands, results, attrs, inner, line))
    return Region(data["args"], ops, data["results"])


def _is_naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**48 for v in value)


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ProgramFormatError(message)
