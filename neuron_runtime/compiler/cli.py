"""Command line: ``python -m neuron_runtime.compile INPUT --target trn1 --output F.neff``."""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from neuron_runtime.compiler import cache
from neuron_runtime.compiler.emit import Options, compile_imported, graph_hash
from neuron_runtime.compiler.importers.jax_callable import import_jax_callable, source_path
from neuron_runtime.compiler.importers.stablehlo import Imported, import_stablehlo
from neuron_runtime.compiler.importers.stablehlo_ops import CONTROL_FLOW, HANDLERS
from neuron_runtime.compiler.version import COMPILER_VERSION
from neuron_runtime.errors import CompileError
from neuron_runtime.manifest import TARGETS
from neuron_runtime.neff import Neff, read_neff, write_neff

_PROG = "neuron_runtime.compile"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CompileError("EARG001", message)


def _parser() -> _Parser:
    parser = _Parser(
        prog=f"python -m {_PROG}",
        description="Compile a JAX function (module:function or file.py:function) or a file of "
        "StableHLO text to a NEFF.",
    )
    parser.add_argument("input", nargs="?", help="StableHLO text file, or module:function")
    parser.add_argument("--framework", default="XLA", help="XLA, the only one")
    parser.add_argument("--target", default="trn1", help=f"{', '.join(TARGETS)} (default trn1)")
    parser.add_argument(
        "--lnc",
        "-lnc",
        "--logical-nc-config",
        type=int,
        metavar="N",
        help="physical cores to a logical one: 1 or 2 (trn2 only; its default is 2)",
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks of the program (default 1)")
    parser.add_argument(
        "--config", metavar="JSON", help="keyword arguments for the function, a JSON object"
    )
    parser.add_argument(
        "--output",
        "-o",
        metavar="F.neff",
        help="file to write; without it the NEFF stays in the cache and its path is printed",
    )
    parser.add_argument("--no-cache", action="store_true", help="compile even if it is cached")
    parser.add_argument("--list-operators", action="store_true", help="print the known operators")
    parser.add_argument("--version", action="version", version=COMPILER_VERSION)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run; returns the exit status. Errors are one line on stderr."""
    try:
        arguments = _parser().parse_args(argv)
        if arguments.list_operators:
            print("\n".join(sorted([*HANDLERS, *CONTROL_FLOW])))
            return 0
        path = _run(arguments)
        if arguments.output is None:
            print(path)
    except CompileError as error:
        _log(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        _log("interrupted")
        return 130
    return 0


def _log(text: str) -> None:
    sys.stderr.write(f"{_PROG}: {text}\n")
    sys.stderr.flush()


def _run(arguments: argparse.Namespace) -> Path:
    if not arguments.input:
        raise CompileError("EARG001", "an input is needed: a StableHLO file or module:function")
    if arguments.framework.upper() != "XLA":
        raise CompileError(
            "EARG008", f"framework {arguments.framework!r} is not supported; use --framework XLA"
        )
    if arguments.ranks is not None and not 1 <= arguments.ranks <= 4096:
        raise CompileError("EARG005", f"--ranks {arguments.ranks} is not in 1..4096")
    options = Options(arguments.target, arguments.lnc)
    options.check()
    output = Path(arguments.output) if arguments.output is not None else None
    if output is not None and not output.resolve().parent.is_dir():
        raise CompileError("EARG009", f"no such directory: {output.parent}")
    if output is None and arguments.no_cache:
        raise CompileError("EARG001", "--no-cache needs --output")
    job = _Job(arguments, options, output)
    return job.text_file() if Path(arguments.input).is_file() else job.jax_entry()


class _Job:
    """One compilation with its options and its clock."""

    def __init__(self, arguments: argparse.Namespace, options: Options, output: Path | None):
        self.input: str = arguments.input
        self.ranks: int | None = arguments.ranks
        self.config = _config(arguments.config)
        self.options = options
        self.output = output
        self.use_cache = not arguments.no_cache
        self.start = time.monotonic()

    def text_file(self) -> Path:
        """A file of StableHLO text."""
        if self.config:
            raise CompileError("EARG006", "--config is for module:function, not for a text file")
        try:
            text = Path(self.input).read_bytes().decode()
        except UnicodeDecodeError:
            raise CompileError(
                "EIMP001",
                f"{self.input} is not text; StableHLO bytecode is not supported, print the module "
                "as text (lowered.as_text())",
            ) from None
        except OSError as error:
            raise CompileError("EARG004", f"{self.input}: {error.strerror}") from None
        imported = import_stablehlo(text)
        if self.ranks is not None and self.ranks != imported.world_size:
            raise CompileError(
                "EARG005",
                f"{self.input} is a program for {imported.world_size} rank(s), "
                f"--ranks says {self.ranks}",
            )
        return self.build(imported)

    def jax_entry(self) -> Path:
        """``module:function``; one process at a time traces the same entry."""
        if ":" not in self.input:
            raise CompileError("EARG004", f"{self.input!r} is neither a file nor module:function")
        ranks = self.ranks or 1
        if not self.use_cache:
            return self.build(import_jax_callable(self.input, self.config, ranks))
        key = cache.fast_key(self.input, self.config, ranks, self.options)
        with cache.locked(cache.cache_root() / f"neuronxcc-{COMPILER_VERSION}/index/{key}.lock"):
            found = cache.lookup(
                self.input, self.config, ranks=ranks, options=self.options, log=_log
            )
            if found is not None:
                _log(f"using the cached {found.parent.name}")
                return self.deliver(found)
            _log(f"tracing {self.input} for {ranks} rank(s)")
            before = set(sys.modules)
            imported = import_jax_callable(self.input, self.config, ranks)
            path = self.build(imported, deliver=False)
            cache.remember(key, path.parent, _sources(self.input, before), _tools())
        return self.deliver(path)

    def build(self, imported: Imported, *, deliver: bool = True) -> Path:
        """Compile, through the cache if it is used; returns where the NEFF is."""
        hash_ = graph_hash(imported)
        parsed = time.monotonic()

        def compile_now() -> Neff:
            neff = compile_imported(imported, self.options, hash_)
            now = time.monotonic()
            _log(
                f"compiling MODULE_{hash_} for {self.options.target}: parse "
                f"{parsed - self.start:.2f} s, passes and emit {now - parsed:.2f} s, "
                f"{len(list(neff.program.body.walk()))} operations, "
                f"{neff.manifest.hbm.total / 2**20:.1f} MiB a core, done in "
                f"{now - self.start:.1f} s"
            )
            return neff

        if not self.use_cache:
            assert self.output is not None
            self.write(compile_now())
            return self.output
        path = cache.store(hash_, self.options, compile_now, _log)
        return self.deliver(path) if deliver else path

    def deliver(self, path: Path) -> Path:
        """Copy a cached NEFF to the wanted place."""
        if self.output is None:
            return path
        self.write(read_neff(path))
        return self.output

    def write(self, neff: Neff) -> None:
        """Write the output file."""
        assert self.output is not None
        try:
            write_neff(self.output, neff)
        except OSError as error:
            raise CompileError(
                "EARG009", f"cannot write {self.output}: {error.strerror or error}"
            ) from None


def _config(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CompileError("EARG006", f"--config is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CompileError("EARG006", "--config is not a JSON object")
    return value


def _tools() -> dict[str, str]:
    """The file that holds the version of the jax that was used."""
    origin = getattr(sys.modules.get("jax.version"), "__file__", None)
    return {} if origin is None else {origin: cache.file_hash(Path(origin))}


def _sources(entry: str, before: set[str]) -> dict[str, str]:
    """Files the entry was made from: its own and those of the user's modules it imported."""
    installed = [Path(sysconfig.get_path(k)).resolve() for k in ("stdlib", "purelib", "platlib")]
    files = {source_path(entry)}
    for name in set(sys.modules) - before:
        origin = getattr(sys.modules[name], "__file__", None)
        if origin is None:
            continue
        path = Path(origin).resolve()
        if path.suffix == ".py" and not any(path.is_relative_to(root) for root in installed):
            files.add(path)
    return {str(path): cache.file_hash(path) for path in sorted(files)}
