"""`jvarlen.testing`: correct code passes, and every kind of mistake that it claims to find is found and named."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jvarlen
from jvarlen import Bucket, CompileOptions, batch_by_tokens, compile_buckets, load, make_plan, pack_samples, testing
from jvarlen.batches import BatchShapes, token_batch_spec
from jvarlen.experimental.large_plans import plan_distributed
from jvarlen.testing import (
    Partition,
    assert_exactly_once,
    assert_no_recompiles,
    assert_partition_invariant,
    assert_same_batches,
)
from tests.conftest import random_dataset
from tests.meshes import data_mesh

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


def test_layouts_are_not_compared_on_a_batch_without_weight():
    without_weight = make_rows()._replace(weights=np.zeros((2, 2)))
    with pytest.raises(ValueError, match="nothing to compare"):
        testing.assert_layout_invariant(right, PARAMS, without_weight, ["data1"], num_steps=1)


def test_shards_that_cannot_be_tried_are_listed():
    with pytest.raises(ValueError, match=r"num_shards \[0, 3, 9\] must be from 1 to 8, .* and divide 2 or 4 micro"):
        assert_partition_invariant(right, PARAMS, make_rows(), num_shards=[0, 2, 3, 9])


def test_a_loss_that_is_not_finite_is_named():
    with pytest.raises(AssertionError, match=r"the step is not finite in gradient\['b'\], loss, loss_sum"):
        assert_partition_invariant(never_finite, PARAMS, make_rows(), num_shards=[1])


LENGTHS = np.random.default_rng(0).integers(1, 30, 90)
BUCKETS = [(3, 10), (2, 20), (2, 30)]
PLAN = make_plan(LENGTHS, BUCKETS, microbatches_per_step=2, order="shuffle")


def changed(**arrays):
    """The plan with entries of its arrays replaced: name=(index, value)."""
    fields = {name: getattr(PLAN, name).copy() for name in arrays}
    for name, (index, value) in arrays.items():
        fields[name][index] = value
    return dataclasses.replace(PLAN, **fields)


@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        make_plan(pack_samples(LENGTHS, 30), [(2, 20), (2, 30)], order="length", microbatches_per_step=2),
        make_plan(np.stack([LENGTHS, LENGTHS[::-1]], axis=1), [(2, 30, 30)], order="length"),
        torch_ref.make_plan(LENGTHS, BUCKETS, order="shuffle"),
        batch_by_tokens(LENGTHS, 64, order="shuffle"),
        pack_samples(LENGTHS, 30),
        [PLAN.rows(step) for step in range(PLAN.num_steps)],
        torch_ref.PlanBatchSampler(PLAN),
        torch_ref.PlanBatchSampler(torch_ref.make_plan(torch_ref.pack_samples(LENGTHS, 30), [(4, 30)])),
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
        ([[0, 7], [1, -3], [7]], 2, r"ids that are none of 0 to 1: id -3: 1, id 7: 2"),
        ([[0, 0], [9, 3]], None, "of samples 0 to 3, 2 are missing: id 1, id 2; .*once: id 0: 2; .*to 3: id 9: 1"),
        ([], 2, "2 are missing"),
    ],
)
def test_samples_at_fault_are_listed(ids, num_samples, message):
    with pytest.raises(AssertionError, match=message):
        assert_exactly_once(ids, num_samples)


@pytest.mark.parametrize("order", ["shuffle", "length"])
def test_plans_of_both_packages_and_from_files_are_the_same(tmp_path, order):
    options = {"microbatches_per_step": 2, "order": order}
    plan = make_plan(LENGTHS, BUCKETS, **options)
    plan.save(tmp_path / "plan.npz")
    assert_same_batches(plan, torch_ref.make_plan(LENGTHS, BUCKETS, **options))
    assert_same_batches(torch_ref.Plan.load(tmp_path / "plan.npz"), plan)
    assert_same_batches(plan, plan_distributed(LENGTHS, BUCKETS, data_mesh(2), **options))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (changed(sample_ids=([0, 1], PLAN.sample_ids[[1, 0]])), r"^step 0 differs: rows\[0, 0\] is \d+ and \d+, \[1"),
        (changed(num_tokens=(5, 1)), r"^step 5 differs: num_tokens is \d+ and 1$"),
        (
            dataclasses.replace(PLAN, buckets=(*PLAN.buckets[:2], Bucket(3, 30))),
            r"^step \d+ differs: bucket is 2×30 and 3×30; rows has shape \(2, 2\) and \(2, 3\)$",
        ),
        (
            make_plan(LENGTHS, BUCKETS, order="length", microbatches_per_step=4),
            r"step 0 differs: .*rows has shape \(2, \d\) and \(4, ",
        ),
        (
            make_plan(LENGTHS, [*BUCKETS, (1, 40)], microbatches_per_step=2, order="shuffle"),
            r"are the same, but the digests differ.*\(2, 30\), and .*\(1, 40\)$",
        ),
        (
            dataclasses.replace(
                PLAN, step_bucket=PLAN.step_bucket[:-1], step_offsets=PLAN.step_offsets[:-1],
                num_tokens=PLAN.num_tokens[:-1],
            ),
            f"the second ends after {PLAN.num_steps - 1} steps, which are the same in both",
        ),
    ],
)  # fmt: skip
def test_the_first_step_that_differs_is_named(other, message):
    with pytest.raises(AssertionError, match=message):
        assert_same_batches(PLAN, other)


def test_batches_are_compared_leaf_by_leaf_across_frameworks():
    dataset = random_dataset(30, 20)
    plan, twin = (
        package.make_plan(np.diff(dataset.offsets), [(3, 10), (2, 20)], order="length", microbatches_per_step=2)
        for package in (jvarlen, torch_ref)
    )
    batches = list(load(plan, dataset))
    assert_same_batches(batches, torch_ref.load(twin, dataset))
    tokens = np.array(batches[2].tokens)
    tokens[1, 0, 0] += 1
    wrong = [*batches[:2], batches[2]._replace(tokens=tokens), *batches[3:]]
    with pytest.raises(AssertionError, match=r"^step 2 differs: \.tokens\[1, 0, 0\] is \d+ and \d+$"):
        assert_same_batches(batches, wrong)
    with pytest.raises(AssertionError, match=r"\.tokens has shape \(2, 3, 10\) and \(2, 3, 9\)"):
        assert_same_batches(batches, [batch._replace(tokens=batch.tokens[..., :-1]) for batch in batches])
    with pytest.raises(AssertionError, match=r"\.weights is only in the first"):
        assert_same_batches(batches, [batch._replace(weights=None) for batch in batches])
    with pytest.raises(AssertionError, match="the first ends after 2 steps"):
        assert_same_batches(batches[:2], iter(batches))
    with pytest.raises(ValueError, match="a plan is compared with a plan"):
        assert_same_batches(plan, batches)


def test_numbers_that_are_none_are_the_same():
    batch = {"x": np.array([1.0, np.nan])}
    assert_same_batches([batch], [{"x": jnp.array([1.0, jnp.nan])}])
    with pytest.raises(AssertionError, match=r"\['x'\]\[1\] is nan and 2"):
        assert_same_batches([batch], [{"x": np.array([1.0, 2.0])}])


SHAPES = [jax.ShapeDtypeStruct((n,), np.float32) for n in (3, 5)]


def minus_two(x):
    return x - 2


def test_a_jitted_function_compiles_each_shape_once():
    assert_no_recompiles(jax.jit(lambda x: x - 1), SHAPES)
    with pytest.raises(AssertionError, match=r"first call with arguments 1 \(\[0\] float32\[5\]\): minus_two"):
        assert_no_recompiles(jax.jit(minus_two), SHAPES, warm_up=False)


def test_a_function_that_is_jitted_anew_each_time_is_found():
    def jitted_anew(x):
        return jax.jit(lambda y: minus_two(y))(x)

    with pytest.raises(AssertionError) as raised:
        assert_no_recompiles(jitted_anew, SHAPES)
    assert "the second call with arguments 0 ([0] float32[3]): <lambda>" in str(raised.value)
    assert "first call" not in str(raised.value)


def test_a_step_that_donates_its_state_can_be_called_again():
    state = {"n": jnp.zeros(3), "key": jax.random.key(0)}
    step = jax.jit(lambda state, x: ({"n": state["n"] + x.sum(), "key": state["key"]}, None), donate_argnums=0)
    assert_no_recompiles(step, [(state, shape) for shape in SHAPES])
    assert not state["n"].is_deleted()


def test_an_argument_that_changes_its_type_is_found():
    calls = []

    def drifting(x):
        calls.append(x)
        return step(x, 1.0 if len(calls) < 3 else jnp.float32(1))

    step = jax.jit(lambda x, y: x * y)
    with pytest.raises(AssertionError, match=r"the second call with arguments 0 .*<lambda>"):
        assert_no_recompiles(drifting, SHAPES)


def test_a_whole_loop_is_a_function_without_arguments():
    double = jax.jit(lambda x: x * 2)

    def epoch():
        return [double(np.ones(n)) for n in (3, 4)]

    assert_no_recompiles(epoch, [()])
    with pytest.raises(ValueError, match="shapes are empty"):
        assert_no_recompiles(epoch, [])


def count_step(state, batch):
    return state + jnp.sum(batch.weights), jnp.sum(batch.tokens)


@pytest.mark.parametrize("num_devices", [None, 2])
def test_compiled_buckets_may_not_compile_at_all(num_devices, monkeypatch):
    mesh = None if num_devices is None else data_mesh(num_devices)
    compiled = compile_buckets(
        count_step,
        jnp.float32(0),
        BatchShapes([(2, 4), (1, 8)], microbatches_per_step=2, layout=mesh),
        progress=False,
        options=CompileOptions(cache_dir=None),
    )
    calls = [(jnp.float32(0), spec) for spec in compiled.specs.values()]
    assert_no_recompiles(compiled, calls)
    assert compiled.report.times_used == 4
    inner = type(compiled).__call__
    compile_for = jax.jit(lambda batch: batch.weights + 17)
    monkeypatch.setattr(type(compiled), "__call__", lambda self, *args: (compile_for(args[1]), inner(self, *args))[1])
    with pytest.raises(AssertionError, match=r"first call with arguments 1 \(\[1\]\.tokens int32\[2,\d,\d\], .*lambda"):
        assert_no_recompiles(compiled, calls)


def test_a_batch_that_nothing_was_compiled_for_is_refused():
    compiled = compile_buckets(count_step, jnp.float32(0), BatchShapes([(2, 4)]), progress=False)
    with pytest.raises(ValueError, match=r"\.tokens is int32\[1,2,5\], planned was"):
        assert_no_recompiles(compiled, [(jnp.float32(0), token_batch_spec(Bucket(2, 5), 1))])
