"""Batches without samples, full ones for measuring; rows of padding; what counts as a token."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvarlen import Bucket, load, make_eval_step, make_plan, make_train_step, scale_by_batch_size
from jvarlen.batches import (
    BatchShapes,
    PackedBatch,
    count_tokens,
    full_batch,
    next_token_targets,
    sum_by_sample,
    token_batch_spec,
)
from jvarlen.batches.batches import arrays_by_name, mark_padding_rows
from jvarlen.batches.shapes import plan_specs
from jvarlen.models import with_window
from jvarlen.parallel import StepLoss
from jvarlen.testing import assert_partition_invariant

SIDES = ("source", "target")


@pytest.mark.parametrize(
    ("spec", "ids"),
    [
        (token_batch_spec(Bucket(2, 3), 2), [[0, 1], [2, 3]]),
        (token_batch_spec(Bucket(1, 3), 2, 2), [[[0, -1]], [[1, -1]]]),
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

    batch = next(load(make_plan([2, 3, 1, 2], [(2, 3)], num_microbatches=2), [np.arange(n) for n in (2, 3, 1, 2)]))
    assert_partition_invariant(loss_fn, 0.5, batch, num_shards=[1])
    one_more = [(0, 0), (0, 1), (0, 0)]
    padded = jax.tree.map(lambda leaf: np.pad(leaf, one_more[: leaf.ndim]) if leaf.ndim else leaf, batch)
    padded = mark_padding_rows(padded)
    assert padded.ids.tolist() == [[*row, -1] for row in batch.ids.tolist()]
    assert padded.is_real.tolist() == [[True, True, False]] * 2


LENGTHS = [2, 3, 1, 2, 3]
NAMED = [{"tokens": np.arange(n) + 1, "near": np.ones((n, n)), "label": n % 2} for n in LENGTHS]
TOKENS = {"tokens": "length", "label": "row"}


@pytest.mark.parametrize("packing", ["padded", "best_fit"])
def test_batches_of_named_fields_are_counted_filled_and_give_targets_as_those_of_tokens(packing):
    plan = make_plan(LENGTHS, [(2, 6)], packing=packing, order="dataset")
    loader = load(plan, NAMED, fields=TOKENS)
    for named, tokens in zip(loader, load(plan, [sample["tokens"] for sample in NAMED]), strict=True):
        assert float(count_tokens(named)) == float(count_tokens(tokens))
        for found, expected in zip(next_token_targets(named), next_token_targets(tokens), strict=True):
            np.testing.assert_array_equal(found, expected)
    (spec,), (of_tokens,) = loader.specs.values(), BatchShapes.of_plan(plan).specs.values()
    full, expected = full_batch(spec), full_batch(of_tokens)._asdict()
    assert set(full) - set(expected) == {"label"}
    for name, array in expected.items():
        np.testing.assert_array_equal(full[name], array)
    windowed = full_batch(jax.eval_shape(lambda batch: with_window(batch, 3), of_tokens))
    assert set(windowed) - set(expected) == {"attention_window"}
    assert windowed["attention_window"] == 0  # tokens see all
    with pytest.raises(ValueError, match="or a batch of named fields with tokens, not a dict"):
        next_token_targets({"tokens": np.ones((1, 2))})


def test_a_full_batch_of_named_fields_of_two_lengths_needs_the_bucket():
    lengths = [[2, 3], [3, 1], [1, 2]]
    samples = [{"nodes": np.ones((n, 2)), "edges": np.arange(e)} for n, e in lengths]
    loader = load(make_plan(lengths, [(3, 4, 5)]), samples, lengths=lengths)
    ((bucket, spec),) = loader.specs.items()
    full = full_batch(spec, bucket)
    assert (full["source_lengths"] == 4).all()
    assert (full["target_lengths"] == 5).all()
    with pytest.raises(ValueError, match="of two lengths needs bucket="):
        full_batch(spec)


def test_checks_of_losses_take_named_fields():
    def loss_fn(scale, microbatch):
        size_B = jnp.where(microbatch["is_real"], microbatch["lengths"], 1)
        mean_B = scale * microbatch["near"].sum(axis=(1, 2)) / size_B - microbatch["label"]
        return (mean_B**2 * microbatch["is_real"]).sum(), microbatch["is_real"].sum()

    def wrong(scale, microbatch):
        return scale * (microbatch["tokens"].sum(axis=1) / microbatch["lengths"]).sum(), microbatch["weights"].sum()

    plan = make_plan(LENGTHS, [(2, 3)], num_microbatches=2, order="dataset")
    batch = next(load(plan, NAMED))
    assert_partition_invariant(loss_fn, 0.5, batch, num_shards=[1])
    with pytest.raises(AssertionError, match="divides by what is 0 for padding rows"):
        assert_partition_invariant(wrong, 0.5, batch, num_shards=[1])


def test_estimates_get_packed_batches_of_buckets_that_the_plan_lacks():
    plan = make_plan([3, 5, 8, 8], max_tokens=16, packing="best_fit")
    batch_spec = plan_specs(plan)
    assert batch_spec(Bucket(1, 4), 2).ids.shape == (2, 1, min(4, plan.samples_per_row[0]))
    assert batch_spec(plan.buckets.shapes[0], 2).ids.shape[-1] == plan.samples_per_row[0]


FIVE = [np.arange(3) + 1 for _ in range(5)]
PAIRS = [*zip(FIVE, FIVE, strict=True)]
NAMED_FIVE = [{"x": x} for x in FIVE]
PACKED = {"packing": "best_fit", "order": "dataset"}
REPEATED = {
    "padded": (make_plan([3] * 5, [(4, 3)]), FIVE, None),
    "packed": (make_plan([3] * 5, [(2, 6)], **PACKED), FIVE, None),
    "pairs": (make_plan([[3, 3]] * 5, [(4, 3, 3)]), PAIRS, None),
    "packed pairs": (make_plan([[3, 3]] * 5, [(2, 6, 6)], **PACKED), PAIRS, None),
    "fields": (make_plan([3] * 5, [(4, 3)]), NAMED_FIVE, {"x": "length"}),
    "packed fields": (make_plan([3] * 5, [(2, 6)], **PACKED), NAMED_FIVE, {"x": "length"}),
}


@pytest.mark.parametrize("kind", REPEATED)
def test_rows_that_repeat_a_sample_are_counted_nowhere(kind):
    plan, samples, fields = REPEATED[kind]
    batches = list(load(plan, samples, fields=fields, padding_rows="repeat"))
    per_sample = 6 if "pairs" in kind else 3
    expected = [4 * per_sample, per_sample]
    assert [float(count_tokens(batch)) for batch in batches] == plan.num_tokens.tolist() == expected

    def weight_of(microbatch):
        return jnp.sum(arrays_by_name(microbatch)["weights"])

    def loss_fn(scale, microbatch):
        return scale * weight_of(microbatch), weight_of(microbatch)

    def sums(scale, microbatch):
        return {"loss": scale * weight_of(microbatch), "weight": weight_of(microbatch)}

    optimizer = optax.chain(optax.sgd(1.0), scale_by_batch_size(per_sample, unit="tokens"))
    for loss in (loss_fn, StepLoss(sums, lambda sums: sums["loss"] / sums["weight"])):
        step, eval_step = make_train_step(loss, optimizer), make_eval_step(loss)
        state, counted, evaluated, scales = step.init(jnp.float32(0)), [], [], []
        for batch in batches:
            evaluated.append(float(eval_step(state, batch)[1].num_tokens))
            before, (state, metrics) = state, step(state, batch)
            counted.append(float(metrics.num_tokens))
            scales.append(float(before.params - state.params))
        assert counted == evaluated == expected
        assert scales == [4, 1]
    assert [float(arrays_by_name(batch)["num_sequences"]) for batch in batches] == [4, 1]


def test_shapes_of_batches_do_not_forget_the_microbatches_of_a_plan():
    plan = make_plan([3, 5, 8, 8], max_tokens=16, num_microbatches=4)
    with pytest.raises(ValueError, match=r"not a sequence.* buckets\.shapes, with num_microbatches=4$"):
        BatchShapes(plan.buckets)
    assert BatchShapes(plan.buckets.shapes, num_microbatches=4).specs == BatchShapes.of_plan(plan).specs


def test_lengths_of_names_of_their_own_are_counted():
    ids, lengths = np.array([[7, -1]]), np.array([[3, 3]], np.int32)
    arrays = {"ids": ids, "is_real": ids >= 0, "weights": np.ones((1, 2, 4)), "num_sequences": np.float32(1)}
    videos = arrays | {"frames_lengths": lengths, "height_lengths": lengths + 1, "width_lengths": lengths + 2}
    assert count_tokens(videos) == 3 + 4 + 5
    assert count_tokens(arrays | {"lengths": lengths, "bond_lengths": lengths}) == 3
    assert count_tokens(arrays | {"source_lengths": lengths, "target_lengths": lengths, "bond_lengths": lengths}) == 6
    with pytest.raises(ValueError, match="full batch"):
        full_batch(videos)


@pytest.mark.parametrize("padding_rows", ["zeros", "repeat"])
@pytest.mark.parametrize("packing", ["padded", "best_fit"])
def test_values_are_summed_over_each_sample(packing, padding_rows):
    rng = np.random.default_rng(0)
    pairs = [tuple(rng.integers(1, 9, size) for size in sizes) for sizes in rng.integers(1, 9, (21, 2))]
    plans = [make_plan([len(pair[0]) for pair in pairs], [(4, 16)], packing=packing)]
    plans += [make_plan([[*map(len, pair)] for pair in pairs], [(4, 12, 16)], packing=packing)]
    for plan, samples, sides in zip(plans, ([pair[0] for pair in pairs], pairs), ((None,), SIDES), strict=True):
        seen = []
        for batch in load(plan, samples, padding_rows=padding_rows):
            microbatch = jax.tree.map(lambda leaf: leaf[0] if leaf.ndim else leaf, batch)
            for side in sides:
                tokens = getattr(microbatch, f"{side}_tokens" if side else "tokens")
                values = jnp.where(tokens[..., None] > 0, jnp.stack([tokens, 2.0 * tokens], axis=-1), jnp.inf)
                sums = sum_by_sample(values, microbatch, side)
                assert sums.shape == (*microbatch.ids.shape, 2)
                for i, found in zip(microbatch.ids.ravel(), sums.reshape(-1, 2), strict=True):
                    total = 0 if i < 0 else np.sum(samples[i][SIDES.index(side)] if side else samples[i])
                    assert found.tolist() == [total, 2 * total]
            seen += microbatch.ids[microbatch.ids >= 0].tolist()
        assert sorted(seen) == [*range(21)]
    with pytest.raises(ValueError, match=r"side=None, the batch has \['source_"):
        sum_by_sample(values, microbatch)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8"])
def test_sums_of_few_bits_do_not_wrap_around(dtype):
    ids = np.array([[0, 1]])
    segments = np.repeat([[1, 2]], 300, axis=1)
    microbatch = PackedBatch(segments, segments, segments, segments, np.float32(2), ids, ids >= 0)
    assert sum_by_sample(np.ones((1, 600), dtype), microbatch).tolist() == [[300, 300]]
