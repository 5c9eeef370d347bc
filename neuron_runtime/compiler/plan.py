"""Memory plan: which values are views, and where all others live.

Every value is a view of a *root*. Roots are program inputs, constants, program outputs (written
in place by the operation that makes them) or buffers at an offset of one scratch area, which is
shared by values that are never alive together. The plan depends on the program alone, so the
compiler can state the need and the loader can repeat it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from neuron_runtime.backends.numpy_kernels import is_in_place
from neuron_runtime.compiler.arena import Allocator
from neuron_runtime.compiler.ir import (
    LOW_FLOATS,
    Op,
    Program,
    Region,
    TensorType,
    numpy_dtype,
    op_uses,
)
from neuron_runtime.compiler.opset import BINARY, UNARY
from neuron_runtime.manifest import HbmNeed

PAGE = 4096
_UPDATES = ("dynamic_update_slice", "scatter")


@dataclass(frozen=True, slots=True)
class Storage:
    """Where a root lives: ``kind`` input, constant, output (``index``) or scratch (``offset``)."""

    kind: str
    index: int


@dataclass(slots=True)
class Member:
    """A part of a bucket; ``direct``: the operand is made in place, the result is read there."""

    operand: int
    result: int
    offset: int
    direct: bool


@dataclass(slots=True)
class Bucket:
    """A flat buffer for one all_reduce. ``dtype`` is the type on the wire."""

    dtype: str
    op: str
    groups: tuple[tuple[int, ...], ...]
    nbytes: int
    offset: int
    members: list[Member]
    wide: bool


@dataclass(slots=True)
class Loop:
    """Loop values of a while, in order. A value of ``staged`` is copied by way of a temporary.

    ``init``: copies (source, carried value) before the loop; ``step``: copies after each turn.
    """

    init: list[tuple[int, int]] = field(default_factory=list)
    step: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Plan:
    """Result of planning; all value numbers are unique over the regions."""

    storage: dict[int, Storage] = field(default_factory=dict)
    root: dict[int, int] = field(default_factory=dict)
    view_of: dict[int, int] = field(default_factory=dict)
    buckets: dict[int, Bucket] = field(default_factory=dict)  # by the first member's result
    loops: dict[int, Loop] = field(default_factory=dict)  # by id of the operation
    branches: dict[int, list[list[tuple[int, int]]]] = field(default_factory=dict)  # likewise
    scratch: int = 0
    last_use: dict[int, int] = field(default_factory=dict)  # of roots, in the outermost region
    made_at: dict[int, int] = field(default_factory=dict)
    made_by: dict[int, Op] = field(default_factory=dict)


# -- shapes of views ---------------------------------------------------------------------------


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a row-major array, in elements."""
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * shape[d + 1]
    return tuple(strides)


def reshaped_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], new: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Strides of the reshaped view, or None when a copy is needed."""
    old = [(n, s) for n, s in zip(shape, strides, strict=True) if n != 1]
    if any(n == 0 for n in shape):
        return dense_strides(new)
    result = [0] * len(new)
    position = 0
    at = 0
    while position < len(new):
        if new[position] == 1:
            position += 1
            continue
        if at >= len(old):
            return None
        group, span = [old[at]], old[at][0]
        targets, covered = [position], new[position]
        while span != covered:
            if span < covered:
                at += 1
                if at >= len(old):
                    return None
                group.append(old[at])
                span *= old[at][0]
            else:
                position += 1
                if position >= len(new):
                    return None
                targets.append(position)
                covered *= new[position]
        for (_, outer), (size, inner) in zip(group, group[1:], strict=False):
            if outer != size * inner:
                return None
        stride = group[-1][1]
        for target in reversed(targets):
            result[target] = stride
            stride *= new[target]
        at += 1
        position += 1
    return tuple(result)


def _view_strides(
    op: Op, type_: TensorType, strides: tuple[int, ...], result: TensorType
) -> tuple[int, ...] | None:
    """Strides of a view operation's result; None when the operation has to copy."""
    if op.name == "reshape":
        return reshaped_strides(type_.shape, strides, result.shape)
    if op.name == "transpose":
        return tuple(strides[p] for p in op.attrs["permutation"])
    if op.name == "slice":
        return tuple(s * k for s, k in zip(strides, op.attrs["stride"], strict=True))
    if op.name == "reverse":
        return tuple(-s if d in op.attrs["dims"] else s for d, s in enumerate(strides))
    if op.name == "broadcast_in_dim":
        found = [0] * len(result.shape)
        for size, stride, dim in zip(type_.shape, strides, op.attrs["dims"], strict=True):
            found[dim] = stride if size == result.shape[dim] and size != 1 else 0
        return tuple(found)
    if op.name == "bitcast_convert":
        return strides
    return None


# -- planning ----------------------------------------------------------------------------------


def plan_program(program: Program) -> Plan:
    """Plan all regions of a verified program."""
    return _Planner(program).run()


def hbm_need(program: Program) -> HbmNeed:
    """Bytes of device memory the program needs; ``program`` (the instructions) left at 0."""
    types = program.types
    constants = 0
    for op in program.body.walk():
        if op.name == "constant":
            type_ = types[op.results[0]]
            splat = "splat" in op.attrs
            constants += numpy_dtype(type_.dtype).itemsize if splat else type_.nbytes
    return HbmNeed(
        inputs=sum(types[v].nbytes for v in program.body.args),
        outputs=sum(types[v].nbytes for v in program.body.results),
        constants=constants,
        scratch=plan_program(program).scratch,
        program=0,
    )


class _Planner:
    def __init__(self, program: Program) -> None:
        self.types = program.types
        self.program = program
        self.plan = Plan()
        self.strides: dict[int, tuple[int, ...]] = {}
        self.memory = Allocator()
        self.block: dict[int, int] = {}  # root -> offset of the block it holds
        self.held: dict[int, int] = {}  # offset -> size of the block

    def run(self) -> Plan:
        body = self.program.body
        for i, value in enumerate(body.args):
            self.new_root(value)
            self.plan.storage[value] = Storage("input", i)
        planner = RegionPlanner(self, body, top=True)
        planner.run()
        self.plan.last_use = planner.last_use
        self.plan.scratch = self.memory.high
        return self.plan

    def new_root(self, value: int) -> None:
        """The value has memory of its own."""
        self.plan.root[value] = value
        self.strides[value] = dense_strides(self.types[value].shape)

    def alias(self, value: int, source: int) -> None:
        """``value`` is ``source`` under another number."""
        self.plan.root[value] = self.plan.root[source]
        self.plan.view_of[value] = source
        self.strides[value] = self.strides[source]

    def is_whole(self, value: int) -> bool:
        """The value covers its root in row-major order."""
        root = self.plan.root[value]
        type_, whole = self.types[value], self.types[root]
        dense = self.strides[value] == dense_strides(type_.shape) or _only_ones_differ(
            type_.shape, self.strides[value]
        )
        return dense and (type_.size, type_.dtype) == (whole.size, whole.dtype)

    def allocate(self, root: int, nbytes: int, align: int = 64) -> None:
        """Give a root its own block."""
        offset = self.memory.allocate(nbytes, align)
        self.block[root] = offset
        self.held[offset] = nbytes
        self.plan.storage[root] = Storage("scratch", offset)

    def release(self, root: int) -> None:
        """Return the root's block, if it has one."""
        offset = self.block.pop(root, None)
        if offset is not None:
            self.memory.free(offset, self.held.pop(offset))


def _only_ones_differ(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    return all(
        n == 1 or s == d for n, s, d in zip(shape, strides, dense_strides(shape), strict=True)
    )


class RegionPlanner:
    """Plans one region: views, lifetimes, targets, then blocks in order of execution."""

    def __init__(self, planner: _Planner, region: Region, top: bool) -> None:
        self.p = planner
        self.plan = planner.plan
        self.types = planner.types
        self.region = region
        self.top = top
        self.own = {id(op) for op in region.ops}
        self.last_use: dict[int, int] = {}  # of roots, as positions in this region
        self.made_here: list[int] = []  # roots that this region's operations make
        self.target: dict[int, Storage] = {}
        self.bucket_of: dict[int, Bucket] = {}  # root -> bucket it is made in
        self.bucket_start: dict[int, list[Bucket]] = {}
        self.bucket_end: dict[int, list[Bucket]] = {}

    def run(self) -> None:
        self.prepare()
        self.place()

    def prepare(self) -> None:
        """Views, lifetimes and targets."""
        for index, op in enumerate(self.region.ops):
            self._layout(index, op)
        self._lifetimes()
        self._find_buckets()
        if self.top:
            self._target_outputs()

    # -- views and lifetimes -------------------------------------------------------------------

    def _layout(self, index: int, op: Op) -> None:
        plan = self.plan
        if op.name == "optimization_barrier":
            for value, source in zip(op.results, op.operands, strict=True):
                self.p.alias(value, source)
            return
        if len(op.operands) == 1 and len(op.results) == 1:
            source, value = op.operands[0], op.results[0]
            strides = _view_strides(
                op, self.types[source], self.p.strides[source], self.types[value]
            )
            if strides is not None:
                plan.root[value] = plan.root[source]
                plan.view_of[value] = source
                self.p.strides[value] = strides
                return
        for place, value in enumerate(op.results):
            if op.name == "while" and op.regions[1].results[place] == op.regions[1].args[place]:
                self.p.alias(value, op.operands[place])
                continue
            self.p.new_root(value)
            plan.made_at[value] = index
            plan.made_by[value] = op
            self.made_here.append(value)
            if op.name == "constant":
                plan.storage[value] = Storage("constant", 0)

    def _lifetimes(self) -> None:
        root = self.plan.root
        for index, op in enumerate(self.region.ops):
            for value in op_uses(op):
                self.last_use[root[value]] = index
            for value in op.results:
                self.last_use.setdefault(root[value], index)
        end = len(self.region.ops)
        for value in self.region.results:
            self.last_use[root[value]] = end

    def makes_whole(self, value: int) -> int | None:
        """The root, if ``value`` is all of it and its operation here may make it anywhere."""
        root = self.plan.root[value]
        op = self.plan.made_by.get(root)
        if op is None or id(op) not in self.own or root in self.target or root in self.bucket_of:
            return None
        if op.regions or op.name in ("constant", "all_reduce"):
            return None
        return root if self.p.is_whole(value) and self.types[value].size > 0 else None

    # -- targets -------------------------------------------------------------------------------

    def _target_outputs(self) -> None:
        for place, value in enumerate(self.region.results):
            root = self.makes_whole(value)
            if root is not None:
                self.target[root] = Storage("output", place)

    def _find_buckets(self) -> None:
        ops = self.region.ops
        position = 0
        while position < len(ops):
            op = ops[position]
            if op.name != "all_reduce":
                position += 1
                continue
            first = position
            number = op.attrs.get("bucket")
            position += 1
            while (
                number is not None
                and position < len(ops)
                and ops[position].name == "all_reduce"
                and ops[position].attrs.get("bucket") == number
            ):
                position += 1
            self._make_bucket(first, ops[first:position])

    def _make_bucket(self, first: int, ops: list[Op]) -> None:
        dtype = self.types[ops[0].operands[0]].dtype
        wide = dtype in LOW_FLOATS
        wire = "float32" if wide else "uint8" if dtype == "bool" else dtype
        item = numpy_dtype(wire).itemsize
        bucket = Bucket(
            wire,
            ops[0].attrs["op"],
            tuple(tuple(g) for g in ops[0].attrs["groups"]),
            0,
            -1,
            [],
            wide,
        )
        start = first
        end = first + len(ops) - 1
        for op in ops:
            operand, result = op.operands[0], op.results[0]
            root = None if wide or dtype == "bool" else self.makes_whole(operand)
            if root is not None and self.last_use[root] > first + len(ops) - 1:
                root = None
            bucket.members.append(Member(operand, result, bucket.nbytes, root is not None))
            bucket.nbytes += (self.types[operand].size * item + 63) // 64 * 64
            if root is not None:
                self.bucket_of[root] = bucket
                start = min(start, self.plan.made_at[root])
            if not wide and dtype != "bool":
                self.bucket_of[self.plan.root[result]] = bucket
                end = max(end, self.last_use[self.plan.root[result]])
        self.plan.buckets[ops[0].results[0]] = bucket
        self.bucket_start.setdefault(start, []).append(bucket)
        self.bucket_end.setdefault(end, []).append(bucket)

    # -- blocks --------------------------------------------------------------------------------

    def place(self) -> None:
        """Give every root its storage, in order of execution."""
        dying: dict[int, list[int]] = {}
        for value in self.made_here:
            dying.setdefault(self.last_use[value], []).append(value)
        for index, op in enumerate(self.region.ops):
            for bucket in self.bucket_start.get(index, ()):
                self._open_bucket(bucket)
            self._place_op(index, op)
            for root in dying.get(index, ()):
                self.p.release(root)
            for bucket in self.bucket_end.get(index, ()):
                self._close_bucket(bucket)

    def finish(self) -> None:
        """Return the blocks that live to the region's end (for regions that are left)."""
        end = len(self.region.ops)
        for value in self.made_here:
            if self.last_use[value] >= end:
                self.p.release(value)
        for bucket in self.bucket_end.get(end, ()):
            self._close_bucket(bucket)

    def _open_bucket(self, bucket: Bucket) -> None:
        bucket.offset = self.p.memory.allocate(bucket.nbytes, PAGE)
        for member in bucket.members:
            storage = Storage("scratch", bucket.offset + member.offset)
            if member.direct:
                self.plan.storage[self.plan.root[member.operand]] = storage
            if self.plan.root[member.result] in self.bucket_of:
                self.plan.storage[member.result] = storage

    def _close_bucket(self, bucket: Bucket) -> None:
        self.p.memory.free(bucket.offset, bucket.nbytes)

    def _place_op(self, index: int, op: Op) -> None:
        from neuron_runtime.compiler.plan_loops import place_case, place_while

        if op.regions:
            (place_while if op.name == "while" else place_case)(self, op)
            return
        for value in op.results:
            if self.plan.root[value] != value or value in self.plan.storage:
                continue
            if value in self.target:
                self.plan.storage[value] = self.target[value]
                continue
            donor = self._donor(index, op, value)
            if donor is not None:
                self.p.block[value] = self.p.block.pop(donor)
                self.plan.storage[value] = self.plan.storage[donor]
                continue
            self.p.allocate(value, self.types[value].nbytes)

    def _donor(self, index: int, op: Op, value: int) -> int | None:
        """An operand that dies here and whose block the result may take."""
        candidates = op.operands
        if op.name in _UPDATES:
            candidates = op.operands[:1]
        elif op.name not in UNARY | BINARY or not is_in_place(op.name, self.types[value].dtype):
            return None
        for operand in candidates:
            root = self.plan.root[operand]
            mine = root in self.plan.made_by and id(self.plan.made_by[root]) in self.own
            dies = root in self.p.block and self.last_use.get(root) == index
            if mine and dies and self.overwrites(op, operand, value):
                return root
        return None

    def overwrites(self, op: Op, operand: int, value: int) -> bool:
        """Writing ``value`` over ``operand`` is right: same elements, no other view is read."""
        root = self.plan.root[operand]
        others = [v for v in op.operands if self.plan.root[v] == root and v != operand]
        alike = self.types[operand] == self.types[value] and self.p.is_whole(operand)
        once = op.name not in _UPDATES or op.operands.count(operand) == 1
        return alike and once and not others
