"""Masks: the B×T×T mask and the length-based one are the same attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvarlen import attention_mask, padding_mask

LENGTHS = jnp.array([5, 3, 0, 1])
T = 5


@pytest.mark.parametrize("causal", [True, False])
def test_a_position_sees_tokens_only_and_nothing_later_where_causal(causal):
    mask = np.asarray(attention_mask(LENGTHS, T, causal=causal))
    for row, length in enumerate(LENGTHS.tolist()):
        for query in range(T):
            for key in range(T):
                assert mask[row, query, key] == (key < length and (key <= query or not causal))
    assert (np.asarray(padding_mask(LENGTHS, T)) == mask.any(axis=1)).all()


@pytest.mark.parametrize("causal", [True, False])
def test_mask_and_lengths_give_the_same_attention_and_gradient(causal):
    shape = (len(LENGTHS), T, 2, 4)
    q, k, v = (jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(0), 3))
    weights = padding_mask(LENGTHS, T)[:, :, None, None]

    def by_mask(q, k, v):
        mask = attention_mask(LENGTHS, T, causal=causal)[:, None]
        return jnp.sum(jnp.sin(jax.nn.dot_product_attention(q, k, v, mask=mask)) * weights)

    def by_lengths(q, k, v):
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=causal, key_value_seq_lengths=LENGTHS)
        return jnp.sum(jnp.sin(attended) * weights)

    expected, expected_grads = jax.value_and_grad(by_mask, argnums=(0, 1, 2))(q, k, v)
    value, grads = jax.value_and_grad(by_lengths, argnums=(0, 1, 2))(q, k, v)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(grad, expected_grad, atol=1e-6)


def test_a_dummy_row_gives_no_nan():
    x = jnp.ones((1, T, 1, 2))
    for arguments in (
        {"mask": attention_mask(jnp.array([0]), T)[:, None]},
        {"is_causal": True, "key_value_seq_lengths": jnp.array([0])},
    ):
        grads = jax.grad(lambda x, arguments=arguments: jax.nn.dot_product_attention(x, x, x, **arguments).sum())(x)
        assert jnp.isfinite(grads).all()
