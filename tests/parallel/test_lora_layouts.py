"""Adapters train on any layout as on one device, with dropout too, and what is not trained stays as it is."""

import functools

import jax
import numpy as np
import optax
import pytest

from jvarlen import make_train_step
from jvarlen.models import DecoderConfig, LoraConfig, init_params, layered
from jvarlen.testing import assert_layout_invariant
from jvarlen.training.trainable import names_of
from tests.support.hand_made import packed_batch_of

LORA = LoraConfig(rank=2, alpha=3, targets=("layers.*.attention.*.kernel", "layers.*.mlp.*.kernel"), dropout=0.25)
CONFIG = DecoderConfig(
    num_layers=2, width=12, mlp_width=8, num_heads=4, num_kv_heads=2, head_size=4, vocab_size=13, lora=LORA
)


@functools.cache
def params_and_batch():
    """Parameters whose adapters are those of no beginning, and rows of two samples with padding after them."""
    rng, shape = np.random.default_rng(0), (4, 2, 8)
    segment_ids = np.broadcast_to(np.array([1, 1, 1, 2, 2, 2, 0, 0], np.int32), shape)
    positions = np.broadcast_to(np.array([0, 1, 2, 0, 1, 2, 0, 0], np.int32), shape)
    tokens, weights = rng.integers(0, 12, shape).astype(np.int32), (segment_ids > 0).astype(np.float32)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape) / len(leaf) ** 0.5, init_params(CONFIG, 0))
    return params, packed_batch_of(tokens, segment_ids, positions, weights, np.float32(16))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "data2.zero1",
        "data2.zero3.remat_full",
        "tensor2",
        "stage2.tensor2.sequence_parallel.zero_bubble",
        "data2.context2.tensor2.zero2.sequence_parallel",
    ],
)
def test_adapters_with_dropout_train_as_on_one_device(layout):
    params, batch = params_and_batch()
    assert len(assert_layout_invariant(layered(CONFIG), params, batch, [layout], num_steps=2)) == 1


@pytest.mark.parametrize("layout", ["data2.zero2", "data2.stage2.tensor2.zero1.sequence_parallel"])
def test_the_base_stays_bit_for_bit_without_optimizer_state(layout):
    params, batch = params_and_batch()
    step = make_train_step(layered(CONFIG), optax.adamw(0.1, weight_decay=0.1), layout=layout)
    state = step.init(jax.tree.map(np.float32, params), seed=0)
    before, names = jax.tree.leaves(step.gather_params(state)), names_of(params)
    num_adapters = sum(leaf.size for name, leaf in zip(names, before, strict=True) if "lora" in name)
    assert sum(leaf.size for leaf in jax.tree.leaves(state.opt_state)) == 1 + 2 * num_adapters  # the count of steps
    after = step.gather_params(jax.jit(step)(state, batch)[0])
    for name, one, other in zip(names, before, jax.tree.leaves(after), strict=True):
        assert np.array_equal(one, other) != ("lora" in name), name
