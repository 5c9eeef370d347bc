"""NumPy executor: runs a NEFF's program with numpy and ml_dtypes alone.

At load every value gets its array: views of the arguments, of constants, or of one scratch area
(``compiler/plan.py``). A run then only calls kernels with ``out=`` arrays. Results are written
straight into the caller's output arrays where nothing that shares their memory is read later,
otherwise by way of a staging copy; so outputs may take the place of inputs (donated state).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from neuron_runtime.backends.base import Allocate, Array, Collectives
from neuron_runtime.backends.numpy_eval import VIEW_OPS, make_kernel
from neuron_runtime.backends.numpy_kernels import is_in_place
from neuron_runtime.backends.numpy_shape import view
from neuron_runtime.backends.numpy_steps import (
    Step,
    all_reduce_step,
    case_step,
    collective_step,
    copy_step,
    kernel_step,
    while_step,
)
from neuron_runtime.compiler.ir import Op, Region, constant_value, numpy_dtype
from neuron_runtime.compiler.opset import BINARY, COLLECTIVES, ELEMENTWISE, UNARY
from neuron_runtime.compiler.plan import PAGE, Plan, Storage, plan_program
from neuron_runtime.errors import NRT_STATUS, NrtError
from neuron_runtime.manifest import TensorInfo
from neuron_runtime.neff import Neff


def host_memory(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Zeroed memory that starts at a page boundary (the default ``allocate``)."""
    raw = np.zeros(nbytes + PAGE, np.uint8)
    skip = -raw.ctypes.data % PAGE
    return raw[skip : skip + nbytes]


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes that the executable took through ``allocate``."""

    constants: int
    scratch: int


class NumpyExecutable:
    """A loaded program.

    ``collectives``: needed when the program's world size is above 1 (its size must be equal).
    ``allocate``: gives device memory; None takes host memory. Raises NrtError NRT_INVALID when
    the collectives do not fit, and what ``allocate`` raises.
    """

    def __init__(
        self,
        neff: Neff,
        collectives: Collectives | None = None,
        allocate: Allocate | None = None,
    ) -> None:
        self.neff = neff
        self.manifest = neff.manifest
        self._links = collectives
        self._check_world()
        self._program = neff.program
        self._types = neff.program.types
        self._plan: Plan = plan_program(neff.program)
        self._env: list[Any] = [None] * len(self._types)
        self._scratch = self._take(allocate, self._plan.scratch)
        self._arrays: dict[tuple[int, str, tuple[int, ...]], Array] = {}
        self._scalars: dict[int, int] = {}  # value -> slot of the 0-d array of a splat constant
        self._constant_bytes = 0
        self._allocate = allocate
        self._views: dict[int, tuple[Callable[[Array], Array] | None, int]] = {}
        self._place_values()
        self._dynamic = self._resolve_views()
        self._steps = self._region_steps(neff.program.body)
        self._staging: dict[int, Array] = {}
        self._bound: tuple[list[Array], list[Array]] = ([], [])
        self._finish: list[Step] = []

    @property
    def memory(self) -> MemoryUse:
        """Bytes taken from ``allocate``."""
        return MemoryUse(self._constant_bytes, self._plan.scratch)

    def _check_world(self) -> None:
        world = self.manifest.world_size
        size = self._links.size if self._links is not None else 1
        uses = any(op.name in COLLECTIVES for op in self.neff.program.body.walk())
        if world > 1 and self._links is None:
            raise NrtError(
                NRT_STATUS.NRT_INVALID,
                f"{self.neff.source}: the program is for {world} ranks; load it with collectives",
            )
        if size != world and (uses or self._links is not None):
            raise NrtError(
                NRT_STATUS.NRT_INVALID,
                f"{self.neff.source}: the program is for {world} ranks, this world has {size}",
            )

    # -- placing values ------------------------------------------------------------------------

    @staticmethod
    def _take(allocate: Allocate | None, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        memory = (allocate or host_memory)(nbytes)
        return np.frombuffer(memory, np.uint8) if isinstance(memory, memoryview) else memory

    def _place_values(self) -> None:
        """Arrays of all scratch roots and constants; how each view is made."""
        for op in self._program.body.walk():
            if op.name == "constant":
                self._place_constant(op)
            elif op.name in VIEW_OPS and op.results[0] in self._plan.view_of:
                make = view(op.name, op.attrs, self._types[op.operands[0]])
                self._views[op.results[0]] = (make, op.operands[0])
        for value, storage in self._plan.storage.items():
            if storage.kind == "scratch":
                self._env[value] = self._scratch_array(value, storage.index)
        for value, source in self._plan.view_of.items():
            self._views.setdefault(value, (None, source))

    def _scratch_array(self, value: int, offset: int) -> Array:
        """One array object per place and type: kernels tell in-place calls by identity."""
        type_ = self._types[value]
        key = (offset, type_.dtype, type_.shape)
        if key not in self._arrays:
            raw = self._scratch[offset : offset + type_.nbytes]
            self._arrays[key] = raw.view(numpy_dtype(type_.dtype)).reshape(type_.shape)
        return self._arrays[key]

    def _place_constant(self, op: Op) -> None:
        value = op.results[0]
        array = constant_value(self._program, op)
        if "splat" in op.attrs:
            element = np.array(array.reshape(-1)[:1].reshape(()) if array.size else 0, array.dtype)
            self._scalars[value] = len(self._env)
            self._env.append(element)
            self._env[value] = np.broadcast_to(element, array.shape)
            self._constant_bytes += array.itemsize
            return
        if array.size:
            memory = self._take(self._allocate, array.nbytes)
            placed = memory[: array.nbytes].view(array.dtype).reshape(array.shape)
            np.copyto(placed, array)
            array = placed
        self._env[value] = array
        self._constant_bytes += array.nbytes

    def _resolve_views(self) -> list[tuple[int, Callable[[Array], Array] | None, int]]:
        """Make the views of fixed memory now; return those of arguments, sources first."""
        dynamic: list[tuple[int, Callable[[Array], Array] | None, int]] = []
        done: set[int] = set()

        def visit(value: int) -> None:
            chain = []
            while value in self._views and value not in done:
                chain.append(value)
                done.add(value)
                value = self._views[value][1]
            for item in reversed(chain):
                make, source = self._views[item]
                if self._env[source] is None:
                    dynamic.append((item, make, source))
                else:
                    self._env[item] = make(self._env[source]) if make else self._env[source]
                    if make is None and source in self._scalars:
                        self._scalars[item] = self._scalars[source]

        for value in self._views:
            visit(value)
        return dynamic

    # -- steps ---------------------------------------------------------------------------------

    def _region_steps(self, region: Region) -> list[Step]:
        steps: list[Step] = []
        members: set[int] = set()
        for position, op in enumerate(region.ops):
            if op.name == "all_reduce":
                if op.results[0] in self._plan.buckets:
                    members = {m.result for m in self._plan.buckets[op.results[0]].members}
                    first = op.results[0]
                members.discard(op.results[0])
                if not members:  # the last one: all operands exist by now
                    steps.append(self._bucket_step(first))
                continue
            step = self._step(op)
            if step is not None:
                steps.append(step)
            del position
        return steps

    def _step(self, op: Op) -> Step | None:
        if op.name in ("constant", "optimization_barrier") or op.results[0] in self._plan.view_of:
            if not op.regions:
                return None
        if op.name == "while":
            return self._while(op)
        if op.name == "case":
            branches = [self._region_steps(r) for r in op.regions]
            return case_step(op.operands[0], branches, self._plan.branches[id(op)])
        if op.name == "partition_id":
            rank = np.uint32(self._links.rank if self._links is not None else 0)
            return kernel_step(lambda out: np.copyto(out, rank), (), op.results)
        if op.name in COLLECTIVES:
            assert self._links is not None
            return collective_step(op, self._types[op.operands[0]].dtype, self._links)
        ins = [self._types[v] for v in op.operands]
        outs = [self._types[v] for v in op.results]
        operands = op.operands
        if op.name in ELEMENTWISE:
            operands = [self._scalars.get(v, v) for v in operands]
        return kernel_step(make_kernel(op.name, op.attrs, ins, outs), operands, op.results)

    def _while(self, op: Op) -> Step:
        loop = self._plan.loops[id(op)]
        condition, body = op.regions
        written = {target for _, target in loop.step}
        staged = [m for m in loop.step if self._plan.root[m[0]] in written]
        moves = [m for m in loop.step if m not in staged]
        return while_step(
            self._region_steps(condition),
            condition.results[0],
            self._region_steps(body),
            loop.init,
            moves,
            staged,
        )

    def _bucket_step(self, first: int) -> Step:
        assert self._links is not None
        bucket = self._plan.buckets[first]
        dtype = numpy_dtype(bucket.dtype)
        flat = self._scratch[bucket.offset : bucket.offset + bucket.nbytes].view(dtype)
        request = self._links.all_reduce_init(flat, bucket.op, bucket.groups)
        copies_in, copies_out = [], []
        for member in bucket.members:
            begin = member.offset // dtype.itemsize
            part = flat[begin : begin + self._types[member.operand].size]
            if not member.direct:
                copies_in.append((member.operand, part))
            storage = self._plan.storage[member.result]
            if storage != Storage("scratch", bucket.offset + member.offset):
                copies_out.append((part, member.result))
        return all_reduce_step(request, copies_in, copies_out)

    # -- running -------------------------------------------------------------------------------

    def run(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """Execute once: read ``inputs``, fill ``outputs`` (arrays by the manifest's names).

        An output may be the same memory as an input. Raises NrtError NRT_INVALID when a name is
        missing or unknown, a type or shape differs, an output is read-only or two overlap.
        """
        given = self._arguments("input", self.manifest.inputs, inputs)
        wanted = self._arguments("output", self.manifest.outputs, outputs)
        if not self._is_bound(given, wanted):
            self._bound = ([], [])
            self._bind(given, wanted)
            self._bound = (given, wanted)
        env = self._env
        with np.errstate(all="ignore"):
            for step in self._steps:
                step(env)
            for step in self._finish:
                step(env)

    def _arguments(
        self, kind: str, infos: tuple[TensorInfo, ...], arrays: Mapping[str, Array]
    ) -> list[Array]:
        found = []
        for info in infos:
            array = arrays.get(info.name)
            if array is None:
                raise self._invalid(f"{kind} {info.name!r} is missing")
            if array.shape != info.shape or array.dtype != info.numpy_dtype:
                raise self._invalid(
                    f"{kind} {info.name!r} is {array.dtype}{list(array.shape)}, "
                    f"the program takes {info.dtype}{list(info.shape)}"
                )
            if kind == "output" and not array.flags.writeable:
                raise self._invalid(f"output {info.name!r} is read-only")
            found.append(array)
        if len(arrays) != len(infos):
            unknown = sorted(set(arrays) - {info.name for info in infos})
            raise self._invalid(f"the program has no {kind} {unknown[0]!r}")
        return found

    def _invalid(self, text: str) -> NrtError:
        return NrtError(NRT_STATUS.NRT_INVALID, f"{self.manifest.name}: {text}")

    def _is_bound(self, given: list[Array], wanted: list[Array]) -> bool:
        before, after = self._bound
        return (
            len(before) == len(given)
            and len(after) == len(wanted)
            and all(a is b for a, b in zip(before, given, strict=True))
            and all(a is b for a, b in zip(after, wanted, strict=True))
            and all(a.flags.c_contiguous for a in given)
        )

    def _bind(self, given: list[Array], wanted: list[Array]) -> None:
        """Put the caller's arrays into the slots and decide which results are staged."""
        body = self._program.body
        env = self._env
        spans = _Spans(given)
        _refuse_overlap(wanted, [t.name for t in self.manifest.outputs], self._invalid)
        for value, array in zip(body.args, given, strict=True):
            env[value] = np.ascontiguousarray(array).reshape(array.shape)
        targets = {s.index: v for v, s in self._plan.storage.items() if s.kind == "output"}
        self._finish = []
        late: list[tuple[int, Array]] = []
        for place, (value, array) in enumerate(zip(body.results, wanted, strict=True)):
            root = targets.get(place)
            if root is not None and array.flags.c_contiguous and self._is_safe(root, array, spans):
                env[root] = array.reshape(self._types[root].shape)
                continue
            if root is not None:
                env[root] = self._stage(place, root)
            late.append((value, array))
        for value, make, source in self._dynamic:
            env[value] = make(env[source]) if make else env[source]
        self._plan_finish(late, wanted)

    def _is_safe(self, root: int, array: Array, spans: _Spans) -> bool:
        """Nothing that shares the output's memory is read once the result is written."""
        made_at, op = self._plan.made_at[root], self._plan.made_by[root]
        for place in spans.overlapping(array):
            argument = self._program.body.args[place]
            last = self._plan.last_use.get(argument, -1)
            if last < made_at:
                continue
            in_place = (
                last == made_at
                and op.name in UNARY | BINARY
                and is_in_place(op.name, self._types[root].dtype)
                and spans.is_same(place, array)
                and self._types[argument] == self._types[root]
                and all(v == argument for v in op.operands if self._plan.root[v] == argument)
            )
            if not in_place:
                return False
        return True

    def _stage(self, place: int, root: int) -> Array:
        if place not in self._staging:
            type_ = self._types[root]
            self._staging[place] = np.empty(type_.shape, numpy_dtype(type_.dtype))
        return self._staging[place]

    def _plan_finish(self, late: list[tuple[int, Array]], wanted: list[Array]) -> None:
        """Copies after the last step: sources that an output overwrites are saved first."""
        env = self._env
        base = len(self._types) + len(self._scalars)
        del env[base:]
        spans = _Spans(wanted)
        saves: list[Step] = []
        copies: list[Step] = []
        for value, array in late:
            env.append(array)
            target = len(env) - 1
            source = value
            if self._plan.storage[self._plan.root[value]].kind == "input" and spans.touches(
                env[self._plan.root[value]]
            ):
                env.append(np.empty(array.shape, array.dtype))
                source = len(env) - 1
                saves.append(copy_step(value, source))
            copies.append(copy_step(source, target))
        self._finish = saves + copies


class _Spans:
    """Address ranges of contiguous arrays, searchable."""

    def __init__(self, arrays: list[Array]) -> None:
        found = []
        for place, array in enumerate(arrays):
            low, high = _bounds(array)
            if high > low:
                found.append((low, high, place))
        self._sorted = sorted(found)
        self._starts = [low for low, _, _ in self._sorted]
        self._longest = max((high - low for low, high, _ in found), default=0)

    def overlapping(self, array: Array) -> list[int]:
        """Places of the arrays that share memory with this one."""
        low, high = _bounds(array)
        first = bisect_left(self._starts, low - self._longest)
        last = bisect_left(self._starts, high)
        return [place for a, b, place in self._sorted[first:last] if a < high and b > low]

    def touches(self, array: Array) -> bool:
        """Whether any of the arrays shares memory with this one."""
        return bool(self.overlapping(array))

    def is_same(self, place: int, array: Array) -> bool:
        """The array at ``place`` has exactly this one's range."""
        return any(p == place and (a, b) == _bounds(array) for a, b, p in self._sorted)


def _bounds(array: Array) -> tuple[int, int]:
    """First and one-past-last address (for any strides)."""
    low = high = int(array.__array_interface__["data"][0])
    if array.size == 0:
        return low, low
    for size, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            low += (size - 1) * stride
        else:
            high += (size - 1) * stride
    return low, high + array.itemsize


def _refuse_overlap(
    arrays: list[Array], names: list[str], invalid: Callable[[str], NrtError]
) -> None:
    spans = sorted((*_bounds(a), i) for i, a in enumerate(arrays) if a.size)
    for (_, high, first), (low, _, second) in zip(spans, spans[1:], strict=False):
        if low < high:
            raise invalid(f"outputs {names[first]!r} and {names[second]!r} share memory")
