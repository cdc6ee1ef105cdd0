"""`jvarlen.testing`: correct code passes, and every kind of mistake that it claims to find is found and named."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvarlen import batch_by_tokens, make_plan, pack_samples, testing
from jvarlen.testing import (
    Partition,
    assert_exactly_once,
    assert_partition_invariant,
)

torch_ref = pytest.importorskip("torch_ref")


class Rows(NamedTuple):
    """M×B rows of two numbers."""

    x: np.ndarray
    weights: np.ndarray
    num_sequences: np.ndarray


PARAMS = {"b": np.float32(0.3), "w": np.array([0.5, -1.5], np.float32)}


def make_rows(num_microbatches=2, rows=2, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_microbatches, rows, 2)).astype(np.float32)
    weights = rng.integers(1, 6, (num_microbatches, rows)).astype(np.float32)
    return Rows(x, weights, np.float32(num_microbatches * rows))


def losses_of(params, microbatch):
    return jnp.sin(microbatch.x @ params["w"]) ** 2 + params["b"]


def right(params, microbatch):
    return jnp.sum(losses_of(params, microbatch) * microbatch.weights), jnp.sum(microbatch.weights)


def mean_of_means(params, microbatch):
    loss_sum, weight_sum = right(params, microbatch)
    return loss_sum / weight_sum, jnp.ones(())


def safe_mean_of_means(params, microbatch):
    loss_sum, weight_sum = right(params, microbatch)
    return loss_sum / jnp.maximum(weight_sum, 1), jnp.ones(())


def normalised_over_the_batch(params, microbatch):
    losses = losses_of(params, microbatch)
    return jnp.sum((losses - losses.mean()) ** 2 * microbatch.weights), jnp.sum(microbatch.weights)


def decay_once_a_microbatch(params, microbatch):
    loss_sum, weight_sum = right(params, microbatch)
    return loss_sum + jnp.sum(params["w"] ** 2), weight_sum


def padding_rows_have_weight(params, microbatch):
    weights = jnp.maximum(microbatch.weights, 0.1)
    return jnp.sum(losses_of(params, microbatch) * weights), jnp.sum(weights)


def root_whose_gradient_is_not_finite(params, microbatch):
    distances = jnp.sqrt(jnp.sum((microbatch.x * params["w"]) ** 2, axis=-1)) + params["b"]
    return jnp.sum(distances * microbatch.weights), jnp.sum(microbatch.weights)


def divides_by_the_sequences(params, microbatch):
    loss_sum, weight_sum = right(params, microbatch)
    return loss_sum / microbatch.num_sequences, weight_sum / microbatch.num_sequences


def in_float32(params, microbatch):
    loss_sum, weight_sum = right(params, microbatch)
    return jax.lax.reduce_precision(loss_sum, exponent_bits=8, mantissa_bits=23), weight_sum


def never_finite(params, microbatch):
    loss_sum, weight_sum = right(params, microbatch)
    return loss_sum + jnp.log(params["b"] - params["b"]), weight_sum


def test_a_right_loss_passes_every_split():
    splits = assert_partition_invariant(right, PARAMS, make_rows(2, 2))
    assert splits[0] == Partition(1, 4)
    assert set(splits) == {
        Partition(1, 4), Partition(2, 2), Partition(2, 2, 2), Partition(4, 1), Partition(4, 1, 2), Partition(4, 1, 4),
        Partition(2, 3, 1, 2), Partition(4, 2, 1, 4), Partition(4, 2, 2, 4), Partition(1, 4, 1, 4),
    }  # fmt: skip
    assert len(splits) == 10


def test_one_microbatch_is_split_into_its_rows():
    splits = assert_partition_invariant(right, PARAMS, make_rows(1, 3), num_shards=[3])
    assert splits == [
        Partition(1, 3),
        Partition(3, 1, 3),
        Partition(1, 4, 1, 1),
        Partition(2, 3, 1, 3),
        Partition(1, 3, 1, 3),
    ]


@pytest.mark.parametrize(
    ("loss_fn", "differs"),
    [
        (mean_of_means, r"2×2, shards 1: weight_sum is 2, not 1 \(relative error 1\.0e\+00\); loss_sum"),
        (normalised_over_the_batch, r"2×2, shards 1: gradient\['w'\]\[1\] is"),
        (decay_once_a_microbatch, r"4×1, shards 1: gradient\['w'\]\[1\] is .*; loss is"),
        (padding_rows_have_weight, r"2×3, shards 1, padding rows 2: weight_sum is 9\.2, not 9 "),
        (root_whose_gradient_is_not_finite, r"2 of 5 .*padding rows 2: gradient\['w'\]\[0\] is nan"),
        (divides_by_the_sequences, r"1 of 5 .*1×4, shards 1, padding rows 4: .*loss is nan, not 0 "),
        (in_float32, r"2×2, shards 1: .*loss_sum is .* \(relative error \d\.\de-0[678]\)"),
    ],
)
def test_a_wrong_loss_is_found(loss_fn, differs):
    with pytest.raises(AssertionError, match=rf"(?s)depends on how it is split.*{differs}.*likely: loss_fn"):
        assert_partition_invariant(loss_fn, PARAMS, make_rows(seed=1), num_shards=[1])


def test_the_mean_of_means_is_found_where_all_weights_are_equal():
    batch = make_rows()._replace(weights=np.ones((2, 2)))
    with pytest.raises(AssertionError, match=r"rows 2×2, shards 1: .*weight_sum is 2, not 1 .*"):
        assert_partition_invariant(safe_mean_of_means, PARAMS, batch, num_shards=[1])


def test_what_shards_add_is_found():
    def counts_shards(params, microbatch):
        loss_sum, weight_sum = right(params, microbatch)
        return loss_sum + params["b"] * jax.lax.axis_index("data"), weight_sum

    assert_partition_invariant(counts_shards, PARAMS, make_rows(), num_shards=[1])
    with pytest.raises(AssertionError, match=r"(?s)3 of 5 splits .*rows 2×2, shards 2: .*gradient\['b'\]"):
        assert_partition_invariant(counts_shards, PARAMS, make_rows(), num_shards=[2])


def test_a_loss_that_communicates_over_the_data_axis_is_checked():
    def beside_the_largest(params, microbatch):
        losses = losses_of(params, microbatch)
        largest = jax.lax.pmax(jax.lax.stop_gradient(losses).max(), "data")  # of all rows, as in a stable log-sum
        return jnp.sum(jnp.exp(losses - largest) * jnp.exp(largest) * microbatch.weights), jnp.sum(microbatch.weights)

    assert len(assert_partition_invariant(beside_the_largest, PARAMS, make_rows(), num_shards=[2])) > 3
    layouts = testing.assert_layout_invariant(beside_the_largest, PARAMS, make_rows(), ["data2"], num_steps=1)
    assert len(layouts) == 1


def test_a_loss_whose_carry_is_float32_is_checked_in_float32():
    def scanned(params, microbatch):
        losses = (losses_of(params, microbatch) * microbatch.weights).ravel()
        loss_sum, _ = jax.lax.scan(lambda total, loss: (total + loss, None), jnp.zeros((), np.float32), losses)
        return loss_sum, jnp.sum(microbatch.weights)

    with pytest.raises(TypeError) as error:
        assert_partition_invariant(scanned, PARAMS, make_rows(), num_shards=[1])
    assert any('give dtype="float32"' in note for note in error.value.__notes__)
    assert len(assert_partition_invariant(scanned, PARAMS, make_rows(), num_shards=[1], dtype="float32")) == 6
    testing.assert_layout_invariant(scanned, PARAMS, make_rows(), ["data1"], num_steps=1, dtype="float32")
    with pytest.raises(ValueError, match=r"dtype \('bfloat16'\) must be one of 'float64', 'float32'"):
        assert_partition_invariant(scanned, PARAMS, make_rows(), dtype="bfloat16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": np.zeros((2, 2))}, "weights of the batch add up to 0.0: there is nothing to compare"),
        ({"weights": np.ones(2)}, r"must begin with the same axes, .*'\.weights': \(2,\)"),
        ({"weights": np.ones((2, 3))}, r"must begin with the same axes, .*'\.x': \(2, 2\), '\.weights': \(2, 3\)"),
    ],
)
def test_a_batch_that_shows_nothing_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        assert_partition_invariant(right, PARAMS, make_rows()._replace(**change), num_shards=[1])


def test_shards_that_cannot_be_tried_are_listed():
    with pytest.raises(ValueError, match=r"num_shards \[0, 3\] must be at least 1 and divide 4 microbatches"):
        assert_partition_invariant(right, PARAMS, make_rows(), num_shards=[0, 2, 3])


def test_layouts_are_not_compared_on_a_batch_without_weight():
    without_weight = make_rows()._replace(weights=np.zeros((2, 2)))
    with pytest.raises(ValueError, match="nothing to compare"):
        testing.assert_layout_invariant(right, PARAMS, without_weight, ["data1"], num_steps=1)


def test_a_loss_that_is_not_finite_is_named():
    with pytest.raises(AssertionError, match=r"the step is not finite in gradient\['b'\], loss, loss_sum"):
        assert_partition_invariant(never_finite, PARAMS, make_rows(), num_shards=[1])


LENGTHS = np.random.default_rng(0).integers(1, 30, 90)
BUCKETS = [(3, 10), (2, 20), (2, 30)]
PLAN = make_plan(LENGTHS, BUCKETS, num_microbatches=2, order="shuffle")


@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        make_plan(LENGTHS, [(2, 20), (2, 30)], packing="best_fit", order="length", num_microbatches=2),
        make_plan(np.stack([LENGTHS, LENGTHS[::-1]], axis=1), [(2, 30, 30)], order="length"),
        torch_ref.make_plan(LENGTHS, BUCKETS, order="shuffle"),
        batch_by_tokens(LENGTHS, 64, order="shuffle"),
        pack_samples(LENGTHS, 30),
        [PLAN.rows(step) for step in range(PLAN.num_steps)],
        torch_ref.PlanBatchSampler(PLAN),
        torch_ref.PlanBatchSampler(torch_ref.make_plan(LENGTHS, [(4, 30)], packing="best_fit")),
        reversed(range(90)),
    ],
    ids=lambda plan: type(plan).__name__,
)
def test_what_holds_every_sample_once_passes(plan):
    assert_exactly_once(plan, 90)


def test_as_many_samples_may_be_missing_as_the_plan_dropped():
    plan = make_plan(LENGTHS, BUCKETS[:2], order="length", overlong="drop")
    num_dropped = int((LENGTHS > 20).sum())
    assert_exactly_once(plan)
    assert_exactly_once(plan, 90)
    few = dataclasses.replace(plan, num_dropped=2)
    with pytest.raises(AssertionError, match=rf"{num_dropped} are missing, not 2 as the plan says: id"):
        assert_exactly_once(few, 90)


@pytest.mark.parametrize(
    ("ids", "num_samples", "message"),
    [
        ([[0, 1], [3, -1]], 4, "of samples 0 to 3, 1 is missing: id 2"),
        ([[0, 1], [2, -1]], 5, "of samples 0 to 4, 2 are missing: id 3, id 4"),
        ([[0, 1], [1, 2], [1]], 3, "samples that come more than once: id 1: 3"),
        ([[0, 7], [1, -3], [7]], 2, r"ids outside 0 to 1: id -3: 1, id 7: 2"),
        ([[0, 0], [9, 3]], None, "of samples 0 to 3, 2 are missing: id 1, id 2; .*once: id 0: 2; .*to 3: id 9: 1"),
        ([], 2, "2 are missing"),
    ],
)
def test_samples_at_fault_are_listed(ids, num_samples, message):
    with pytest.raises(AssertionError, match=message):
        assert_exactly_once(ids, num_samples)
