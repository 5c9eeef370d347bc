"""Importer of JAX callables: ``module:function`` to StableHLO text to a per-rank program.

The function is called with the configuration as keyword arguments (and ``ranks=N`` when it has
such a parameter). It returns a ``JaxProgram``, a dictionary with that class's fields, or a pair
``(fn, args)``; a ``module:name`` may also name such an object itself. jax is imported here only.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from neuron_runtime.compiler.importers.stablehlo import Imported, clean_path, import_stablehlo
from neuron_runtime.compiler.spec import JaxProgram
from neuron_runtime.errors import CompileError
from neuron_runtime.manifest import TensorInfo

_COUNT_FLAG = "--xla_force_host_platform_device_count"


def split_entry(entry: str) -> tuple[str, str]:
    """``module:function`` or ``file.py:function``; raises CompileError EARG004."""
    module, _, name = entry.rpartition(":")
    if not module or not name.isidentifier():
        raise CompileError("EARG004", f"{entry!r} is not module:function")
    return module, name


def source_path(entry: str) -> Path:
    """The source file of the entry's module, found without running it. Raises EARG004."""
    module, _ = split_entry(entry)
    if module.endswith(".py") or os.sep in module:
        path = Path(module)
        if not path.is_file():
            raise CompileError("EARG004", f"no such file: {module}")
        return path.resolve()
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError) as error:
        raise CompileError("EARG004", f"cannot find module {module!r}: {error}") from None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise CompileError("EARG004", f"cannot find module {module!r} (is it on PYTHONPATH?)")
    return Path(spec.origin).resolve()


def import_jax_callable(entry: str, config: Mapping[str, Any], ranks: int) -> Imported:
    """Trace and lower the entry for that many ranks. Raises CompileError."""
    jax = _import_jax(ranks)
    program = _load_program(entry, config, ranks)
    try:
        lowered, names = _lower(jax, program, ranks)
    except CompileError:
        raise
    except Exception as error:
        first = str(error).strip().split("\n")[0]
        raise CompileError(
            "EIMP010", f"jax cannot trace {entry}: {type(error).__name__}: {first:.400}"
        ) from error
    imported = import_stablehlo(lowered.as_text())
    if imported.world_size != ranks:
        raise CompileError(
            "EARG005",
            f"{entry} is a program for {imported.world_size} rank(s), --ranks says {ranks}; give "
            "JaxProgram a mesh of that size, or build the shard_map over jax.devices()",
        )
    imported.inputs = _renamed(imported.inputs, names[0])
    imported.outputs = _renamed(imported.outputs, names[1])
    imported.name = program.name or split_entry(entry)[1]
    return imported


def _import_jax(ranks: int) -> ModuleType:
    """jax with at least that many host devices."""
    if "jax" not in sys.modules:
        flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if _COUNT_FLAG not in f]
        os.environ["XLA_FLAGS"] = " ".join([*flags, f"{_COUNT_FLAG}={ranks}"])
        os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        jax = importlib.import_module("jax")
    except ImportError as error:
        raise CompileError(
            "EIMP011",
            f"compiling a JAX function needs jax ({error}): pip install 'clusterctl[jax]'",
        ) from None
    if len(jax.devices()) < ranks:
        raise CompileError(
            "EIMP012",
            f"jax was started with {len(jax.devices())} device(s), {ranks} are needed; compile in "
            f"a fresh process or set XLA_FLAGS={_COUNT_FLAG}={ranks} before jax is imported",
        )
    return jax


# -- the entry ---------------------------------------------------------------------------------


def _load_program(entry: str, config: Mapping[str, Any], ranks: int) -> JaxProgram:
    module_name, name = split_entry(entry)
    module = _load_module(module_name, source_path(entry))
    found = getattr(module, name, None)
    if found is None:
        raise CompileError("EARG004", f"module {module_name} has no {name!r}")
    if callable(found) and not isinstance(found, JaxProgram):
        found = _call(entry, found, config, ranks)
    elif config:
        raise CompileError("EARG006", f"{entry} is not a function, so it takes no --config")
    return _as_program(entry, found)


def _load_module(name: str, path: Path) -> ModuleType:
    try:
        if not name.endswith(".py") and os.sep not in name:
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    except CompileError:
        raise
    except Exception as error:
        raise CompileError(
            "EIMP013", f"importing {name} failed: {type(error).__name__}: {error}"
        ) from error
    return module


def _call(entry: str, function: Any, config: Mapping[str, Any], ranks: int) -> Any:
    parameters = inspect.signature(function).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [k for k in config if k not in parameters and not anything]
    if unknown:
        known = ", ".join(parameters) or "none"
        raise CompileError("EARG006", f"{entry} has no parameter {unknown[0]!r}; it has: {known}")
    extra = {"ranks": ranks} if "ranks" in parameters and "ranks" not in config else {}
    try:
        return function(**config, **extra)
    except CompileError:
        raise
    except Exception as error:
        first = str(error).strip().split("\n")[0]
        raise CompileError(
            "EIMP014", f"{entry} failed: {type(error).__name__}: {first:.400}"
        ) from error


def _as_program(entry: str, found: Any) -> JaxProgram:
    if isinstance(found, JaxProgram):
        return found
    if isinstance(found, Mapping) and {"fn", "args"} <= set(found):
        try:
            return JaxProgram(**found)
        except TypeError as error:
            raise CompileError("EIMP015", f"{entry}: {error}") from None
    if isinstance(found, tuple) and len(found) == 2 and callable(found[0]):
        return JaxProgram(found[0], found[1])
    raise CompileError(
        "EIMP015",
        f"{entry} gave {type(found).__name__}; wanted JaxProgram, a dictionary with its fields "
        "(fn, args, mesh, ...), or (fn, args)",
    )


# -- lowering ----------------------------------------------------------------------------------


def _lower(jax: Any, program: JaxProgram, ranks: int) -> tuple[Any, tuple[list[str], list[str]]]:
    function = program.fn
    if program.mesh is not None:
        axes = dict(program.mesh)
        sizes = tuple(axes.values())
        total = 1
        for size in sizes:
            total *= size
        if total != ranks:
            raise CompileError("EARG005", f"the mesh {axes} has {total} ranks, --ranks is {ranks}")
        automatic = (jax.sharding.AxisType.Auto,) * len(axes)
        devices = jax.devices()[:ranks]
        mesh = jax.make_mesh(sizes, tuple(axes), devices=devices, axis_types=automatic)
        function = jax.shard_map(
            program.fn,
            mesh=mesh,
            in_specs=program.in_specs,
            out_specs=program.out_specs,
            check_vma=False,
        )
    jitted = jax.jit(function, donate_argnums=tuple(program.donate), keep_unused=True)
    lowered = jitted.lower(*program.args)
    return lowered, (_arg_names(jax, program), _result_names(jax, program, lowered.out_info))


def _arg_names(jax: Any, program: JaxProgram) -> list[str]:
    tops = list(program.arg_names) if program.arg_names is not None else _parameters(program)
    names: list[str] = []
    for place, arg in enumerate(program.args):
        top = tops[place] if place < len(tops) else f"arg{place}"
        leaves = jax.tree_util.tree_flatten_with_path(arg)[0]
        names.extend(top + _path(jax, path) for path, _ in leaves)
    return names


def _parameters(program: JaxProgram) -> list[str]:
    try:
        parameters = inspect.signature(program.fn).parameters.values()
    except (TypeError, ValueError):
        return []
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in plain]


def _result_names(jax: Any, program: JaxProgram, out_info: Any) -> list[str]:
    names = []
    tops = program.result_names
    for path, _ in jax.tree_util.tree_flatten_with_path(out_info)[0]:
        head = path[:1]
        if tops is not None and head and isinstance(head[0], jax.tree_util.SequenceKey):
            place = head[0].idx
            if place >= len(tops):
                raise CompileError("EARG007", f"result_names has no name for result {place}")
            names.append(tops[place] + _path(jax, path[1:]))
        elif tops is not None and not path:
            names.append(tops[0])
        elif head and isinstance(head[0], jax.tree_util.DictKey):
            names.append(_path(jax, path).lstrip("."))
        else:
            names.append("result" + _path(jax, path))
    return names


def _path(jax: Any, path: Any) -> str:
    """``['a'][0]`` as ``.a.0``."""
    return clean_path(jax.tree_util.keystr(path))


def _renamed(tensors: list[TensorInfo], names: list[str]) -> list[TensorInfo]:
    if len(tensors) != len(names):
        raise CompileError(
            "EINT002", f"internal: {len(tensors)} tensors in the module, {len(names)} in the tree"
        )
    return [
        TensorInfo(name, t.dtype, t.shape, t.global_shape, t.partition)
        for t, name in zip(tensors, names, strict=True)
    ]
