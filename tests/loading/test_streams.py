"""Streams that are packed, and read from generators whose lengths are known."""

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
from jvarlen.batches import PackedBatch
from tests.conftest import random_dataset
from tests.support.same_batches import assert_same_batches

SAMPLES = [np.asarray(sample) + 1 for sample in random_dataset(60, 20)]
LENGTHS = [len(sample) for sample in SAMPLES]
PACKED = {"packing": "best_fit", "samples_per_row": 4}
STREAMS = {
    "packed": {"buckets": [(2, 24)], "shuffle_buffer": 5},
    "cut": {"buckets": [(2, 12)], "overlong": "truncate"},
    "dropped": {"buckets": [(2, 12)], "overlong": "drop"},
}


@pytest.mark.parametrize("name", STREAMS)
def test_every_sample_is_loaded_once_whole_and_beside_its_id(name):
    """From random access and from a generator; and after a state of every other step."""

    def batches_from(data, state=None):
        stream = stream_batches(LENGTHS, num_microbatches=2, state=state, **STREAMS[name], **PACKED)
        return stream, load(stream, data)

    stream, loading = batches_from(SAMPLES)
    batches, given = list(loading), []
    assert_same_batches(batches_from(sample for sample in SAMPLES)[1], batches)
    for batch in batches:
        assert isinstance(batch, PackedBatch)
        ids = np.asarray(batch.ids)
        for place in np.argwhere(ids >= 0).tolist():
            given.append(ids[tuple(place)])
            is_own = np.asarray(batch.segment_ids)[*place[:2]] == place[2] + 1
            held = np.asarray(batch.tokens)[*place[:2]][is_own]
            assert held.tolist() == SAMPLES[given[-1]][: stream.buckets.shapes[-1].length].tolist()
        assert batch.num_sequences == (ids >= 0).sum()
    assert sorted(given) == [i for i, length in enumerate(LENGTHS) if name != "dropped" or length <= 12]
    assert len(batches) > 2
    for num_given in range(1, len(batches), 2):
        stream, loading = batches_from(SAMPLES)
        list(itertools.islice(loading, num_given))
        state = json.loads(json.dumps(stream.state()))
        assert_same_batches(batches_from((sample for sample in SAMPLES), state)[1], batches[num_given:])


def test_a_generator_of_other_samples_than_the_lengths_is_refused():
    """Shifted, read before, or read by the lengths themselves."""

    def batches(data, lengths=LENGTHS):
        return load(stream_batches(lengths, [(2, 24)], **PACKED), data)

    shifted = [*SAMPLES[1:], SAMPLES[0]]
    with pytest.raises(ValueError, match=r"id \d+: \d+ tokens, planned \d+ tokens"):
        list(batches(iter(shifted)))
    started = (sample for sample in SAMPLES)
    next(started)
    with pytest.raises(ValueError, match=r"id \d+: \d+ tokens, planned \d+ tokens"):
        list(batches(started))
    same = iter(SAMPLES)
    with pytest.raises(ValueError, match=r"whose lengths are not of this dataset|split it with itertools\.tee"):
        list(batches(same, map(len, same)))
    with pytest.raises(ValueError, match="the dataset has only 59 samples"):
        list(batches(iter(SAMPLES[:-1])))


@pytest.mark.parametrize("form", ["padded", "named", "packed", "resumed"])
def test_samples_are_compared_with_their_lengths_also_where_they_are_cut(form):
    """What loses its end needs no more than what stays."""
    planned, options = [12, 3, 2, 8], {"buckets": [(1, 4), (1, 8)], "num_microbatches": 2, "overlong": "truncate"}
    if form == "packed":
        options |= {"buckets": [(1, 8)], "packing": "best_fit", "samples_per_row": 2}
    for found in (planned, [20, 3, 2, 8], [9, 3, 2, 8], [7, 3, 2, 8], [12, 3, 2, 20], [12, 3, 2, 7]):
        samples = [{"tokens": np.arange(n)} if form == "named" else np.arange(n) for n in found]
        stream = stream_batches(planned, **options)
        if form == "resumed":
            next(stream)
            stream = stream_batches(planned, state=json.loads(json.dumps(stream.state())))
        batches = load(stream, samples, microbatches=form == "padded")
        if all(n == p or n >= 8 <= p for n, p in zip(found, planned, strict=True)):
            assert len(list(batches)) > 0
        else:
            with pytest.raises(ValueError, match=r"id \d: 7 tokens, planned 8 tokens"):
                list(batches)


def test_the_shapes_of_a_stream_are_all_that_is_compiled():
    """Before its first step; the rate follows the sequences of each step."""

    def loss_fn(params, microbatch):
        return params * microbatch.weights.sum(), microbatch.weights.sum()

    stream = stream_batches(LENGTHS, num_microbatches=2, **STREAMS["packed"], **PACKED)
    batches = load(stream, SAMPLES)
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
    assert sum(counts) == len(SAMPLES)
    assert len(set(counts)) > 2


def test_packed_samples_of_named_fields_are_loaded():
    samples = [{"tokens": sample, "label": i} for i, sample in enumerate(SAMPLES)]
    batches = list(load(stream_batches(LENGTHS, [(2, 24)], **PACKED), (sample for sample in samples)))
    for batch in batches:
        is_real = np.asarray(batch["is_real"])
        assert (np.asarray(batch["label"])[is_real] == np.asarray(batch["ids"])[is_real]).all()
    assert sum(int(batch["is_real"].sum()) for batch in batches) == len(samples)
