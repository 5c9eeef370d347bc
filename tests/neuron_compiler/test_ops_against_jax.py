"""Single operations and small idioms against JAX, over types and edge values."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.neuron_compiler.support import compile_text, run_one

pytestmark = pytest.mark.jax

Function = Callable[..., Any]
RNG = np.random.default_rng(7)
X = (RNG.standard_normal((4, 6)) * 2).astype(np.float32)
Y = (RNG.standard_normal((4, 6)) + 2).astype(np.float32)
POSITIVE = np.abs(X) + np.float32(0.1)
EDGES = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-30, 3e38, 0.5, -0.5, 2.5], np.float32)
INTS = np.array([[7, -7, 0, 2**31 - 1], [-(2**31), 3, -1, 12]], np.int32)
DIVISORS = np.array([[2, 2, 0, 5], [-1, -3, 4, 31]], np.int32)
U = np.array([[1, 2, 2**32 - 1, 7]], np.uint32)


def check(jax: ModuleType, function: Function, *args: Any, rtol: float = 2e-6, atol: float = 1e-6):
    """The compiled function gives what the jitted one does."""
    jitted = jax.jit(function, keep_unused=True)
    expected = jax.tree.leaves(jitted(*args))
    neff = compile_text(jitted.lower(*args).as_text())
    found = run_one(neff, *[np.asarray(a) for a in jax.tree.leaves(args)])
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        wanted = np.asarray(b)
        assert a.dtype == wanted.dtype
        assert a.shape == wanted.shape
        wide = np.float64 if wanted.dtype.kind not in "iub" else wanted.dtype
        np.testing.assert_allclose(a.astype(wide), wanted.astype(wide), rtol=rtol, atol=atol)


UNARY = [
    "abs",
    "negative",
    "exp",
    "expm1",
    "sin",
    "cos",
    "tan",
    "tanh",
    "floor",
    "ceil",
    "rint",
    "sign",
    "logistic",
    "sqrt",
    "rsqrt",
    "cbrt",
    "log",
    "log1p",
    "round",
    "erf",
    "erfc",
    "erf_inv",
    "square",
    "isfinite",
    "logical_not",
]


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_unary(jax: ModuleType, name: str, dtype: str) -> None:
    lax, jnp = jax.lax, jax.numpy
    special = {
        "logistic": lax.logistic,
        "rsqrt": lax.rsqrt,
        "round": lax.round,
        "erf": lax.erf,
        "erfc": lax.erfc,
        "erf_inv": lax.erf_inv,
        "cbrt": lax.cbrt,
        "logical_not": lambda a: ~(a > 0),
    }
    function = special.get(name) or getattr(jnp, name)
    values = POSITIVE if name in ("sqrt", "rsqrt", "log", "log1p") else X
    values = np.clip(X / 4, -0.99, 0.99) if name == "erf_inv" else values
    rtol = {"float32": 3e-6, "bfloat16": 1e-2, "float16": 2e-3}[dtype]
    check(jax, function, jnp.asarray(values, dtype), rtol=rtol, atol=rtol)


@pytest.mark.parametrize(
    "name", ["exp", "tanh", "abs", "sign", "erf", "floor", "isfinite", "rsqrt"]
)
def test_unary_edges(jax: ModuleType, name: str) -> None:
    function = getattr(jax.lax, name, None) or getattr(jax.numpy, name)
    with np.errstate(all="ignore"):
        check(jax, function, EDGES)


@pytest.mark.parametrize(
    "name",
    [
        "add",
        "subtract",
        "multiply",
        "divide",
        "maximum",
        "minimum",
        "power",
        "remainder",
        "arctan2",
        "greater",
        "less_equal",
        "equal",
        "not_equal",
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_binary(jax: ModuleType, name: str, dtype: str) -> None:
    jnp = jax.numpy
    left = POSITIVE if name == "power" else X
    rtol = 1e-5 if dtype == "float32" else 1e-2
    check(
        jax,
        getattr(jnp, name),
        jnp.asarray(left, dtype),
        jnp.asarray(Y, dtype),
        rtol=rtol,
        atol=rtol,
    )


@pytest.mark.parametrize(
    "name",
    [
        "add",
        "sub",
        "mul",
        "div",
        "rem",
        "max",
        "min",
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
        "shift_left",
        "shift_right_logical",
        "shift_right_arithmetic",
    ],
)
def test_integers(jax: ModuleType, name: str) -> None:
    function = getattr(jax.lax, name)
    check(jax, function, INTS, DIVISORS)
    if name not in ("div", "rem"):
        check(jax, function, U, np.array([[0, 31, 32, 40]], np.uint32))


def test_integer_helpers(jax: ModuleType) -> None:
    jnp, lax = jax.numpy, jax.lax
    check(
        jax,
        lambda a, b: (a // b, a % b, ~a, abs(a), jnp.sign(a)),
        INTS,
        np.where(DIVISORS == 0, 1, DIVISORS),
    )
    check(jax, lambda a: (lax.population_count(a), a.astype(jnp.int8), a > 3, -a), INTS)
    check(jax, lambda a: (a & (a ^ True), a | ~a, a.astype(jnp.float32)), X > 0)


@pytest.mark.parametrize("target", ["int32", "uint8", "bool", "bfloat16", "float16", "int8"])
def test_convert(jax: ModuleType, target: str) -> None:
    check(jax, lambda a: a.astype(target), X * 50)
    check(jax, lambda a: a.astype(target), INTS)
    check(jax, lambda a: a.astype(target), X > 0)


def test_convert_edges(jax: ModuleType) -> None:
    edges = np.array([np.nan, np.inf, -np.inf, 3e9, -3e9, 1.9, -1.9], np.float32)
    with np.errstate(all="ignore"):
        check(jax, lambda a: a.astype("int32"), edges)
    check(jax, lambda a: jax.lax.bitcast_convert_type(a, np.int32), X)


@pytest.mark.parametrize("axis", [0, 1, (0, 1), None])
@pytest.mark.parametrize("name", ["sum", "max", "min", "prod", "mean", "argmax", "argmin"])
def test_reductions(jax: ModuleType, name: str, axis: Any) -> None:
    if name.startswith("arg") and not isinstance(axis, int):
        axis = 0
    check(jax, lambda a: getattr(a, name)(axis=axis), X, rtol=1e-5)
    if name in ("sum", "max"):
        check(jax, lambda a: getattr(a.astype("bfloat16"), name)(axis=axis), X, rtol=2e-2)
        check(jax, lambda a: getattr(a, name)(axis=axis), INTS)
    if name == "max":
        check(jax, lambda a: (jax.numpy.any(a > 0, axis=axis), jax.numpy.all(a < 9, axis=axis)), X)


def test_reduction_with_nan(jax: ModuleType) -> None:
    with_nan = X.copy()
    with_nan[1, 2] = np.nan
    check(jax, lambda a: (a.max(1), a.argmax(1), a.sum(0), a.argmin()), with_nan)


def test_scans(jax: ModuleType) -> None:
    jnp, lax = jax.numpy, jax.lax
    check(jax, lambda a: (jnp.cumsum(a, 1), jnp.cumsum(a, 0), lax.cummax(a, 1)), X, rtol=1e-5)
    check(jax, lambda a: jnp.cumsum(a[::-1], 0)[::-1], X, rtol=1e-5)


def test_windows(jax: ModuleType) -> None:
    lax = jax.lax
    image = RNG.standard_normal((2, 8, 8, 3)).astype(np.float32)
    check(
        jax,
        lambda a: (
            lax.reduce_window(a, -np.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
            lax.reduce_window(a, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME"),
        ),
        image,
        rtol=1e-5,
    )


def test_shapes(jax: ModuleType) -> None:
    jnp, lax = jax.numpy, jax.lax
    a = RNG.standard_normal((2, 3, 4)).astype(np.float32)
    check(
        jax,
        lambda a: (
            a.transpose(2, 0, 1).reshape(8, 3),
            a[:, ::-1, 1:4:2],
            jnp.concatenate([a, a[:, :1] * 2], 1),
            lax.pad(a, np.float32(9), ((1, 2, 1), (-1, 0, 0), (0, -2, 2))),
            jnp.broadcast_to(a[:, :, :1], (5, 2, 3, 4)).sum(0),
            a.reshape(6, 4).T.reshape(3, 8),
            jnp.stack([a, -a], 1)[..., None],
            jnp.tril(a[0, :, :3]),
            a[1, 2, 3],
        ),
        a,
    )


def test_dynamic_slices_are_clamped(jax: ModuleType) -> None:
    lax = jax.lax

    def f(a: Any, i: Any) -> Any:
        part = lax.dynamic_slice(a, (i, i + 1), (2, 3))
        return part, lax.dynamic_update_slice(a, part * 2, (i - 2, i))

    for start in (-5, 0, 1, 3, 99):
        check(jax, f, X, np.int32(start))


@pytest.mark.parametrize(
    "spec",
    [
        "ij,jk->ik",
        "ij,kj->ki",
        "bij,bjk->bik",
        "bhqd,bhkd->bhqk",
        "ab,cd->abcd",
        "ij,ij->",
        "bij,bkj->bki",
        "aib,bja->ij",
        "i,i->",
        "ij,j->i",
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_products(jax: ModuleType, spec: str, dtype: str) -> None:
    jnp = jax.numpy
    left, right = spec.split("->")[0].split(",")
    size = dict(zip("abcdhijkq", (2, 3, 4, 5, 2, 3, 4, 5, 6), strict=True))
    arrays = [
        jnp.asarray(RNG.integers(-4, 5, [size[c] for c in names]), dtype) for names in (left, right)
    ]
    check(jax, lambda a, b: jnp.einsum(spec, a, b), *arrays, rtol=1e-5)


def test_gather_forms(jax: ModuleType) -> None:
    jnp = jax.numpy
    table = RNG.standard_normal((7, 5)).astype(np.float32)
    index = np.array([[0, 6, -1], [3, 99, 2]], np.int32)
    check(
        jax,
        lambda t, i: (
            t[i],
            t.at[i].get(mode="clip"),
            jnp.take(t, i, axis=1, mode="clip"),
            t[i, 2],
            t[1:3][:, i[0] % 5],
        ),
        table,
        index,
    )
    rows = np.array([[0], [4], [2], [2], [1], [3], [0]], np.int32)
    check(jax, lambda t, r: jnp.take_along_axis(t, r, 1), table, rows)


@pytest.mark.parametrize("mode", ["add", "multiply", "min", "max", "set"])
def test_scatter_forms(jax: ModuleType, mode: str) -> None:
    table = RNG.standard_normal((7, 5)).astype(np.float32)
    rows = np.array([3, 0, 6] if mode == "set" else [3, 3, 6], np.int32)
    updates = RNG.standard_normal((3, 5)).astype(np.float32)
    check(jax, lambda t, r, u: getattr(t.at[r], mode)(u), table, rows, updates)
    check(jax, lambda t, r, u: getattr(t.at[r, r % 5], mode)(u[:, 0]), table, rows, updates)
    outside = np.array([1, 50, 2], np.int32)
    check(jax, lambda t, r, u: getattr(t.at[r], mode)(u, mode="drop"), table, outside, updates)


def test_embedding_gradient(jax: ModuleType) -> None:
    jnp = jax.numpy
    table = RNG.standard_normal((9, 4)).astype(np.float32)
    tokens = RNG.integers(0, 9, (5, 6)).astype(np.int32)

    def f(t: Any) -> Any:
        logp = jax.nn.log_softmax(t[tokens] @ t.T)
        return -jnp.take_along_axis(logp, tokens[..., None], -1).mean()

    check(jax, lambda t: jax.value_and_grad(f)(t), table, rtol=1e-5)


def test_control_flow(jax: ModuleType) -> None:
    lax, jnp = jax.lax, jax.numpy

    def f(x: Any, n: Any) -> Any:
        y = lax.fori_loop(0, n, lambda i, a: a * 0.9 + i, x)
        z = lax.while_loop(lambda c: c[1] < 5, lambda c: (c[0] + x, c[1] + 1), (y, 0))[0]
        w = lax.cond(n > 2, lambda: z * 2, lambda: z - 1)
        swapped = lax.fori_loop(0, 3, lambda i, c: (c[1], c[0], c[0].T), (w, z, w.T))
        ys = lax.scan(lambda c, r: (c + r, c * r), x[0], x)
        return w, swapped, ys, lax.switch(n, [lambda: x, lambda: -x, lambda: x * 0])

    for n in (0, 1, 4):
        check(jax, f, X, np.int32(n), rtol=1e-5)
    check(jax, lambda x: lax.map(lambda r: jnp.tanh(r).sum(), x), X)


def test_scan_gradient_with_remat(jax: ModuleType) -> None:
    lax, jnp = jax.lax, jax.numpy
    w = RNG.standard_normal((3, 6, 6)).astype(np.float32)

    def f(w: Any, x: Any) -> Any:
        body = jax.checkpoint(lambda h, layer: (jnp.tanh(h @ layer), h.mean()))
        h, means = lax.scan(body, x, w)
        return (h**2).sum() + means.sum()

    check(jax, lambda w, x: jax.value_and_grad(f, (0, 1))(w, x), w, X, rtol=1e-5, atol=1e-5)


def test_random_numbers_are_the_same(jax: ModuleType) -> None:
    def f(seed: Any) -> Any:
        key = jax.random.key(seed)
        return jax.random.uniform(key, (3, 4)), jax.random.normal(key, (50,)), jax.random.bits(key)

    check(jax, f, np.uint32(11), rtol=1e-5, atol=1e-5)


def test_gelu_exact_and_softmax(jax: ModuleType) -> None:
    check(jax, lambda a: (jax.nn.gelu(a, approximate=False), jax.nn.softmax(a), jax.nn.silu(a)), X)


def test_arguments_returned_and_unused(jax: ModuleType) -> None:
    check(jax, lambda a, b, c: (b, a, a + 1, a, b), X, Y, INTS)
    check(jax, lambda a: (jax.numpy.zeros((2, 2)), 3, a.T), X)
    check(jax, lambda a: a.sum(), np.zeros((0, 4), np.float32))
