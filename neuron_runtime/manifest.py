"""Manifest of a NEFF: what a program needs and offers, readable without the program itself.

Sizes are bytes, ``flops`` floating-point operations of one execution on one rank, both counted
by ``compiler/cost.py``. Shapes of ``TensorInfo.shape`` are what one rank holds.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from dataclasses import dataclass
from typing import Any

import numpy as np

from neuron_runtime.compiler.ir import DTYPES, numpy_dtype

TARGETS = ("trn1", "trn2", "inf2")


class MalformedManifest(ValueError):
    """The JSON is not a manifest; the message names the field."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A named input or output of the per-rank program.

    ``global_shape`` is the shape over all ranks; ``partition`` lists, for each dimension, the
    mesh axes it is divided by (major first, empty: not divided).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    partition: tuple[tuple[str, ...], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one rank's part."""
        return math.prod(self.shape) * self.numpy_dtype.itemsize

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """NumPy's dtype (ml_dtypes for bfloat16 and the 8-bit floats)."""
        return numpy_dtype(self.dtype)


@dataclass(frozen=True, slots=True)
class HbmNeed:
    """Device memory of one core, in bytes.

    ``scratch``: intermediate values and the buckets of collectives. ``program``: the instructions.
    """

    inputs: int
    outputs: int
    constants: int
    scratch: int
    program: int

    @property
    def total(self) -> int:
        """Sum of all parts: the need when no output shares memory with an input."""
        return sum(dataclasses.astuple(self))


@dataclass(frozen=True, slots=True)
class CollectiveInfo:
    """One collective call. ``nbytes``: payload of one rank; ``tensors``: how many it joins.

    ``op`` is the reduction ("add", "max", ...) or "" for data movement. ``groups`` lists the
    replica groups, or source-target pairs for collective_permute. ``in_loop``: it is repeated.
    """

    kind: str
    op: str
    dtype: str
    nbytes: int
    tensors: int
    groups: tuple[tuple[int, ...], ...]
    level: int
    in_loop: bool


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything a loader or a scheduler asks about an executable.

    ``aliases`` pairs (output index, input index) that the program's author lets share memory
    (donated state: after a step the output takes the input's place). ``mesh`` is the logical
    mesh in rank order (last axis fastest). ``requested_cores``: logical cores one rank needs.
    """

    name: str
    graph_hash: str
    compiler_version: str
    target: str
    lnc_size: int
    requested_cores: int
    world_size: int
    mesh: tuple[tuple[str, int], ...]
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    aliases: tuple[tuple[int, int], ...]
    hbm: HbmNeed
    flops: int
    bytes_accessed: int
    collectives: tuple[CollectiveInfo, ...]

    def input(self, name: str) -> TensorInfo:
        """The input of that name; KeyError names the known ones."""
        return _named(self.inputs, name)

    def output(self, name: str) -> TensorInfo:
        """The output of that name; KeyError names the known ones."""
        return _named(self.outputs, name)

    def aliased_input(self, output: str) -> str | None:
        """Name of the input whose memory this output may take over, if any."""
        for out, inp in self.aliases:
            if self.outputs[out].name == output:
                return self.inputs[inp].name
        return None


def _named(tensors: tuple[TensorInfo, ...], name: str) -> TensorInfo:
    for tensor in tensors:
        if tensor.name == name:
            return tensor
    raise KeyError(f"no tensor {name!r}; there are: {', '.join(t.name for t in tensors)}")


def manifest_to_json(manifest: Manifest) -> dict[str, Any]:
    """JSON value of a manifest."""
    return dataclasses.asdict(manifest)


def manifest_from_json(data: Any) -> Manifest:
    """Typed manifest from JSON; raises MalformedManifest naming the first wrong field."""
    manifest = _decode(Manifest, data, "manifest")
    assert isinstance(manifest, Manifest)
    _check(manifest)
    return manifest


def _check(manifest: Manifest) -> None:
    _need(manifest.target in TARGETS, f"target {manifest.target!r:.40} is unknown")
    _need(manifest.lnc_size in (1, 2), "lnc_size is not 1 or 2")
    _need(1 <= manifest.world_size <= 2**20, "world_size is out of range")
    _need(1 <= manifest.requested_cores <= 2**10, "requested_cores is out of range")
    _need(len(manifest.mesh) <= 32, "mesh has more than 32 axes")
    product = math.prod(size for _, size in manifest.mesh)
    _need(not manifest.mesh or product == manifest.world_size, "mesh does not match world_size")
    for which in ("inputs", "outputs"):
        tensors: tuple[TensorInfo, ...] = getattr(manifest, which)
        _need(len({t.name for t in tensors}) == len(tensors), f"{which} has a name twice")
        for tensor in tensors:
            _need(tensor.dtype in DTYPES, f"{which}: unknown element type {tensor.dtype!r:.40}")
            _need(len(tensor.shape) <= 32, f"{which}: {tensor.name!r:.60} has too many dimensions")
            _need(math.prod(tensor.shape) < 2**48, f"{which}: {tensor.name!r:.60} is too large")
            ranks = {len(tensor.shape), len(tensor.global_shape), len(tensor.partition)}
            _need(len(ranks) == 1, f"{which}: {tensor.name!r:.60} has shapes of several ranks")
    for out, inp in manifest.aliases:
        known = out < len(manifest.outputs) and inp < len(manifest.inputs)
        _need(known, "aliases names a tensor that does not exist")
        a, b = manifest.outputs[out], manifest.inputs[inp]
        _need((a.dtype, a.shape) == (b.dtype, b.shape), "aliases joins tensors of two types")


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise MalformedManifest(message)


def _decode(kind: Any, data: Any, where: str) -> Any:
    """Check ``data`` against a type made of dataclasses, tuples, str, int and bool."""
    origin = typing.get_origin(kind)
    if origin is tuple:
        _need(isinstance(data, list), f"{where} is not a list")
        inner = typing.get_args(kind)
        if inner[-1] is Ellipsis:
            return tuple(_decode(inner[0], item, f"{where}[{i}]") for i, item in enumerate(data))
        _need(len(data) == len(inner), f"{where} has the wrong length")
        pairs = zip(inner, data, strict=True)
        return tuple(_decode(t, item, f"{where}[{i}]") for i, (t, item) in enumerate(pairs))
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        _need(isinstance(data, dict), f"{where} is not an object")
        hints = _hints(kind)
        _need(set(data) == set(hints), f"{where} has missing or unknown fields")
        return kind(**{key: _decode(t, data[key], f"{where}.{key}") for key, t in hints.items()})
    _need(type(data) is kind, f"{where} is not {getattr(kind, '__name__', kind)}")
    if kind is int:
        _need(0 <= data < 2**62, f"{where} is out of range")
    return data


_HINTS: dict[type, types.MappingProxyType[str, Any]] = {}


def _hints(kind: type) -> types.MappingProxyType[str, Any]:
    if kind not in _HINTS:
        _HINTS[kind] = types.MappingProxyType(typing.get_type_hints(kind))
    return _HINTS[kind]
