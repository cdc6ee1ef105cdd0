"""Float64 training of a small model by layers: embedding, four layers, tied loss. Each case gives what is held of it.

Letters: M microbatches, B rows, T positions, D width, V values of a token, H heads.
"""

import functools
from typing import Any

import numpy as np
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

from . import calls

M, B, T, D, V, H = 8, 2, 8, 24, 53, 4  # arrays of some 1,000 elements are sharded by ZeRO, smaller ones are not
NUM_LAYERS = 4
NUM_STEPS = 20
NUM_PROJECTIONS = 3


def norm(x: Any, scale: Any) -> Any:
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def embed(ends: Any, microbatch: Any, axes: Any) -> Any:
    """The embedding of the token before each position."""
    before_BxT = jnp.pad(microbatch.tokens, ((0, 0), (1, 0)))[:, :-1]
    if axes.positions is not None:
        before_BxT = before_BxT[:, axes.positions]
    return calls.vocabulary_embedding(ends["table"], before_BxT, axes=axes)


def layer(own: Any, x: Any, microbatch: Any, axes: Any) -> Any:
    """Attention, then a hidden layer."""
    inside = calls.enter_tensor_parallel(norm(x, own["scale"]), axes=axes)
    heads = (inside @ own["qkv"].reshape(D, -1)).reshape(*inside.shape[:2], 3, -1, D // H)
    attended = calls.attend_over_axis(heads[:, :, 0], heads[:, :, 1], heads[:, :, 2], axes=axes)
    x = x + calls.row_linear(attended.reshape(*inside.shape[:2], -1), own["out"], axes=axes)
    hidden = jnp.tanh(calls.column_linear(norm(x, own["scale"]), own["up"], own["up_bias"], axes=axes))
    return x + calls.row_linear(hidden, own["down"], own["down_bias"], axes=axes)


def loss(ends: Any, x: Any, microbatch: Any, axes: Any) -> Any:
    """The loss of logits with the table of the embedding."""
    tokens, weights = microbatch.tokens, microbatch.weights
    if axes.positions is not None:
        tokens, weights = tokens[:, axes.positions], weights[:, axes.positions]
    logits = calls.column_linear(norm(x, ends["scale"]), ends["table"].T, axes=axes)
    losses = calls.vocabulary_cross_entropy(logits, tokens, vocab_size=V, axes=axes)
    return jnp.sum(losses * weights), jnp.sum(weights)


SPECS = (
    {"table": calls.tensor_spec(P("tensor"), num_values=V), "scale": P()},
    {
        "scale": P(),
        "qkv": P(None, None, "tensor"),
        "out": P("tensor"),
        "up": P(None, "tensor"),
        "up_bias": P("tensor"),
        "down": P("tensor"),
        "down_bias": P(),
    },
)
MODEL = calls.layered_model(embed, layer, loss, SPECS)


def first_params() -> Any:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return rng.normal(size=(NUM_LAYERS, *shape)) / np.sqrt(D)

    ends = {"table": rng.normal(size=(V, D)), "scale": 1 + rng.normal(size=D) / 10}
    layers = {
        "scale": 1 + normal(D) / 4,
        "qkv": normal(D, 3, D),
        "out": normal(D, D),
        "up": normal(D, 2 * D),
        "up_bias": normal(2 * D),
        "down": normal(2 * D, D),
        "down_bias": normal(D),
    }
    return calls.layered_params(ends, layers)


@functools.cache
def batches() -> list[Any]:
    """The batches of every step: rows of different lengths and weights, some of them empty."""
    rng = np.random.default_rng(1)
    made = []
    for _ in range(NUM_STEPS):
        lengths = rng.integers(1, T + 1, (M, B)) * (rng.random((M, B)) < 0.8)
        lengths[0, 0] = T
        is_real = np.arange(T) < lengths[..., None]
        tokens = rng.integers(0, V, (M, B, T)) * is_real
        weights = rng.uniform(0.5, 2, (M, B, T)) * is_real
        made.append(calls.batch(tokens.astype(np.int32), lengths.astype(np.int32), weights, float((lengths > 0).sum())))
    return made


def sums_of(leaves: dict[str, Any]) -> dict[str, list[float]]:
    """By name: the norm, the sum, and sums with random signs, which another value anywhere changes."""
    found = {}
    for name, leaf in leaves.items():
        values = np.asarray(leaf, np.float64).ravel()
        signs = np.random.default_rng(len(values)).choice([-1.0, 1.0], (NUM_PROJECTIONS, len(values)))
        found[name] = [float(np.linalg.norm(values)), float(values.sum()), *(signs @ values).tolist()]
    return found


def values_of(steps: calls.Trained) -> dict[str, Any]:
    """The metrics of all steps, and parameters after the first and the last."""
    return {
        "loss": steps.losses,
        "weight_sum": steps.weight_sums,
        "grad_norm": steps.grad_norms,
        "after 1 step": sums_of(steps.first_params),
        f"after {len(steps.losses)} steps": sums_of(steps.last_params),
    }


def trained(layout: str | None, **options: Any) -> dict[str, Any]:
    """By AdamW, scaled by the batch size, clipped by the norm of the whole gradient; None: on one device."""
    return values_of(calls.train(MODEL, first_params(), batches(), layout=layout, **options))


LENGTHS = np.random.default_rng(2).integers(1, 13, 60)
SAMPLES = [np.random.default_rng(length).integers(0, V, length).astype(np.int32) for length in LENGTHS]


def plain_loss(params: Any, microbatch: Any) -> Any:
    """The loss of every token, from those before it."""
    x_BxTxD = params["table"][microbatch.tokens]
    before = jnp.tanh(jnp.cumsum(x_BxTxD @ params["kernel"], axis=1) - x_BxTxD)
    losses = jnp.sum((before - x_BxTxD) ** 2, axis=-1)
    return jnp.sum(losses * microbatch.weights), jnp.sum(microbatch.weights)


def plain_params() -> Any:
    rng = np.random.default_rng(3)
    return {"table": rng.normal(size=(V, D)), "kernel": rng.normal(size=(D, D)) / D}


def ordinary_plan() -> Any:
    buckets = [(6, 4), (4, 8), (2, 12)]
    return calls.make_plan("jvarlen", LENGTHS, buckets, order="shuffle", num_microbatches=2)


def stale(delays: Any) -> dict[str, Any]:
    """Each microbatch with the parameters of some updates ago."""
    return values_of(calls.train_stale(plain_loss, plain_params(), ordinary_plan(), SAMPLES, delays))


def asynchronous() -> dict[str, Any]:
    """By a worker process that waits for every update."""
    return values_of(calls.train_asynchronously(plain_loss, plain_params(), ordinary_plan(), SAMPLES))


DELAYS = {"1": 1, "0, 2, 1": [0, 2, 1], "by microbatch": [[0, 1], [3, 0]]}


def recorded() -> dict[str, Any]:
    """All on one device."""
    cases = {"layers": trained(None), "plain": stale(0)}
    return cases | {f"stale {name}": stale(delays) for name, delays in DELAYS.items()}
