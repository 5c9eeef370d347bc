"""StableHLO module to per-rank program: calls inlined, shard_map's body taken as the program."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from neuron_runtime.compiler.importers.builder import Builder
from neuron_runtime.compiler.importers.mlir_ops import parse_module
from neuron_runtime.compiler.importers.mlir_text import RawFunc, RawModule, RawOp, RawRegion
from neuron_runtime.compiler.importers.stablehlo_ops import (
    HANDLERS,
    SHARD_MAP_RECIPE,
    unsupported,
)
from neuron_runtime.compiler.ir import Program, Region, TensorType
from neuron_runtime.compiler.opset import COLLECTIVES
from neuron_runtime.compiler.verify import VerifyError, verify_program
from neuron_runtime.errors import CompileError
from neuron_runtime.manifest import TensorInfo

_MAX_CALL_DEPTH = 64
Env = dict[str, list[int]]
Sharding = tuple[str, list[list[str]]]


@dataclass(slots=True)
class Imported:
    """A per-rank program with what the module says about it. ``text``: the source."""

    name: str
    program: Program
    world_size: int
    mesh: list[tuple[str, int]]
    inputs: list[TensorInfo]
    outputs: list[TensorInfo]
    aliases: list[tuple[int, int]]
    donated: list[int]
    text: str = field(repr=False)


def import_stablehlo(text: str) -> Imported:
    """Read StableHLO text. Raises CompileError (EIMP, EUOC, EVRF) with the line."""
    module = parse_module(text)
    main = module.funcs.get("@main")
    if main is None and len(module.funcs) == 1:
        main = next(iter(module.funcs.values()))
    if main is None:
        raise CompileError("EIMP006", "the module has no function @main")
    imported = _Importer(module, text).run(main)
    try:
        verify_program(imported.program)
    except VerifyError as error:
        raise CompileError("EVRF001", str(error)) from None
    return imported


class _Importer:
    def __init__(self, module: RawModule, text: str) -> None:
        self.module = module
        self.text = text
        self.builder = Builder()
        self.depth = 0

    # -- the program of one rank ---------------------------------------------------------------

    def run(self, main: RawFunc) -> Imported:
        partitions = int(self.module.attrs.get("mhlo.num_partitions", 1))
        replicas = int(self.module.attrs.get("mhlo.num_replicas", 1))
        if partitions > 1 and replicas > 1:
            raise CompileError("EVRF010", "replicas and partitions at once are not supported")
        if self._has_manual(main.region, set()):
            return _ManualImport(self, main, partitions).run()
        if partitions > 1:
            raise CompileError(
                "EVRF010",
                f"the module is for {partitions} partitions and sharded automatically, so it has "
                f"no collectives to run; {SHARD_MAP_RECIPE}",
            )
        return self._per_rank(main, replicas)

    def _has_manual(self, region: RawRegion, seen: set[str]) -> bool:
        for op in region.ops:
            if op.name == "sdy.manual_computation":
                return True
            if op.symbol and op.symbol in self.module.funcs and op.symbol not in seen:
                seen.add(op.symbol)
                if self._has_manual(self.module.funcs[op.symbol].region, seen):
                    return True
        return False

    def _per_rank(self, main: RawFunc, replicas: int) -> Imported:
        program = self.builder.program
        env: Env = {}
        for name, type_ in main.region.args:
            value = program.new_value(type_)
            program.body.args.append(value)
            env[name] = [value]
        program.body.results = self.region_ops(main.region, env)
        groups = [
            sum(map(len, op.attrs["groups"]))
            for op in program.body.walk()
            if "groups" in op.attrs
        ]
        world = max([replicas, *groups])
        inputs = [
            _info(f"arg{i}", type_, type_, []) for i, (_, type_) in enumerate(main.region.args)
        ]
        names = _result_names(main.result_attrs, len(program.body.results))
        types = [program.types[v] for v in program.body.results]
        outputs = [_info(n, t, t, []) for n, t in zip(names, types, strict=True)]
        aliases, donated = _donations(main.arg_attrs)
        return Imported(
            self.module.name, program, world, [], inputs, outputs, aliases, donated, self.text
        )

    # -- operations ----------------------------------------------------------------------------

    def region_ops(self, region: RawRegion, env: Env) -> list[int]:
        """Convert a region's operations; returns the values of its terminator."""
        for op in region.ops:
            if op.name in ("return", "func.return", "stablehlo.return", "sdy.return"):
                return [self.value(env, name, op) for name in op.operands]
            results = self.op(op, env)
            self.bind(op, results, env)
        raise CompileError("EIMP002", "a region has no return")

    def bind(self, op: RawOp, results: list[int], env: Env) -> None:
        """Give the results their names."""
        position = 0
        for name, count in op.results:
            env[name] = results[position : position + count]
            position += count
        if position != len(results):
            raise CompileError(
                "EIMP002", f"line {op.line}: {op.name} has {len(results)} results, not {position}"
            )

    def value(self, env: Env, name: str, op: RawOp) -> int:
        """The value of ``%x`` or ``%x#1``."""
        base, _, number = name.partition("#")
        values = env.get(base, [])
        index = int(number or 0)
        if index >= len(values):
            raise CompileError("EIMP002", f"line {op.line}: {name} is not defined")
        return values[index]

    def op(self, op: RawOp, env: Env) -> list[int]:
        """Convert one operation and check its declared types."""
        operands = [self.value(env, name, op) for name in op.operands]
        if op.name in ("call", "func.call", "stablehlo.composite"):
            results = self.call(op, operands)
        elif op.name == "stablehlo.while":
            results = self._while(op, operands, env)
        elif op.name in ("stablehlo.case", "stablehlo.if"):
            results = self._case(op, operands, env)
        elif op.name in HANDLERS:
            results = HANDLERS[op.name](self.builder, op, operands)
        else:
            unsupported(op)
        return self.builder.check(op, results)

    def callee(self, op: RawOp) -> RawFunc:
        """The function a call names."""
        symbol = op.symbol
        if op.name == "stablehlo.composite":
            symbol = str(op.attrs.get("decomposition", ""))
        func = self.module.funcs.get(symbol or str(op.attrs.get("callee", "")))
        if func is None:
            raise CompileError("EIMP006", f"line {op.line}: no function {symbol or '(unnamed)'}")
        if self.depth >= _MAX_CALL_DEPTH:
            raise CompileError("EIMP006", f"line {op.line}: calls nested too deep (recursion?)")
        return func

    def call(self, op: RawOp, operands: list[int]) -> list[int]:
        """Inline the callee."""
        func = self.callee(op)
        names = [name for name, _ in func.region.args]
        if len(names) != len(operands):
            raise CompileError("EIMP006", f"line {op.line}: {func.name} takes {len(names)} values")
        self.depth += 1
        inner: Env = {n: [v] for n, v in zip(names, operands, strict=True)}
        results = self.region_ops(func.region, inner)
        self.depth -= 1
        return results

    def _inner_region(self, raw: RawRegion, env: Env) -> Region:
        region = Region([], [], [])
        inner = dict(env)
        for name, type_ in raw.args:
            value = self.builder.program.new_value(type_)
            region.args.append(value)
            inner[name] = [value]
        saved, self.builder.ops = self.builder.ops, region.ops
        try:
            region.results = self.region_ops(raw, inner)
        finally:
            self.builder.ops = saved
        return region

    def _while(self, op: RawOp, operands: list[int], env: Env) -> list[int]:
        if len(op.regions) != 2:
            raise CompileError("EIMP005", f"line {op.line}: while needs two regions")
        regions = [self._inner_region(raw, env) for raw in op.regions]
        types = [self.builder.type(v) for v in operands]
        return self.builder.emit_regions("while", operands, types, regions, op.line)

    def _case(self, op: RawOp, operands: list[int], env: Env) -> list[int]:
        regions = [self._inner_region(raw, env) for raw in op.regions]
        if op.name == "stablehlo.if":  # true branch first; case counts from 0 = false
            regions.reverse()
        inside = {o.name for region in regions for o in region.walk()} & COLLECTIVES
        if inside:
            raise CompileError(
                "EVRF011",
                f"line {op.line}: {', '.join(sorted(inside))} inside a branch: ranks that take "
                "different branches would wait for each other for ever; move it out of the branch",
            )
        if not regions:
            raise CompileError("EIMP005", f"line {op.line}: case without branches")
        types = [self.builder.type(v) for v in regions[0].results]
        return self.builder.emit_regions("case", operands, types, regions, op.line)


class _ManualImport:
    """A module whose main function only hands its arguments to one shard_map body."""

    def __init__(self, importer: _Importer, main: RawFunc, partitions: int) -> None:
        self.importer = importer
        self.main = main
        self.partitions = partitions
        self.inputs: list[TensorInfo | None] = [None] * len(main.region.args)
        self.input_values: list[int | None] = [None] * len(main.region.args)
        self.outputs: list[TensorInfo] = []
        self.output_values: list[int] = []
        self.mesh: list[tuple[str, int]] | None = None

    def run(self) -> Imported:
        env: dict[str, list[Any]] = {
            name: [("arg", i)] for i, (name, _) in enumerate(self.main.region.args)
        }
        returned = self._global_ops(self.main.region, env)
        program = self.importer.builder.program
        for i, (_, type_) in enumerate(self.main.region.args):
            if self.input_values[i] is None:  # never used inside
                self.input_values[i] = program.new_value(type_)
                self.inputs[i] = _info(f"arg{i}", type_, type_, [])
        program.body.args = [v for v in self.input_values if v is not None]
        names = _result_names(self.main.result_attrs, len(returned))
        outputs = []
        for name, item in zip(names, returned, strict=True):
            if item[0] != "result":
                self._outside("returns a value that shard_map did not make")
            info = self.outputs[item[1]]
            outputs.append(
                TensorInfo(name, info.dtype, info.shape, info.global_shape, info.partition)
            )
            program.body.results.append(self.output_values[item[1]])
        aliases, donated = _donations(self.main.arg_attrs)
        return Imported(
            self.importer.module.name,
            program,
            self.partitions,
            self.mesh or [],
            [t for t in self.inputs if t is not None],
            outputs,
            aliases,
            donated,
            self.importer.text,
        )

    def _outside(self, what: str) -> None:
        raise CompileError(
            "EVRF010", f"the module {what}: put the whole step inside shard_map; {SHARD_MAP_RECIPE}"
        )

    def _global_ops(self, region: RawRegion, env: dict[str, list[Any]]) -> list[Any]:
        """Walk code over global arrays: arguments, results of shard_map, and constants."""
        for op in region.ops:
            items = [self._lookup(env, name, op) for name in op.operands]
            if op.name in ("return", "func.return"):
                return items
            if op.name == "sdy.manual_computation":
                results = self._manual(op, items)
            elif op.name in ("call", "func.call"):
                func = self.importer.callee(op)
                names = [name for name, _ in func.region.args]
                self.importer.depth += 1
                inner = {n: [item] for n, item in zip(names, items, strict=True)}
                results = self._global_ops(func.region, inner)
                self.importer.depth -= 1
            elif all(item[0] == "local" for item in items):
                names = [f"%{k}" for k in range(len(items))]
                local: Env = {n: [item[1]] for n, item in zip(names, items, strict=True)}
                raw = RawOp(
                    op.name, op.line, [], names, op.attrs, op.words, op.symbol, op.in_types,
                    op.out_types, op.regions,
                )
                results = [("local", v) for v in self.importer.op(raw, local)]
            else:
                self._outside(f"computes {op.name} (line {op.line}) on arrays over all ranks")
            position = 0
            for name, count in op.results:
                env[name] = results[position : position + count]
                position += count
        raise CompileError("EIMP002", "a function has no return")

    def _lookup(self, env: dict[str, list[Any]], name: str, op: RawOp) -> Any:
        base, _, number = name.partition("#")
        values = env.get(base, [])
        if int(number or 0) >= len(values):
            raise CompileError("EIMP002", f"line {op.line}: {name} is not defined")
        return values[int(number or 0)]

    def _manual(self, op: RawOp, items: list[Any]) -> list[Any]:
        if self.mesh is not None:
            self._outside("has more than one shard_map")
        shardings: list[Sharding] = op.attrs["in_shardings"]
        self.mesh = self._mesh_of(op, shardings + op.attrs["out_shardings"])
        env: Env = {}
        program = self.importer.builder.program
        args = op.regions[0].args
        if not len(args) == len(items) == len(shardings):
            raise CompileError("EIMP005", f"line {op.line}: manual_computation is malformed")
        for (name, type_), item, sharding in zip(args, items, shardings, strict=True):
            if item[0] == "local":
                if program.types[item[1]] != type_:
                    self._outside("divides a constant among the ranks")
                env[name] = [item[1]]
                continue
            if item[0] != "arg":
                self._outside("feeds results of shard_map back")
            index = item[1]
            whole = self.main.region.args[index][1]
            info = _info(f"arg{index}", type_, whole, sharding[1])
            if self.input_values[index] is None:
                self.input_values[index] = program.new_value(type_)
                self.inputs[index] = info
            elif self.inputs[index] != info:
                self._outside(f"uses argument {index} with two shardings")
            env[name] = [self.input_values[index] or 0]
        self.output_values = self.importer.region_ops(op.regions[0], env)
        for value, whole, sharding in zip(
            self.output_values, op.out_types, op.attrs["out_shardings"], strict=True
        ):
            self.outputs.append(_info("", program.types[value], whole, sharding[1]))
        return [("result", i) for i in range(len(self.output_values))]

    def _mesh_of(self, op: RawOp, shardings: list[Sharding]) -> list[tuple[str, int]]:
        names = {name for name, _ in shardings} or set(self.importer.module.meshes)
        meshes = [m for n, m in self.importer.module.meshes.items() if n in names and m]
        if len(meshes) != 1:
            raise CompileError("EVRF010", f"line {op.line}: shard_map needs exactly one mesh")
        mesh = meshes[0]
        automatic = [a for a, n in mesh if a not in op.attrs["manual_axes"] and n > 1]
        if automatic:
            raise CompileError(
                "EVRF010",
                f"line {op.line}: mesh axes {', '.join(automatic)} are left to automatic sharding; "
                "name every axis in shard_map's axis_names (the default)",
            )
        return mesh


def _info(
    name: str, local: TensorType, whole: TensorType, dims: list[list[str]]
) -> TensorInfo:
    axes = [*dims, *([[]] * len(local.shape))][: len(local.shape)]
    partition = tuple(tuple(a) for a in axes)
    return TensorInfo(name, local.dtype, local.shape, whole.shape, partition)


def _result_names(attrs: list[dict[str, Any]], count: int) -> list[str]:
    """Names from JAX's ``jax.result_info`` ("result[0]['w']" -> "result.0.w"), unique."""
    names = []
    for i in range(count):
        info = attrs[i].get("jax.result_info") if i < len(attrs) else None
        names.append(clean_path(str(info)) if info else f"result.{i}")
    if len(set(names)) != len(names):
        return [f"result.{i}" for i in range(count)]
    return names


def clean_path(path: str) -> str:
    """``result[0]['w'].b`` as ``result.0.w.b``."""
    for old in ("['", '["', "["):
        path = path.replace(old, ".")
    for old in ("']", '"]', "]"):
        path = path.replace(old, "")
    return path


def _donations(arg_attrs: list[dict[str, Any]]) -> tuple[list[tuple[int, int]], list[int]]:
    """Output-input pairs that the module fixes, and inputs it only offers."""
    aliases = [
        (int(attrs["tf.aliasing_output"]), i)
        for i, attrs in enumerate(arg_attrs)
        if "tf.aliasing_output" in attrs
    ]
    donated = [i for i, attrs in enumerate(arg_attrs) if attrs.get("jax.buffer_donor")]
    return aliases, donated
