"""Compiled programs against jitted JAX in one process."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from neuron_runtime.backends.numpy_backend import NumpyExecutable
from neuron_runtime.compiler.emit import Options, compile_imported
from neuron_runtime.compiler.importers import jax_callable
from neuron_runtime.neff import Neff, neff_bytes, read_neff
from tests.neuron_compiler.support import compile_text, run_world

pytestmark = pytest.mark.jax
STEPS = 5


def _tokens(steps: int = STEPS) -> Any:
    from tests.neuron_compiler import jax_programs as programs

    rng = np.random.default_rng(1)
    shape = (programs.BATCH, programs.SEQ + 1)
    return rng.integers(0, programs.VOCAB, shape, dtype=np.int32)


def _reference(jax: ModuleType, layers: int) -> list[Any]:
    """State and loss after some steps of the single-device program."""
    from tests.neuron_compiler import jax_programs as programs

    p = programs.params(layers)
    zero = jax.tree.map(np.zeros_like, p)
    state: Any = (p, zero, zero, np.float32(0))
    step = jax.jit(programs.train)
    for _ in range(STEPS):
        *state, value = step(*state, _tokens())
    return [np.asarray(a) for a in jax.tree.leaves((tuple(state), value))]


def _compile(name: str, ranks: int, monkeypatch: pytest.MonkeyPatch, **config: Any) -> Neff:
    entry = f"tests.neuron_compiler.jax_programs:{name}"
    imported = jax_callable.import_jax_callable(entry, config, ranks)
    return read_neff(neff_bytes(compile_imported(imported, Options())))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_transformer_step_agrees_with_one_device(
    jax: ModuleType, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.neuron_compiler import jax_programs as programs

    neff = _compile("data_parallel", ranks, monkeypatch)
    program = programs.data_parallel(ranks)
    leaves = [np.asarray(a) for a in jax.tree.leaves(program.args[:4])] + [_tokens()]
    names = [t.name for t in neff.manifest.inputs]
    assert names[0] == "params.emb"
    assert names[-1] == "tokens"
    arrays = dict(zip(names, leaves, strict=True))
    # Everything but the loss takes the place of an input.
    assert len(neff.manifest.aliases) == len(neff.manifest.outputs) - 1
    result, world = run_world(neff, arrays, STEPS, feed_back=True)
    if ranks > 1:  # all gradients and the loss in one call a step
        assert len(world.calls) == STEPS
        assert [c.tensors for c in neff.manifest.collectives] == [len(leaves[:-1]) // 3 + 1]
    for expected, (name, found) in zip(_reference(jax, 2), result.items(), strict=True):
        scale = max(1e-3, float(np.abs(expected).max()))
        # Adam divides by the gradient's size: the key's bias gradient is rounding noise only.
        bound = 1e-5 if name in ("loss", "t") or name.startswith("params") else 3e-5
        assert float(np.abs(found - expected).max()) <= bound * max(scale, 1.0), name


@pytest.mark.parametrize(
    "name",
    ["tensor_parallel", "fsdp", "moe", "ring", "scan", "mesh_2d", "gather_dim1", "bf16"],
)
def test_parallel_program_agrees(jax: ModuleType, name: str) -> None:
    from tests.neuron_compiler import jax_programs as programs

    function, in_specs, out_specs, axes, args = programs.sharded(name)
    automatic = (jax.sharding.AxisType.Auto,) * len(axes)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=automatic)
    mapped = jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    )
    neff = compile_text(mapped.lower(*args).as_text())
    assert neff.manifest.world_size == 4
    assert dict(neff.manifest.mesh) == axes
    arrays = dict(zip((t.name for t in neff.manifest.inputs), args, strict=True))
    result, _ = run_world(neff, arrays)
    expected = jax.tree.leaves(mapped(*args))
    tolerance = 2e-2 if name == "bf16" else 1e-5
    for found, wanted in zip(result.values(), expected, strict=True):
        np.testing.assert_allclose(
            found.astype(np.float32),
            np.asarray(wanted).astype(np.float32),
            rtol=tolerance,
            atol=tolerance,
        )


def test_automatic_sharding_is_refused_with_the_recipe(jax: ModuleType) -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    x = jax.device_put(np.ones((8, 4), np.float32), sharding)
    text = jax.jit(lambda a: a @ a.T).lower(x).as_text()
    with pytest.raises(RuntimeError, match=r"EVRF010.*jax\.shard_map"):
        compile_text(text)


def test_computation_outside_shard_map_is_refused(jax: ModuleType) -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    inner = jax.shard_map(lambda a: a * 2, mesh=mesh, in_specs=spec, out_specs=spec)
    text = jax.jit(lambda a: inner(a) + 1).lower(np.ones((8, 4), np.float32)).as_text()
    with pytest.raises(RuntimeError, match=r"EVRF010.*add \(line \d+\)"):
        compile_text(text)


def test_loss_falls_over_many_steps(jax: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.neuron_compiler import jax_programs as programs

    neff = _compile("data_parallel", 1, monkeypatch, layers=1)
    program = programs.data_parallel(1, layers=1)
    leaves = [np.array(a) for a in jax.tree.leaves(program.args[:4])] + [_tokens()]
    inputs = dict(zip((t.name for t in neff.manifest.inputs), leaves, strict=True))
    outputs: dict[str, Any] = {"loss": np.zeros((), np.float32)}
    for info in neff.manifest.outputs:
        source = neff.manifest.aliased_input(info.name)
        if source is not None:
            outputs[info.name] = inputs[source]
    executable = NumpyExecutable(neff)
    losses = []
    for _ in range(30):
        executable.run(inputs, outputs)
        losses.append(float(outputs["loss"]))
    assert losses[0] == pytest.approx(np.log(programs.VOCAB), abs=0.1)
    assert losses[-1] < losses[0] - 0.5
