"""A target is the next token of the same sample, in rows of every kind."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jvarlen import load, make_plan
from jvarlen.batches import PackedBatch, next_token_targets
from jvarlen.data import WeightedTokens
from tests.support.hand_made import batch_of
from tests.support.meshes import data_mesh

RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(1, 17, 60)
OTHER_LENGTHS = RNG.integers(1, 17, 60)
BEGIN = 5_000


def token_range(i, length):
    """Tokens that name their sample and their place."""
    return 17 * i + np.arange(length)


def weights_of(i, length):
    return (np.arange(length) + i) % 3 / 2


SAMPLES = [
    WeightedTokens(token_range(i, n), weights_of(i, n)) if i % 2 else token_range(i, n) for i, n in enumerate(LENGTHS)
]
PAIRS = [(token_range(i, n), sample) for i, (n, sample) in enumerate(zip(OTHER_LENGTHS, SAMPLES, strict=True))]
PAIR_LENGTHS = np.stack([OTHER_LENGTHS, LENGTHS], axis=1)


WRAPPED = make_plan(LENGTHS, [(3, 11)], order="dataset", packing="wrapped", num_microbatches=2)


def wrapped_chunks():
    """The parts of each sample that rows of 11 hold, end to end."""
    end = 0
    for length in map(int, LENGTHS):
        begin, end = end, end + length
        cuts = [begin, *range(begin - begin % 11 + 11, end, 11), end]
        yield [slice(one - begin, other - begin) for one, other in itertools.pairwise(cuts)]


def batches_of(kind):
    """Some steps, with padding rows and padding in rows."""
    if kind == "padded":
        return load(make_plan(LENGTHS, [(4, 8), (4, 16)], order="dataset", num_microbatches=2), SAMPLES)
    if kind == "truncated":
        plan = make_plan(LENGTHS, [(4, 8)], order="dataset", num_microbatches=2, overlong="truncate")
        return load(plan, SAMPLES)
    if kind == "packed":
        return load(make_plan(LENGTHS, [(3, 35)], packing="best_fit", num_microbatches=2), SAMPLES)
    if kind == "split":
        split = {"packing": "best_fit", "overlong": "split"}
        return load(make_plan(LENGTHS, [(3, 11)], num_microbatches=2, **split), SAMPLES)
    if kind == "wrapped":
        return load(WRAPPED, SAMPLES)
    if kind == "pairs":
        return load(make_plan(PAIR_LENGTHS, [(4, 16, 16)], order="dataset", num_microbatches=2), PAIRS)
    plan = make_plan(PAIR_LENGTHS, [(3, 35, 35)], packing="best_fit", num_microbatches=2)
    return load(plan, PAIRS)


def expected_pairs(kind):
    """(input, target, weight) of all samples, from their text; of a split one, each chunk is a sample."""
    most = {"truncated": 8, "split": 11}.get(kind, 16)
    found, wrapped = [], wrapped_chunks()
    for sample in SAMPLES:
        tokens = getattr(sample, "tokens", sample)
        weights = getattr(sample, "weights", np.ones(len(tokens), np.float32))
        starts = range(0, len(tokens) if kind == "split" else 1, most)
        chunks = [slice(start, start + most) for start in starts] if kind != "wrapped" else next(wrapped)
        for chunk in chunks:
            found += zip(tokens[chunk][:-1], tokens[chunk][1:], weights[chunk][1:], strict=True)
    return sorted((int(one), int(next_one), float(weight)) for one, next_one, weight in found if weight)


KINDS = ["padded", "truncated", "packed", "split", "wrapped", "pairs", "packed pairs"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_but_the_first_of_a_sample_is_the_target_of_the_one_before_it(kind):
    found = []
    for batch in batches_of(kind):
        inputs, targets, weights = map(np.asarray, next_token_targets(batch))
        is_target = weights > 0
        found += zip(inputs[is_target].tolist(), targets[is_target].tolist(), weights[is_target].tolist(), strict=True)
    assert sorted(found) == expected_pairs(kind)


@pytest.mark.parametrize("kind", ["padded", "packed", "pairs", "packed pairs"])
def test_with_a_token_before_each_sample_every_token_is_a_target(kind):
    found = []
    for batch in batches_of(kind):
        inputs, targets, weights = map(np.asarray, next_token_targets(batch, begin_token=BEGIN))
        is_target = weights > 0
        found += zip(inputs[is_target].tolist(), targets[is_target].tolist(), strict=True)
    wanted = [(one, target) for one, target, _ in expected_pairs(kind)]
    first = [17 * i for i, sample in enumerate(SAMPLES) if getattr(sample, "weights", [1])[0]]
    assert sorted(found) == sorted(wanted + [(BEGIN, token) for token in first])


def test_packed_samples_have_a_target_less_than_tokens_and_rows_with_a_weight_of_their_neighbour_too_many():
    lengths = RNG.integers(4, 13, 60)
    samples = [token_range(i, n) for i, n in enumerate(lengths)]
    plan = make_plan(lengths, [(4, 32)], packing="best_fit")
    batches = list(load(plan, samples))
    across_samples = sum(float(batch.weights[:, :, 1:].sum()) for batch in batches)
    assert across_samples - sum(lengths - 1) == 60 - plan.num_rows > 0
    assert sum(float(next_token_targets(batch)[2].sum()) for batch in batches) == sum(lengths - 1)


def test_rows_of_one_microbatch_on_devices_that_share_the_tokens_of_a_row_have_the_same_targets():
    microbatch = PackedBatch(*(leaf[0] if np.ndim(leaf) else leaf for leaf in next(batches_of("packed"))))
    shape = np.shape(microbatch.tokens)
    has_positions = jax.tree.map(lambda leaf: np.shape(leaf) == shape, microbatch)
    microbatch = jax.tree.map(
        lambda leaf, has: np.pad(leaf, ((0, 0), (0, 5))) if has else leaf, microbatch, has_positions
    )
    shardings = jax.tree.map(
        lambda has: NamedSharding(data_mesh(8), PartitionSpec(*[None, "data"] * has)), has_positions
    )
    sharded = jax.jit(next_token_targets)(jax.device_put(microbatch, shardings))
    for one, other in zip(sharded, next_token_targets(microbatch), strict=True):
        np.testing.assert_array_equal(one, other)


def test_bytes_hold_no_token_above_255_and_inputs_do():
    tokens = np.array([[1, 2]], np.uint8)
    inputs, _, _ = next_token_targets(batch_of(tokens, np.array([2]), np.ones((1, 2)), np.float32(1)), begin_token=256)
    assert inputs.tolist() == [[256, 1]]


def test_what_has_no_neighbours_is_refused():
    microbatch = next(batches_of("packed"))
    with pytest.raises(ValueError, match=r"takes a Batch, .* or PackedPairBatch .* not a dict"):
        next_token_targets({"tokens": np.zeros((1, 2), int)})
    with pytest.raises(ValueError, match=r"begin_token \(-1\)"):
        next_token_targets(microbatch, begin_token=-1)


def test_named_tokens_of_two_lengths_are_those_that_the_loss_weights_are_of():
    """In rows of 7 and 7, weights and segments of the other length let 13 predict 1, of another sample."""
    tokens, image = [np.arange(1, 5), np.arange(11, 14)], [np.ones((2, 3)), np.ones((4, 3))]
    plan = make_plan([[2, 4], [4, 3]], [(1, 7, 7)], packing="best_fit")
    samples = [{"img": one, "target_tokens": other} for one, other in zip(image, tokens, strict=True)]
    (batch,) = load(plan, samples, fields={"img": "source", "target_tokens": "target"})
    inputs, targets, weights = next_token_targets(batch)
    assert inputs[0, 0].tolist() == [11, 12, 13, 1, 2, 3, 4]
    assert targets[0, 0].tolist() == [12, 13, 1, 2, 3, 4, 11]
    assert weights[0, 0].tolist() == [1, 1, 0, 1, 1, 1, 0]

    flipped = make_plan([[4, 2], [3, 4]], [(1, 7, 7)], packing="best_fit")
    samples = [{"tokens": one, "img": other} for one, other in zip(tokens, image, strict=True)]
    (batch,) = load(flipped, samples, fields={"tokens": "source", "img": "target"})
    with pytest.raises(ValueError, match=r"needs the field target_tokens in a batch of two .* its length the target"):
        next_token_targets(batch)
    samples = [{"target_tokens": one, "img": other} for one, other in zip(tokens, image, strict=True)]
    with pytest.raises(ValueError, match="target_tokens are tokens of the target"):
        load(flipped, samples, fields={"target_tokens": "source", "img": "target"})


def test_tokens_of_other_axes_than_the_loss_weights_are_refused():
    samples = [{"tokens": np.arange(5), "x": np.ones(n)} for n in (2, 3)]
    (batch,) = load(make_plan([2, 3], [(2, 4)]), samples, fields={"tokens": "row", "x": "length"})
    with pytest.raises(ValueError, match=r"tokens have shape \(1, 2, 5\), but the loss weights \(1, 2, 4\)"):
        next_token_targets(batch)
    samples = [{"tokens": np.ones(n, int), "target_tokens": np.ones(n, int) * 2} for n in (2, 3)]
    (batch,) = load(make_plan([2, 3], [(2, 4)]), samples)
    assert set(np.ravel(next_token_targets(batch)[0]).tolist()) == {0, 1}
