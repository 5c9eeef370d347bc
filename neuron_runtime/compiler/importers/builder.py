"""Builds operations while importing: infers types, compares them with the declared ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from neuron_runtime.compiler.importers.mlir_text import Dense, RawOp
from neuron_runtime.compiler.ir import (
    FLOATS,
    Array,
    Op,
    Program,
    Region,
    TensorType,
    constant_attrs,
    numpy_dtype,
)
from neuron_runtime.compiler.opset import VerifyError, infer
from neuron_runtime.errors import CompileError


class Builder:
    """Appends operations to ``ops``, the list of the region that is being built."""

    def __init__(self) -> None:
        self.program = Program([], Region([], [], []))
        self.ops = self.program.body.ops

    def type(self, value: int) -> TensorType:
        """Type of a value."""
        return self.program.types[value]

    def emit(
        self, name: str, operands: list[int], attrs: dict[str, Any] | None = None, line: int = 0
    ) -> list[int]:
        """Append an operation without regions; raises CompileError EVRF001 for a bad one."""
        attrs = attrs or {}
        try:
            types = infer(name, [self.type(v) for v in operands], attrs)
        except VerifyError as error:
            raise CompileError("EVRF001", f"line {line}: {name} {error}") from None
        results = [self.program.new_value(t) for t in types]
        self.ops.append(Op(name, operands, results, attrs, [], line))
        return results

    def emit_regions(
        self, name: str, operands: list[int], types: list[TensorType], regions: list[Region],
        line: int,
    ) -> list[int]:
        """Append an operation with regions."""
        results = [self.program.new_value(t) for t in types]
        self.ops.append(Op(name, operands, results, {}, regions, line))
        return results

    def constant(self, array: Array, line: int) -> int:
        """Append a constant."""
        attrs = {"dtype": array.dtype.name, "shape": list(array.shape)}
        attrs.update(constant_attrs(self.program, array))
        return self.emit("constant", [], attrs, line)[0]

    def check(self, op: RawOp, results: list[int]) -> list[int]:
        """The declared result types must be the inferred ones."""
        found = [self.type(v) for v in results]
        if op.out_types and found != op.out_types:
            raise CompileError(
                "EVRF002",
                f"line {op.line}: {op.name} gives {', '.join(map(str, found))}, "
                f"declared {', '.join(map(str, op.out_types))}",
            )
        return results


def dense_array(dense: Any, line: int, type_: TensorType | None = None) -> Array:
    """The array of a ``dense<...>`` attribute; raises CompileError EIMP004."""
    if not isinstance(dense, Dense):
        raise CompileError("EIMP004", f"line {line}: a dense<...> attribute is missing")
    type_ = dense.type or type_
    if type_ is None or dense.text.startswith("dense_resource"):
        raise CompileError(
            "EIMP004", f"line {line}: {dense.text[:40]} has no data here; print the module in full"
        )
    body = dense.text[len("dense<") : -1].strip()
    try:
        return _dense_values(body, type_)
    except (ValueError, OverflowError) as error:
        raise CompileError("EIMP004", f"line {line}: constant of {type_}: {error!s:.100}") from None


def _dense_values(body: str, type_: TensorType) -> Array:
    dtype = numpy_dtype(type_.dtype)
    if body.startswith('"'):
        return _from_hex(body.strip('"'), type_, dtype)
    words = [w for w in body.replace("[", " ").replace("]", " ").replace(",", " ").split() if w]
    if not body.startswith("[") and len(words) == 1:
        return np.broadcast_to(_scalar(words[0], type_.dtype, dtype), type_.shape)
    if len(words) != type_.size:
        raise ValueError(f"{len(words)} elements")
    values = [_scalar(word, type_.dtype, dtype) for word in words]
    return np.array(values, dtype=dtype).reshape(type_.shape)


def _from_hex(text: str, type_: TensorType, dtype: np.dtype[Any]) -> Array:
    raw = np.frombuffer(bytes.fromhex(text.removeprefix("0x")), np.uint8)
    if type_.dtype == "bool" and raw.size != type_.size:
        raw = np.unpackbits(raw, bitorder="little")[: type_.size]
    if type_.dtype == "bool":
        raw = (raw != 0).astype(np.uint8)
    if raw.size == dtype.itemsize:
        return np.broadcast_to(raw.view(dtype).reshape(()), type_.shape)
    if raw.size != type_.nbytes:
        raise ValueError(f"{raw.size} bytes, {type_.nbytes} needed")
    return raw.view(dtype).reshape(type_.shape)


def _scalar(word: str, name: str, dtype: np.dtype[Any]) -> Array:
    if name == "bool":
        if word not in ("true", "false"):
            raise ValueError(f"{word!r} is not true or false")
        return np.array(word == "true")
    if name in FLOATS:
        if word.startswith("0x"):
            bits = int(word, 16).to_bytes(dtype.itemsize, "little")
            return np.frombuffer(bits, dtype).reshape(())
        return np.array(float(word)).astype(dtype)
    value = int(word, 0)
    return np.array(value, dtype=dtype)
