"""Compile cache in Neuron's layout, safe for many processes at once.

``<root>/neuronxcc-<version>/MODULE_<graph hash>+<flags hash>/model.neff``. Beside it, ``index/``
maps a key that can be computed without jax (entry, configuration, ranks, flags) to a module and
the hashes of the source files it was made from, so that ranks find what a launcher compiled. The
jax that traced it counts as a source where it is still installed; ranks without jax need none.

root: NEURON_COMPILE_CACHE_URL (a path), else /var/tmp/neuron-compile-cache when this user can own
it, else ``$XDG_CACHE_HOME/neuron-compile-cache``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from neuron_runtime.compiler.emit import Options
from neuron_runtime.compiler.importers.jax_callable import source_path
from neuron_runtime.compiler.version import COMPILER_VERSION
from neuron_runtime.errors import CompileError, NrtError
from neuron_runtime.neff import Neff, read_neff, write_atomic, write_neff

DEFAULT_ROOT = Path("/var/tmp/neuron-compile-cache")
Log = Callable[[str], None]


def _silent(text: str) -> None:
    """Progress that nobody wants to see."""


def cache_root() -> Path:
    """The cache directory, created. Raises CompileError ECCH001 when none can be used."""
    url = os.environ.get("NEURON_COMPILE_CACHE_URL", "").strip()
    if url:
        path = Path(url.removeprefix("file://"))
        if "://" in url.removeprefix("file://"):
            raise CompileError(
                "ECCH001", f"NEURON_COMPILE_CACHE_URL={url}: only paths are supported"
            )
        if not _usable(path, shared=True):
            raise CompileError(
                "ECCH001", f"NEURON_COMPILE_CACHE_URL={url}: the directory is not writable"
            )
        return path
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / DEFAULT_ROOT.name
    for candidate in (DEFAULT_ROOT, own):
        if _usable(candidate, shared=False):
            return candidate
    raise CompileError(
        "ECCH001",
        f"neither {DEFAULT_ROOT} nor {own} is writable; "
        "set NEURON_COMPILE_CACHE_URL to a directory",
    )


def _usable(path: Path, *, shared: bool) -> bool:
    """Create and test; a default place must be this user's own (others could plant results)."""
    try:
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
        owner = path.stat().st_uid
    except OSError:
        return False
    return os.access(path, os.W_OK | os.X_OK) and (shared or owner == os.geteuid())


def _version_dir() -> Path:
    return cache_root() / f"neuronxcc-{COMPILER_VERSION}"


def module_dir(graph_hash: str, options: Options) -> Path:
    """Directory of a compiled module."""
    flags = hashlib.sha256(options.flags().encode()).hexdigest()[:8]
    return _version_dir() / f"MODULE_{graph_hash}+{flags}"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path`` (created); the kernel frees it when the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def cached(directory: Path, log: Log = _silent) -> Path | None:
    """The whole and readable NEFF in that directory, or None. A corrupt one is named."""
    path = directory / "model.neff"
    try:
        read_neff(path, validate_hash=True)
    except FileNotFoundError:
        return None
    except (NrtError, OSError) as error:
        log(f"cached NEFF is not usable and will be compiled again: {error}")
        return None
    return path


def store(graph_hash: str, options: Options, build: Callable[[], Neff], log: Log = _silent) -> Path:
    """The cached NEFF of a graph; ``build`` makes it when it is not there. Raises CompileError."""
    directory = module_dir(graph_hash, options)
    with _disk_errors(directory), locked(directory / "model.lock"):
        found = cached(directory, log)
        if found is not None:
            log(f"using the cached {directory.name}")
            return found
        write_neff(directory / "model.neff", build())
    return directory / "model.neff"


@contextlib.contextmanager
def _disk_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CompileError(
            "ECCH002", f"cannot write to the compile cache {directory}: {error.strerror or error}"
        ) from error


# -- finding without jax -----------------------------------------------------------------------


def fast_key(entry: str, config: Mapping[str, Any], ranks: int, options: Options) -> str:
    """Key of a JAX entry: its place, configuration, ranks and flags (not its sources)."""
    parts = [str(source_path(entry)), entry.rpartition(":")[2], config, ranks, options.flags()]
    text = json.dumps([COMPILER_VERSION, *parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _index_file(key: str) -> Path:
    return _version_dir() / "index" / f"{key}.json"


def remember(
    key: str, module: Path, sources: Mapping[str, str], tools: Mapping[str, str] | None = None
) -> None:
    """Record that a key leads to a module made from these sources (path -> SHA-256).

    ``tools``: files that stand for the version of what traced the program (jax). One that has
    changed makes the record void; one that is gone does not.
    """
    content = {"module": module.name, "sources": dict(sources), "tools": dict(tools or {})}
    path = _index_file(key)
    with _disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(content, indent=1).encode())


def lookup(
    entry: str,
    config: Mapping[str, Any] | None = None,
    *,
    ranks: int = 1,
    options: Options | None = None,
    log: Log = _silent,
) -> Path | None:
    """The NEFF that was compiled for exactly this, or None; needs no jax.

    None also when one of the program's source files, or jax, has changed since. Raises
    CompileError when the entry's module does not exist.
    """
    key = fast_key(entry, config or {}, ranks, options or Options())
    try:
        content = json.loads(_index_file(key).read_bytes())
        module, sources = str(content["module"]), dict(content["sources"])
        tools = dict(content["tools"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if os.sep in module or any(file_hash(Path(p)) != h for p, h in sources.items()):
        return None
    if any(file_hash(Path(p)) not in ("", h) for p, h in tools.items()):
        return None
    return cached(_version_dir() / module, log)


def file_hash(path: Path) -> str:
    """SHA-256 of a file, empty when it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def compile_cached(
    entry: str,
    config: Mapping[str, Any] | None = None,
    *,
    ranks: int = 1,
    options: Options | None = None,
    log: Log | None = None,
) -> Path:
    """The NEFF of ``module:function`` from the cache, compiled first when it is not there.

    The compiler runs in a process of its own (jax must start with the right number of devices,
    and the caller stays small); its progress goes to stderr, or line by line to ``log``. Raises
    CompileError with the compiler's code.
    """
    options = options or Options()
    found = lookup(entry, config, ranks=ranks, options=options, log=log or _silent)
    if found is not None:
        return found
    command = [sys.executable, "-m", "neuron_runtime.compile", entry, "--framework", "XLA"]
    command += ["--target", options.target, "--ranks", str(ranks)]
    command += ["--config", json.dumps(config or {})]
    if options.lnc is not None:
        command += ["--lnc", str(options.lnc)]
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    result = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    lines = []
    assert result.stdout is not None
    assert result.stderr is not None
    with result:
        for line in result.stderr:
            lines.append(line.rstrip("\n"))
            if log is not None:
                log(lines[-1])
            else:
                sys.stderr.write(line)
        output = result.stdout.read()
    if result.returncode != 0:
        raise _as_compile_error(lines, result.returncode)
    return Path(output.strip().split("\n")[-1])


def _as_compile_error(lines: list[str], code: int) -> CompileError:
    """The child's last ``error: [CODE] text`` line as an exception."""
    for line in reversed(lines):
        _, found, rest = line.partition("error: [")
        if found:
            name, _, text = rest.partition("] ")
            return CompileError(name, text)
    last = lines[-1] if lines else "no output"
    return CompileError("EINT003", f"the compiler ended with status {code}: {last}")
