"""Attention on a device: the same numbers whole and in chunks, and finite ones for rows without a token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvarlen import attend

LENGTHS = np.array(
    [300, 0, 1, 257]
)  # as long as can be, a padding row, a single token, a chunk of queries and one more
IS_TOKEN = np.arange(LENGTHS.max()) < LENGTHS[:, None]


def random_qkv(dtype):
    shape = (*IS_TOKEN.shape, 2, 16)
    return [jax.random.normal(key, shape).astype(dtype) for key in jax.random.split(jax.random.key(0), 3)]


def outputs_and_gradients(implementation, *qkv):
    def loss(*qkv):
        outputs = attend(*qkv, lengths=jnp.array(LENGTHS), implementation=implementation)
        return jnp.sum(jnp.sin(outputs.astype(jnp.float32)) * IS_TOKEN[..., None, None]), outputs

    with jax.default_matmul_precision("highest"):
        grads, outputs = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*qkv)
    assert all(bool(jnp.isfinite(array).all()) for array in (outputs, *grads))
    return np.asarray(outputs.astype(jnp.float32))[IS_TOKEN], [np.asarray(grad.astype(jnp.float32)) for grad in grads]


@pytest.fixture(scope="module")
def whole():
    return outputs_and_gradients("xla", *random_qkv("float32"))


@pytest.mark.parametrize("implementation", ["blocks", "auto"])
def test_all_forms_give_the_numbers_of_the_whole(whole, implementation):
    compare(whole, outputs_and_gradients(implementation, *random_qkv("float32")), atol=1e-5)


@pytest.mark.parametrize("implementation", ["auto", "cudnn"])
def test_bfloat16_gives_the_numbers_of_float32_to_its_rounding(whole, implementation, on_gpu):
    if implementation == "cudnn" and not on_gpu:
        pytest.skip("cuDNN is for GPUs")
    compare(whole, outputs_and_gradients(implementation, *random_qkv("bfloat16")), atol=0.1)


def compare(expected, found, atol):
    check = functools.partial(np.testing.assert_allclose, atol=atol, rtol=0)
    check(found[0], expected[0])
    for grad, expected_grad in zip(found[1], expected[1], strict=True):
        check(grad, expected_grad)
