"""The NEFF file: round trip, header, and everything that can be wrong with one."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import random
import stat
import struct
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neuron_runtime import neff as container
from neuron_runtime.compiler.emit import Options, compile_imported
from neuron_runtime.compiler.importers.stablehlo import import_stablehlo
from neuron_runtime.errors import NRT_STATUS, NrtError
from neuron_runtime.neff import HEADER, Neff, neff_bytes, read_neff, write_neff
from tests.neuron_compiler import texts
from tests.neuron_compiler.support import run_one


@pytest.fixture(scope="module")
def built() -> Neff:
    return compile_imported(import_stablehlo(texts.MLP), Options())


@pytest.fixture(scope="module")
def raw(built: Neff) -> bytes:
    return neff_bytes(built)


def refused(raw: bytes, message: str, status: NRT_STATUS = NRT_STATUS.NRT_INVALID) -> None:
    with pytest.raises(NrtError, match=message) as caught:
        read_neff(raw)
    assert caught.value.status is status
    assert str(caught.value).startswith(f"NRT Error {status.name}({int(status)}): ")


def repacked(raw: bytes, change: Callable[[dict[str, bytes]], None]) -> bytes:
    """The file with changed members and a right header."""
    members: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(raw[1024:])) as tar:
        for info in tar.getmembers():
            file = tar.extractfile(info)
            assert file is not None
            members[info.name] = file.read()
    change(members)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    data = buffer.getvalue()
    fields = list(HEADER.unpack(raw[:1024]))
    fields[2] = len(data)
    return HEADER.pack(*fields) + data


def test_round_trip(built: Neff, raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.neff"
    write_neff(path, built)
    assert path.read_bytes() == raw  # the same program gives the same bytes
    again = read_neff(path, validate_hash=True)
    assert again.manifest == built.manifest
    assert again.stablehlo == texts.MLP
    assert again.program.body == built.program.body
    assert again.program.types == built.program.types
    for name, array in built.program.constants.items():
        np.testing.assert_array_equal(again.program.constants[name], array)
    assert built.program.constants, "the test program has a constant kept as an array"
    assert neff_bytes(again) == raw


def test_manifest_says_what_the_program_is(built: Neff) -> None:
    manifest = built.manifest
    assert [(t.name, t.dtype, t.shape) for t in manifest.inputs] == [
        ("arg0", "float32", (4, 3)),
        ("arg1", "float32", (5, 4)),
    ]
    assert [t.name for t in manifest.outputs] == ["result.0.w", "result.1"]
    assert manifest.aliased_input("result.0.w") == "arg0"
    assert manifest.aliased_input("result.1") is None
    assert manifest.world_size == 1
    assert manifest.requested_cores == 1
    assert manifest.target == "trn1"
    # 2 products of 2mkn, tanh 15, sum 15, add 20, subtract 12
    assert manifest.flops == 2 * 2 * 5 * 4 * 3 + 15 + 15 + 20 + 12
    assert manifest.hbm.inputs == 4 * (12 + 20)
    assert manifest.hbm.total > manifest.hbm.inputs + manifest.hbm.outputs
    with pytest.raises(KeyError, match="there are: arg0, arg1"):
        manifest.input("nope")


def test_header_fields(built: Neff, raw: bytes) -> None:
    assert struct.unpack("<5Q", raw[:40]) == (2, 1024, len(raw) - 1024, 1, 1)
    assert raw[40:168].rstrip(b"\0").decode() == built.manifest.compiler_version
    assert struct.unpack("<I", raw[168:172]) == (1,)
    assert raw[220:476].rstrip(b"\0") == b"mlp"
    assert struct.unpack("<I", raw[476:480]) == (1,)
    assert struct.unpack("<I", raw[552:556]) == (1,)  # lnc_size
    assert raw[556:1024] == bytes(468)


def test_ordinary_tar_reads_it(raw: bytes) -> None:
    with tarfile.open(fileobj=io.BytesIO(raw[1024:])) as tar:
        assert {"manifest.json", "program.json", "stablehlo.mlir", "constants/c0.bin"} == set(
            tar.getnames()
        )


def test_written_file_is_whole_or_absent(
    built: Neff, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "b.neff"
    path.write_bytes(b"old")
    real = os.fsync

    def full(handle: int) -> None:
        if stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(container.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_neff(path, built)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["b.neff"]


def test_unsupported_version(raw: bytes) -> None:
    fields = list(HEADER.unpack(raw[:1024]))
    fields[3:5] = [2, 0]
    refused(
        HEADER.pack(*fields) + raw[1024:],
        "NEFF version mismatch supported: 1.1 received: 2.0",
        NRT_STATUS.NRT_UNSUPPORTED_NEFF_VERSION,
    )


def test_bad_headers(raw: bytes, tmp_path: Path) -> None:
    refused(b"", "truncated: 0 bytes")
    refused(raw[:1000], "truncated: 1000 bytes")
    refused(raw[:-512], r"truncated: header says \d+ bytes of data, the file has \d+")
    refused(raw + b"x", "trailing bytes")
    refused(b"\x7fELF" + raw[4:], "not a NEFF")
    fields = list(HEADER.unpack(raw[:1024]))
    fields[2] = 2**63
    refused(HEADER.pack(*fields) + raw[1024:], "truncated")
    path = tmp_path / "empty.neff"
    path.write_bytes(b"")
    with pytest.raises(NrtError, match=r"empty\.neff: truncated"):
        read_neff(path)
    with pytest.raises(FileNotFoundError):
        read_neff(tmp_path / "none.neff")


def test_hash_is_checked_when_asked(raw: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    place = raw.index(b"stablehlo.tanh %arg0")
    changed = raw[:place] + b"STABLEHLO" + raw[place + 9 :]
    monkeypatch.delenv("NEURON_RT_VALIDATE_HASH", raising=False)
    read_neff(changed)
    with pytest.raises(NrtError, match="hash"):
        read_neff(changed, validate_hash=True)
    monkeypatch.setenv("NEURON_RT_VALIDATE_HASH", "TRUE")
    refused(changed, "hash of the data does not match")
    read_neff(raw)


def edit_json(raw: bytes, member: str, edit: Callable[[Any], None]) -> bytes:
    def change(members: dict[str, bytes]) -> None:
        value = json.loads(members[member])
        edit(value)
        members[member] = json.dumps(value).encode()

    return repacked(raw, change)


def test_wrong_members(raw: bytes) -> None:
    refused(repacked(raw, lambda m: m.pop("program.json") and None), "program.json is missing")
    refused(repacked(raw, lambda m: m.update({"x.so": b"1"})), "unknown member 'x.so'")
    refused(repacked(raw, lambda m: m.update({"constants/zz.bin": b""})), "is not a constant")
    refused(repacked(raw, lambda m: m.update({"constants/c0.bin": b"1"})), "has 1 bytes")
    refused(repacked(raw, lambda m: m.update({"manifest.json": b"{"})), "manifest.json is not JSON")
    deep = b"[" * 100_000
    refused(repacked(raw, lambda m: m.update({"program.json": deep})), "program.json is not JSON")
    huge = b'{"x": ' + b"9" * 10_000 + b"}"
    refused(repacked(raw, lambda m: m.update({"manifest.json": huge})), "manifest.json")


def test_wrong_manifests(raw: bytes) -> None:
    def put(key: str, value: Any) -> bytes:
        return edit_json(raw, "manifest.json", lambda m: m.update({key: value}))

    refused(put("target", "gpu"), "target 'gpu' is unknown")
    refused(put("world_size", -1), "world_size is out of range")
    refused(put("world_size", True), "world_size is not int")
    refused(put("lnc_size", 2), "differ in lnc_size")
    refused(put("surprise", 1), "missing or unknown fields")
    refused(put("aliases", [[0, 9]]), "aliases names a tensor that does not exist")
    refused(put("aliases", [[1, 0]]), "joins tensors of two types")

    def forget(m: Any) -> None:
        m["inputs"], m["aliases"] = [], []

    refused(edit_json(raw, "manifest.json", forget), "the manifest has 0 inputs")

    def grow(m: Any) -> None:
        m["hbm"]["scratch"] += 64

    refused(edit_json(raw, "manifest.json", grow), "memory for scratch")


def test_wrong_programs(raw: bytes) -> None:
    def edit(change: Callable[[Any], None]) -> bytes:
        return edit_json(raw, "program.json", change)

    def op(program: Any, name: str) -> Any:
        return next(o for o in program["body"]["ops"] if o[0] == name)

    refused(edit(lambda p: p.update(ir_version=99)), "ir_version is 99")
    refused(edit(lambda p: op(p, "tanh").__setitem__(0, "system")), "unknown operation 'system'")
    refused(edit(lambda p: op(p, "tanh").__setitem__(1, [10**6])), "operand 1000000 is not defined")
    refused(edit(lambda p: op(p, "add")[1].pop()), "takes 2 operands")
    refused(edit(lambda p: p["types"].__setitem__(0, ["float32", [2**50]])), "bad shape|elements")
    refused(edit(lambda p: p["types"].__setitem__(0, ["object", [1]])), "unknown element type")
    refused(edit(lambda p: op(p, "dot_general")[3].update(lhs_contract=[7])), "out of range")
    refused(edit(lambda p: p["body"]["results"].reverse()), "the manifest says otherwise")
    refused(edit(lambda p: p["constants"].update({"../../x": ["float32", [1]]})), "is missing")


def outcome(raw: bytes) -> NRT_STATUS | None:
    """The status a file is refused with, None when it passes; anything else is an error."""
    try:
        read_neff(raw)
    except NrtError as error:
        status = error.status
    else:
        return None
    assert status in (NRT_STATUS.NRT_INVALID, NRT_STATUS.NRT_UNSUPPORTED_NEFF_VERSION)
    return status


def test_random_damage_is_always_refused_or_harmless(raw: bytes) -> None:
    """Bytes flipped, cut, doubled: an NrtError or a program that still passes all checks."""
    rng = random.Random(2)
    refusals = 0
    for turn in range(2000):
        if turn == 1800:  # slow, so only for the last ones
            tracemalloc.start()
        data = bytearray(raw)
        kind = rng.random()
        if kind < 0.15:
            del data[rng.randrange(len(data)) :]
        elif kind < 0.25:
            at = rng.randrange(len(data))
            data[at:at] = data[at : at + rng.randrange(1, 600)]
        else:
            for _ in range(rng.choice((1, 1, 2, 8, 40))):
                data[rng.randrange(len(data))] = rng.randrange(256)
        refusals += outcome(bytes(data)) is not None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refusals > 1000
    assert peak < 20 * len(raw) + 2**20


_STRANGE = (
    0,
    1,
    -1,
    2,
    2**31,
    2**63,
    2**200,
    True,
    None,
    "",
    "float32",
    "x" * 99,
    [],
    {},
    [0],
    1.5,
)


def _mutate(value: Any, rng: random.Random) -> Any:
    """One random change somewhere inside a JSON value."""
    places: list[tuple[Any, Any]] = []

    def walk(v: Any) -> None:
        items = v.items() if isinstance(v, dict) else enumerate(v) if isinstance(v, list) else ()
        for key, inner in items:
            places.append((v, key))
            walk(inner)

    walk(value)
    holder, key = rng.choice(places)
    action = rng.random()
    if action < 0.6:
        old = holder[key]
        near = old + rng.choice((-1, 1)) if type(old) is int else rng.choice(_STRANGE)
        holder[key] = near if rng.random() < 0.5 else rng.choice(_STRANGE)
    elif action < 0.75:
        del holder[key]
    else:
        other, place = rng.choice(places)
        with contextlib.suppress(KeyError, IndexError):
            holder[key] = copy.deepcopy(other[place])
    return value


@pytest.mark.parametrize("source", ["MLP", "LOOP", "GRADS"])
@pytest.mark.parametrize("member", ["program.json", "manifest.json"])
def test_mutated_structure_never_crashes_the_reader(source: str, member: str) -> None:
    """Well-formed files with damaged JSON: NRT_INVALID, or accepted by every check."""
    text = texts.two_gradients() if source == "GRADS" else getattr(texts, source)
    raw = neff_bytes(compile_imported(import_stablehlo(text), Options()))
    rng = random.Random(hash_free_seed(source, member))
    refusals = 0
    for _ in range(250):
        changed = edit_json(raw, member, lambda v: _mutate(v, rng) and None)
        refusals += outcome(changed) is NRT_STATUS.NRT_INVALID
    assert refusals > 100


def hash_free_seed(*words: str) -> int:
    """A seed that is the same in every process."""
    return sum(ord(c) * (i + 1) for i, c in enumerate("".join(words)))


def test_constant_survives_and_is_aligned(raw: bytes) -> None:
    neff = read_neff(raw)
    w = np.ones((4, 3), np.float32)
    x = np.zeros((5, 4), np.float32)
    c = np.array([0.1, 0.2, 0.30000001, -1.5, *np.arange(2.5, 18)], np.float32).reshape(5, 4)
    hidden = np.tanh(c @ w)
    out, total = run_one(neff, w, x)
    np.testing.assert_allclose(out, w - c.T @ hidden, rtol=1e-6)
    np.testing.assert_allclose(total, hidden.sum(), rtol=1e-6)
    assert all(a.ctypes.data % 16 == 0 for a in neff.program.constants.values())
