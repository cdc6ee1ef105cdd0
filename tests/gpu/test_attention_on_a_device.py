"""Attention on a device: the same numbers by every implementation, none of another sample, finite without a token."""

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


# Samples that end within blocks and with them, have one token, and have padding between them.
PACKED = np.stack(
    [np.repeat(ids, lengths) for ids, lengths in (((1, 2, 0, 3), (64, 1, 35, 200)), ((4, 5), (170, 130)))]
)


def random_qkv(dtype, rows=4, heads=(2, 2, 2)):
    keys = jax.random.split(jax.random.key(0), 3)
    shape = rows, IS_TOKEN.shape[1]
    return [jax.random.normal(key, (*shape, n, 16)).astype(dtype) for key, n in zip(keys, heads, strict=True)]


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


def skip_unless_here(implementation, on_gpu):
    if implementation in ("cudnn", "triton") and not on_gpu:
        pytest.skip(f"{implementation} is for GPUs")


@pytest.mark.parametrize("implementation", ["blocks", "triton", "auto"])
def test_all_forms_give_the_numbers_of_the_whole(whole, implementation, on_gpu):
    skip_unless_here(implementation, on_gpu)
    compare(whole, outputs_and_gradients(implementation, *random_qkv("float32")), atol=1e-5)


@pytest.mark.parametrize("implementation", ["auto", "triton", "cudnn"])
def test_bfloat16_gives_the_numbers_of_float32_to_its_rounding(whole, implementation, on_gpu):
    skip_unless_here(implementation, on_gpu)
    compare(whole, outputs_and_gradients(implementation, *random_qkv("bfloat16")), atol=0.1)


def compare(expected, found, atol):
    check = functools.partial(np.testing.assert_allclose, atol=atol, rtol=0)
    check(found[0], expected[0])
    for grad, expected_grad in zip(found[1], expected[1], strict=True):
        check(grad, expected_grad)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("implementation", ["auto", "blocks", "triton", "cudnn", "xla"])
def test_packed_samples_give_what_each_gives_alone_and_nothing_of_another_flows_in(
    implementation, causal, dtype, on_gpu
):
    skip_unless_here(implementation, on_gpu)
    if implementation == "cudnn" and (dtype == "float32" or float(jax.devices()[0].compute_capability) < 9):
        pytest.skip("cuDNN takes packed rows in 16 bits, on Hopper and later")

    @functools.partial(jax.jit, static_argnames="implementation")
    def run(qkv, ids, implementation):
        options = {"causal": causal, "implementation": implementation, "samples_per_row": int(PACKED.max())}
        outputs, vjp = jax.vjp(lambda *qkv: attend(*qkv, segment_ids=ids, **options), *qkv)
        return outputs, *vjp(jnp.cos(outputs))

    with jax.default_matmul_precision("highest"):
        qkv = random_qkv(dtype, len(PACKED), heads=(4, 2, 2))
        found = run(qkv, jnp.array(PACKED), implementation)
        for id_ in range(1, PACKED.max() + 1):
            is_sample = id_ == PACKED
            row, positions = is_sample.any(axis=1).argmax(), is_sample.any(axis=0)
            alone = [x[row : row + 1, positions].astype(jnp.float32) for x in qkv]
            expected = run(alone, jnp.ones((1, positions.sum()), int), "xla")
            for a, b in zip(found, expected, strict=True):
                tolerance = 1e-5 if dtype == "float32" else 0.1
                np.testing.assert_allclose(a[row, positions].astype(jnp.float32), b[0], atol=tolerance, rtol=0)
        is_changed = jnp.array(PACKED == 2)[..., None, None]
        changed = run([jnp.where(is_changed, 3, x) for x in qkv], jnp.array(PACKED), implementation)
        tolerance = 0.02 if implementation == "cudnn" else 0  # which adds gradients of queries in any order
        for a, b in zip(changed, found, strict=True):
            a, b = (x[PACKED != 2].astype(jnp.float32) for x in (a, b))
            np.testing.assert_allclose(a, b, atol=tolerance, rtol=0)
