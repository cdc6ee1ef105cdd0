"""Batches without samples: full ones for measuring, and rows of padding that are added."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvarlen import Bucket, load, make_plan
from jvarlen.batches import full_batch, packed_batch_spec, token_batch_spec
from jvarlen.compiling.unplanned import pad_to_spec
from jvarlen.testing import assert_finite_on_padding_rows, assert_partition_invariant


@pytest.mark.parametrize(
    ("spec", "ids"),
    [
        (token_batch_spec(Bucket(2, 3), 2), [[0, 1], [2, 3]]),
        (packed_batch_spec(Bucket(1, 3), 2, 2), [[[0, -1]], [[1, -1]]]),
    ],
    ids=["padded", "packed"],
)
def test_every_row_of_a_full_batch_is_a_sample(spec, ids):
    batch = full_batch(spec)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), batch) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), spec
    )
    assert batch.ids.tolist() == ids
    assert batch.is_real.tolist() == (batch.ids >= 0).tolist()
    assert batch.num_sequences == batch.is_real.sum() == 2 * len(ids[0])


def test_rows_that_are_added_have_no_id():
    def loss_fn(scale, microbatch):  # which takes no weights, and is not finite for rows with an id and without tokens
        has_id = microbatch.ids >= 0
        mean_B = scale * microbatch.tokens.sum(axis=1) / jnp.where(has_id, microbatch.lengths, 1)
        return jnp.where(has_id, mean_B, 0).sum(), has_id.sum()

    batch = next(load(make_plan([2, 3, 1, 2], [(2, 3)], microbatches_per_step=2), [np.arange(n) for n in (2, 3, 1, 2)]))
    assert_partition_invariant(loss_fn, 0.5, batch, num_shards=[1])
    assert_finite_on_padding_rows(loss_fn, 0.5, [batch])
    padded = pad_to_spec(batch, token_batch_spec(Bucket(3, 4), 2))
    assert padded.ids.tolist() == [[*row, -1] for row in batch.ids.tolist()]
    assert padded.is_real.tolist() == [[True, True, False]] * 2
