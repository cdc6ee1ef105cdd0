"""What tests of steps over several devices share: a small model, its batches, and its training on one device."""

import functools
import itertools

import jax
import numpy as np
import optax

from jvarlen import Bucket, load, make_plan, scale_by_batch_size
from jvarlen.models import DecoderConfig, init_params
from tests.conftest import random_dataset

DECODER = DecoderConfig(num_layers=4, width=16, num_heads=2, windows=(0, 3, 5, 0))
BUCKET = Bucket(2, 8)


def assert_equal_trees(found, expected, rtol):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for leaf, expected_leaf in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        largest = max(np.max(np.abs(expected_leaf), initial=0), 1e-3)
        np.testing.assert_allclose(leaf, expected_leaf, rtol=rtol, atol=rtol * largest)


def clipped_adamw():
    """The norm to be clipped is that of the whole gradient: of one part alone it would be another."""
    return optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2), scale_by_batch_size(8))


@functools.cache
def batches_of(num_microbatches):
    """Three steps of packed rows; the last one has padding rows."""
    dataset = random_dataset(6 * num_microbatches * BUCKET.rows - 3, BUCKET.length)
    options = {"packing": "best_fit", "order": "length", "num_microbatches": num_microbatches}
    plan = make_plan(np.diff(dataset.offsets), [BUCKET], **options)
    return jax.tree.map(np.asarray, list(load(plan, dataset)))


def take_steps(step, state, batches, num_steps=10):
    losses = []
    for batch in itertools.islice(itertools.cycle(batches), num_steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    return state, losses


@functools.cache
def initial_params(config=DECODER, dtype=np.float64):
    with jax.enable_x64(True):
        return jax.tree.map(dtype, init_params(config, seed=0))
