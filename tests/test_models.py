"""The demo model: causal, blind to padding and dummy rows, the same for the same seed."""

import jax
import jax.numpy as jnp
import numpy as np

from jvarlen.collate import Batch
from jvarlen.models import TransformerConfig, flat_params, init_params, make_loss_fn

CONFIG = TransformerConfig(num_layers=2, width=16, num_heads=2)
PARAMS = init_params(CONFIG, seed=0)
LOSS_FN = jax.jit(make_loss_fn(CONFIG))


def microbatch(tokens, lengths, length):
    tokens = np.array([row + [0] * (length - len(row)) for row in tokens], np.int32)
    weights = (np.arange(length) < np.array(lengths)[:, None]).astype(np.float32)
    return Batch(tokens, np.array(lengths, np.int32), weights, np.float32(len(tokens)))


def test_a_byte_is_predicted_from_those_before_it_only():
    one = microbatch([[1, 2, 3, 4]], [4], 4)
    for changed in range(4):
        tokens = [1, 2, 3, 4]
        tokens[changed] = 99
        other = microbatch([tokens], [4], 4)
        for t in range(changed):
            only_t = np.zeros((1, 4), np.float32)
            only_t[0, t] = 1
            assert (
                LOSS_FN(PARAMS, one._replace(weights=only_t))[0] == LOSS_FN(PARAMS, other._replace(weights=only_t))[0]
            )


def test_padding_and_dummy_rows_change_nothing():
    alone, weight = LOSS_FN(PARAMS, microbatch([[5, 6, 7]], [3], 3))
    padded, padded_weight = LOSS_FN(PARAMS, microbatch([[5, 6, 7], []], [3, 0], 8))
    np.testing.assert_allclose(padded, alone, rtol=1e-6)
    assert weight == padded_weight == 3


def test_gradients_of_dummy_rows_are_zero_and_finite():
    grads = jax.grad(lambda params: LOSS_FN(params, microbatch([[], []], [0, 0], 8))[0])(PARAMS)
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(grads))


def test_an_untrained_model_knows_nothing():
    loss, weight = LOSS_FN(PARAMS, microbatch([list(range(200))], [200], 200))
    assert abs(float(loss / weight) / np.log(2) - 8) < 0.5


def test_the_seed_decides_the_weights():
    same, other = init_params(CONFIG, seed=0), init_params(CONFIG, seed=1)
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(PARAMS), jax.tree.leaves(same), strict=True))
    assert not all((a == b).all() for a, b in zip(jax.tree.leaves(PARAMS), jax.tree.leaves(other), strict=True))


def test_flat_params_have_dotted_names():
    flat = flat_params(PARAMS)
    assert flat["blocks.1.qkv.kernel"].shape == (16, 48)
    assert flat["embed.embedding"].shape == (257, 16)
    assert sum(value.size for value in flat.values()) == sum(jnp.size(leaf) for leaf in jax.tree.leaves(PARAMS))
