"""The NumPy executor without jax: buckets, donated memory, bad arguments, memory use."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neuron_runtime.backends.base import Array
from neuron_runtime.backends.numpy_backend import NumpyExecutable, host_memory
from neuron_runtime.compiler.arena import Allocator
from neuron_runtime.compiler.passes.schedule import nodes
from neuron_runtime.compiler.plan import plan_program, reshaped_strides
from neuron_runtime.errors import NRT_STATUS, NrtError
from neuron_runtime.neff import neff_bytes
from tests.neuron_compiler import texts
from tests.neuron_compiler.support import (
    FakeWorld,
    compile_text,
    empty_outputs,
    function,
    run_one,
    run_world,
)


def test_loop() -> None:
    neff = compile_text(texts.LOOP)
    x = np.array([1, 2, 3], np.float32)
    for turns in (0, 1, 5):
        np.testing.assert_array_equal(run_one(neff, x, np.int32(turns))[0], x * 2**turns)


def test_independent_all_reduces_share_a_bucket() -> None:
    neff = compile_text(texts.two_gradients())
    assert neff.manifest.world_size == 2
    found = [(c.kind, c.op, c.tensors, c.nbytes, c.level) for c in neff.manifest.collectives]
    assert found == [
        ("all_reduce", "add", 2, 64, 0),
        ("all_reduce", "maximum", 1, 16, 0),
        ("all_reduce", "add", 1, 32, 1),
    ]
    kinds = [n.kind for n in nodes(neff.program.body)]
    assert kinds == ["segment", "all_reduce", "all_reduce", "segment", "all_reduce"]
    # Products are made in the bucket itself; the argument has to be copied into it.
    members = [m.direct for b in plan_program(neff.program).buckets.values() for m in b.members]
    assert members == [True, True, False, True]


def test_buckets_compute_the_right_sums() -> None:
    neff = compile_text(texts.two_gradients())
    rng = np.random.default_rng(0)
    parts = [
        {
            "arg0": rng.standard_normal(8).astype(np.float32),
            "arg1": rng.standard_normal(8).astype(np.float32),
            "arg2": rng.integers(-9, 9, 4).astype(np.int32),
        }
        for _ in range(2)
    ]
    world = FakeWorld(2)

    def work(links: Any) -> dict[str, Array]:
        executable = NumpyExecutable(neff, links)
        outputs = empty_outputs(neff)
        for _ in range(3):  # persistent requests work again and again
            executable.run(parts[links.rank], outputs)
        return outputs

    squares = parts[0]["arg0"] ** 2 + parts[1]["arg0"] ** 2
    negative = -(parts[0]["arg1"] + parts[1]["arg1"])
    for outputs in world.run(work):
        found = list(outputs.values())
        np.testing.assert_allclose(found[0], squares, rtol=1e-6)
        np.testing.assert_allclose(found[1], negative, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(found[2], np.maximum(parts[0]["arg2"], parts[1]["arg2"]))
        np.testing.assert_allclose(found[3], 2 * (squares + negative), rtol=1e-5, atol=1e-5)
    assert len(world.calls) == 9


@pytest.mark.parametrize("dtype", ["bf16", "f16", "i1", "i64", "f64"])
def test_all_reduce_of_other_types(dtype: str) -> None:
    type_ = f"tensor<6x{dtype}>"
    op = "or" if dtype == "i1" else "add"
    text = function(
        texts.all_reduce("%arg0", "%0", type_, op) + f"\n    return %0 : {type_}",
        f"%arg0: {type_}",
        type_,
    )
    neff = compile_text(text)
    info = neff.manifest.inputs[0]
    values = np.array([0, 1, 2, 3, 4, 5]).astype(info.numpy_dtype)
    result, _ = run_world(neff, {"arg0": values})
    expected = values if dtype == "i1" else values + values
    np.testing.assert_array_equal(result["result.0"].astype(float), expected.astype(float))


def test_a_group_of_one_needs_no_call() -> None:
    text = texts.two_gradients().replace(
        "[[0, 1]]> : tensor<1x2xi64>", "[[0], [1]]> : tensor<2x1xi64>"
    )
    neff = compile_text(text)
    assert neff.manifest.collectives == ()
    assert neff.manifest.world_size == 2


# -- donated memory ----------------------------------------------------------------------------

_MIXED = function(
    """
    %0 = stablehlo.add %arg0, %arg1 : tensor<3x3xf32>
    %1 = stablehlo.transpose %arg0, dims = [1, 0] : (tensor<3x3xf32>) -> tensor<3x3xf32>
    %2 = stablehlo.subtract %arg1, %1 : tensor<3x3xf32>
    %3 = stablehlo.multiply %arg2, %arg2 : tensor<3x3xf32>
    %4 = stablehlo.slice %3 [0:3, 0:1] : (tensor<3x3xf32>) -> tensor<3x1xf32>
    %5 = stablehlo.dot_general %0, %arg2, contracting_dims = [1] x [0] : (tensor<3x3xf32>, tensor<3x3xf32>) -> tensor<3x3xf32>
    return %2, %0, %arg0, %5, %3 : tensor<3x3xf32>, tensor<3x3xf32>, tensor<3x3xf32>, tensor<3x3xf32>, tensor<3x3xf32>
    """,  # noqa: E501
    "%arg0: tensor<3x3xf32>, %arg1: tensor<3x3xf32>, %arg2: tensor<3x3xf32>",
    "tensor<3x3xf32>, tensor<3x3xf32>, tensor<3x3xf32>, tensor<3x3xf32>, tensor<3x3xf32>",
)


def test_every_way_of_sharing_memory_gives_the_same() -> None:
    """All assignments of the three inputs' memory to the five outputs."""
    neff = compile_text(_MIXED)
    rng = np.random.default_rng(3)
    values = [rng.standard_normal((3, 3)).astype(np.float32) for _ in range(3)]
    expected = run_one(neff, *values)
    executable = NumpyExecutable(neff)
    out_names = [t.name for t in neff.manifest.outputs]
    tried = 0
    for places in itertools.product([None, 0, 1, 2], repeat=5):
        used = [p for p in places if p is not None]
        if len(set(used)) != len(used):
            continue
        inputs = {f"arg{i}": v.copy() for i, v in enumerate(values)}
        outputs = empty_outputs(neff)
        for name, place in zip(out_names, places, strict=True):
            if place is not None:
                outputs[name] = inputs[f"arg{place}"]
        executable.run(inputs, outputs)
        for name, wanted in zip(out_names, expected, strict=True):
            np.testing.assert_array_equal(outputs[name], wanted, err_msg=f"{places} {name}")
        tried += 1
    assert tried == 136


def test_partly_overlapping_and_strided_arrays() -> None:
    neff = compile_text(_MIXED)
    rng = np.random.default_rng(4)
    values = [rng.standard_normal((3, 3)).astype(np.float32) for _ in range(3)]
    expected = run_one(neff, *values)
    memory = np.zeros(64, np.float32)
    inputs = {"arg0": memory[4:13].reshape(3, 3), "arg1": memory[20:29].reshape(3, 3)}
    inputs["arg2"] = np.zeros((3, 6), np.float32)[:, ::2]
    for array, value in zip(inputs.values(), values, strict=True):
        array[...] = value
    outputs = empty_outputs(neff)
    names = list(outputs)
    outputs[names[0]] = memory[0:9].reshape(3, 3)  # overlaps arg0 in part
    outputs[names[1]] = memory[25:34].reshape(3, 3)  # overlaps arg1 in part
    outputs[names[3]] = np.zeros((3, 3), np.float32).T
    NumpyExecutable(neff).run(inputs, outputs)
    for name, wanted in zip(names, expected, strict=True):
        np.testing.assert_array_equal(outputs[name], wanted)


def test_results_are_written_straight_into_donated_memory() -> None:
    neff = compile_text(texts.MLP)
    executable = NumpyExecutable(neff)
    w = np.ones((4, 3), np.float32)
    x = np.ones((5, 4), np.float32)
    total = np.zeros((), np.float32)
    executable.run({"arg0": w, "arg1": x}, {"result.0.w": w, "result.1": total})
    assert executable._finish == []  # nothing had to be copied at the end
    fresh = np.ones((4, 3), np.float32)
    expected = run_one(neff, fresh, x)
    np.testing.assert_array_equal(w, expected[0])


# -- bad arguments -----------------------------------------------------------------------------


def test_bad_arguments_are_refused() -> None:
    neff = compile_text(texts.MLP)
    executable = NumpyExecutable(neff)
    good = {"arg0": np.ones((4, 3), np.float32), "arg1": np.ones((5, 4), np.float32)}
    outputs = empty_outputs(neff)
    read_only = np.zeros((4, 3), np.float32)
    read_only.setflags(write=False)
    shared = np.zeros((4, 3), np.float32)
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"arg0": good["arg0"]}, outputs, "input 'arg1' is missing"),
        ({**good, "extra": good["arg0"]}, outputs, "has no input 'extra'"),
        ({**good, "arg0": np.ones((3, 4), np.float32)}, outputs, r"float32\[3, 4\].*\[4, 3\]"),
        ({**good, "arg0": np.ones((4, 3))}, outputs, "float64"),
        (good, {"result.1": outputs["result.1"]}, "output 'result.0.w' is missing"),
        (good, {**outputs, "result.0.w": read_only}, "output 'result.0.w' is read-only"),
        (good, {"result.0.w": shared, "result.1": shared[0, 0:1].reshape(())}, "share memory"),
    ]
    for inputs, outs, message in cases:
        with pytest.raises(NrtError, match=message) as caught:
            executable.run(inputs, outs)
        assert caught.value.status is NRT_STATUS.NRT_INVALID
    executable.run(good, outputs)  # and it still works


def test_world_size_must_fit() -> None:
    neff = compile_text(texts.two_gradients())
    with pytest.raises(NrtError, match="for 2 ranks; load it with collectives"):
        NumpyExecutable(neff)
    with pytest.raises(NrtError, match="for 2 ranks, this world has 3"):
        FakeWorld(3).run(lambda links: NumpyExecutable(neff, links))


# -- memory ------------------------------------------------------------------------------------


def test_memory_comes_from_the_allocator_and_matches_the_manifest() -> None:
    neff = compile_text(texts.MLP)
    taken: list[int] = []

    def allocate(nbytes: int) -> Any:
        taken.append(nbytes)
        return host_memory(nbytes)

    executable = NumpyExecutable(neff, allocate=allocate)
    assert executable.memory.scratch == neff.manifest.hbm.scratch
    assert executable.memory.constants == neff.manifest.hbm.constants
    assert sum(taken) <= neff.manifest.hbm.constants + neff.manifest.hbm.scratch
    as_view = NumpyExecutable(neff, allocate=lambda n: memoryview(bytearray(n)))  # type: ignore[arg-type,return-value]
    outputs = empty_outputs(neff)
    as_view.run({"arg0": np.ones((4, 3), np.float32), "arg1": np.ones((5, 4), np.float32)}, outputs)
    assert np.isfinite(outputs["result.1"])


def test_dead_values_give_their_memory_back() -> None:
    lines = ["    %0 = stablehlo.negate %arg0 : tensor<1000xf32>"]
    for i in range(50):  # a chain that cannot be done in place
        lines.append(f"    %r{i} = stablehlo.reverse %{i}, dims = [0] : tensor<1000xf32>")
        lines.append(f"    %{i + 1} = stablehlo.add %{i}, %r{i} : tensor<1000xf32>")
    lines.append("    return %50 : tensor<1000xf32>")
    neff = compile_text(function("\n".join(lines), "%arg0: tensor<1000xf32>", "tensor<1000xf32>"))
    assert neff.manifest.hbm.scratch <= 2 * 4032
    x = np.arange(1000, dtype=np.float32)
    expected = -x
    for _ in range(50):
        expected = expected + expected[::-1]
    np.testing.assert_allclose(run_one(neff, x)[0], expected, rtol=1e-5)


def test_allocator_never_overlaps_and_reuses() -> None:
    rng = np.random.default_rng(9)
    allocator = Allocator()
    live: list[tuple[int, int]] = []
    total_live = peak = 0
    for _ in range(3000):
        if live and rng.random() < 0.5:
            offset, size = live.pop(int(rng.integers(len(live))))
            allocator.free(offset, size)
            total_live -= size
        else:
            size = int(rng.integers(1, 5000))
            align = 4096 if rng.random() < 0.1 else 64
            offset = allocator.allocate(size, align)
            assert offset % align == 0
            for other, length in live:
                assert offset + size <= other or other + length <= offset
            live.append((offset, size))
            total_live += size
            peak = max(peak, total_live)
    assert allocator.high <= 2 * peak
    for offset, size in live:
        allocator.free(offset, size)
    assert allocator._holes == [(0, allocator.high)]


@pytest.mark.parametrize(
    ("shape", "order", "new"),
    [
        ((2, 3, 4), (0, 1, 2), (6, 4)),
        ((2, 3, 4), (1, 0, 2), (6, 4)),
        ((2, 3, 4), (1, 0, 2), (3, 2, 2, 2)),
        ((2, 3, 4), (2, 1, 0), (4, 6)),
        ((1, 6, 1), (2, 0, 1), (2, 3)),
        ((4,), (0,), (1, 2, 1, 2)),
        ((2, 2, 2), (1, 0, 2), (2, 4)),
        ((2, 6), (1, 0), (3, 2, 2)),
    ],
)
def test_reshape_is_a_view_exactly_where_numpy_makes_one(
    shape: tuple[int, ...], order: tuple[int, ...], new: tuple[int, ...]
) -> None:
    array = np.zeros(shape, np.int8).transpose(order)
    view = array.reshape(new)
    strides = reshaped_strides(array.shape, array.strides, new)
    assert (strides is not None) == np.shares_memory(view, array)
    if strides is not None:
        pairs = zip(strides, view.strides, new, strict=True)
        assert all(n == 1 or a == b for a, b, n in pairs)


def test_execution_needs_numpy_and_ml_dtypes_only(tmp_path: Path) -> None:
    path = tmp_path / "mlp.neff"
    path.write_bytes(neff_bytes(compile_text(texts.MLP)))
    code = f"""
import sys
denied = ("jax", "jaxlib", "scipy", "msgspec", "typer", "mpi4py", "scheduler", "clusterctl")
class Deny:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in denied:
            raise ImportError(name + " is not allowed here")
sys.meta_path.insert(0, Deny())
import pathlib, numpy as np
from neuron_runtime.neff import read_neff
from neuron_runtime.backends.numpy_backend import NumpyExecutable
from neuron_runtime.compiler.cache import compile_cached, lookup
neff = read_neff(pathlib.Path({str(path)!r}))
total = np.zeros((), np.float32)
w = np.ones((4, 3), np.float32)
NumpyExecutable(neff).run(
    {{"arg0": w, "arg1": np.ones((5, 4), np.float32)}}, {{"result.0.w": w, "result.1": total}}
)
top = {{m.split(".")[0] for m in sys.modules}}
outside = top - set(sys.stdlib_module_names) - {{"numpy", "ml_dtypes", "neuron_runtime"}}
print(float(total), sorted(m for m in outside if not m.startswith("_")))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    total, _, outside = done.stdout.strip().partition(" ")
    assert np.isfinite(float(total))
    assert outside == "[]"
