"""Cross-entropy in chunks: the numbers of all logits at once, on any layout, in less memory."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jvarlen.distributed.layout import Layout
from jvarlen.parallel import (
    Axes,
    chunked_cross_entropy,
    chunked_log_probs,
    cross_entropy,
    enter_tensor_parallel,
    vocabulary_cross_entropy,
)
from tests.support.meshes import layout_mesh

B, T, D, V = 3, 8, 5, 11


CHUNKS = {
    "whole": (2**27, 2**23),
    "chunks": (7 * V, 2**23),
    "tokens": (V, 2**23),
    "parts": (2**27, V),
    "both": (7 * V, V),
}


@pytest.fixture(params=CHUNKS.values(), ids=CHUNKS)
def any_chunks(request, monkeypatch):
    for name, value in zip(("_MOST_LOGITS", "_LOGITS_OF_PART"), request.param, strict=True):
        monkeypatch.setattr(cross_entropy, name, value)


def arrays_of(dtype="float64"):
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(B, T, D)).astype(dtype), rng.normal(size=(D, V)).astype(dtype)
    targets, weights = rng.integers(0, V, (B, T)), rng.random((B, T)) * (rng.random((B, T)) < 0.7)
    return x, kernel, targets.astype(np.int32), weights.astype(dtype)


def chunked(x, kernel, targets, weights, **options):
    arrays = map(jnp.asarray, (x, kernel, targets, weights))
    return chunked_cross_entropy(*arrays, **{"vocab_size": V, "axes": Axes()} | options)


def of_all_logits(x, kernel, targets, weights):
    return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(x @ kernel, targets) * weights)


def log_probs_and_entropies(x, kernel, targets, weights, **options):
    """A sum that is not linear in either, of whose weights some are 0."""
    log_probs, entropies = chunked_log_probs(
        *map(jnp.asarray, (x, kernel, targets)),
        **{"vocab_size": V, "axes": Axes(), "temperature": 0.7, "has_entropy": True} | options,
    )
    return jnp.sum(weights * (jnp.exp(log_probs) + 0.3 * entropies**2))


def both_of_all_logits(x, kernel, targets, weights):
    log_probs = jax.nn.log_softmax(x @ kernel / 0.7)
    entropies = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
    of_targets = jnp.take_along_axis(log_probs, jnp.asarray(targets)[..., None], axis=-1)[..., 0]
    return jnp.sum(weights * (jnp.exp(of_targets) + 0.3 * entropies**2))


def with_table(found_of, x, kernel, targets, weights):
    return found_of(x, kernel.T, targets, weights, is_table=True)


PAIRS = [(chunked, of_all_logits), (log_probs_and_entropies, both_of_all_logits)]
of_both = pytest.mark.parametrize(("found_of", "expected_of"), PAIRS, ids=["losses", "log probs"])


def assert_equal(found, expected, rtol=1e-12):
    for leaf, expected_leaf in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(expected_leaf).max() > 1e-3
        np.testing.assert_allclose(leaf, expected_leaf, rtol=rtol, atol=rtol * np.abs(expected_leaf).max())


@of_both
@pytest.mark.usefixtures("any_chunks")
def test_loss_and_gradients_are_those_of_all_logits(found_of, expected_of):
    with jax.enable_x64(True):
        x, kernel, targets, weights = arrays_of()

        @functools.partial(jax.jit, static_argnums=0)
        def value_and_grads(loss_sum, x, table, weights):  # of a mean, with a kernel that is a table's transpose
            def loss(x, table, weights):
                return loss_sum(x, table.T, targets, weights) / 7

            return loss(x, table, weights), jax.value_and_grad(loss, argnums=(0, 1, 2))(x, table, weights)

        given = x, kernel.T.copy(), weights
        expected, grads = value_and_grads(expected_of, *given)
        of_table = functools.partial(with_table, found_of)
        for loss_sum in (found_of, of_table):
            found, found_and_grads = value_and_grads(loss_sum, *given)
            assert_equal(found, expected)  # without a gradient
            assert_equal(found_and_grads, grads)


@pytest.mark.parametrize(
    ("index", "argnums", "num_products"), [(0, (1,), 2), (1, (1,), 3), (1, (0,), 3), (1, (0, 1), 4)]
)
def test_gradients_that_are_not_asked_for_are_not_computed(index, argnums, num_products):
    """Log probabilities compute their logits twice."""
    found_of, expected_of = PAIRS[index]
    with jax.enable_x64(True):
        arrays = arrays_of()
        grad = jax.value_and_grad(found_of, argnums=argnums)
        assert str(jax.make_jaxpr(grad)(*arrays)).count("dot_general[") == num_products
        assert_equal(grad(*arrays), jax.value_and_grad(expected_of, argnums=argnums)(*arrays))


@pytest.mark.parametrize("index", [0, 1], ids=["log probs", "entropies"])
def test_one_of_log_probabilities_and_entropies_may_be_told_alone(index):
    def loss(x, kernel, both_of):
        both = both_of(x, kernel)
        return jnp.sum(weights * both[index]), both[1 - index]

    def chunked_both(x, kernel):
        return chunked_log_probs(x, kernel, targets, vocab_size=V, axes=Axes(), temperature=0.7, has_entropy=True)

    def both_of_all(x, kernel):
        log_probs = jax.nn.log_softmax(x @ kernel / 0.7)
        of_targets = jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
        return of_targets, -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)

    with jax.enable_x64(True):
        x, kernel, targets, weights = map(jnp.asarray, arrays_of())
        found, expected = (
            jax.value_and_grad(functools.partial(loss, both_of=each), argnums=(0, 1), has_aux=True)(x, kernel)
            for each in (chunked_both, both_of_all)
        )
        assert_equal(found, expected)


@pytest.mark.parametrize("num_weighted", [0, 7])
@pytest.mark.parametrize("most_logits", [2**27, 12 * V])
def test_parts_without_weight_are_not_computed(most_logits, num_weighted, monkeypatch):
    """Chunks of 24 or 12 tokens in 4 parts; what is not computed may be NaN."""
    monkeypatch.setattr(cross_entropy, "_MOST_LOGITS", most_logits)
    monkeypatch.setattr(cross_entropy, "_LOGITS_OF_PART", V)
    x, kernel, targets, _ = arrays_of("float32")
    part = (24 if most_logits == 2**27 else 12) // 4
    has_weight = np.zeros(B * T, bool)
    has_weight[np.random.default_rng(1).permutation(B * T)[:num_weighted]] = True
    is_computed = np.arange(B * T) < -(-num_weighted // part) * part
    order = np.concatenate([np.flatnonzero(has_weight), np.flatnonzero(~has_weight)])
    x.reshape(B * T, D)[order[~is_computed]] = np.nan
    weights = has_weight.astype(np.float32).reshape(B, T)
    found = jax.jit(jax.value_and_grad(chunked, argnums=(0, 1)))(x, kernel, targets, weights)
    expected_of = jax.jit(jax.value_and_grad(of_all_logits, argnums=(0, 1)))
    expected = expected_of(np.nan_to_num(x), kernel, targets, weights)
    for leaf, expected_leaf in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, expected_leaf, rtol=1e-5, atol=1e-5)


@of_both
def test_gradients_do_not_depend_on_those_taken_before(found_of, expected_of):
    """Arguments of the same shapes, for which JAX keeps what it has traced."""
    rng = np.random.default_rng(0)
    given = tuple(jnp.asarray(rng.normal(size=(size, V)), jnp.float32) for size in (17, V))  # of no other test
    others = jnp.arange(17) % V, jnp.ones(17)
    for asked in ("remat x", "kernel", "x"):
        argnums = tuple(i for i, name in enumerate(("x", "kernel")) if name in asked.split())
        loss, expected = (
            functools.partial(lambda f, x, kernel: f(x, kernel, *others), f) for f in (found_of, expected_of)
        )
        found = jax.grad(jax.checkpoint(loss) if "remat" in asked else loss, argnums)(*given)
        assert_equal(found, jax.grad(expected, argnums)(*given), rtol=1e-5)


@of_both
@pytest.mark.usefixtures("any_chunks")
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_vocabulary_over_devices_that_do_not_divide_it_gives_the_unsplit_numbers(
    sequence_parallel, found_of, expected_of
):
    axes = Axes(tensor="tensor", sequence_parallel=sequence_parallel)
    positions = P(None, "tensor") if sequence_parallel else P()
    with jax.enable_x64(True):
        x, kernel, targets, weights = arrays_of()
        expected = jax.jit(jax.value_and_grad(expected_of, argnums=(0, 1)))(x, kernel, targets, weights)

        def on_device(x, kernel):
            def loss(x, kernel):
                return found_of(enter_tensor_parallel(x, axes=axes), kernel, targets, weights, axes=axes)

            return loss(x, kernel), jax.value_and_grad(loss, argnums=(0, 1))(x, kernel)

        specs = positions, P(None, "tensor")
        mesh = layout_mesh(Layout(data=1, tensor=4))
        on_devices = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=(P(), (P(), specs)), check_vma=False)
        padded = np.pad(kernel, ((0, 0), (0, 1)), constant_values=99)
        alone, (loss, (x_grad, kernel_grad)) = jax.jit(on_devices)(x, padded)
        assert_equal((alone, (loss, (x_grad, kernel_grad[:, :V]))), (expected[0], expected))
        assert not np.any(kernel_grad[:, V:])


@pytest.mark.usefixtures("any_chunks")
@of_both
@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_a_loop_over_microbatches_on_several_devices(check_vma, found_of, expected_of):
    x, kernel, targets, weights = arrays_of("float32")

    def on_device(kernel, *arrays):
        def loss(kernel):
            one = lambda total, microbatch: (total + found_of(microbatch[0], kernel, *microbatch[1:]), None)  # noqa: E731
            zero = jnp.zeros_like(arrays[2], shape=())
            return jax.lax.scan(one, zero, jax.tree.map(lambda array: jnp.stack([array, array]), arrays))[0]

        loss_sum, grad = jax.value_and_grad(loss)(kernel)
        # A checked axis sums the gradient of what is whole by itself.
        return jax.lax.psum((loss_sum, grad), "data") if not check_vma else (jax.lax.psum(loss_sum, "data"), grad)

    rows = P("data")
    on_devices = jax.shard_map(
        on_device,
        mesh=layout_mesh(Layout(data=3)),
        in_specs=(P(), rows, rows, rows),
        out_specs=(P(), P()),
        check_vma=check_vma,
    )
    found = jax.jit(on_devices)(kernel, x, targets, weights)
    expected = jax.value_and_grad(expected_of, argnums=1)(x, kernel, targets, weights)
    assert_equal(found, jax.tree.map(lambda leaf: 2 * leaf, expected), rtol=1e-5)


@pytest.mark.parametrize("form", ["bfloat16", "float32 parameters", "float32"])
def test_products_in_bfloat16_are_summed_in_float32_over_all_chunks(form, monkeypatch):
    """Each of 64 chunks adds to the kernel's gradient, which would lose them if it were rounded between them."""
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((2048, D), (D, V)))
    targets, weights = jnp.zeros(2048, jnp.int32), jnp.ones(2048)
    wide = x.astype(jnp.float32), kernel.astype(jnp.float32)
    expected, expected_grads = jax.jit(jax.value_and_grad(of_all_logits, argnums=(0, 1)))(*wide, targets, weights)
    given = (x, kernel) if form == "bfloat16" else wide
    options = {"compute_dtype": jnp.bfloat16} if form == "float32 parameters" else {}
    found = []
    for most_logits in (2**27, 32 * V):
        monkeypatch.setattr(cross_entropy, "_MOST_LOGITS", most_logits)
        value_and_grad = jax.jit(jax.value_and_grad(functools.partial(chunked, **options), argnums=(0, 1)))
        loss, grads = value_and_grad(*given, targets, weights)
        assert loss.dtype == jnp.float32
        np.testing.assert_allclose(loss, expected, rtol=1e-5)  # the very products: only sums are rounded
        for grad, array, expected_grad in zip(grads, given, expected_grads, strict=True):
            assert grad.dtype == array.dtype
            error = jnp.linalg.norm(grad.astype(jnp.float32) - expected_grad) / jnp.linalg.norm(expected_grad)
            assert error < (1e-6 if form == "float32" else 3e-3)
        found.append(grads)
    one, many = (np.asarray(grads[1], np.float32) for grads in found)
    np.testing.assert_allclose(many, one, rtol=2**-8 if form == "bfloat16" else 1e-4, atol=1e-4 * np.abs(one).max())


@pytest.mark.usefixtures("any_chunks")
def test_a_target_that_is_no_token_counts_only_with_a_weight():
    x, kernel, targets, weights = arrays_of("float32")
    weights[0, :2] = 0
    expected = jax.jit(jax.value_and_grad(of_all_logits))(x, kernel, targets, weights)
    targets = targets.copy()  # JAX may be reading them
    targets[0, :2] = (-100, V)
    assert_equal(jax.jit(jax.value_and_grad(chunked))(x, kernel, targets, weights), expected, rtol=1e-5)
    assert np.isnan(jax.jit(chunked)(x, kernel, targets, np.ones_like(weights)))
    losses = vocabulary_cross_entropy(jnp.asarray(x @ kernel), jnp.asarray(targets), vocab_size=V, axes=Axes())
    assert np.isnan(losses).sum() == 2


def test_a_kernel_of_another_vocabulary_is_refused():
    with pytest.raises(ValueError, match="11 logits on each of 1 devices are not those of a vocabulary of 12"):
        chunked(*arrays_of("float32"), vocab_size=12)


def test_products_in_float16_are_refused():
    for dtype, compute_dtype in (("float16", None), ("float32", "float16")):
        with pytest.raises(ValueError, match=r"float16 .* compute_dtype=jnp.bfloat16"):
            chunked(*arrays_of(dtype), vocab_size=11, compute_dtype=compute_dtype)
        options = {"vocab_size": 11, "compute_dtype": compute_dtype}
        assert np.isfinite(log_probs_and_entropies(*arrays_of(dtype), **options))
        with pytest.raises(ValueError, match=r"float16 .* compute_dtype=jnp.bfloat16"):
            jax.grad(functools.partial(log_probs_and_entropies, **options))(*map(jnp.asarray, arrays_of(dtype)))


def argument_shapes(num_tokens, num_values):
    shapes = (num_tokens, 8), (8, num_values), (num_tokens,), (num_tokens,)
    types = jnp.float32, jnp.float32, jnp.int32, jnp.float32
    return [jax.ShapeDtypeStruct(*each) for each in zip(shapes, types, strict=True)]


def most_elements(call, num_tokens, num_values):
    """Elements of the largest array of a program."""
    text = jax.jit(call).lower(*argument_shapes(num_tokens, num_values)).compile().as_text()
    return max(math.prod(map(int, size.split(","))) for size in re.findall(r"f32\[([\d,]+)\]", text))


@pytest.mark.usefixtures("optimized")
def test_8192_tokens_of_128256_values_take_an_eighth_of_the_memory_of_all_logits():
    num_tokens, num_values = 8192, 128_256
    arguments = argument_shapes(num_tokens, num_values)
    in_chunks = functools.partial(chunked, vocab_size=num_values)

    def gigabytes(call):
        return jax.jit(call).lower(*arguments).compile().memory_analysis().temp_size_in_bytes / 1e9

    assert gigabytes(jax.value_and_grad(of_all_logits, argnums=(0, 1))) > 8.4
    assert gigabytes(jax.value_and_grad(in_chunks, argnums=(0, 1))) < 1.1
    assert gigabytes(in_chunks) < 0.55
    assert gigabytes(jax.grad(in_chunks)) < 0.55  # without the gradient of a kernel that is frozen
    both = functools.partial(log_probs_and_entropies, vocab_size=num_values)
    assert gigabytes(jax.value_and_grad(both, argnums=(0, 1))) < 1.7
    assert most_elements(jax.grad(both), num_tokens, num_values) <= 2**27
    assert most_elements(jax.grad(in_chunks), num_tokens, num_values) <= 2**27


@pytest.mark.usefixtures("optimized")
def test_chunks_of_at_least_1024_tokens_have_half_as_many_logits():
    for num_values, most in ((32_064, 2**26), (2**16, 2**26), (2**16 + 2**14, 1024 * (2**16 + 2**14))):
        in_chunks = functools.partial(chunked, vocab_size=num_values)
        assert 0.9 * most < most_elements(jax.grad(in_chunks), 8192, num_values) <= most
