"""Streams that are packed, of pairs, and read from generators whose lengths are known."""

import itertools
import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvarlen import (
    compile_buckets,
    load,
    make_train_step,
    no_recompiles,
    scale_by_batch_size,
    stream_batches,
)
from jvarlen.batches import PackedBatch, PackedPairBatch, PairBatch
from tests.conftest import random_dataset
from tests.support.same_batches import assert_same_batches

SAMPLES = [np.asarray(sample) + 1 for sample in random_dataset(60, 20)]
LENGTHS = [len(sample) for sample in SAMPLES]
PAIRS = [(sample, other[:12]) for sample, other in itertools.pairwise(SAMPLES)]
PAIR_LENGTHS = np.array([[len(source), len(target)] for source, target in PAIRS])
PACKED = {"packing": "best_fit", "samples_per_row": 4}
STREAMS = {
    "packed": (LENGTHS, SAMPLES, {"buckets": [(2, 12), (1, 24)], **PACKED}, PackedBatch),
    "cut": (LENGTHS, SAMPLES, {"buckets": [(2, 12)], "overlong": "truncate", **PACKED}, PackedBatch),
    "pairs": (PAIR_LENGTHS, PAIRS, {"buckets": [(2, 9, 9), (1, 20, 12)]}, PairBatch),
    "packed pairs": (PAIR_LENGTHS, PAIRS, {"buckets": [(2, 40, 30)], "shuffle_buffer": 5, **PACKED}, PackedPairBatch),
    "dropped": (PAIR_LENGTHS, PAIRS, {"buckets": [(2, 15, 9)], "overlong": "drop", **PACKED}, PackedPairBatch),
}


@pytest.mark.parametrize("name", STREAMS)
def test_every_sample_is_loaded_once_whole_and_beside_its_id(name):
    """From random access and from a generator; and after a state of every other step."""
    lengths, samples, options, kind = STREAMS[name]

    def batches_from(data, state=None):
        stream = stream_batches(lengths, num_microbatches=2, state=state, **options)
        return stream, load(stream, data)

    stream, loading = batches_from(samples)
    batches, given = list(loading), []
    assert_same_batches(batches_from(sample for sample in samples)[1], batches)
    for batch in batches:
        assert isinstance(batch, kind)
        ids, is_packed = np.asarray(batch.ids), name != "pairs"
        prefixes = ("source_", "target_") if "pair" in kind.__name__.lower() else ("",)
        for place in np.argwhere(ids >= 0).tolist():
            given.append(ids[tuple(place)])
            sides = samples[given[-1]] if len(prefixes) > 1 else (samples[given[-1]],)
            for prefix, side in zip(prefixes, sides, strict=True):
                tokens = np.asarray(getattr(batch, f"{prefix}tokens"))[*place[:2]]
                segments = np.asarray(getattr(batch, f"{prefix}segment_ids"))[*place[:2]] if is_packed else tokens > 0
                held = tokens[segments == (place[2] + 1 if is_packed else 1)]
                assert held.tolist() == list(side[: 12 if name == "cut" else None])
        assert batch.num_sequences == (ids >= 0).sum()
    longest = stream.buckets.shapes[-1].lengths
    is_dropped = [name == "dropped" and not np.all(each <= longest) for each in np.reshape(lengths, (len(samples), -1))]
    assert sorted(given) == [i for i in range(len(samples)) if not is_dropped[i]]
    assert len(batches) > 2
    for num_given in range(1, len(batches), 2):
        stream, loading = batches_from(samples)
        list(itertools.islice(loading, num_given))
        state = json.loads(json.dumps(stream.state()))
        assert_same_batches(batches_from((sample for sample in samples), state)[1], batches[num_given:])


def test_a_generator_of_other_samples_than_the_lengths_is_refused():
    """Shifted, read before, read by the lengths themselves, or with more samples."""

    def batches(data, lengths=LENGTHS):
        return load(stream_batches(lengths, [(2, 12), (1, 24)], **PACKED), data)

    shifted = [*SAMPLES[1:], SAMPLES[0]]
    with pytest.raises(ValueError, match=r"id \d+: \d+ tokens, planned \d+ tokens"):
        list(batches(iter(shifted)))
    started = (sample for sample in SAMPLES)
    next(started)
    with pytest.raises(ValueError, match="the generator has given samples before load read the first"):
        next(batches(started))

    class LengthsOf:
        def __init__(self, samples):
            self.samples = samples

        def __iter__(self):
            return map(len, self.samples)

    same = (np.ones(1, int) for _ in range(10))
    with pytest.raises(ValueError, match="the generator has given samples before load read the first"):
        list(load(stream_batches(LengthsOf(same), [(1, 1)]), same))
    with pytest.raises(ValueError, match=r"more samples than the stream has lengths, 59"):
        list(batches(iter(SAMPLES), LENGTHS[:-1]))
    with pytest.raises(ValueError, match="the dataset has only 59 samples"):
        list(batches(iter(SAMPLES[:-1])))
    with pytest.raises(ValueError, match=r"use lengths, samples = itertools.tee\(dataset\), .* or give .* as an array"):
        batches(iter(SAMPLES), map(len, SAMPLES))


@pytest.mark.parametrize("form", ["padded", "named", "packed", "resumed"])
@pytest.mark.parametrize("overlong", ["truncate", "truncate_start", "truncate_random"])
def test_whole_samples_are_compared_with_their_lengths_also_where_they_are_cut(overlong, form):
    """What only loses its end needs no more than what stays, as in a plan."""
    planned, options = [12, 3, 2, 8], {"buckets": [(1, 4), (1, 8)], "num_microbatches": 2, "overlong": overlong}
    if form == "packed":
        options |= {"buckets": [(1, 8)], "packing": "best_fit", "samples_per_row": 2}
    for found in (planned, [20, 3, 2, 8], [9, 3, 2, 8], [7, 3, 2, 8], [12, 3, 2, 20], [12, 3, 2, 7]):
        samples = [{"tokens": np.arange(n)} if form == "named" else np.arange(n) for n in found]
        stream = stream_batches(planned, **options)
        if form == "resumed":
            next(stream)
            stream = stream_batches(planned, state=json.loads(json.dumps(stream.state())))
        batches = load(stream, samples, microbatches=form == "padded")
        if all(n == p or (overlong == "truncate" and n >= 8 < p) for n, p in zip(found, planned, strict=True)):
            assert len(list(batches)) > 0
        else:
            with pytest.raises(ValueError, match=r"id \d: \d+ tokens, planned (12|8) tokens"):
                list(batches)


@pytest.mark.parametrize("name", ["packed", "packed pairs"])
def test_the_shapes_of_a_stream_are_all_that_is_compiled(name):
    """Before its first step; the rate follows the sequences of each step."""
    lengths, samples, options, _ = STREAMS[name]

    def loss_fn(params, microbatch):
        return params * microbatch.weights.sum(), microbatch.weights.sum()

    stream = stream_batches(lengths, num_microbatches=2, **options)
    batches = load(stream, samples)
    step = make_train_step(loss_fn, optax.chain(optax.sgd(0.5), scale_by_batch_size(4)))
    state = step.init(jnp.float32(0.0))
    compiled = compile_buckets(step, state, batches, progress=False)
    counts, found = [], [0.0]
    with no_recompiles():
        for batch in batches:
            state, _ = compiled(state, batch)
            counts.append(int(batch.num_sequences))
            found.append(float(state.params))
    assert np.allclose(-np.diff(found), 0.5 * np.array(counts) / 4, atol=1e-5)
    assert sum(counts) == len(samples)
    assert len(set(counts)) > 2


def test_packed_samples_of_named_fields_are_loaded():
    samples = [{"tokens": sample, "label": i} for i, sample in enumerate(SAMPLES)]
    batches = list(load(stream_batches(LENGTHS, [(2, 24)], **PACKED), (sample for sample in samples)))
    for batch in batches:
        is_real = np.asarray(batch["is_real"])
        assert (np.asarray(batch["label"])[is_real] == np.asarray(batch["ids"])[is_real]).all()
    assert sum(int(batch["is_real"].sum()) for batch in batches) == len(samples)
