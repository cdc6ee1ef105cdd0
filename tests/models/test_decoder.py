"""The decoder: causal, blind to padding and padding rows, the same for the same seed and with every form of mask."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvarlen import load, make_plan, no_recompiles
from jvarlen._common.pytree import plain_names
from jvarlen.data import WeightedTokens
from jvarlen.models import DecoderConfig, init_params, layered, make_loss_fn
from jvarlen.models.decoder import param_shapes
from jvarlen.parallel import layered_loss_fn
from tests.support.hand_made import batch_of

CONFIG = DecoderConfig(num_layers=2, width=16, num_heads=2)
LOSS_FN = jax.jit(make_loss_fn(CONFIG))
SHALLOW = dataclasses.replace(CONFIG, num_layers=1)
LOSS_AND_GRAD = jax.jit(jax.value_and_grad(make_loss_fn(SHALLOW), has_aux=True))


@functools.cache
def initial_params():
    with jax.enable_x64(False):
        return init_params(CONFIG, seed=0)


def microbatch(tokens, lengths, length):
    tokens = np.array([row + [0] * (length - len(row)) for row in tokens], np.int32)
    weights = (np.arange(length) < np.array(lengths)[:, None]).astype(np.float32)
    return batch_of(tokens, np.array(lengths, np.int32), weights, np.float32(len(tokens)))


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
                LOSS_FN(initial_params(), one._replace(weights=only_t))[0]
                == LOSS_FN(initial_params(), other._replace(weights=only_t))[0]
            )


def test_padding_and_padding_rows_change_nothing():
    alone, weight = LOSS_FN(initial_params(), microbatch([[5, 6, 7]], [3], 3))
    padded, padded_weight = LOSS_FN(initial_params(), microbatch([[5, 6, 7], []], [3, 0], 8))
    np.testing.assert_allclose(padded, alone, rtol=1e-6)
    assert weight == padded_weight == 3


def test_gradients_of_padding_rows_are_zero_and_finite():
    grads = jax.grad(lambda params: LOSS_FN(params, microbatch([[], []], [0, 0], 8))[0])(initial_params())
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(grads))


@pytest.fixture(scope="module")
def told_lengths():
    """Loss and gradient in float64 of rows of all kinds, by the model as it is."""
    return loss_and_grad_in_float64(CONFIG)


def loss_and_grad_in_float64(config):
    rows = microbatch([[1, 2, 3, 4, 5, 6], [], [7], [8, 9, 10]], [6, 0, 1, 3], 6)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), initial_params())
        return jax.jit(jax.value_and_grad(make_loss_fn(config), has_aux=True))(params, rows)


@pytest.mark.parametrize("attention", ["xla", "blocks"])
def test_every_form_of_mask_gives_the_same_loss_and_gradient(attention, told_lengths):
    """In float64, where nothing but a wrong term can differ."""
    (expected, expected_weight), expected_grads = told_lengths
    (loss, weight), grads = loss_and_grad_in_float64(dataclasses.replace(CONFIG, attention=attention))
    assert loss.dtype == jnp.float64
    assert weight == expected_weight == 10
    np.testing.assert_allclose(loss, expected, rtol=1e-13)
    for grad, expected_grad in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(grad, expected_grad, atol=1e-12)


@pytest.mark.parametrize("how", ["padded", "split"])
def test_rows_with_loss_weights_have_the_loss_and_gradient_of_the_samples_alone(how):
    rng = np.random.default_rng(0)
    samples = [WeightedTokens(rng.integers(0, 256, n), rng.choice([0.0, 0.25, 1.0], n)) for n in (1, 11, 10, 11, 10, 1)]
    lengths = list(map(len, samples))
    pieces = samples
    if how == "split":
        plan = make_plan(lengths, [(2, 10)], packing="best_fit", overlong="split", order="length")
        pieces = [sample[start : start + 10] for sample in samples for start in range(0, len(sample), 10)]
    else:
        plan = make_plan(lengths, [(4, 12)], order="length")
    with jax.enable_x64(True):
        params = jax.tree.map(np.float64, init_params(SHALLOW, seed=0))

        def sums(microbatches):
            of_each = jax.device_get([LOSS_AND_GRAD(params, each) for each in microbatches])
            (loss, weight), grads = jax.tree.map(lambda *leaves: sum(leaves), *of_each)
            return loss / weight, jax.tree.map(lambda leaf: leaf / weight, grads)

        def of_rows():
            for batch in load(plan, samples):
                yield jax.tree.map(lambda leaf: leaf[0] if leaf.ndim else leaf, batch)

        def alone():
            for sample in pieces:
                one = microbatch([sample.tokens.tolist()], [len(sample)], len(sample))
                yield one._replace(weights=sample.weights[None].astype(np.float64))

        for of_row, of_sample in zip(jax.tree.leaves(sums(of_rows())), jax.tree.leaves(sums(alone())), strict=True):
            assert of_row.dtype == np.float64
            np.testing.assert_allclose(of_row, of_sample, rtol=1e-12, atol=1e-14)


def test_an_untrained_model_knows_nothing():
    loss, weight = LOSS_FN(initial_params(), microbatch([list(range(200))], [200], 200))
    assert abs(float(loss / weight) / np.log(2) - 8) < 0.5


def test_the_seed_decides_the_weights():
    same, other = init_params(CONFIG, seed=0), init_params(CONFIG, seed=1)
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(initial_params()), jax.tree.leaves(same), strict=True))
    assert not all(
        (a == b).all() for a, b in zip(jax.tree.leaves(initial_params()), jax.tree.leaves(other), strict=True)
    )


def test_an_equal_model_is_initialized_without_compiling_again():
    init_params(CONFIG, seed=0)
    with no_recompiles():
        init_params(dataclasses.replace(CONFIG), seed=1)


def test_parameters_have_the_names_of_their_parts():
    named = dict(zip(plain_names(initial_params()), jax.tree.leaves(initial_params()), strict=True))
    shapes = {name.removesuffix(".value"): leaf.shape for name, leaf in named.items()}
    of_layer = {
        "attention_norm.scale": (16,),
        **{f"attention.{name}.kernel": (16, 16) for name in ("q", "k", "v", "out")},
        "mlp_norm.scale": (16,),
        "mlp.gate.kernel": (16, 48),
        "mlp.up.kernel": (16, 48),
        "mlp.down.kernel": (48, 16),
    }
    ends = {"embed.embedding": (257, 16), "norm.scale": (16,), "head.kernel": (16, 257)}
    assert shapes == ends | {f"layers.{i}.{name}": shape for i in range(2) for name, shape in of_layer.items()}


@pytest.mark.parametrize(("windows", "by_layers"), [((256, 256), True), ((256, 0), False), ((256, 0), True)])
def test_windows_leave_tpus_their_kernel(windows, by_layers):
    """Layers in a loop share a program: it knows the window if all have the same, and else it is data."""
    config = dataclasses.replace(CONFIG, windows=windows)
    loss_fn = layered_loss_fn(layered(config)) if by_layers else make_loss_fn(config)
    rows = microbatch([[1] * 512], [512], 512)
    traced = jax.jit(jax.grad(lambda *args: loss_fn(*args)[0])).trace(init_params(config, seed=0), rows)
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_shapes_of_parameters_are_told_without_drawing_them_wherever_they_are_asked_for(compilations):
    config = DecoderConfig(num_layers=3, width=20, num_heads=2, vocab_size=301)  # of no other test
    with jax.ensure_compile_time_eval():
        shapes = param_shapes(config)
    assert "jit(init)" not in compilations
    assert shapes["embed"]["embedding"].shape == (301, 20)
    init_params(config, 0)
    assert "jit(init)" in compilations, "random parameters are drawn by other programs: name them"
