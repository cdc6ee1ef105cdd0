"""Collation: every token in its place, padding without weight, mistakes named."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvarlen import Bucket, load, make_plan, stream_batches
from jvarlen.batches import BatchShapes
from jvarlen.batches.batches import count_tokens
from jvarlen.data import WeightedTokens
from jvarlen.loading import StepSamples, collate_tokens
from jvarlen.loading.plan_source import PlanSource


def make_step(microbatches, bucket, *, truncate=False, num_tokens=None):
    """Ids count up in the order of the microbatches."""
    ids = np.full((len(microbatches), bucket.rows), -1)
    next_id = 0
    for m, samples in enumerate(microbatches):
        ids[m, : len(samples)] = np.arange(next_id, next_id + len(samples))
        next_id += len(samples)
    lengths = [len(sample) for samples in microbatches for sample in samples]
    if num_tokens is None:
        num_tokens = sum(min(length, bucket.length) if truncate else length for length in lengths)
    return StepSamples(bucket, ids, microbatches, num_tokens, truncate, len(lengths))


@settings(max_examples=30)
@given(st.data(), st.integers(1, 3), st.integers(1, 4), st.integers(1, 6))
def test_rows_hold_their_samples_and_nothing_else(data, num_microbatches, rows, length):
    sample = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=length).map(lambda x: np.array(x, np.int64))
    microbatches = [data.draw(st.lists(sample, max_size=rows)) for _ in range(num_microbatches)]
    microbatches[0] = microbatches[0] or [np.array([7])]
    batch = collate_tokens(make_step(microbatches, Bucket(rows, length)))
    assert batch.num_sequences == sum(map(len, microbatches))
    for m, samples in enumerate(microbatches):
        for row in range(rows):
            tokens = samples[row] if row < len(samples) else np.zeros(0, int)
            assert batch.lengths[m, row] == len(tokens)
            assert batch.tokens[m, row, : len(tokens)].tolist() == tokens.tolist()
            assert not batch.tokens[m, row, len(tokens) :].any()
            assert batch.weights[m, row].tolist() == [1.0] * len(tokens) + [0.0] * (length - len(tokens))


@settings(max_examples=40)
@given(st.data(), st.booleans(), st.booleans())
def test_loss_weights_come_with_their_tokens(data, truncate, packed):
    token = st.tuples(st.integers(1, 9), st.sampled_from([0.0, 0.5, 1.0]))
    rows = data.draw(st.lists(st.lists(token, min_size=1, max_size=6), min_size=1, max_size=5))
    is_weighted = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    dataset = [
        WeightedTokens(*zip(*row, strict=True)) if weighted else np.array([token for token, _ in row])
        for row, weighted in zip(rows, is_weighted, strict=True)
    ]
    expected = {  # of every token in order, with the place of its row among all
        i: [weight if is_weighted[i] else 1.0 for _, weight in row] for i, row in enumerate(rows)
    }
    lengths = list(map(len, rows))
    if packed:
        planned = make_plan(lengths, [(1, 6)], packing="best_fit", order="length")
        collate = collate_tokens
    else:
        most = 4 if truncate else 6
        expected = {i: weights[:most] for i, weights in expected.items()}
        planned, collate = make_plan(lengths, [(2, most)], order="length", overlong="truncate"), collate_tokens
    source = PlanSource(planned, dataset, collate, lengths=lengths)
    for step, batch in enumerate(map(source.__getitem__, range(len(source)))):
        for ids, tokens, weights in zip(planned.rows(step)[0], batch.tokens[0], batch.weights[0], strict=True):
            in_row = [weight for i in np.atleast_1d(ids) if i >= 0 for weight in expected[int(i)]]
            assert weights.tolist() == in_row + [0.0] * (len(weights) - len(in_row))
            assert np.count_nonzero(tokens) == len(in_row)


LENGTHS = np.random.default_rng(3).integers(1, 9, (20, 2))
PLAN_OF = {
    "padded": lambda epoch: make_plan(LENGTHS[:, 0], [(3, 4), (2, 9)], num_microbatches=2, epoch=epoch),
    "packed": lambda epoch: make_plan(
        LENGTHS[:, 0], [(2, 9), (2, 14)], num_microbatches=2, packing="best_fit", epoch=epoch
    ),
    "pairs": lambda epoch: make_plan(LENGTHS, [(3, 4, 4), (2, 9, 9)], num_microbatches=2, epoch=epoch),
    "packed pairs": lambda epoch: make_plan(
        LENGTHS, [(2, 14, 12)], num_microbatches=2, packing="best_fit", epoch=epoch
    ),
}


@pytest.mark.parametrize("kind", PLAN_OF)
def test_every_row_tells_its_samples_in_shapes_that_are_known_before(kind):
    pairs = [tuple(np.full(length, i) for length in lengths) for i, lengths in enumerate(LENGTHS.tolist())]
    samples = pairs if "pairs" in kind else [source for source, _ in pairs]
    plans = [PLAN_OF[kind](epoch) for epoch in range(2)]
    loader = load(plans.__getitem__, samples, num_epochs=2)
    specs = loader.specs  # of the first epoch
    assert specs == BatchShapes.of_plan(plans[1]).specs
    steps = [(plan, step) for plan in plans for step in range(plan.num_steps)]
    for (plan, step), batch in zip(steps, loader, strict=True):
        spec = specs[plan.buckets.shapes[plan.step_bucket[step]]]
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), batch) == jax.tree.map(
            lambda leaf: (leaf.shape, leaf.dtype), spec
        )
        batch, rows = jax.device_get(batch), plan.rows(step)
        missing = [(0, 0)] * (rows.ndim - 1) + [(0, batch.ids.shape[-1] - rows.shape[-1])]
        assert batch.ids.tolist() == np.pad(rows, missing, constant_values=-1).tolist()
        assert batch.is_real.tolist() == (batch.ids >= 0).tolist()
        tokens = batch.target_tokens if "pairs" in kind else batch.tokens
        segments = getattr(batch, "target_segment_ids" if "pairs" in kind else "segment_ids", None)
        is_token = np.asarray(batch.weights) > 0
        index = np.zeros_like(tokens) if segments is None else np.maximum(segments, 1) - 1
        ids = np.asarray(batch.ids if segments is not None else batch.ids[..., None])
        assert (np.take_along_axis(ids, index, axis=2) == tokens)[is_token].all()


def test_ids_that_arrays_cannot_hold_are_refused():
    step = make_step([[np.arange(3)]], Bucket(1, 4))
    with pytest.raises(ValueError, match=f"ids of samples must fit int32, and this step has {2**31}"):
        collate_tokens(step._replace(ids=np.array([[2**31]])))


def test_lengths_other_than_planned_are_an_error():
    with pytest.raises(ValueError, match=r"hold 5 tokens, but 6 were planned.*id 0: 2, id 1: 3"):
        collate_tokens(make_step([[np.arange(2), np.arange(3)]], Bucket(2, 4), num_tokens=6))


NO_TOKENS = [
    (np.zeros((2, 2), int), "2-D int64"),
    (np.zeros(2), "1-D float64"),
    ((np.arange(3), 1), "tuple of ndarray, int"),
    (([1, 2], [3, 4]), "tuple of list, list"),
    ({"tokens": [1, 2], "label": 1}, "dict with the keys 'tokens', 'label'"),
    ([[1, 2], 3], "list of list, int"),
    (list("text"), "1-D <U1"),
]


@pytest.mark.parametrize("sample", ["text", b"text"])
def test_texts_are_no_tokens_yet(sample):
    with pytest.raises(ValueError, match="id 1: text, not tokens: a tokenizer gives these"):
        collate_tokens(make_step([[np.arange(2), sample]], Bucket(2, 4)))


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize(("sample", "said"), NO_TOKENS)
def test_samples_that_are_no_tokens_are_named(sample, said, truncate):
    with pytest.raises(ValueError, match=f"id 1: no 1-D array of integer tokens, but {said}; .* your own collate=$"):
        collate_tokens(make_step([[np.arange(2), sample]], Bucket(2, 4), truncate=truncate))


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        ((np.arange(2), ([1, 2], 3)), "tuple of list, int"),
        ({"source": [1]}, "dict with the keys 'source'"),
        ((np.arange(2),), "tuple of ndarray"),
        (np.arange(2), "0-D int64"),
        (np.arange(3), "ndarray"),
        (WeightedTokens([1], [1]), "WeightedTokens"),
        ((np.arange(2), np.arange(2), np.zeros(2)), "tuple of ndarray, ndarray, ndarray"),
        ((np.arange(2), np.arange(2), 1), "tuple of ndarray, ndarray, int"),
    ],
)
def test_pairs_that_are_no_tokens_are_named(pair, said):
    plan = make_plan([[2, 2], [2, 2]], [(2, 2, 2)], order="dataset")
    with pytest.raises(ValueError, match=f"id 1: no .*, but {said}(;|\n)"):
        next(load(plan, [(np.arange(2), np.arange(2)), pair]))


def batches_of_each_kind():
    """A plan, and a batch of its only step: padded and cut, packed, of pairs."""
    samples = [np.arange(n, dtype=np.int32) for n in (3, 9, 4, 6)]
    lengths = np.array([3, 9, 4, 6])
    cut = make_plan(lengths, [(2, 8)], order="length", num_microbatches=2, overlong="truncate")
    packed = make_plan(lengths, [(1, 12)], packing="best_fit", order="length", num_microbatches=2)
    pairs = make_plan(np.stack([lengths, lengths[::-1]], axis=1), [(2, 9, 9)], order="length", num_microbatches=2)
    yield cut, load(cut, samples)
    yield packed, load(packed, samples)
    yield pairs, load(pairs, list(zip(samples, samples[::-1], strict=True)))


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["cut", "packed", "pairs"])
def test_the_tokens_of_a_batch_are_those_that_were_planned(kind):
    plan, batches = list(batches_of_each_kind())[kind]
    counted = [float(count_tokens(batch)) for batch in batches]
    assert counted == plan.num_tokens.tolist()
    assert counted[0] != plan.num_sequences[0]


def test_tokens_of_a_batch_of_another_kind_are_not_counted():
    assert count_tokens({"tokens": np.ones((2, 3))}) is None


class OwnTokens(WeightedTokens):
    pass


@pytest.mark.parametrize("kind", [WeightedTokens, OwnTokens])
def test_streams_have_the_loss_weights_of_their_samples(kind):
    samples = [kind(range(1, n + 1), np.arange(n) / 4) for n in (3, 1, 4)]
    batches = list(load(stream_batches(map(len, samples), [(2, 4)]), samples))
    rows = [
        (tokens[:n].tolist(), weights.tolist())
        for batch in batches
        for tokens, weights, n in zip(batch.tokens[0], np.asarray(batch.weights[0]), batch.lengths[0], strict=True)
        if n
    ]
    expected = [(s.tokens.tolist(), [*s.weights.tolist(), *[0.0] * (4 - len(s))]) for s in samples]
    assert sorted(rows) == sorted(expected)
