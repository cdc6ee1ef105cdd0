"""Adapters: they alone change in training, and computing with them is computing with merged kernels."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from jvarlen import UserError, make_eval_step, make_train_step
from jvarlen.estimates import estimate_memory
from jvarlen.inference import generate
from jvarlen.models import DecoderConfig, LoraConfig, add_lora, init_params, layered, make_loss_fn, merge_lora
from jvarlen.models.config import PRODUCTS
from jvarlen.models.decoder import param_shapes
from jvarlen.models.products import Dropout
from jvarlen.parallel import Axes, StepLoss, layered_loss_fn
from jvarlen.training.trainable import names_of
from tests.support.hand_made import batch_of, packed_batch_of

BASE = DecoderConfig(num_layers=2, width=16, num_heads=2)
EVERY = LoraConfig(rank=2, alpha=6, targets=("layers.*.attention.*.kernel", "layers.*.mlp.*.kernel"))
CONFIG = dataclasses.replace(BASE, lora=EVERY)
DROPPING = dataclasses.replace(BASE, lora=dataclasses.replace(EVERY, dropout=0.5))


def padded_batch():
    rng, lengths = np.random.default_rng(0), np.array([[5, 8], [3, 0]], np.int32)
    is_real = np.arange(8) < lengths[..., None]
    tokens = np.where(is_real, rng.integers(0, 256, is_real.shape), 0).astype(np.int32)
    return batch_of(tokens, lengths, is_real.astype(np.float32), np.float32(3))


def packed_batch():
    rng = np.random.default_rng(1)
    segment_ids = np.array([[[1, 1, 1, 2, 2, 0, 0, 0], [1] * 8]], np.int32)
    positions = np.array([[[0, 1, 2, 0, 1, 0, 0, 0], range(8)]], np.int32)
    tokens = np.where(segment_ids > 0, rng.integers(0, 256, segment_ids.shape), 0).astype(np.int32)
    return packed_batch_of(tokens, segment_ids, positions, (segment_ids > 0).astype(np.float32), np.float32(3))


@functools.cache
def trained_params(config=CONFIG):
    """Parameters whose adapters are those of no beginning."""
    params, rng = init_params(config, 0), np.random.default_rng(2)
    return jax.tree.unflatten(
        jax.tree.structure(params),
        [
            jnp.asarray(rng.normal(size=leaf.shape, scale=2), jnp.float32) if name.endswith("lora_b") else leaf
            for name, leaf in zip(names_of(params), jax.tree.leaves(params), strict=True)
        ],
    )


def named(params):
    return dict(zip(names_of(params), jax.tree.leaves(params), strict=True))


def first_of(batch):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[0] if leaf.ndim else leaf), batch)


@pytest.mark.parametrize(
    ("targets", "offenders"),
    [
        ("layers.*.attention.w.kernel", "'layers.\\*.attention.w.kernel'"),
        (("layers.*.mlp.up.kernel", "q"), "no kernel: 'q'"),
        ((), "no kernel"),
        ("*", "embed.embedding, .*norm.scale"),
        ("*.kernel", "no kernel of a layer and has no adapter: head.kernel"),
        ("layers.1.mlp.*.kernel", "lack layers.0.mlp.gate.kernel, layers.0.mlp.up.kernel, layers.0.mlp.down.kernel"),
        ("layers.*.attention.[qk].*", "layers.0.attention.q.bias"),
    ],
)
def test_targets_that_are_not_the_same_kernels_of_all_layers_are_listed(targets, offenders):
    with pytest.raises(ValueError, match=offenders):
        DecoderConfig(lora=LoraConfig(targets=targets), qkv_bias=True)


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"alpha": 0}, {"dropout": 1.0}, {"dropout": -0.1}, {"targets": 3}])
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LoraConfig(**wrong)


@pytest.mark.parametrize("targets", [("layers.0.mlp.up.kernel", "layers.1.mlp.up.kernel"), "layers.[01].mlp.up.kernel"])
def test_targets_may_name_every_layer(targets):
    config = dataclasses.replace(BASE, lora=LoraConfig(targets=targets))
    assert config.adapted == config.one_layer.adapted == ("mlp.up",)
    assert {*named(param_shapes(config))} == {*named(init_params(config, 0))}


@pytest.mark.parametrize("others", [{}, {"qkv_bias": True, "out_bias": True}, {"qk_norm": True, "tied": True}])
def test_all_kernels_of_layers_can_have_adapters_and_nothing_else(others):
    config = DecoderConfig(num_layers=1, width=16, **others)
    for name in named(param_shapes(config)):
        is_kernel = name.startswith("layers.") and name.endswith(".kernel")
        assert is_kernel == (name in {f"layers.0.{product}.kernel" for product in PRODUCTS})
        if is_kernel:
            shapes = named(param_shapes(dataclasses.replace(config, lora=LoraConfig(rank=3, targets=name))))
            num_in, num_out = shapes[name].shape
            of = name.removesuffix("kernel")
            assert (shapes[f"{of}lora_a"].shape, shapes[f"{of}lora_b"].shape) == ((num_in, 3), (3, num_out))
        else:
            with pytest.raises(ValueError, match=f"no kernel of a layer and has no adapter: {name}"):
                dataclasses.replace(config, lora=LoraConfig(targets=name))


def test_adapters_put_beside_a_base_are_those_of_a_fresh_model_and_change_nothing():
    base, fresh = init_params(BASE, 3), init_params(CONFIG, 3)
    added = add_lora(base, CONFIG, 3)
    for name, leaf in named(added).items():
        np.testing.assert_array_equal(leaf, named(fresh)[name])
        if name in named(base):
            assert leaf is named(base)[name]
    lora_a = np.concatenate(
        [leaf.ravel() * len(leaf) ** 0.5 for name, leaf in named(added).items() if "lora_a" in name]
    )
    assert 0.9 < abs(lora_a).max() <= 1
    assert abs(lora_a.mean()) < 0.1
    loss_fn, microbatch = make_loss_fn(CONFIG), first_of(padded_batch())
    assert loss_fn(added, microbatch)[0] == make_loss_fn(BASE)(base, microbatch)[0]


def test_adapters_are_float32_beside_views_in_bfloat16():
    base = jax.tree.map(lambda leaf: np.asarray(leaf).astype(ml_dtypes.bfloat16), init_params(BASE, 0))
    added = add_lora(base, CONFIG, 0)
    dtypes = {name: leaf.dtype for name, leaf in named(added).items()}
    assert all(dtypes[name] == (np.float32 if "lora" in name else jnp.bfloat16) for name in dtypes)
    assert all(named(added)[name] is leaf for name, leaf in named(base).items())
    step = make_train_step(make_loss_fn(CONFIG), optax.adam(1e-2))
    state, metrics = step(step.init(added), padded_batch())
    assert np.isfinite(metrics.loss)
    assert {name: leaf.dtype for name, leaf in named(state.params).items()} == dtypes


def test_what_has_adapters_or_is_another_model_gets_none():
    with pytest.raises(ValueError, match=r"already.*layers\.0\.attention\.k\.lora_a"):
        add_lora(trained_params(), CONFIG, 0)
    with pytest.raises(ValueError, match=r"head\.kernel"):
        add_lora(init_params(dataclasses.replace(BASE, tied=True), 0), CONFIG, 0)
    with pytest.raises(ValueError, match="no adapters"):
        add_lora(init_params(BASE, 0), BASE, 0)
    with pytest.raises(ValueError, match=r"not those of this config.*layers\.0\.attention\.k\.lora_a"):
        merge_lora(init_params(BASE, 0), CONFIG)


def test_parameters_of_another_config_are_refused():
    higher, microbatch = dataclasses.replace(CONFIG, lora=dataclasses.replace(EVERY, rank=4)), first_of(padded_batch())
    with_adapters, without = trained_params(), init_params(BASE, 0)
    for config, params, said in (
        (BASE, with_adapters, r"in the parameters alone: layers\.0\.attention\.k\.lora_a.*merge_lora"),
        (CONFIG, without, r"in the config alone: layers\.0\.attention\.k\.lora_a.*add_lora"),
        (higher, with_adapters, r"adapters of rank 2, and the config of rank 4"),
    ):
        for use in (make_loss_fn(config), layered_loss_fn(layered(config))):
            with pytest.raises(UserError, match=said):
                use(params, microbatch)
        with pytest.raises(UserError, match=said):
            generate(params, config, [np.array([1, 2])], max_new_tokens=1)
    with pytest.raises(UserError, match="adapters of rank 2, and the config of rank 4"):
        merge_lora(with_adapters, higher)


def test_adapters_are_not_trained_with_their_base_unasked():
    loss_fn = make_loss_fn(CONFIG)
    wrapped = lambda params, microbatch: loss_fn(params, microbatch)  # noqa: E731
    for model in (wrapped, StepLoss(wrapped, lambda sums: sums)):
        with pytest.raises(UserError, match=r'have adapters, layers\.0.*trainable="\*\.lora_\[ab\]", or "\*" for all'):
            make_train_step(model, optax.sgd(0.1)).init(trained_params())
        for trainable, is_trained in (("*.lora_[ab]", False), ("*", True)):
            step = make_train_step(model, optax.sgd(0.1, momentum=0.9), trainable=trainable)
            kept = named(step.init(trained_params()).opt_state)
            assert any(name.endswith("embed.embedding") for name in kept) == is_trained


def test_adapters_are_merged_in_whole_float32_on_accelerators():
    merging = str(jax.make_jaxpr(lambda params: merge_lora(params, CONFIG))(trained_params()))
    assert merging.count("dot_general") == merging.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") > 0


@pytest.mark.parametrize("make_batch", [padded_batch, packed_batch])
def test_losses_and_logits_are_those_of_merged_kernels(make_batch):
    merged, microbatch = merge_lora(trained_params(), CONFIG), first_of(make_batch())
    expected, weight = make_loss_fn(BASE)(merged, microbatch)
    for loss_fn in (make_loss_fn(CONFIG), layered_loss_fn(layered(CONFIG))):
        loss, found = jax.jit(loss_fn)(trained_params(), microbatch)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        assert found == weight
    assert abs(float(make_loss_fn(BASE)(init_params(BASE, 0), microbatch)[0] - expected)) > 0.1


def test_bfloat16_products_are_near_float32_ones():
    config, microbatch = dataclasses.replace(CONFIG, compute_dtype="bfloat16"), first_of(padded_batch())

    def loss_and_grads(each):
        run = jax.value_and_grad(lambda params: make_loss_fn(each)(params, microbatch)[0])
        loss, grads = jax.jit(run)(jax.tree.map(lambda leaf: leaf / 4, trained_params()))
        adapters = [leaf for name, leaf in named(grads).items() if "lora" in name]
        assert {leaf.dtype for leaf in adapters} == {np.dtype(np.float32)}
        return loss, np.concatenate([leaf.ravel() for leaf in adapters])

    (found, grads), (expected, wanted) = loss_and_grads(config), loss_and_grads(CONFIG)
    np.testing.assert_allclose(found, expected, rtol=1e-2)
    assert 0 < np.linalg.norm(grads - wanted) < 0.1 * np.linalg.norm(wanted)


def test_merging_keeps_types_and_other_arrays():
    rounded = jax.tree.map(lambda leaf: np.asarray(leaf), trained_params())
    halves = {"kernel": ml_dtypes.bfloat16, "embedding": ml_dtypes.bfloat16}
    leaves = [leaf.astype(halves.get(name.split(".")[-1], leaf.dtype)) for name, leaf in named(rounded).items()]
    params = jax.tree.unflatten(jax.tree.structure(rounded), leaves)
    merged = named(merge_lora(params, CONFIG))
    assert merged["embed.embedding"] is named(params)["embed.embedding"]
    of = "layers.1.mlp.down."
    kernel, lora_a, lora_b = (named(params)[of + name].astype(np.float64) for name in ("kernel", "lora_a", "lora_b"))
    assert merged[of + "kernel"].dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(merged[of + "kernel"].astype(np.float64), kernel + 3 * lora_a @ lora_b, rtol=2**-8)


@pytest.mark.parametrize("make_model", [make_loss_fn, layered])
@pytest.mark.parametrize("make_batch", [padded_batch, packed_batch])
def test_a_step_changes_adapters_alone_and_keeps_no_state_of_others(make_model, make_batch):
    step = make_train_step(make_model(CONFIG), optax.adamw(1e-2, weight_decay=0.1))
    first = step.init(trained_params())
    sizes = [leaf.size for name, leaf in named(trained_params()).items() if "lora" in name]
    assert sorted(leaf.size for leaf in jax.tree.leaves(first.opt_state)) == sorted([1, *sizes, *sizes])
    run, batch = jax.jit(step), make_batch()
    state, before = run(first, batch)
    _, after = run(state, batch)
    for name, leaf in named(state.params).items():
        assert np.array_equal(leaf, named(trained_params())[name]) != ("lora" in name), name
    assert after.loss < before.loss


@pytest.mark.parametrize("make_model", [make_loss_fn, layered])
def test_all_parameters_are_trained_on_request(make_model):
    step = make_train_step(make_model(CONFIG), optax.sgd(1.0), trainable="*")
    state, _ = step(step.init(trained_params()), padded_batch())
    unchanged = [
        name for name, leaf in named(state.params).items() if np.array_equal(leaf, named(trained_params())[name])
    ]
    assert unchanged == []


def test_what_is_trained_passes_through_partial_functions_and_losses_of_the_step():
    def with_power(params, microbatch, power):
        return make_loss_fn(CONFIG)(params, microbatch)

    with_power.trainable = "layers.0.*.lora_b"
    loss_fns = [functools.partial(with_power, power=2), jax.jit(with_power, static_argnames="power")]
    assert make_train_step(loss_fns[0], optax.sgd(1.0)).trainable == "layers.0.*.lora_b"
    assert make_train_step(loss_fns[1], optax.sgd(1.0)).trainable == "layers.0.*.lora_b"
    for sums in (layered(CONFIG), make_loss_fn(CONFIG)):
        assert make_train_step(StepLoss(sums, lambda sums: sums["x"]), optax.sgd(1.0)).trainable == CONFIG.trainable
    assert make_train_step(make_loss_fn(BASE), optax.sgd(1.0)).trainable is None


@pytest.mark.parametrize(("tied", "dtype"), [(False, None), (True, "bfloat16")])
@pytest.mark.parametrize("make_model", [make_loss_fn, layered])
def test_kernels_that_are_not_trained_get_no_gradients_computed(make_model, tied, dtype):
    base = DecoderConfig(num_layers=2, width=32, tied=tied, compute_dtype=dtype)
    config = dataclasses.replace(base, lora=LoraConfig(rank=1, targets="layers.*.attention.q.kernel"))
    batch = jax.tree.map(lambda leaf: np.tile(leaf, (1, 8, 8)) if leaf.ndim == 3 else leaf, padded_batch())
    batch = batch._replace(lengths=np.tile(batch.lengths, (1, 8)), ids=np.tile(batch.ids, (1, 8)))
    batch = batch._replace(is_real=batch.ids >= 0)

    def flops(each):
        step = make_train_step(make_model(each), optax.sgd(1.0))
        state = jax.eval_shape(lambda: step.init(init_params(each, 0)))
        return jax.jit(step).lower(state, batch).compile().cost_analysis()["flops"]

    # The 6 operations a weight and token of products become 4; attention, norms and the rest stay.
    assert flops(config) < 0.8 * flops(base)


def test_continuations_are_those_of_merged_kernels():
    merged = merge_lora(trained_params(), CONFIG)
    options = {"max_new_tokens": 6, "progress": False}
    prompts = [[1, 2, 3], [], [250, 7]]
    found = generate(trained_params(), DROPPING, prompts, **options)  # without dropout
    expected = generate(merged, BASE, prompts, **options)
    assert [tokens.tolist() for tokens in found] == [tokens.tolist() for tokens in expected]


def test_estimates_count_no_optimizer_state_and_no_gradients_of_the_base():
    shapes = param_shapes(CONFIG)
    num_bytes = {name: leaf.size * 4 for name, leaf in named(shapes).items()}
    adapters = sum(size for name, size in num_bytes.items() if "lora" in name)
    for model in (make_loss_fn(CONFIG), layered(CONFIG)):
        estimate = estimate_memory(model, optax.adam(1e-3), layout="data1", params=shapes)
        assert estimate.params == sum(num_bytes.values())
        assert (estimate.grads, estimate.opt_state) == (adapters, 2 * adapters + 4)


@pytest.mark.parametrize("make_model", [make_loss_fn, layered])
def test_dropout_needs_a_seed_and_is_left_out_of_evaluations(make_model):
    step = make_train_step(make_model(DROPPING), optax.sgd(0.0))
    with pytest.raises(ValueError, match="seed"):
        step.init(trained_params())
    state = step.init(trained_params(), seed=0)
    batch = padded_batch()
    expected = make_eval_step(make_model(CONFIG))(trained_params(), batch)[1].loss
    np.testing.assert_allclose(make_eval_step(make_model(DROPPING))(state, batch)[1].loss, expected, rtol=1e-6)
    losses = [float(jax.jit(step)(state._replace(step=jnp.int32(at)), batch)[1].loss) for at in (0, 1)]
    assert len({round(loss, 4) for loss in (*losses, float(expected))}) == 3


def test_dropout_is_by_the_key_of_the_microbatch_and_the_layer_however_the_model_is_written():
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), trained_params())
        microbatch = first_of(padded_batch())
        whole = jax.jit(make_loss_fn(DROPPING))
        by_layers = jax.jit(layered_loss_fn(layered(DROPPING)))
        losses = [whole(params, microbatch, jax.random.key(seed))[0] for seed in range(3)]
        np.testing.assert_allclose(by_layers(params, microbatch, jax.random.key(0))[0], losses[0], rtol=1e-12)
        assert len({round(float(loss), 3) for loss in losses}) == 3


def test_dropout_gives_each_product_inputs_whose_mean_stays():
    dropout = Dropout(rate=0.25, axes=Axes(key=jax.random.key(0)), num_rows=8, num_positions=None)
    q, k = (dropout(jnp.ones((8, 16, 64)), f"attention.{name}", is_split=False) for name in "qk")
    for each in (q, k):
        assert {*np.unique(each).tolist()} == {0, np.float32(1 / 0.75)}
        assert abs(each.mean() - 1) < 0.02
    assert 0.5 < np.mean(np.asarray(q) == k) < 0.75  # 0.625 of those that are independent
    np.testing.assert_array_equal(dropout(jnp.ones((128, 64)), "attention.q", is_split=False), q.reshape(128, 64))
