"""Batches for loops of others have the same rows, without the axis of microbatches or under other names."""

import dataclasses

import jax
import numpy as np
import pytest

from jvarlen import compile_buckets, load, make_plan, stream_batches
from jvarlen.batches import next_token_targets
from jvarlen.loading import PlanSource
from tests.support.meshes import data_mesh

RNG = np.random.default_rng(0)
SAMPLES = [RNG.integers(1, 90, length) for length in RNG.integers(1, 30, 60)]
LENGTHS = np.array([len(sample) for sample in SAMPLES])
PAIRS = np.stack([LENGTHS, LENGTHS[::-1]], axis=1)
FORMS = {
    "padded": (make_plan(LENGTHS, max_tokens=120, max_shapes=3, num_microbatches=4), SAMPLES),
    "packed": (make_plan(LENGTHS, [(2, 40)], packing="best_fit", num_microbatches=4), SAMPLES),
    "split": (make_plan(LENGTHS, [(3, 9)], packing="best_fit", overlong="split", num_microbatches=4), SAMPLES),
    "fields": (
        make_plan(LENGTHS, max_tokens=120, max_shapes=3, num_microbatches=4),
        [{"tokens": tokens, "square": np.eye(len(tokens)), "label": i} for i, tokens in enumerate(SAMPLES)],
    ),
    "pairs": (
        make_plan(PAIRS, max_tokens=240, max_shapes=2, num_microbatches=4),
        [*zip(SAMPLES, SAMPLES[::-1], strict=True)],
    ),
}
MAXTEXT = {
    "tokens": "inputs",
    "segment_ids": "inputs_segmentation",
    "positions": ["inputs_position", "targets_position"],
    "targets": "targets",
    "target_weights": "targets_segmentation",
}


def in_order(batch):
    """The rows of all microbatches in the order of the plan, by their definition."""

    def flat(array):
        m, b = array.shape[:2]
        return np.stack([array[j % m, j // m] for j in range(m * b)])

    return jax.tree.map(lambda array: flat(array) if np.ndim(array) else array, batch)


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("padding_rows", ["zeros", "repeat"])
def test_rows_without_microbatches_are_in_the_order_of_the_plan_in_any_number_of_shards(form, padding_rows):
    plan, samples = FORMS[form]
    options = {"padding_rows": padding_rows, "lengths": PAIRS if form == "pairs" else LENGTHS}
    as_microbatches = PlanSource(plan, samples, **options)
    whole = PlanSource(plan, samples, microbatches=False, **options)
    for step in range(plan.num_steps):
        assert_same(whole[step], in_order(as_microbatches[step]))
        for expected, flat in ((as_microbatches, {}), (whole, {"microbatches": False})):
            shards = [
                PlanSource(plan, samples, shard=shard, **flat, **options)[step]
                for shard in (([1, 2], 4), (0, 4), (3, 4))
            ]
            shards = [shards[i] for i in (1, 0, 2)]
            joined = jax.tree.map(lambda *parts: np.concatenate(parts) if np.ndim(parts[0]) else parts[0], *shards)
            assert_same(joined, expected[step])


@pytest.mark.parametrize("microbatches", [True, False])
@pytest.mark.parametrize("packing", ["padded", "best_fit"])
@pytest.mark.parametrize("found", [(9, 3, 4), (0, 3, 4), (0, 0, 4), (5, 0, 4), (3, 9, 4)])
def test_the_row_that_is_repeated_is_adjusted_and_skipped_alike_on_any_number_of_processes(
    microbatches, packing, found
):
    planned = [5, 3, 4]
    plan = make_plan(planned, [(4, 8)], num_microbatches=2, order="dataset", packing=packing)
    samples = [np.arange(1, size + 1) for size in found]
    for options in ({"on_mismatch": "adjust"}, {"on_mismatch": "error"}):
        options |= {"lengths": planned, "padding_rows": "repeat", "on_bad_sample": "skip", "microbatches": microbatches}
        (expected,) = PlanSource(plan, samples, **options)
        (parts,) = zip(*(PlanSource(plan, samples, shard=(i, 2), **options) for i in range(2)), strict=True)
        joined = jax.tree.map(lambda *each: np.concatenate(each) if np.ndim(each[0]) else each[0], *parts)
        assert_same(joined, expected)


@pytest.mark.parametrize("form", FORMS)
def test_the_specs_of_renamed_rows_are_those_of_the_arrays_on_a_mesh(form):
    plan, samples = FORMS[form]
    plan = dataclasses.replace(plan, step_groups=np.array([0, 1, *range(3, plan.num_groups), plan.num_groups]))
    lengths = PAIRS if form == "pairs" else LENGTHS
    names = {"targets": "y", "ids": ["ids", "rows"], "num_sequences": "n"}
    batches = load(plan, samples, lengths=lengths, layout=data_mesh(4), microbatches=False, rename_fields=names)

    def describe(arrays):
        return jax.tree.map(lambda array: (array.shape, array.dtype, array.sharding), arrays)

    specs = [describe(spec) for spec in batches.specs.values()]
    expected = PlanSource(plan, samples)
    for step, batch in enumerate(batches):
        of_step = expected[step]
        groups = list(zip(batch.groups, of_step.groups, strict=True))
        for found, group in groups:
            assert describe(found) in specs
            flat = in_order(group)
            ids = flat["ids"] if form == "fields" else flat.ids
            assert_same(found, {"y": next_token_targets(flat)[1], "ids": ids, "rows": ids, "n": found["n"]})


def test_a_compiled_step_of_ones_own_takes_renamed_rows_and_a_single_microbatch_on_many_shards():
    plan = make_plan(LENGTHS, [(8, 30)], packing="best_fit")
    batches = load(plan, SAMPLES, layout=data_mesh(4), microbatches=False, rename_fields=MAXTEXT)

    def step(total, batch):
        return total + (batch["targets"] * (batch["targets_segmentation"] != 0)).sum(), {}

    compiled = compile_buckets(step, np.int32(0), batches, progress=False)
    total = np.int32(0)
    for batch in batches:
        assert batch["inputs"].shape == (8, 30)
        assert batch["inputs"].sharding.spec == jax.sharding.PartitionSpec("data")
        total, _ = compiled(total, batch)
    assert total == sum(sample[1:].sum() for sample in SAMPLES)


def test_a_collate_function_of_ones_own_gets_all_rows_as_one_microbatch():
    plan, samples = FORMS["padded"]
    batches = load(plan, samples, collate=lambda step: {"ids": step.ids, "n": 1.0}, microbatches=False)
    for step, batch in enumerate(batches):
        assert_same(batch, {"ids": in_order(plan.rows(step)), "n": np.float32(1)})
    sizes = {(4 * bucket.rows,) for bucket in plan.buckets.shapes}
    assert {spec["ids"].shape for spec in batches.specs.values()} == sizes


def test_datasets_read_forward_and_streams_have_these_forms():
    plan = make_plan(LENGTHS, max_tokens=120, max_shapes=3, order="dataset", num_microbatches=4)
    options = {"microbatches": False, "rename_fields": {"tokens": "x", "lengths": "l"}}
    forward = load(plan, (sample for sample in SAMPLES), lengths=LENGTHS, **options)
    for batch, expected in zip(forward, load(plan, SAMPLES), strict=True):
        assert_same(batch, {"x": in_order(expected.tokens), "l": in_order(expected.lengths)})
    stream, plain = (stream_batches(LENGTHS, plan.buckets, num_microbatches=4) for _ in range(2))
    batches = load(stream, SAMPLES, **options)
    for batch, expected in zip(batches, load(plain, SAMPLES), strict=True):
        assert_same(batch, {"x": in_order(expected.tokens), "l": in_order(expected.lengths)})
        assert batch["x"].shape in {spec["x"].shape for spec in batches.specs.values()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rename_fields": {"token": "x", "y": "z"}}, "names 'token', 'y', but a batch has .* 'tokens', 'lengths'"),
        ({"rename_fields": {"tokens": "x", "ids": ["x", "y"], "lengths": "y"}}, "several arrays the names 'x', 'y'"),
        ({"rename_fields": {"tokens": 3}}, "must map arrays of a batch to one name or several"),
        ({"rename_fields": "tokens"}, "must map arrays"),
        ({"rename_fields": {"tokens": "x"}, "collate": lambda step: step.ids}, "rename_fields= are for samples that"),
        ({"microbatches": False, "layout": "data5"}, r"5 shards do not divide the \d+ rows of a group"),
    ],
)
def test_names_and_shards_that_do_not_fit_are_refused_before_the_first_batch(options, message):
    plan, samples = FORMS["padded"]
    with pytest.raises(ValueError, match=message):
        load(plan, samples, **options)


@pytest.mark.parametrize("shard", [(2, 2), ([], 2), (-1, 2), (0.5, 1), 3])
def test_a_shard_is_an_index_and_a_count(shard):
    with pytest.raises(ValueError, match=r"shard must be \(i, n\)"):
        PlanSource(*FORMS["padded"], shard=shard)
