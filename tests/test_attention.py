"""Attention: the same numbers in all forms of mask, each sample on its own, no T×T array where that is promised."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvarlen import attention, padding_mask
from jvarlen.attention import attend, attend_within_segments

pytestmark = pytest.mark.usefixtures("optimized")

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


def attend_alone(q_LxHxK, k_LxHxK, v_LxHxK, causal):
    """Attention of one sample by its definition, one query at a time."""
    attended = []
    for t in range(len(q_LxHxK)):
        seen = t + 1 if causal else len(q_LxHxK)
        logits_LxH = jnp.sum(q_LxHxK[t] * k_LxHxK[:seen], axis=-1) / np.sqrt(q_LxHxK.shape[-1])
        powers_LxH = jnp.exp(logits_LxH - logits_LxH.max(axis=0))
        attended.append(jnp.sum((powers_LxH / powers_LxH.sum(axis=0))[..., None] * v_LxHxK[:seen], axis=0))
    return jnp.stack(attended)


FORMS = {
    "lengths": lambda q, k, v, **options: attend(q, k, v, **options, implementation="xla"),
    "mask": lambda q, k, v, **options: attend(q, k, v, **options, implementation="mask"),
    "chunks": lambda q, k, v, **options: attend(q, k, v, **options, implementation="chunked"),
    "segments": lambda q, k, v, lengths, causal: attend_within_segments(
        q, k, v, padding_mask(lengths, q.shape[1]).astype(jnp.int32), causal=causal
    ),
}
ROWS = np.array([5, 0, 1, 3])  # as long as can be, a dummy, a single token, some of each


@pytest.fixture
def short_chunks(monkeypatch):
    monkeypatch.setattr(attention, "_CHUNK", 2)  # two whole chunks of queries and a part of one


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_all_forms_of_mask_give_what_each_sample_gives_alone(causal, dtype):
    with jax.enable_x64(dtype == "float64"):
        atol = {"float64": 1e-13, "float32": 2e-6}[dtype]
        keys = jax.random.split(jax.random.key(0), 4)
        *qkv, weights = (jax.random.normal(key, (len(ROWS), ROWS.max(), 2, 4), dtype) for key in keys)
        is_token = np.arange(ROWS.max()) < ROWS[:, None]

        def alone(q, k, v):
            total, outputs = 0, []
            for row, n in enumerate(ROWS):
                if n:
                    outputs.append(attend_alone(q[row, :n], k[row, :n], v[row, :n], causal))
                    total += jnp.sum(outputs[-1] * weights[row, :n])
            return total, jnp.concatenate(outputs)

        def together(form, q, k, v):
            outputs = FORMS[form](q, k, v, lengths=jnp.array(ROWS, jnp.int32), causal=causal)
            return jnp.sum(outputs * weights * is_token[..., None, None]), outputs

        expected, expected_outputs = jax.jit(jax.grad(alone, argnums=(0, 1, 2), has_aux=True))(*qkv)
        for form in FORMS:
            gradient = jax.jit(jax.grad(functools.partial(together, form), argnums=(0, 1, 2), has_aux=True))
            grads, outputs = gradient(*qkv)
            assert outputs.dtype == dtype
            assert jnp.isfinite(outputs).all()  # those of padding and of the dummy row as well
            np.testing.assert_allclose(outputs[is_token], expected_outputs, atol=atol)
            for grad, expected_grad in zip(grads, expected, strict=True):
                np.testing.assert_allclose(grad, expected_grad, atol=atol)
                assert (np.asarray(grad)[~is_token] == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("causal", [True, False])
def test_rows_without_a_token_give_no_nan_even_where_their_outputs_count(causal, dtype):
    x = jax.random.normal(jax.random.key(0), (2, 5, 1, 2), dtype)
    for form in FORMS:
        attended = functools.partial(FORMS[form], lengths=jnp.zeros(2, jnp.int32), causal=causal)
        for grad in jax.grad(lambda *qkv: attended(*qkv).sum().astype("float32"), argnums=(0, 1, 2))(x, x, x):  # noqa: B023
            assert jnp.isfinite(grad).all()


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
