"""Steps of token slices: the numbers of the unsplit model, from rows that go through stages a part at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvarlen import make_train_step, place
from jvarlen.distributed.layout import Layout
from jvarlen.experimental.token_slices import attend_over_slices, earlier_of, make_sliced_train_step, sliced_model
from jvarlen.experimental.token_slices.program import sum_sliced
from jvarlen.models import DecoderConfig, LoraConfig, init_params, layered, with_window
from jvarlen.parallel.layers import LayeredModel, LayeredParams, layered_loss_fn
from jvarlen.parallel.pipeline import sum_scheduled
from jvarlen.training.reduction import Shards
from jvarlen.training.step_sums import LossProgram
from jvarlen.training.train_state import new_state
from jvarlen.training.trainable import names_of
from tests.parallel.steps import DECODER, assert_equal_trees
from tests.support.collectives import count_collectives
from tests.support.hand_made import batch_of
from tests.support.meshes import layout_mesh

LENGTH, WIDTH = 12, 4


def positions_of(axes):
    return np.arange(LENGTH) if axes.positions is None else axes.positions


def dropped(x, axes, rate):
    """The mask is that of whole rows."""
    kept = jax.random.bernoulli(axes.key, 1 - rate, (len(x), LENGTH, x.shape[2]))
    return x * kept[:, positions_of(axes)]


def noisy_embed(ends, microbatch, axes):
    places = positions_of(axes)
    x = microbatch["x"][:, places] @ ends["in"] + jnp.sin(places / 3.0)[:, None]
    return {"x": dropped(x, axes, 0.1), "layers": jnp.zeros(x.shape[:2], jnp.int32)}


def sum_so_far(x, axes):
    return jnp.sum(earlier_of(x, axes=axes), axis=1, keepdims=True) + jnp.cumsum(x, axis=1)


def noisy_layer(own, x, microbatch, axes):
    """Attention within segments, two heads of queries to one of keys, and a sum of whatever came before."""
    own_x = x["x"] + axes.layer * own["kind"]
    query, key_value = jnp.split(own_x @ own["qkv"], 2, axis=-1)
    key, value = jnp.split(key_value[:, :, None], 2, axis=-1)
    query = query.reshape(*query.shape[:2], 2, -1)
    segments = microbatch["segments"][:, positions_of(axes)]
    attended = attend_over_slices(query, key, value, axes=axes, segment_ids=segments).reshape(own_x.shape)
    change = jnp.tanh(attended + jnp.sin(sum_so_far(own_x, axes))) @ own["out"]
    return {"x": x["x"] + dropped(change, axes, 0.2), "layers": x["layers"] + 1}


def noisy_loss(ends, x, microbatch, axes):
    places = positions_of(axes)
    weights, targets = microbatch["w"][:, places], microbatch["x"][:, places]
    errors = dropped(x["x"] @ ends["in"].T * x["layers"][..., None] - targets, axes, 0.1)
    return jnp.sum(errors**2 * weights[..., None]), jnp.sum(weights), {"squares": jnp.sum(x["x"] ** 2)}


# Tied ends, dropout in all three functions, integers among what layers pass on, and a further sum.
NOISY = LayeredModel(noisy_embed, noisy_layer, noisy_loss, by_positions=True)


def noisy_params():
    rng = np.random.default_rng(0)
    layers = {"qkv": rng.normal(size=(4, WIDTH, 2 * WIDTH)), "out": rng.normal(size=(4, WIDTH, WIDTH))}
    layers["kind"] = np.arange(4) % 3  # a constant of each
    return LayeredParams({"in": rng.normal(size=(3, WIDTH))}, layers)


def noisy_batch(num_microbatches):
    """The last microbatch has no weight."""
    rng = np.random.default_rng(num_microbatches)
    weights = rng.integers(0, 4, (num_microbatches, 2, LENGTH)).astype(np.float64)
    weights[1:][-1:] = 0
    return {
        "x": rng.normal(size=(num_microbatches, 2, LENGTH, 3)),
        "w": weights,
        "segments": np.sort(rng.integers(1, 4, (num_microbatches, 2, LENGTH)), axis=-1),
        "num_tokens": weights.sum(axis=(1, 2)),
        "num_sequences": np.float64(7),
    }


def sums_on(text, slices, model=NOISY, **options):
    return sum_sliced(model, Shards(mesh=layout_mesh(Layout.parse(text))), slices=slices, **options).whole


@functools.cache
def unsplit_sums(num_microbatches):
    with jax.enable_x64(True):
        state = new_state(noisy_params(), optax.identity(), seed=3)
        return jax.jit(LossProgram(layered_loss_fn(NOISY)).sums_of.whole)(state, noisy_batch(num_microbatches))


def test_sums_and_gradients_are_those_of_the_unsplit_model():
    with jax.enable_x64(True):
        state = new_state(noisy_params(), optax.identity(), seed=3)
        found = jax.jit(sums_on("data2.stage2", {LENGTH: (5, 1, 6)}))(state, noisy_batch(2))
        assert_equal_trees(found, unsplit_sums(2), 1e-12)
        assert np.abs(np.asarray(found.grads.layers["qkv"])).max(axis=(1, 2)).min() > 1e-3


def test_adapters_alone_are_trained_with_the_dropout_and_the_window_of_whole_rows():
    lora = LoraConfig(rank=2, targets="layers.*.mlp.down.kernel", dropout=0.4)
    config = DecoderConfig(num_layers=2, width=8, num_heads=2, vocab_size=9, lora=lora)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 8, (2, 2, 6)).astype(np.int32)
    lengths, weights = np.full((2, 2), 6, np.int32), np.ones(tokens.shape)
    batch = with_window(batch_of(tokens, lengths, weights, np.float64(4)), 2)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape) + leaf, init_params(config, 0))

        def stepped(step):
            state, metrics = jax.jit(step)(step.init(params, seed=0), batch)
            return step.gather_params(state), np.asarray(metrics.loss)

        whole = stepped(make_train_step(layered(config), optax.sgd(0.1)))
        placement = place("stage2", jax.devices()[:2])
        sliced = make_sliced_train_step(sliced_model(config), optax.sgd(0.1), layout=placement, slices=2)
        found = stepped(sliced)
        assert_equal_trees(found, whole, 1e-12)
        changed = jax.tree.map(lambda one, other: not np.array_equal(one, other), found[0], params)
        names = [name for name, leaf in zip(names_of(params), jax.tree.leaves(changed), strict=True) if leaf]
        assert names == [f"layers.{i}.mlp.down.lora_{each}" for i in range(2) for each in "ab"]


def running_mean(own, x, microbatch, axes):
    """A layer with 25 times as many hidden features as its x."""
    change = jnp.tanh(sum_so_far(x, axes) @ own["up"]) @ own["down"]
    return x + change


LONG = LayeredModel(
    lambda ends, microbatch, axes: (microbatch if axes.positions is None else microbatch[:, axes.positions]) * ends,
    running_mean,
    lambda ends, x, microbatch, axes: (jnp.sum(x * x), jnp.float32(x.size)),
    by_positions=True,
)


def compiled_on(slices):
    params = LayeredParams(np.ones(4, np.float32), {"up": np.ones((4, 4, 100)), "down": np.ones((4, 100, 4))})
    state = new_state(jax.tree.map(np.float32, params), optax.identity())
    layout = Layout.parse("data1.stage2")
    shards = Shards(mesh=layout_mesh(layout))
    sums = sum_scheduled(LONG, shards, layout) if slices is None else sum_sliced(LONG, shards, slices=slices)
    return jax.jit(sums.whole).lower(state, jax.ShapeDtypeStruct((2, 1, 4096, 4), np.float32)).compile()


def test_temporaries_are_those_of_a_slice():
    """For rows whose hidden features take 25 times the memory of what is sent from stage to stage."""
    compiled = [compiled_on(slices) for slices in (None, 1, 4)]
    whole, in_one, in_four = (each.memory_analysis().temp_size_in_bytes for each in compiled)
    assert in_four < 0.4 * in_one
    assert in_four < 0.5 * whole
    counts = count_collectives(compiled[-1])
    assert counts.keys() == {"all-reduce", "collective-permute"}
    assert counts["all-reduce"].in_loops == 0
    assert counts["collective-permute"].in_loops == 2


def test_what_does_not_fit_is_refused_by_name_before_it_is_compiled():
    model, optimizer = sliced_model(DECODER), optax.sgd(0.1)

    def make(text, model=model):
        return make_sliced_train_step(model, optimizer, slices=2, layout=text)

    def trace(slices, model=NOISY):
        state = new_state(noisy_params(), optax.identity(), seed=3)
        jax.eval_shape(sums_on("data1.stage2", slices, model), state, noisy_batch(2))

    with pytest.raises(ValueError, match=r"^slices need stages, .* the layout data2 has none"):
        make("data2")
    with pytest.raises(ValueError, match=r"token_slices: leave gpipe out of the layout data1.stage2.gpipe"):
        make("data1.stage2.gpipe")
    with pytest.raises(ValueError, match=r"^slices of rows do not go with sequence_parallel"):
        make("data1.stage2.tensor2.sequence_parallel")
    with pytest.raises(ValueError, match=r"^slices of rows do not go with context2"):
        make("data1.stage2.context2")
    with pytest.raises(ValueError, match=r"^slices keep inputs, .*: leave remat_none out of data1.stage2.remat_none"):
        make("data1.stage2.remat_none")
    with pytest.raises(ValueError, match=r"^slices take a LayeredModel that works by positions .* by_positions=True"):
        make("data1.stage2", model=model._replace(by_positions=False))
    with pytest.raises(ValueError, match=r"^slices 4, 4 sum to 8 tokens; length is 12"):
        trace(lambda length: (4, 4))
    with pytest.raises(ValueError, match=r"^there are no slices for rows of 12 tokens, only for 8, 16"):
        trace({16: (8, 8), 8: (8,)})
    with pytest.raises(ValueError, match="3 microbatches a step do not spread over 2 shards"):
        jax.eval_shape(sums_on("data2.stage2", 2), new_state(noisy_params(), optax.identity()), noisy_batch(3))
    whole = NOISY._replace(embed=lambda ends, microbatch, axes: microbatch["x"] @ ends["in"])
    with pytest.raises(ValueError, match=r"^embed returned float32\[2,12,4\] for 6 of 12 positions"):
        trace(2, whole)
    flat = NOISY._replace(embed=lambda ends, microbatch, axes: jnp.ones(3))
    with pytest.raises(ValueError, match=r"^a model by positions has x of arrays \[B, T, …\] .* not x float32\[3\]"):
        trace(2, flat)
    looking = NOISY._replace(embed=lambda *args: sum_so_far(noisy_embed(*args)["x"], args[-1]))
    with pytest.raises(ValueError, match=r"^embed and loss look at no earlier slices"):
        trace(2, looking)
    dropping = NOISY._replace(layer=lambda own, x, microbatch, axes: earlier_of(x["x"][:, :1], axes=axes) and x)
    with pytest.raises(ValueError, match=r"^a layer gave earlier_of float32\[2,1,4\] for 6 of 12 positions"):
        trace(2, dropping)

    def changing(own, x, microbatch, axes):
        if axes.positions[0] > 0:
            earlier_of(x["x"], axes=axes)
        return x

    with pytest.raises(ValueError, match=r"^a layer must give earlier_of the same arrays in each slice"):
        trace(2, NOISY._replace(layer=changing))
