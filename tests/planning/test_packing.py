"""Packing: full rows, every sample once, fast planning of rows, and the same training as without."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvarlen import make_buckets, make_plan, pack_samples
from jvarlen._common.checks import UserError
from jvarlen.loading import collate_tokens
from jvarlen.loading.collate import StepSamples
from jvarlen.loading.plan_source import PlanSource
from jvarlen.models import DecoderConfig, init_params, make_loss_fn
from jvarlen.planning import choose_row_lengths
from jvarlen.planning.balance import balance_plan
from jvarlen.planning.cost_model import CostModel
from jvarlen.planning.steps import bucket_figures
from jvarlen.testing import assert_exactly_once
from tests.conftest import random_dataset

DATASET = random_dataset(90, 40)
LENGTHS = np.diff(DATASET.offsets)


def uniform_lengths():
    return np.random.RandomState(2023).randint(128, 4096, 200_000)


def test_rows_of_4096_are_998_thousandths_full():
    packing = pack_samples(uniform_lengths(), 4096)
    assert packing.fill >= 0.998
    assert (np.sort(packing.sample_ids) == np.arange(200_000)).all()
    assert packing.num_tokens.max() <= 4096
    assert (packing.starts + packing.sample_lengths <= np.repeat(packing.capacity, np.diff(packing.row_offsets))).all()


def test_shuffled_rows_of_4096_are_99_hundredths_full():
    assert pack_samples(uniform_lengths(), 4096, order="shuffle", epoch=1).fill >= 0.99


def test_wikipedia_lengths_fill_rows():
    counts = np.loadtxt(Path(__file__).parents[2] / "benchmarks" / "support" / "wikipedia_lengths.txt", np.int64)
    counts = counts.reshape(-1) // 16
    packed = pack_samples(np.repeat(np.arange(1, 513), counts), 512)
    assert packed.fill >= 0.9994
    assert packed.num_tokens.max() <= 512
    assert (np.bincount(packed.sample_lengths)[1:] == counts).all()


@pytest.mark.parametrize("row_lengths", [(512, 1024, 2048, 4096), (4096,)], ids=["chosen by hand", "one"])
def test_packed_shapes_leave_less_than_one_percent_padding(row_lengths):
    options = {"max_tokens": 500_000, "packing": "best_fit", "order": "length", "num_microbatches": 8}
    plan = make_plan(uniform_lengths(), row_lengths=row_lengths, **options)
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
        pieces = plan.planned_lengths(lengths)[plan.step_offsets[step] : plan.step_offsets[step + 1]]
        expected[k] += 2 * (0.5 + 1e-3 * rows * length) + 1e-4 * (pieces**2).sum()
    np.testing.assert_allclose(bucket_figures(plan, cost, lengths).seconds, expected, rtol=1e-12)
    assert f"{expected.sum():,.1f}" in plan.report(cost=cost, lengths=lengths)
    for refused in (lambda: plan.report(cost=cost), lambda: plan.report(cost=cost, lengths=lengths + 1)):
        with pytest.raises(UserError, match="lengths"):
            refused()
    linear = dataclasses.replace(cost, quadratic=0.0)  # which needs no lengths
    of_rows = bucket_figures(plan, lambda rows, length: linear(rows, length)).seconds
    np.testing.assert_array_equal(bucket_figures(plan, linear).seconds, of_rows)


def packed_plan(**options):
    options = {"row_lengths": (32, 64), "num_microbatches": 2} | options
    return make_plan(LENGTHS, max_tokens=256, packing="best_fit", **options)


def test_pieces_of_every_sample_come_exactly_once():
    packing = pack_samples(LENGTHS, 16, overlong="split")
    plan = make_plan(LENGTHS, [(8, 16)], packing="best_fit", overlong="split")
    assert_exactly_once(packing, len(LENGTHS))
    assert_exactly_once(plan, len(LENGTHS))
    by_piece = np.lexsort([plan.chunk_starts, plan.sample_ids])
    assert (plan.planned_lengths(LENGTHS)[by_piece] == [min(16, n - s) for n in LENGTHS for s in range(0, n, 16)]).all()
    wrapped = pack_samples(LENGTHS, 16, method="wrapped")
    assert_exactly_once(wrapped, len(LENGTHS))
    plan = make_plan(LENGTHS, [(8, 16)], packing="wrapped", num_microbatches=2)
    assert_exactly_once(plan, len(LENGTHS))
    assert (np.add.reduceat(plan.planned_lengths(LENGTHS), plan.row_offsets[:-1]) == 16).sum() == LENGTHS.sum() // 16
    balanced = balance_plan(plan, np.arange(plan.num_rows), 2)
    assert_exactly_once(balanced, len(LENGTHS))
    repeated = dataclasses.replace(packing, sample_ids=np.zeros_like(packing.sample_ids))
    with pytest.raises(AssertionError, match="more than once"):
        assert_exactly_once(repeated, len(LENGTHS))


def test_every_sample_is_laid_out_as_planned():
    plan = packed_plan()
    source = PlanSource(plan, DATASET, collate_tokens)
    for step in range(plan.num_steps):
        batch = source[step]
        assert batch.num_sequences == plan.num_sequences[step]
        for m, rows in enumerate(plan.rows(step)):
            for b, ids in enumerate(rows):
                samples = [DATASET[i] for i in ids if i >= 0]
                tokens = np.concatenate([[], *samples])
                assert batch.tokens[m, b, : len(tokens)].tolist() == tokens.tolist()
                segments = [s + 1 for s, sample in enumerate(samples) for _ in sample]
                positions = [t for sample in samples for t in range(len(sample))]
                rest = batch.tokens.shape[2] - len(tokens)
                assert batch.segment_ids[m, b].tolist() == segments + [0] * rest
                assert batch.positions[m, b].tolist() == positions + [0] * rest
                assert batch.weights[m, b].tolist() == [1.0] * len(tokens) + [0.0] * rest


def test_rows_of_other_samples_than_those_packed_are_refused_by_id():
    plan = make_plan([4, 4, 2, 2], [(2, 6)], packing="best_fit", order="length")
    swapped = [np.ones(length, np.int64) for length in (4, 4, 4, 0)]  # as many tokens in all
    with pytest.raises(ValueError, match=r"longer than their bucket.*id 0: 4, id 2: 4 \(limit 6\)"):
        PlanSource(plan, swapped, collate_tokens)[0]


def test_packed_samples_have_the_loss_and_gradient_that_they_have_alone():
    """In float64, where nothing but a wrong term can differ."""
    config = DecoderConfig(num_layers=1, width=16, num_heads=2, attention="xla")
    loss_fn = make_loss_fn(config)
    ids = np.arange(24)
    num_rows = pack_samples(LENGTHS[ids], 64).num_rows
    longest = int(LENGTHS[ids].max())
    packed_rows = make_plan(LENGTHS[ids], [(num_rows, 64)], packing="best_fit", order="length").rows(0)
    num_tokens = int(LENGTHS[ids].sum())

    def batch_of(collate, ids_MxB, bucket):
        samples = [[DATASET[i] for i in row[row >= 0].tolist()] for row in ids_MxB]
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
