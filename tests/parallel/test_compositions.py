"""Random layouts of random models: the numbers of one device. `make compositions` tries many, the suite some."""

import dataclasses
import os
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvarlen.batches import PackedBatch, StepBatch
from jvarlen.models import DecoderConfig, LoraConfig, init_params, layered
from jvarlen.models.config import PRODUCTS, RotaryScaling
from jvarlen.parallel import LayeredModel, LayeredParams, Layout, layered_loss_fn
from jvarlen.testing import assert_layout_invariant
from tests.support.hand_made import batch_of, packed_batch_of

NUM_COMPOSITIONS = int(os.environ.get("COMPOSITIONS", "2"))
LONG = 10**6  # longer than any row
NUM_STEPS = int(os.environ.get("COMPOSITION_STEPS", "3"))


def random_layout(draw):
    """On at most eight devices, and the number of layers and of microbatches a shard that it takes."""
    while True:
        data, stage, context, tensor = (draw.choice([1, 1, 2, 2, 2, 3, 4, 5, 7]) for _ in range(4))
        if 2 <= data * stage * context * tensor <= 8:
            break
    zero = draw.randrange(4) if data * context > 1 else 0
    schedule = "eager_1f1b"
    if stage > 1:
        schedule = draw.choice(["gpipe", "1f1b", "eager_1f1b", "interleaved", "zero_bubble"])
    virtual = draw.choice([2, 3]) if schedule == "interleaved" else 1
    layout = Layout(
        data=data, stage=stage, context=context, tensor=tensor, zero=zero, schedule=schedule, virtual=virtual,
        sequence_parallel=tensor > 1 and draw.random() < 0.5,
        context_from=LONG if context > 1 and draw.random() < 0.3 else 0,
    )  # fmt: skip
    layout = dataclasses.replace(layout, remat=random.Random(str(layout)).choice([None, "selective", "full", "none"]))
    layout = dataclasses.replace(layout, grad_bucket_bytes=random.Random(f"buckets {layout}").choice([0, 2**12]))
    of_shard = stage * draw.choice([1, 2]) if schedule == "interleaved" else draw.choice([1, 2, 3, 5])
    per_part = draw.choice([1, 2])
    return *random_cut(layout, stage * virtual * per_part, per_part), of_shard


def random_cut(layout, num_layers, per_part):
    """The layout and fewer layers, half of the times that some stage can have fewer than others."""
    draw = random.Random(f"layers {layout}")
    if layout.stage == 1 or layout.virtual * per_part == 1 or draw.random() < 0.5:
        return layout, num_layers
    return dataclasses.replace(layout, layers=draw.choice([0, per_part])), num_layers - draw.randrange(1, layout.stage)


def random_batch(draw, num_microbatches, length, vocab_size, *, packed):
    """Microbatches of two rows, some of which are empty, and sometimes all of a shard's."""
    rng = np.random.default_rng(draw.randrange(2**32))
    lengths = rng.integers(0, length + 1, (num_microbatches, 2))
    lengths[rng.random(num_microbatches) < 0.3] = 0
    lengths[0, 0] = length
    places = np.arange(length)
    is_real = places < lengths[..., None]
    tokens = np.where(is_real, rng.integers(0, vocab_size, is_real.shape), 0).astype(np.int32)
    weights = np.where(is_real, rng.uniform(0.5, 2, is_real.shape), 0)
    if not packed:
        return batch_of(tokens, lengths.astype(np.int32), weights, np.float64((lengths > 0).sum()))
    first = lengths[..., None] // 2  # two samples a row
    segment_ids = np.where(is_real, 1 + (places >= first), 0).astype(np.int32)
    positions = np.where(is_real, np.where(places >= first, places - first, places), 0).astype(np.int32)
    return packed_batch_of(tokens, segment_ids, positions, weights, np.float64(2 * (lengths > 0).sum()))


def random_groups(number, layout, first, of_shard, vocab_size):
    """A layout and a step of up to four groups of other shapes after the first, some of whose rows it spreads."""
    draw, length, packed = random.Random(f"groups {number}"), first.tokens.shape[-1], isinstance(first, PackedBatch)
    num_groups = draw.choice([1, 1, 2, 3, 4])
    if num_groups == 1:
        return layout, first
    if layout.context > 1 and draw.random() < 0.5:
        layout = dataclasses.replace(layout, context_from=length)
    lengths = [draw.choice([length // 2, length, 2 * length]) for _ in range(num_groups - 1)]
    sizes = [layout.num_shards * draw.choice([1, 2]) * (of_shard if layout.virtual > 1 else 1) for _ in lengths]
    others = [random_batch(draw, *each, vocab_size, packed=packed) for each in zip(sizes, lengths, strict=True)]
    if draw.random() < 0.3:
        others[-1] = jax.tree.map(np.zeros_like, others[-1])._replace(ids=others[-1].ids * 0 - 1)
    groups = (first, *others)
    return layout, StepBatch(groups, np.float64(sum(group.num_sequences for group in groups)))


def positions_of(batch, axes):
    return np.arange(batch.tokens.shape[1]) if axes.positions is None else axes.positions


def tied_layer(own, x, batch, axes):
    change = jnp.tanh(x @ own["k"] + own["b"]) / (own["kind"] + axes.layer)
    kept = jax.random.bernoulli(axes.key, 0.8, (*batch.tokens.shape, x.shape[-1]))  # of whole rows
    return x + change * kept[:, positions_of(batch, axes)]


def tied_loss(ends, x, batch, axes):
    tokens, weights = (leaf[:, positions_of(batch, axes)] for leaf in (batch.tokens, batch.weights))
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ ends["table"].T, tokens)
    return jnp.sum(losses * weights), jnp.sum(weights)


# A user's model: tied ends, dropout, constants of layers, and widths that no number of shards divides.
TIED = LayeredModel(
    lambda ends, batch, axes: ends["table"][batch.tokens[:, positions_of(batch, axes)]],
    tied_layer,
    tied_loss,
    by_positions=True,
)


def tied_params(rng, num_layers, vocab_size, width):
    layers = {"k": rng.normal(size=(num_layers, width, width)) / width, "b": rng.normal(size=(num_layers, width))}
    layers["kind"] = np.arange(1, num_layers + 1, dtype=np.int32) % 3
    return LayeredParams({"table": rng.normal(size=(vocab_size, width)) / 4}, layers)


def decoder_params(rng, config):
    """Parameters of the sizes that a model starts with; all scales of norms differ."""
    shapes = jax.eval_shape(lambda: init_params(config, seed=0))
    is_scale = jax.tree.map_with_path(lambda path, _: "scale" in jax.tree_util.keystr(path), shapes)
    return jax.tree.map(
        lambda leaf, is_scale: is_scale + rng.normal(size=leaf.shape) / (10 if is_scale else leaf.shape[0] ** 0.5),
        shapes,
        is_scale,
    )


def random_decoder(draw, num_parts, num_layers, num_values, length):
    """A decoder of any family, with heads and features for this number of parts."""
    scaling = RotaryScaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=32)
    windows = tuple(draw.choice([0, 1, 3, 7, length // 2 + 1, LONG]) for _ in range(num_layers))
    kv_heads, begins_samples = num_parts * draw.choice([1, 1, 2]), draw.random() < 0.5
    return DecoderConfig(
        num_layers=num_layers, width=draw.choice([18, 20]), mlp_width=num_parts * draw.choice([5, 8]),
        num_heads=kv_heads * draw.choice([1, 2]), num_kv_heads=kv_heads, head_size=draw.choice([4, 6]),
        vocab_size=num_values + begins_samples, begins_samples=begins_samples, tied=draw.random() < 0.5,
        qkv_bias=draw.random() < 0.4, out_bias=draw.random() < 0.2, qk_norm=draw.random() < 0.4,
        windows=draw.choice([(), windows, windows]), rotary_scaling=draw.choice([None, scaling]),
    )  # fmt: skip


def with_adapters(number, config):
    """Half of the decoders with adapters, some of which have dropout."""
    draw = random.Random(f"adapters {number}")
    products = [product for product in PRODUCTS if draw.random() < 0.6]
    if draw.random() < 0.5 or not products:
        return config
    targets = tuple(f"layers.*.{product}.kernel" for product in products)
    lora = LoraConfig(rank=draw.choice([1, 3]), alpha=3, targets=targets, dropout=draw.choice([0, 0.4]))
    return dataclasses.replace(config, lora=lora)


def with_shared_heads(number, config, num_devices):
    """Half of the decoders with fewer heads of keys and values than devices."""
    draw = random.Random(f"heads {number}")
    divisors = [size for size in range(1, num_devices) if num_devices % size == 0]
    can = [size for size in divisors if size * config.head_size % num_devices == 0]
    return dataclasses.replace(config, num_kv_heads=draw.choice(can)) if can and draw.random() < 0.5 else config


def composition(number):
    """A layout, and a model, parameters, a batch of one group or several and what is trained for it."""
    draw, of_names = random.Random(number), random.Random(f"names {number}")
    layout, num_layers, of_shard = random_layout(draw)
    vocab_size, length = draw.choice([53, 64, 131]), 8 * layout.context * layout.tensor
    num_microbatches = of_shard * (layout.num_shards if layout.context_from else layout.data)
    batch = random_batch(draw, num_microbatches, length, vocab_size, packed=draw.random() < 0.4)
    layout, batch = random_groups(number, layout, batch, of_shard, vocab_size)
    if layout.tensor == 1 and draw.random() < 0.5:
        rng = np.random.default_rng(number)
        params = tied_params(rng, num_layers, vocab_size, draw.choice([31, 42]))
        return (
            layout,
            TIED._replace(num_layers=num_layers),
            params,
            batch,
            of_names.choice([None, "layers.k", "ends.*"]),
        )
    config = random_decoder(draw, layout.tensor, num_layers, vocab_size, length)
    config = with_shared_heads(number, config, layout.tensor)
    config = with_adapters(number, config)
    params = decoder_params(np.random.default_rng(number), config)
    trainable = of_names.choice([None, "layers.*.attention.*", ["layers.0.*", "*.up.kernel", "embed.*"]])
    return layout, layered(config), params, batch, trainable


def composition_of_loss(number):
    """The same of a loss function at ZeRO-3."""
    draw = random.Random(f"loss {number}")
    layout = Layout(data=draw.choice([2, 3, 4, 5, 7]), zero=3, grad_bucket_bytes=draw.choice([0, 2**12]))
    of_shard, vocab_size, rng = draw.choice([1, 2, 3]), draw.choice([53, 64, 131]), np.random.default_rng(number)
    batch = random_batch(draw, of_shard * layout.data, 8, vocab_size, packed=draw.random() < 0.5)
    layout, batch = random_groups(f"of loss {number}", layout, batch, of_shard, vocab_size)
    if draw.random() < 0.5:
        params = tied_params(rng, 2, vocab_size, draw.choice([42, 60]))
        return layout, layered_loss_fn(TIED), params, batch, draw.choice([None, "layers.k", "ends.*"])
    config = with_adapters(number, random_decoder(draw, 4, 2, vocab_size, 8))
    loss_fn, trainable = layered_loss_fn(layered(config)), draw.choice([None, ["layers.0.*", "*.up.kernel", "embed.*"]])
    return layout, loss_fn, decoder_params(rng, config), batch, trainable


@pytest.mark.slow
@pytest.mark.usefixtures("in_blocks")
@pytest.mark.parametrize(
    ("compose", "number"),
    [
        *((composition, number) for number in sorted({*range(NUM_COMPOSITIONS), 4})),  # 4: stages, sequence_parallel
        *((composition_of_loss, number) for number in range(NUM_COMPOSITIONS)),
    ],
)
def test_a_random_composition_trains_as_one_device(compose, number):
    layout, model, params, batch, trainable = compose(number)
    rtol = 1e-12 if NUM_STEPS <= 3 else 1e-11  # rounding grows from step to step
    given = {"trainable": trainable, "num_steps": NUM_STEPS, "rtol": rtol}
    assert assert_layout_invariant(model, params, batch, [layout], **given) == [layout]


def test_compositions_vary():
    layouts = [random_layout(random.Random(number))[0] for number in range(200)]
    for field in {field.name for field in dataclasses.fields(Layout)} - {"reduce_dtype"}:  # which changes numbers
        assert len({getattr(layout, field) for layout in layouts}) > 1, field
    assert len(set(map(str, layouts))) > 100
    assert sum(sum(size > 1 for size in layout.axis_sizes.values()) > 2 for layout in layouts) > 20
