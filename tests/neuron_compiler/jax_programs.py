"""Programs for the comparisons with jax (imported only where jax is installed)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from neuron_runtime.compiler.spec import JaxProgram

VOCAB, SEQ, DIM, HEADS, BATCH = 64, 16, 32, 4, 8


def params(layers: int, seed: int = 0) -> Any:
    """Weights of a small decoder-only transformer."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Any:
        return (rng.standard_normal(shape) * 0.05).astype(np.float32)

    ones = np.ones(DIM, np.float32)
    blocks = [
        {
            "ln1": ones,
            "qkv": normal(DIM, 3 * DIM),
            "out": normal(DIM, DIM),
            "ln2": ones,
            "up": normal(DIM, 4 * DIM),
            "down": normal(4 * DIM, DIM),
        }
        for _ in range(layers)
    ]
    return {"emb": normal(VOCAB, DIM), "pos": normal(SEQ, DIM), "lnf": ones, "layers": blocks}


def _norm(x: Any, gain: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    var = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-5) * gain


def _logits(p: Any, tokens: Any) -> Any:
    batch, seq = tokens.shape
    h = p["emb"][tokens] + p["pos"]
    mask = jnp.tril(jnp.ones((seq, seq), bool))
    for block in p["layers"]:
        q, k, v = jnp.split(_norm(h, block["ln1"]) @ block["qkv"], 3, -1)
        q, k, v = (t.reshape(batch, seq, HEADS, -1).transpose(0, 2, 1, 3) for t in (q, k, v))
        a = jnp.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(DIM // HEADS)
        a = jax.nn.softmax(jnp.where(mask, a, -1e9), -1)
        mixed = jnp.einsum("bhqk,bhkd->bhqd", a, v).transpose(0, 2, 1, 3)
        h = h + mixed.reshape(batch, seq, DIM) @ block["out"]
        h = h + jax.nn.gelu(_norm(h, block["ln2"]) @ block["up"]) @ block["down"]
    return _norm(h, p["lnf"]) @ p["emb"].T


def loss(p: Any, tokens: Any) -> Any:
    """Mean next-token cross entropy."""
    logp = jax.nn.log_softmax(_logits(p, tokens[:, :-1]))
    return -jnp.take_along_axis(logp, tokens[:, 1:, None], -1).mean()


def adam(p: Any, m: Any, v: Any, t: Any, grads: Any) -> Any:
    """One Adam update."""
    t = t + 1
    m = jax.tree.map(lambda a, g: 0.9 * a + 0.1 * g, m, grads)
    v = jax.tree.map(lambda a, g: 0.999 * a + 0.001 * g * g, v, grads)
    scale = jnp.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    p = jax.tree.map(lambda w, a, b: w - 1e-3 * scale * a / (jnp.sqrt(b) + 1e-6), p, m, v)
    return p, m, v, t


def train(p: Any, m: Any, v: Any, t: Any, tokens: Any) -> Any:
    """One step on one device."""
    value, grads = jax.value_and_grad(loss)(p, tokens)
    return (*adam(p, m, v, t, grads), value)


def train_parallel(p: Any, m: Any, v: Any, t: Any, tokens: Any) -> Any:
    """One step of one of several data-parallel ranks."""
    value, grads = lax.pmean(jax.value_and_grad(loss)(p, tokens), "data")
    return (*adam(p, m, v, t, grads), value)


def data_parallel(ranks: int, layers: int = 2) -> JaxProgram:
    """The training step over ``ranks`` ranks."""
    p = params(layers)
    zero = jax.tree.map(np.zeros_like, p)
    tokens = jax.ShapeDtypeStruct((BATCH, SEQ + 1), jnp.int32)
    return JaxProgram(
        train_parallel,
        (p, zero, zero, np.float32(0), tokens),
        mesh={"data": ranks},
        in_specs=(P(), P(), P(), P(), P("data")),
        out_specs=P(),
        donate=(0, 1, 2, 3),
        arg_names=("params", "m", "v", "t", "tokens"),
        result_names=("params", "m", "v", "t", "loss"),
    )


def sharded(name: str) -> tuple[Any, Any, Any, dict[str, int], tuple[Any, ...]]:
    """(function, in_specs, out_specs, mesh, example arguments) of the named program."""
    rng = np.random.default_rng(5)

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32) * 0.3

    x = normal(16, 8)
    w1, w2 = normal(8, 16), normal(16, 8)
    programs: dict[str, Any] = {
        "tensor_parallel": (
            _tensor_parallel,
            (P(), P(None, "x"), P("x", None)),
            (P(), P(None, "x"), P("x", None)),
            {"x": 4},
            (x, w1, w2),
        ),
        "fsdp": (
            _fsdp,
            (P("x"), P("x"), P("x")),
            (P(), P("x"), P("x")),
            {"x": 4},
            (x, w1, w2),
        ),
        "moe": (_moe, (P("x"), P("x")), P("x"), {"x": 4}, (x, normal(4, 8, 8))),
        "ring": (_ring, (P("x"), P("x")), (P(), P("x")), {"x": 4}, (x, normal(16, 8))),
        "scan": (_scanned, (P("x"), P()), (P(), P()), {"x": 4}, (x, normal(3, 8, 8))),
        "mesh_2d": (
            _mesh_2d,
            (P("d"), P(None, "m"), P("m", None)),
            (P(), P(None, "m"), P("m", None)),
            {"d": 2, "m": 2},
            (x, w1, w2),
        ),
        "gather_dim1": (_gather_dim1, P(None, "x"), (P(), P(None, "x")), {"x": 4}, (x,)),
        "bf16": (_bf16, (P("x"), P()), (P(), P()), {"x": 4}, (x, w1)),
    }
    found: tuple[Any, Any, Any, dict[str, int], tuple[Any, ...]] = programs[name]
    return found


def _tensor_parallel(x: Any, a: Any, b: Any) -> Any:
    def f(a: Any, b: Any) -> Any:
        h = jnp.tanh(x @ a)
        return (lax.psum(h @ b, "x") ** 2).mean()

    value, grads = jax.value_and_grad(f, (0, 1))(a, b)
    return value, a - 0.1 * grads[0], b - 0.1 * grads[1]


def _fsdp(x: Any, a: Any, b: Any) -> Any:
    def f(a: Any, b: Any) -> Any:
        whole_a = lax.all_gather(a, "x", tiled=True)
        whole_b = lax.all_gather(b, "x", tiled=True)
        return (jax.nn.gelu(x @ whole_a) @ whole_b).mean()

    value, grads = jax.value_and_grad(f, (0, 1))(a, b)
    return lax.pmean(value, "x"), a - 0.1 * grads[0], b - 0.1 * grads[1]


def _moe(x: Any, w: Any) -> Any:
    sent = lax.all_to_all(x.reshape(4, 1, 8), "x", 0, 1)
    done = jnp.maximum(sent @ w[0], 0)
    return lax.all_to_all(done, "x", 1, 0).reshape(4, 8)


def _ring(q: Any, k: Any) -> Any:
    pairs = [(i, (i + 1) % 4) for i in range(4)]

    def f(k: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            block, total = carry
            total = total + jax.nn.softmax(q @ block.T).sum()
            return (lax.ppermute(block, "x", pairs), total), None

        (_, total), _ = lax.scan(body, (k, jnp.float32(0)), None, length=4)
        return total**2

    value, grad = jax.value_and_grad(f)(k)
    return lax.psum(value, "x"), grad


def _scanned(x: Any, w: Any) -> Any:
    def f(w: Any) -> Any:
        def body(h: Any, layer: Any) -> Any:
            h = jnp.tanh(h @ layer)
            return h - lax.pmean(h, "x"), h.sum()

        h, sums = lax.scan(body, x, w)
        return (h**2).sum() + sums.sum()

    value, grad = jax.value_and_grad(f)(w)
    return lax.psum(value, "x"), lax.pmean(grad, "x")


def _mesh_2d(x: Any, a: Any, b: Any) -> Any:
    def f(a: Any, b: Any) -> Any:
        return (lax.psum(jnp.tanh(x @ a) @ b, "m") ** 2).mean()

    value, grads = jax.value_and_grad(f, (0, 1))(a, b)
    grads = lax.pmean(grads, "d")
    return lax.pmean(value, "d"), a - 0.1 * grads[0], b - 0.1 * grads[1]


def _gather_dim1(x: Any) -> Any:
    whole = lax.all_gather(x, "x", axis=1, tiled=True)
    part = lax.psum_scatter(whole * 2, "x", scatter_dimension=1, tiled=True)
    return whole, part + lax.axis_index("x").astype(jnp.float32)


def _bf16(x: Any, w: Any) -> Any:
    def f(w: Any) -> Any:
        h = jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))
        return h.astype(jnp.float32).sum()

    value, grad = jax.value_and_grad(f)(w)
    return lax.psum(value, "x"), lax.psum(grad.astype(jnp.bfloat16), "x")
