"""Mixed precision: bfloat16 factors, float32 parameters and sums, and training that goes as in float32."""

import dataclasses
import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jvarlen import make_train_step
from jvarlen.models import DecoderConfig, LoraConfig, init_params, make_loss_fn
from jvarlen.models.products import Linear, multiply_in_bfloat16, rngs_of
from jvarlen.training.train_state import new_state
from tests.support.hand_made import batch_of
from tests.support.meshes import data_mesh

CONFIG = DecoderConfig(num_layers=2, width=16, num_heads=2)
HALF = dataclasses.replace(CONFIG, compute_dtype="bfloat16")
SMALL = DecoderConfig(num_layers=1, width=8, num_heads=1)
SMALL_HALF = dataclasses.replace(SMALL, compute_dtype="bfloat16")


@functools.cache
def params(config=CONFIG):
    """Made when a test needs them: every process of tests imports this module."""
    return init_params(config, seed=0)


def random_batch(num_microbatches, rows, length):
    """Rows of eight different bytes, which a model learns in a few steps, with padding."""
    rng = np.random.default_rng(0)
    shape = (num_microbatches, rows)
    lengths = rng.integers(1, length + 1, shape).astype(np.int32)
    weights = (np.arange(length) < lengths[..., None]).astype(np.float32)
    tokens = rng.integers(97, 105, (*shape, length)) * (weights > 0)
    return batch_of(tokens.astype(np.int32), lengths, weights, np.float32(lengths.size))


BATCH = random_batch(1, 8, 24)
MICROBATCH = jax.tree.map(lambda leaf: leaf[0] if leaf.ndim else leaf, BATCH)


def loss_and_grad(config):
    return jax.value_and_grad(make_loss_fn(config), has_aux=True)


@pytest.fixture(scope="module")
def sums():
    """((loss_sum, weight_sum), gradients) of the microbatch, in float32 and in bfloat16."""
    return [jax.jit(loss_and_grad(config))(params(), MICROBATCH) for config in (CONFIG, HALF)]


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def relative_error(tree, expected):
    return np.linalg.norm(flat(tree) - flat(expected)) / np.linalg.norm(flat(expected))


def equations(jaxpr):
    """All equations of a program, those of the functions that it calls among them."""
    is_jaxpr = lambda value: isinstance(value, jax.extend.core.Jaxpr | jax.extend.core.ClosedJaxpr)  # noqa: E731
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(value):
                yield from equations(getattr(value, "jaxpr", value))


def types_multiplied(config):
    """The types of the factors of all matrix products of loss and gradient; what is rounded on the way in counts so."""
    products = [
        equation
        for equation in equations(jax.make_jaxpr(loss_and_grad(config))(params(), MICROBATCH).jaxpr)
        if equation.primitive.name == "dot_general"
    ]
    # A layer has those of queries, keys and values, of gate and up, each one in bfloat16, of outputs, down, and two of
    # attention. There is the head, and attention's logits again backward.
    assert len(products) == 3 * (2 * (6 if config is HALF else 9) + 1) + 2
    rounded = jax.lax.DotAlgorithmPreset.BF16_BF16_F32
    return {
        "bfloat16" if product.params["precision"] == rounded else str(factor.aval.dtype)
        for product in products
        for factor in product.invars
    }


def test_no_matrix_is_multiplied_in_another_type():
    assert types_multiplied(HALF) == {"bfloat16"}
    assert types_multiplied(CONFIG) == {"float32"}


def test_exponents_and_the_sums_of_a_softmax_are_float32():
    """In attention and cross-entropy, and in the statistics of norms as well."""
    jaxpr = jax.make_jaxpr(make_loss_fn(HALF))(params(), MICROBATCH).jaxpr
    sensitive = [equation for equation in equations(jaxpr) if equation.primitive.name in {"exp", "log", "rsqrt"}]
    sums_ = [equation for equation in equations(jaxpr) if equation.primitive.name in {"reduce_sum", "reduce_max"}]
    assert {equation.primitive.name for equation in sensitive} == {"exp", "log", "rsqrt"}
    assert sums_
    assert {str(equation.invars[0].aval.dtype) for equation in sensitive + sums_} == {"float32"}


def test_parameters_gradients_and_sums_are_float32(sums):
    _, ((loss_sum, weight_sum), grads) = sums
    assert {leaf.dtype for leaf in jax.tree.leaves(init_params(HALF, seed=0))} == {jnp.dtype("float32")}
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    assert loss_sum.dtype == weight_sum.dtype == jnp.float32


def test_loss_and_gradient_are_near_those_of_float32(sums):
    ((expected_loss, expected_weight), expected_grads), ((loss, weight), grads) = sums
    assert weight == expected_weight
    assert loss != expected_loss
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-3)
    assert relative_error(grads, expected_grads) < 0.03


def test_gradients_of_a_tiny_loss_do_not_vanish(sums):
    """Without a loss scale: in float16, whose smallest number is 6e-8, nothing of them would be left."""
    scale = 2.0**-100  # of which no rounding comes
    loss_fn = make_loss_fn(HALF)
    grads = jax.jit(jax.grad(lambda params, microbatch: loss_fn(params, microbatch)[0] * scale))(params(), MICROBATCH)
    assert 0 < np.abs(flat(grads)).max() < 1e-28
    _, (_, expected) = sums
    assert relative_error(jax.tree.map(lambda leaf: leaf / scale, grads), expected) < 1e-6


def test_a_gradient_does_not_depend_on_how_rows_are_split_into_microbatches(sums):
    """Because its sums over rows are never rounded to bfloat16."""
    one_a_row = jax.tree.map(lambda leaf: leaf[:, None] if leaf.ndim else leaf, MICROBATCH)
    gradient = jax.grad(make_loss_fn(HALF), has_aux=True)
    row_grads = jax.jit(lambda rows: jax.lax.map(lambda row: gradient(params(), row)[0], rows))(
        one_a_row._replace(num_sequences=np.ones(len(one_a_row.tokens), np.float32))
    )
    _, (_, expected) = sums
    assert relative_error(jax.tree.map(lambda leaf: leaf.sum(axis=0), row_grads), expected) < 1e-5


@pytest.mark.parametrize("check_vma", [True, False])
def test_kernels_that_all_shards_share_have_the_gradient_of_all(check_vma):
    rng = np.random.default_rng(0)
    inputs, kernel = (rng.normal(size=shape).astype(np.float32) for shape in ((8, 4), (4, 5)))

    def total(inputs, kernel):
        return jnp.sum(jnp.sin(multiply_in_bfloat16(inputs, kernel)))

    shards, whole = PartitionSpec("data"), PartitionSpec()
    over_shards = jax.shard_map(
        lambda inputs, kernel: jax.lax.psum(total(inputs, kernel), "data"),
        mesh=data_mesh(4),
        in_specs=(shards, whole),
        out_specs=whole,
        check_vma=check_vma,
    )
    for grad, expected in zip(
        jax.jit(jax.grad(over_shards, argnums=(0, 1)))(inputs, kernel),
        jax.jit(jax.grad(total, argnums=(0, 1)))(inputs, kernel),
        strict=True,
    ):
        np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-6)


def test_training_goes_as_in_float32():
    losses = []
    for config in (SMALL, SMALL_HALF):
        optimizer = optax.adam(1e-2)
        state = new_state(params(SMALL), optimizer)
        step = jax.jit(make_train_step(make_loss_fn(config), optimizer))
        for _ in range(30):
            state, metrics = step(state, BATCH)
        losses.append(float(metrics.loss))
    assert losses[0] < 2.5  # from 5.5
    np.testing.assert_allclose(losses[1], losses[0], rtol=0.01)


@pytest.mark.parametrize("num_groups", [1, 2])
def test_products_of_one_input_give_together_what_each_gives(num_groups):
    config = dataclasses.replace(HALF, lora=LoraConfig(rank=2, alpha=3.0, targets="layers.*.attention.v.kernel"))
    rngs = rngs_of(jax.random.key(0))
    sizes = (("q", 12), ("k", 4), ("v", 4))
    products = [Linear(config, 8, size, f"attention.{name}", has_bias=True, rngs=rngs) for name, size in sizes]
    for i, each in enumerate(products):
        each.bias[...] += i
    products[2].lora_b[...] += 0.5
    x = jax.random.normal(jax.random.key(1), (5, 8)).astype(jnp.bfloat16)

    def total(x, outputs_of):
        outputs = outputs_of(x)
        return sum(jnp.sum(jnp.sin(each.astype(np.float32))) for each in outputs), outputs

    alone, together = (
        jax.grad(lambda x, outputs_of=outputs_of: total(x, outputs_of), has_aux=True)(x)
        for outputs_of in (
            lambda x: [each(x) for each in products],
            lambda x: Linear.together(x, products, num_groups=num_groups),
        )
    )
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(other.astype(np.float32), one.astype(np.float32), rtol=0.02, atol=0.02)


@pytest.mark.usefixtures("optimized")
def test_products_are_sums_of_rounded_factors():
    rng = np.random.default_rng(0)
    inputs, kernel, weights = (
        rng.normal(size=shape).astype(np.float32) for shape in ((3, 2048, 4), (4, 5), (3, 2048, 5))
    )

    def total(inputs, kernel):
        outputs = multiply_in_bfloat16(inputs, kernel)
        return jnp.sum(outputs * weights), outputs

    x, w, g = (array.astype(jnp.bfloat16).astype(np.float64) for array in (inputs, kernel, weights))
    grads, outputs = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(inputs, kernel)
    np.testing.assert_allclose(outputs, x @ w, rtol=1e-5, atol=1e-5)
    for grad, expected in zip(grads, (g @ w.T, np.einsum("brd,brf->df", x, g)), strict=True):
        np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-4)
