"""The command line, the cache, and finding a compiled program without jax."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from neuron_runtime.compiler import cache
from neuron_runtime.compiler.cli import main
from neuron_runtime.compiler.emit import Options
from neuron_runtime.errors import CompileError
from neuron_runtime.neff import read_neff
from tests.neuron_compiler import texts

ROOT = Path(__file__).resolve().parents[2]
ENTRY = """
from neuron_runtime.compiler.spec import JaxProgram

def build(ranks, size=4):
    import jax.numpy as jnp
    import jax
    from jax.sharding import PartitionSpec as P

    def step(w, x):
        return w + jax.lax.psum((x * w).sum(0), "data")

    s = jax.ShapeDtypeStruct
    return JaxProgram(step, (s((size,), jnp.float32), s((2 * ranks, size), jnp.float32)),
                      mesh={"data": ranks}, in_specs=(P(), P("data")), out_specs=P(),
                      donate=(0,), result_names=("w",))

def pair():
    import jax.numpy as jnp
    return (lambda a: {"y": a * 2}), (jnp.zeros(3),)

def breaks():
    raise ValueError("no data here")

def untraceable():
    return (lambda a: a if a > 0 else -a), (1.0,)

nothing = 5
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory with a text module, an entry file, and a cache of its own."""
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "cache"))
    (tmp_path / "mlp.mlir").write_text(texts.MLP)
    (tmp_path / "entry.py").write_text(ENTRY)
    return tmp_path


def errors(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Status 1, nothing on stdout, one line on stderr: that line."""
    assert main(list(arguments)) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("neuron_runtime.compile: error: [")
    return err


def run_cli(place: Path, *arguments: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "neuron_runtime.compile", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


def test_text_file_to_neff(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = place / "mlp.neff"
    status = main(
        [str(place / "mlp.mlir"), "--framework", "XLA", "--target", "trn2", "--output", str(output)]
    )
    assert status == 0
    out, err = capsys.readouterr()
    assert out == ""
    neff = read_neff(output, validate_hash=True)
    assert (neff.manifest.target, neff.manifest.lnc_size) == ("trn2", 2)
    assert f"compiling MODULE_{neff.manifest.graph_hash} for trn2: parse " in err
    cached = cache.module_dir(neff.manifest.graph_hash, Options("trn2")) / "model.neff"
    assert cached.read_bytes() == output.read_bytes()
    assert main([str(place / "mlp.mlir"), "--target", "trn2", "--output", str(output)]) == 0
    assert "using the cached MODULE_" in capsys.readouterr().err


def test_flags_are_part_of_the_key(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = set()
    for flags in (
        ["--target", "trn1"],
        ["--target", "inf2"],
        ["--target", "trn2", "--lnc", "1"],
        ["--target", "trn2", "-lnc", "2"],
        ["--target", "trn2"],
    ):
        assert main([str(place / "mlp.mlir"), *flags]) == 0
        paths.add(Path(capsys.readouterr().out.strip()))
    assert len(paths) == 4
    for path in paths:
        assert path.parent.name.startswith("MODULE_")
        assert path.parent.parent.name.startswith("neuronxcc-")
        assert path.name == "model.neff"
        read_neff(path)


def test_bad_arguments(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = str(place / "mlp.mlir")
    entry = f"{place / 'entry.py'}:build"
    assert "[EARG001] an input is needed" in errors(capsys)
    assert "[EARG001] unrecognized arguments: --what" in errors(capsys, text, "--what")
    assert "[EARG002] unknown target 'gpu'" in errors(capsys, text, "--target", "gpu")
    assert "[EARG003]" in errors(capsys, text, "--lnc", "2")
    assert "[EARG003]" in errors(capsys, text, "--target", "trn2", "--lnc", "3")
    assert "[EARG008] framework 'TF'" in errors(capsys, text, "--framework", "TF")
    assert "is a program for 1 rank(s)" in errors(capsys, text, "--ranks", "2")
    assert "[EARG005]" in errors(capsys, text, "--ranks", "0")
    assert "[EARG006]" in errors(capsys, text, "--config", '{"a": 1}')
    assert "[EARG006] --config is not JSON" in errors(capsys, entry, "--config", "{")
    assert "not a JSON object" in errors(capsys, entry, "--config", "[1]")
    assert "[EARG009] no such directory" in errors(capsys, text, "-o", str(place / "no" / "f"))
    assert "[EARG004]" in errors(capsys, str(place / "gone.mlir"))
    assert "no such file" in errors(capsys, f"{place / 'gone.py'}:f")
    assert "cannot find module" in errors(capsys, "no_such_module_x:f")
    (place / "binary.mlir").write_bytes(b"ML\xefR\x00\xff")
    assert "[EIMP001]" in errors(capsys, str(place / "binary.mlir"))
    (place / "bad.mlir").write_text(texts.MLP.replace("stablehlo.tanh", "stablehlo.frobnicate"))
    message = errors(capsys, str(place / "bad.mlir"))
    assert "[EUOC001]" in message
    assert "stablehlo.frobnicate" in message
    assert main(["--list-operators"]) == 0
    assert "stablehlo.dot_general" in capsys.readouterr().out


def test_unwritable_places(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = str(place / "mlp.mlir")
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", "s3://bucket/cache")
    assert "[ECCH001]" in errors(capsys, text)
    (place / "file").write_text("")
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(place / "file" / "below"))
    assert "not writable" in errors(capsys, text)
    assert main([text, "--no-cache", "--output", str(place / "x.neff")]) == 0
    (place / "dir.neff").mkdir()
    capsys.readouterr()
    assert main([text, "--no-cache", "--output", str(place / "dir.neff")]) == 1
    assert "[EARG009] cannot write" in capsys.readouterr().err


def test_default_cache_must_be_ones_own(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEURON_COMPILE_CACHE_URL")
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "xdg"))
    shared = place / "shared"
    monkeypatch.setattr(cache, "DEFAULT_ROOT", shared)
    assert cache.cache_root() == shared
    monkeypatch.setattr(os, "geteuid", lambda: shared.stat().st_uid + 1)
    with pytest.raises(CompileError, match="ECCH001"):  # neither belongs to that user
        cache.cache_root()
    shared.rmdir()
    shared.write_text("in the way")
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "xdg"))
    monkeypatch.delenv("NEURON_COMPILE_CACHE_URL", raising=False)
    monkeypatch.setattr(cache, "DEFAULT_ROOT", shared)
    assert cache.cache_root() == place / "xdg" / "shared"


def test_corrupt_cached_neff_is_named_and_compiled_again(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = str(place / "mlp.mlir")
    assert main([text]) == 0
    path = Path(capsys.readouterr().out.strip())
    good = path.read_bytes()
    for damage in (good[:500], good[:-700], good.replace(b"tanh", b"sine"), b""):
        path.write_bytes(damage)
        assert main([text]) == 0
        out, err = capsys.readouterr()
        assert str(path) in err
        assert "will be compiled again" in err
        assert Path(out.strip()) == path
        assert path.read_bytes() == good


def test_many_processes_at_once_compile_once(place: Path) -> None:
    processes = [run_cli(place, "mlp.mlir") for _ in range(6)]
    results = [finished(p) for p in processes]
    assert [status for status, _, _ in results] == [0] * 6
    assert len({out for _, out, _ in results}) == 1
    assert sum("passes and emit" in err for _, _, err in results) == 1
    assert sum("using the cached" in err for _, _, err in results) == 5


def test_missing_jax_says_what_to_install(place: Path) -> None:
    blocked = place / "blocked" / "jax"
    blocked.mkdir(parents=True)
    (blocked / "__init__.py").write_text("raise ImportError('No module named jax')")
    path = f"{place / 'blocked'}{os.pathsep}{ROOT}"
    status, out, err = finished(run_cli(place, "entry.py:build", PYTHONPATH=path))
    assert (status, out) == (1, "")
    assert "[EIMP011]" in err
    assert "pip install 'clusterctl[jax]'" in err


@pytest.mark.jax
def test_jax_entry_is_compiled_once_and_found_without_jax(place: Path) -> None:
    pytest.importorskip("jax")
    entry = str(place / "entry.py") + ":build"
    config = {"size": 8}
    assert cache.lookup(entry, config, ranks=2) is None
    lines: list[str] = []
    path = cache.compile_cached(entry, config, ranks=2, log=lines.append)
    assert any("compiling MODULE_" in line for line in lines)
    manifest = read_neff(path).manifest
    assert manifest.world_size == 2
    assert [(t.name, t.shape, t.global_shape) for t in manifest.inputs] == [
        ("w", (8,), (8,)),
        ("x", (2, 8), (4, 8)),
    ]
    assert manifest.inputs[1].partition == (("data",), ())
    assert manifest.aliased_input("w") == "w"
    # A rank: no jax, another process, the same answer.
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "from neuron_runtime.compiler.cache import lookup\n"
        f"print(lookup({entry!r}, {config!r}, ranks=2))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=env,
        timeout=60,
        check=True,
    )
    assert Path(done.stdout.strip()) == path
    assert cache.compile_cached(entry, config, ranks=2) == path
    assert cache.lookup(entry, {"size": 9}, ranks=2) is None
    assert cache.lookup(entry, config, ranks=4) is None
    assert cache.lookup(entry, config, ranks=2, options=Options("inf2")) is None
    (place / "entry.py").write_text(ENTRY + "# changed\n")
    assert cache.lookup(entry, config, ranks=2) is None


@pytest.mark.jax
def test_another_jax_compiles_again(place: Path) -> None:
    jax = pytest.importorskip("jax")
    entry = str(place / "entry.py") + ":build"
    path = cache.compile_cached(entry, log=lambda line: None)
    index = cache._index_file(cache.fast_key(entry, {}, 1, Options()))
    content = json.loads(index.read_bytes())
    (version_file,) = content["tools"]
    assert Path(version_file).samefile(jax.version.__file__)
    assert cache.lookup(entry) == path
    content["tools"] = {version_file: "made by another version"}
    index.write_text(json.dumps(content))
    assert cache.lookup(entry) is None
    content["tools"] = {str(place / "no" / "jax.py"): "made where jax was"}
    index.write_text(json.dumps(content))
    assert cache.lookup(entry) == path


@pytest.mark.jax
def test_jax_entries_that_fail_say_why(place: Path) -> None:
    pytest.importorskip("jax")
    output = str(place / "o.neff")
    cases = [
        (["entry.py:breaks"], "[EIMP014]", "no data here"),
        (["entry.py:untraceable"], "[EIMP010]", "TracerBoolConversionError"),
        (["entry.py:nothing"], "[EIMP015]", "int"),
        (["entry.py:absent"], "[EARG004]", "absent"),
        (["entry.py:pair", "--ranks", "2"], "[EARG005]", "1 rank(s), --ranks says 2"),
        (["entry.py:build", "--config", '{"sise": 3}'], "[EARG006]", "'sise'"),
    ]
    processes = [run_cli(place, *arguments, "--output", output) for arguments, _, _ in cases]
    for process, (_, code, word) in zip(processes, cases, strict=True):
        status, out, err = finished(process)
        assert (status, out) == (1, "")
        last = err.strip().split("\n")[-1]
        assert code in last
        assert word in last
    with pytest.raises(CompileError) as caught:
        cache.compile_cached(str(place / "entry.py") + ":breaks", log=lambda line: None)
    assert caught.value.code == "EIMP014"
    status, _, err = finished(run_cli(place, "entry.py:pair", "--output", output))
    assert status == 0, err
    manifest = read_neff(place / "o.neff").manifest
    assert [t.name for t in manifest.inputs] == ["a"]
    assert [t.name for t in manifest.outputs] == ["y"]


def test_index_of_another_shape_is_ignored(place: Path) -> None:
    entry = str(place / "entry.py") + ":build"
    key = cache.fast_key(entry, {}, 1, Options())
    index = cache._index_file(key)
    index.parent.mkdir(parents=True)
    for content in (
        b"",
        b"[]",
        b"{}",
        json.dumps({"module": "../x", "sources": {}, "tools": {}}).encode(),
    ):
        index.write_bytes(content)
        assert cache.lookup(entry) is None
