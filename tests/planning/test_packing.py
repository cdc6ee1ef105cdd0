"""Packing: full rows, every sample once, fast planning of rows, and the same training as without."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvarlen import make_buckets, make_plan, pack_samples
from jvarlen._common.checks import UserError
from jvarlen.loading import collate_tokens
from jvarlen.loading.collate import StepSamples
from jvarlen.models import DecoderConfig, init_params, make_loss_fn
from jvarlen.planning import choose_row_lengths
from jvarlen.planning.cost_model import CostModel
from jvarlen.planning.steps import bucket_figures
from tests.conftest import random_dataset


@pytest.mark.parametrize("row_lengths", [(512, 1024, 2048, 4096), (4096,)], ids=["chosen by hand", "one"])
def test_packed_shapes_leave_less_than_one_percent_padding(row_lengths):
    options = {"max_tokens": 500_000, "packing": "best_fit", "order": "length", "num_microbatches": 8}
    lengths = np.random.RandomState(2023).randint(128, 4096, 200_000)
    plan = make_plan(lengths, row_lengths=row_lengths, **options)
    assert len(plan.buckets.shapes) == len(row_lengths)
    assert plan.padding < 0.01
    assert (np.sort(plan.sample_ids) == np.arange(200_000)).all()
    assert plan.num_sequences.sum() == 200_000


def test_row_lengths_follow_the_cost():
    """A function that charges the square of a row gets short rows; a cost model, whose pairs stay, those by tokens."""
    lengths = np.random.default_rng(0).geometric(1 / 200, 2_000).clip(1, 2048)
    attention = CostModel(constant=0.0, linear=15e-6, quadratic=0.22e-6)
    choose = functools.partial(choose_row_lengths, lengths, 16_384, max_shapes=4, length_multiple=32)
    by_tokens, by_model, by_row = choose(), choose(cost=attention), choose(cost=lambda b, t: attention(b, t))
    assert by_model == by_tokens

    def seconds(row_lengths, is_skipping):
        plan = make_plan(lengths, max_tokens=16_384, packing="best_fit", row_lengths=row_lengths, order="length")
        cost = attention if is_skipping else lambda rows, length: attention(rows, length)
        return bucket_figures(plan, cost, lengths).seconds.sum()

    assert seconds(by_row, is_skipping=False) < 0.66 * seconds(by_model, is_skipping=False)
    assert seconds(by_model, is_skipping=True) < seconds(by_row, is_skipping=True)


@pytest.mark.parametrize("method", ["best_fit", "wrapped"])
def test_predicted_seconds_of_packed_rows_count_the_pairs_of_their_samples(method):
    """Summed row by row and microbatch by microbatch; never with the square of a row in their place."""
    lengths = np.random.default_rng(2).integers(1, 120, 400)
    cost = CostModel(constant=0.5, linear=1e-3, quadratic=1e-4)
    overlong = "split" if method == "best_fit" else "error"
    row_lengths = [40, 96] if method == "best_fit" else [64]
    options = {"packing": method, "row_lengths": row_lengths, "overlong": overlong}
    plan = make_plan(lengths, max_tokens=256, num_microbatches=2, **options)
    expected = np.zeros(len(row_lengths))
    for step, k in enumerate(plan.step_bucket):
        rows, length = plan.buckets.shapes[k]
        chunks = plan.planned_lengths(lengths)[plan.step_offsets[step] : plan.step_offsets[step + 1]]
        expected[k] += 2 * (0.5 + 1e-3 * rows * length) + 1e-4 * (chunks**2).sum()
    np.testing.assert_allclose(bucket_figures(plan, cost, lengths).seconds, expected, rtol=1e-12)
    assert f"{expected.sum():,.1f}" in plan.report(cost=cost, lengths=lengths)
    for refused in (lambda: plan.report(cost=cost), lambda: plan.report(cost=cost, lengths=lengths + 1)):
        with pytest.raises(UserError, match="lengths"):
            refused()
    linear = dataclasses.replace(cost, quadratic=0.0)  # which needs no lengths
    of_rows = bucket_figures(plan, lambda rows, length: linear(rows, length)).seconds
    np.testing.assert_array_equal(bucket_figures(plan, linear).seconds, of_rows)


def test_packed_samples_have_the_loss_and_gradient_that_they_have_alone():
    """In float64, where nothing but a wrong term can differ."""
    config = DecoderConfig(num_layers=1, width=16, num_heads=2, attention="xla")
    loss_fn = make_loss_fn(config)
    dataset = random_dataset(24, 40)
    ids, lengths = np.arange(24), np.diff(dataset.offsets)
    num_rows, longest, num_tokens = pack_samples(lengths, 64).num_rows, int(lengths.max()), int(lengths.sum())
    packed_rows = make_plan(lengths, [(num_rows, 64)], packing="best_fit", order="length").rows(0)

    def batch_of(collate, ids_MxB, bucket):
        samples = [[dataset[i] for i in row[row >= 0].tolist()] for row in ids_MxB]
        batch = collate(StepSamples(bucket, ids_MxB, samples, num_tokens, False, int((ids_MxB >= 0).sum())))
        return jax.tree.map(lambda leaf: leaf[0] if leaf.ndim else leaf, batch)

    packed = batch_of(collate_tokens, packed_rows, make_buckets([64], 64).shapes[0]._replace(rows=num_rows))
    unpacked = batch_of(collate_tokens, ids[None], make_buckets([longest], longest).shapes[0]._replace(rows=len(ids)))
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), init_params(config, seed=0))
        value_and_grad = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
        (loss, weight), grads = value_and_grad(params, packed)
        (expected, expected_weight), expected_grads = value_and_grad(params, unpacked)
        assert loss.dtype == jnp.float64
        assert weight == expected_weight == num_tokens
        np.testing.assert_allclose(loss, expected, rtol=1e-13)
        for grad, expected_grad in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
            np.testing.assert_allclose(grad, expected_grad, atol=1e-11)
