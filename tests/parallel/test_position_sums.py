"""Losses of parts of rows: sums over positions are taken, and what is no sum is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvarlen import make_train_step
from jvarlen.experimental.token_slices import make_sliced_train_step
from jvarlen.parallel import Axes, LayeredModel, LayeredParams, chunked_cross_entropy, vocabulary_cross_entropy
from jvarlen.parallel.position_sums import check_sums_over_positions

ROWS, LENGTH, WIDTH, NUM_VALUES = 2, 12, 5, 7
POSITIONS = np.arange(4, 8)


def parts(microbatch, positions):
    return (leaf if positions is None else leaf[:, positions] for leaf in (microbatch["tokens"], microbatch["weights"]))


def cross_entropies(ends, x, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(x @ ends["table"].T, tokens)


def summed(ends, x, microbatch, positions):
    tokens, weights = parts(microbatch, positions)
    losses = cross_entropies(ends, x, tokens)
    return jnp.sum(losses * weights), jnp.sum(weights), {"hits": jnp.sum((x @ ends["table"].T).argmax(-1) == tokens)}


def of_rows_weights(ends, x, microbatch, positions):
    """Divided by what is the same for all parts."""
    tokens, weights = parts(microbatch, positions)
    losses = cross_entropies(ends, x, tokens) * weights / microbatch["weights"].sum(axis=1, keepdims=True)
    return jnp.sum(losses), jnp.sum(weights / 3.0)


def squares(ends, x, microbatch, positions):
    _, weights = parts(microbatch, positions)
    return 0.5 * jnp.einsum("bsd,bsd,bs->", x, x, weights), jnp.float32(x.shape[0] * x.shape[1])


def flattened(ends, x, microbatch, positions):
    tokens, weights = parts(microbatch, positions)
    losses = jax.nn.logsumexp(x.reshape(-1, WIDTH) @ ends["table"].T, axis=-1).reshape(tokens.shape)
    return jnp.where(weights > 0, losses, 0.0).sum(axis=1).sum(), weights.sum()


def chunked(ends, x, microbatch, positions):
    tokens, weights = parts(microbatch, positions)
    kernel = ends["table"].T
    loss_sum = chunked_cross_entropy(x, kernel, tokens, weights, vocab_size=NUM_VALUES, axes=Axes())
    return loss_sum, weights.sum()


def mean_of_chunks(ends, x, microbatch, positions):
    loss_sum, weight_sum = chunked(ends, x, microbatch, positions)
    return loss_sum / weight_sum, weight_sum


def mean_over_a_vocabulary(ends, x, microbatch, positions):
    tokens, weights = parts(microbatch, positions)
    losses = vocabulary_cross_entropy(x @ ends["table"].T, tokens, vocab_size=NUM_VALUES, axes=Axes())
    return jnp.mean(losses), jnp.sum(weights)


def mean(ends, x, microbatch, positions):
    tokens, weights = parts(microbatch, positions)
    return jnp.mean(cross_entropies(ends, x, tokens)), jnp.sum(weights)


def mean_of_weights(ends, x, microbatch, positions):
    tokens, weights = parts(microbatch, positions)
    losses = (cross_entropies(ends, x, tokens) * weights).sum(axis=1) / jnp.maximum(weights.sum(axis=1), 1.0)
    return losses.sum(), jnp.float32(len(x))


def with_a_norm(ends, x, microbatch, positions):
    return summed(ends, x, microbatch, positions)[0] + 0.1 * jnp.sum(ends["table"] ** 2), jnp.float32(1)


def root(ends, x, microbatch, positions):
    return jnp.sqrt(jnp.sum(x**2)), jnp.float32(1)


def hardest(ends, x, microbatch, positions):
    tokens, weights = parts(microbatch, positions)
    return cross_entropies(ends, x, tokens).max(axis=1).sum(), weights.sum()


def whole_weights(ends, x, microbatch, positions):
    return summed(ends, x, microbatch, positions)[0], microbatch["weights"].sum()


def neighbours(ends, x, microbatch, positions):
    return jnp.sum((x[:, 1:] - x[:, :-1]) ** 2), jnp.float32(len(x))


def check(loss):
    ends = {"table": np.ones((NUM_VALUES, WIDTH), np.float32)}
    microbatch = {"tokens": np.zeros((ROWS, LENGTH), np.int32), "weights": np.ones((ROWS, LENGTH), np.float32)}
    x = np.ones((ROWS, len(POSITIONS), WIDTH), np.float32)

    def at(positions):
        return lambda ends, x, microbatch: loss(ends, x, microbatch, positions)

    check_sums_over_positions(at(POSITIONS), at(None), ends, x, microbatch, LENGTH)


@pytest.mark.parametrize("loss", [summed, of_rows_weights, squares, flattened, chunked])
def test_sums_over_positions_are_taken(loss):
    check(loss)


@pytest.mark.parametrize(
    "loss",
    [
        mean, mean_of_chunks, mean_over_a_vocabulary, mean_of_weights, with_a_norm, root, hardest, whole_weights,
        neighbours,
    ],
)  # fmt: skip
def test_what_is_no_sum_over_positions_is_refused(loss):
    with pytest.raises(ValueError, match="of the model's loss is no sum over positions"):
        check(loss)


@pytest.mark.parametrize("layout", ["data1.context2", "data1.stage2"])
def test_steps_of_parts_of_rows_refuse_a_mean_when_they_are_traced(layout):
    model = LayeredModel(
        lambda ends, microbatch, axes: ends["table"][microbatch["tokens"][:, positions_of(microbatch, axes)]],
        lambda own, x, microbatch, axes: x * own,
        lambda ends, x, microbatch, axes: mean(ends, x, microbatch, axes.positions),
        by_positions=True,
    )
    optimizer = optax.sgd(0.1)
    if layout == "data1.stage2":
        step = make_sliced_train_step(model, optimizer, layout=layout, slices=3)
    else:
        step = make_train_step(model, optimizer, layout=layout)
    params = LayeredParams({"table": np.ones((NUM_VALUES, WIDTH), np.float32)}, np.ones(2, np.float32))
    shape = 2, ROWS, LENGTH
    batch = {"tokens": np.zeros(shape, np.int32), "weights": np.ones(shape, np.float32)}
    with pytest.raises(ValueError, match="the number of positions in a mean"):
        jax.eval_shape(step, step.init(params), batch)


def positions_of(microbatch, axes):
    return np.arange(microbatch["tokens"].shape[1]) if axes.positions is None else axes.positions
