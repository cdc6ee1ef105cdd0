"""Attention: the same numbers however it is computed, each sample on its own, no T×T array where that is promised."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvarlen.attention import attend, attend_within_segments
from jvarlen.masks import attention_mask, segment_mask

T = 600  # two whole chunks of queries and a part of one


def random_qkv(batch, length, seed=0):
    shape = (batch, length, 2, 8)
    return [jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(seed), 3)]


def segments_of(rows, length):
    """Segment ids of rows given as lists of sample lengths."""
    ids = np.zeros((len(rows), length), np.int32)
    for row, lengths in enumerate(rows):
        ids[row, : sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return jnp.array(ids)


SEGMENTS = segments_of([[600], [1, 299, 256, 3], []], T)


@pytest.mark.parametrize("causal", [True, False])
def test_positions_see_their_own_sample_only(causal):
    segments = segments_of([[2, 3], [4]], 6)
    mask = np.asarray(segment_mask(segments, segments, causal=causal))
    for row, ids in enumerate(np.asarray(segments)):
        for query in range(6):
            for key in range(6):
                assert mask[row, query, key] == (ids[query] == ids[key] and (key <= query or not causal))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("implementation", ["chunked", "xla"])
def test_each_sample_attends_as_if_it_were_alone(causal, implementation):
    q, k, v = random_qkv(3, T)
    attended = attend_within_segments(q, k, v, SEGMENTS, causal=causal, implementation=implementation)
    start = 1
    for length in (299, 256, 3):
        part = np.s_[1:2, start : start + length]
        alone = attend(q[part], k[part], v[part], jnp.array([length]), causal=causal)
        np.testing.assert_allclose(attended[part], alone, atol=2e-6)
        start += length


@pytest.mark.parametrize("causal", [True, False])
def test_chunks_give_the_values_and_gradients_of_the_whole(causal):
    weights = (SEGMENTS > 0)[:, :, None, None]

    def total(implementation, q, k, v):
        attended = attend_within_segments(q, k, v, SEGMENTS, causal=causal, implementation=implementation)
        return jnp.sum(jnp.sin(attended) * weights)

    qkv = random_qkv(3, T)
    expected, expected_grads = jax.value_and_grad(total, argnums=(1, 2, 3))("xla", *qkv)
    value, grads = jax.value_and_grad(total, argnums=(1, 2, 3))("chunked", *qkv)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert jnp.isfinite(grad).all()
        np.testing.assert_allclose(grad, expected_grad, atol=1e-5)


def test_many_chunks_lose_no_precision_in_bfloat16():
    """Gradients of keys are sums over all chunks, which must not be rounded one by one."""
    length = 4096
    q, k, v = (x.astype(jnp.bfloat16) for x in random_qkv(1, length))
    segments = jnp.ones((1, length), jnp.int32)

    def key_gradient(implementation, *qkv):
        def loss(k):
            attended = attend_within_segments(qkv[0], k, qkv[2], segments, causal=False, implementation=implementation)
            return jnp.sum(jnp.sin(attended.astype(jnp.float32)))

        return jax.grad(loss)(qkv[1]).astype(jnp.float32)

    exact = key_gradient("xla", *(x.astype(jnp.float32) for x in (q, k, v)))

    def error(implementation):
        return float(jnp.linalg.norm(key_gradient(implementation, q, k, v) - exact) / jnp.linalg.norm(exact))

    assert error("chunked") < 1.2 * error("xla")


def test_lengths_and_the_mask_they_stand_for_are_the_same():
    q, k, v = random_qkv(2, 16)
    lengths = jnp.array([16, 5])
    masked = jax.nn.dot_product_attention(q, k, v, mask=attention_mask(lengths, 16)[:, None])
    np.testing.assert_allclose(attend(q, k, v, lengths)[0], masked[0], atol=1e-6)
    np.testing.assert_allclose(attend(q, k, v, lengths)[1, :5], masked[1, :5], atol=1e-6)


def test_chunks_never_hold_all_pairs_of_positions():
    length = 2048

    def program(implementation):
        def loss(q, k, v, segments):
            return attend_within_segments(q, k, v, segments, implementation=implementation).sum()

        spec = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
        segments = jax.ShapeDtypeStruct((1, length), jnp.int32)
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(spec, spec, spec, segments).compile()

    whole, chunked = program("xla"), program("chunked")
    assert f"{length},{length}" in whole.as_text()
    assert f"{length},{length}" not in chunked.as_text()
    assert f"{length},{length}" not in program(None).as_text()  # long rows are chunked by themselves
    assert chunked.memory_analysis().temp_size_in_bytes < whole.memory_analysis().temp_size_in_bytes / 3


@pytest.mark.gpu
def test_cudnn_keeps_samples_apart():
    q, k, v = (x.astype(jnp.bfloat16) for x in random_qkv(1, 128))
    segments = segments_of([[100, 28]], 128)
    expected, actual = (
        attend_within_segments(q, k, v, segments, implementation=name).astype(jnp.float32) for name in ("xla", "cudnn")
    )
    np.testing.assert_allclose(actual, expected, atol=3e-2)


@pytest.mark.gpu
def test_cudnn_gives_the_same_numbers():
    """In bfloat16, the type that its kernels take."""
    q, k, v = (x.astype(jnp.bfloat16) for x in random_qkv(2, 128))
    lengths = jnp.array([128, 40])
    for query_end, row in ((128, 0), (40, 1)):
        expected = attend(q, k, v, lengths, implementation="xla")[row, :query_end].astype(jnp.float32)
        actual = attend(q, k, v, lengths, implementation="cudnn")[row, :query_end].astype(jnp.float32)
        np.testing.assert_allclose(actual, expected, atol=3e-2)
