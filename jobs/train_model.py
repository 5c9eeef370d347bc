"""The compiled side of train.py: a decoder-only byte-level transformer, in JAX.

Imported by the compile step only; the ranks that run the result need no JAX. Both functions are
data parallel: each rank holds all parameters and its share of the batch, and ``pmean``/``psum``
inside ``shard_map`` become all-reduces of the compiled program.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jobs.train_spec import VOCAB, TrainSpec, parameter_shapes
from neuron_runtime.compiler.spec import JaxProgram

AXIS = "data"
BETA1, BETA2, EPSILON = 0.9, 0.98, 1e-8
CLIP_NORM = 1.0
FINAL_LR_FRACTION = 0.1

Parameters = dict[str, jax.Array]


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def _attention(spec: TrainSpec, x: jax.Array, qkv: jax.Array, out: jax.Array) -> jax.Array:
    batch, length, width = x.shape
    head_width = width // spec.heads
    parts = (x.reshape(batch * length, width) @ qkv).reshape(batch, length, 3, spec.heads, -1)
    query, key, value = (parts[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    scores = query @ key.transpose(0, 1, 3, 2) * head_width**-0.5
    seen = jnp.arange(length)[:, None] >= jnp.arange(length)[None, :]
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1)
    mixed = (weights @ value).transpose(0, 2, 1, 3).reshape(batch * length, width)
    return (mixed @ out).reshape(batch, length, width)


def _feed_forward(x: jax.Array, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
    batch, length, width = x.shape
    hidden = jnp.maximum(x.reshape(batch * length, width) @ w_in, 0.0)
    return (hidden * hidden @ w_out).reshape(batch, length, width)


def _nll(spec: TrainSpec, p: Parameters, tokens: jax.Array) -> jax.Array:
    """Negative log likelihood in nats of each next byte: [batch, seq_len]."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    batch = inputs.shape[0]
    # One-hot products instead of gathers: their gradient is a product too, no scatter.
    one_hot = jax.nn.one_hot(inputs.reshape(-1), VOCAB, dtype=jnp.float32)
    x = (one_hot @ p["embed"]).reshape(batch, spec.seq_len, spec.width) + p["position"]
    for index in range(spec.layers):
        name = f"layer{index:02d}"
        normed = _rms_norm(x, p[f"{name}_attention_norm"])
        x = x + _attention(spec, normed, p[f"{name}_attention_qkv"], p[f"{name}_attention_out"])
        normed = _rms_norm(x, p[f"{name}_ff_norm"])
        x = x + _feed_forward(normed, p[f"{name}_ff_in"], p[f"{name}_ff_out"])
    x = _rms_norm(x, p["final_norm"]).reshape(-1, spec.width)
    logits = x @ p["unembed"]
    wanted = jnp.sum(jax.nn.one_hot(targets.reshape(-1), VOCAB) * logits, axis=-1)
    return (jax.nn.logsumexp(logits, axis=-1) - wanted).reshape(batch, spec.seq_len)


def _learning_rate(spec: TrainSpec, step: jax.Array) -> jax.Array:
    """Learning rate at ``step`` (float32, 1 for the first step)."""
    rise = jnp.minimum(step / max(spec.warmup_steps, 1), 1.0)
    span = max(spec.steps - spec.warmup_steps, 1)
    done = jnp.clip((step - spec.warmup_steps) / span, 0.0, 1.0)
    fall = FINAL_LR_FRACTION + (1 - FINAL_LR_FRACTION) * 0.5 * (1 + jnp.cos(jnp.pi * done))
    return spec.learning_rate * rise * fall


def _train_step(
    spec: TrainSpec,
    moment1: Parameters,
    moment2: Parameters,
    parameters: Parameters,
    step: jax.Array,
    tokens: jax.Array,
) -> tuple[Parameters, Parameters, Parameters, jax.Array]:
    loss, grads = jax.value_and_grad(lambda p: jnp.mean(_nll(spec, p, tokens)))(parameters)
    # Equal shares on every rank, so the mean of means is the global batch's mean.
    loss, grads = jax.lax.pmean((loss, grads), AXIS)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads.values()))
    shrink = jnp.minimum(1.0, CLIP_NORM / (norm + 1e-6))
    rate = _learning_rate(spec, step)
    correct1 = 1.0 / (1.0 - jnp.exp(step * np.float32(np.log(BETA1))))
    correct2 = 1.0 / (1.0 - jnp.exp(step * np.float32(np.log(BETA2))))
    new1, new2, new_p = {}, {}, {}
    for name, value in parameters.items():
        grad = grads[name] * shrink
        new1[name] = BETA1 * moment1[name] + (1 - BETA1) * grad
        new2[name] = BETA2 * moment2[name] + (1 - BETA2) * (grad * grad)
        change = new1[name] * correct1 / (jnp.sqrt(new2[name] * correct2) + EPSILON)
        decay = spec.weight_decay if value.ndim > 1 else 0.0
        new_p[name] = value - rate * (change + decay * value)
    return new1, new2, new_p, loss


def _eval_step(spec: TrainSpec, parameters: Parameters, tokens: jax.Array) -> jax.Array:
    return jax.lax.psum(jnp.sum(_nll(spec, parameters, tokens)), AXIS)


def _structs(spec: TrainSpec, group: str) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        f"{group}/{name}": jax.ShapeDtypeStruct(shape, jnp.float32)
        for name, shape in parameter_shapes(spec).items()
    }


def _group(state: Parameters, group: str) -> Parameters:
    """The tensors of one group, without the group's name."""
    prefix = f"{group}/"
    return {name[len(prefix) :]: v for name, v in state.items() if name.startswith(prefix)}


def train_step(ranks: int, **config: Any) -> JaxProgram:
    """The training step, for the compiler; ``config`` are the fields of TrainSpec.

    ``(state, step, tokens) -> (state, loss)``: state holds ``moment1/...``, ``moment2/...`` and
    ``parameters/...`` and is donated, so the compiled program updates it in place; ``step`` counts
    from 1; ``tokens`` is the global batch [global_batch, seq_len + 1], divided over the ranks.
    Inputs and outputs are in the order of JAX's trees: the state's names sorted, then the others.
    """
    spec = TrainSpec(**config)
    groups = ("moment1", "moment2", "parameters")

    def step_on_rank(
        state: Parameters, step: jax.Array, tokens: jax.Array
    ) -> tuple[Parameters, jax.Array]:
        moment1, moment2, parameters = (_group(state, group) for group in groups)
        *updated, loss = _train_step(spec, moment1, moment2, parameters, step, tokens)
        new = {
            f"{group}/{name}": value
            for group, part in zip(groups, updated, strict=True)
            for name, value in part.items()
        }
        return new, loss

    state = {name: v for group in groups for name, v in _structs(spec, group).items()}
    step = jax.ShapeDtypeStruct((), jnp.float32)
    return JaxProgram(
        fn=step_on_rank,
        args=(state, step, _tokens(spec)),
        mesh={AXIS: ranks},
        in_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec(AXIS)),
        out_specs=(PartitionSpec(), PartitionSpec()),
        donate=(0,),
        result_names=("state", "loss"),
        name="train_step",
    )


def eval_step(ranks: int, **config: Any) -> JaxProgram:
    """Validation: ``(parameters, tokens) -> nll``, summed over the global batch, in nats."""
    spec = TrainSpec(**config)

    def eval_on_rank(parameters: Parameters, tokens: jax.Array) -> jax.Array:
        return _eval_step(spec, _group(parameters, "parameters"), tokens)

    return JaxProgram(
        fn=eval_on_rank,
        args=(_structs(spec, "parameters"), _tokens(spec)),
        mesh={AXIS: ranks},
        in_specs=(PartitionSpec(), PartitionSpec(AXIS)),
        out_specs=PartitionSpec(),
        result_names=("nll",),
        name="eval_step",
    )


def _tokens(spec: TrainSpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((spec.global_batch, spec.seq_len + 1), jnp.int32)
