"""Loader: the plan's rows in the plan's order, from any place, whatever the workers."""

import dataclasses
import itertools
import json
import threading
from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jvarlen import data_mesh, load, load_stream, make_buckets, make_plan, plan_distributed, stream_batches
from jvarlen.datasets import TokenDataset
from jvarlen.testing import assert_exactly_once, assert_same_batches

from .conftest import random_dataset

DATASET = random_dataset(60, 20)
LENGTHS = np.diff(DATASET.offsets)
BUCKETS = make_buckets(LENGTHS, 64, max_shapes=3, microbatches_per_step=4)


def plan_of_epoch(epoch, **options):
    return make_plan(LENGTHS, BUCKETS, microbatches_per_step=4, order="shuffle", epoch=epoch, **options)


def rows_of(batch):
    """Texts of all rows of a batch, microbatch by microbatch; None for a dummy row."""
    tokens, lengths = np.asarray(batch.tokens), np.asarray(batch.lengths)
    return [
        [tokens[m, b, :n].astype(np.uint8).tobytes() if (n := lengths[m, b]) else None for b in range(lengths.shape[1])]
        for m in range(len(lengths))
    ]


def planned_rows(plan, step):
    return [[DATASET[i].tobytes() if i >= 0 else None for i in ids] for ids in plan.rows(step)]


def test_every_step_holds_the_planned_rows():
    plan = plan_of_epoch(0)
    batches = list(load(plan, DATASET))
    assert len(batches) == plan.num_steps
    for step, batch in enumerate(batches):
        assert rows_of(batch) == planned_rows(plan, step)
        assert float(batch.num_sequences) == plan.num_sequences[step]
        assert float(np.sum(batch.weights)) == plan.num_tokens[step]
        assert isinstance(batch.tokens, jax.Array)


@pytest.mark.parametrize("start_step", [0, 3, "last", "end"])
def test_loading_starts_at_any_step(start_step):
    plan = plan_of_epoch(0)
    start_step = {"last": plan.num_steps - 1, "end": plan.num_steps}.get(start_step, start_step)
    batches = list(load(plan, DATASET, start_step=start_step))
    assert [rows_of(b) for b in batches] == [planned_rows(plan, s) for s in range(start_step, plan.num_steps)]


def test_the_next_epoch_is_planned_while_one_is_loaded():
    planned = []
    is_planned = threading.Event()

    def plan_and_tell(epoch):
        planned.append((epoch, threading.current_thread() is threading.main_thread()))
        if epoch == 2:
            is_planned.set()
        return plan_of_epoch(epoch)

    batches = load(plan_and_tell, DATASET, epoch=1)
    next(batches)
    assert is_planned.wait(timeout=60)
    assert planned == [(1, True), (2, False)]


@pytest.mark.parametrize("num_epochs", [2, 4])
def test_epochs_end_where_they_should_and_none_is_planned_beyond(num_epochs):
    planned = []

    def plan_and_tell(epoch):
        planned.append(epoch)
        return plan_of_epoch(epoch)

    batches = list(load(plan_and_tell, DATASET, epoch=1, num_epochs=num_epochs))
    assert planned == list(range(1, num_epochs))
    expected = [planned_rows(plan_of_epoch(e), s) for e in planned for s in range(plan_of_epoch(e).num_steps)]
    assert [rows_of(batch) for batch in batches] == expected


def test_steps_before_the_start_are_not_read():
    plan = make_plan(LENGTHS, BUCKETS, microbatches_per_step=4)
    before = set(plan.sample_ids[: plan.step_offsets[3]].tolist())

    class Guarded:
        def __len__(self):
            return len(DATASET)

        def __getitem__(self, index):
            assert index not in before
            return DATASET[index]

    assert len(list(load(plan, Guarded(), start_step=3))) == plan.num_steps - 3


def test_a_function_of_the_epoch_goes_on_over_epochs():
    batches = load(plan_of_epoch, DATASET, epoch=2, start_step=1)
    for epoch, first in ((2, 1), (3, 0), (4, 0)):
        plan = plan_of_epoch(epoch)
        for step in range(first, plan.num_steps):
            assert rows_of(next(batches)) == planned_rows(plan, step)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_worker_processes_do_not_change_the_order():
    plan = plan_of_epoch(0)
    assert_same_batches(load(plan, DATASET, num_workers=2, start_step=1), load(plan, DATASET, start_step=1))


def test_cut_samples_are_cut_and_counted():
    plan = make_plan(LENGTHS, [(4, 8)], microbatches_per_step=2, overlong="truncate")
    batches = list(load(plan, DATASET))
    assert sum(float(np.sum(b.weights)) for b in batches) == np.minimum(LENGTHS, 8).sum()


def test_microbatches_lie_on_their_shards():
    mesh = data_mesh(4)
    plan = plan_of_epoch(0)
    for step, batch in enumerate(load(plan, DATASET, mesh=mesh)):
        assert batch.tokens.sharding.spec == PartitionSpec("data")
        assert batch.num_sequences.sharding.is_fully_replicated
        for shard in batch.tokens.addressable_shards:
            m = shard.index[0].start
            assert mesh.devices[m] == shard.device
            assert (np.asarray(shard.data[0]) == np.asarray(batch.tokens)[m]).all()
        assert rows_of(batch) == planned_rows(plan, step)


class Counted(NamedTuple):
    ids: np.ndarray
    num_sequences: np.ndarray


def count_samples(step):
    return Counted(step.ids, np.float32(sum(map(len, step.samples))))


def test_a_collate_function_of_ones_own_makes_any_pytree():
    plan = plan_of_epoch(0)
    for step, batch in enumerate(load(plan, DATASET, collate=count_samples)):
        assert (np.asarray(batch.ids) == plan.rows(step)).all()
        assert float(batch.num_sequences) == plan.num_sequences[step]


def test_shards_must_divide_the_microbatches():
    plan = make_plan(LENGTHS, BUCKETS, microbatches_per_step=3)
    with pytest.raises(ValueError, match="3 microbatches a step do not spread over 4 shards"):
        load(plan, DATASET, mesh=data_mesh(4))
    with pytest.raises(ValueError, match="no 'data'"):
        load(plan, DATASET, mesh=jax.make_mesh((1,), ("model",), devices=jax.devices()[:1]))


def test_a_smaller_dataset_is_refused():
    with pytest.raises(ValueError, match="the plan holds sample 59, the dataset only 10 samples"):
        load(plan_of_epoch(0), random_dataset(10, 20))


def test_another_dataset_is_noticed():
    other = TokenDataset.from_bytes([DATASET[i].tobytes()[:1] for i in range(len(DATASET))])
    with pytest.raises(ValueError, match="were planned"):
        list(load(plan_of_epoch(0), other))


@pytest.mark.parametrize("options", [{"start_step": -1}, {"start_step": 10**6}, {"num_workers": -1}])
def test_impossible_places_and_workers_are_refused(options):
    with pytest.raises(ValueError, match="must be"):
        load(plan_of_epoch(0), DATASET, **options)


def test_a_sample_that_cannot_be_read_is_named():
    class Broken:
        def __len__(self):
            return len(DATASET)

        def __getitem__(self, index):
            if index == 7:
                raise OSError("disk on fire")
            return DATASET[index]

    with pytest.raises(OSError, match="disk on fire") as raised:
        list(load(plan_of_epoch(0), Broken()))
    assert "while reading sample 7" in "".join(raised.value.__notes__)


def test_an_iterator_left_early_holds_no_thread_that_raises():
    batches = load(plan_of_epoch(0), DATASET)
    next(batches)
    del batches


def test_a_stream_loads_every_sample_once():
    mesh = data_mesh(2)
    read = []

    class Counting:
        def __getitem__(self, i):
            read.append(i)
            return DATASET[i]

    stream = stream_batches(LENGTHS.tolist(), BUCKETS, microbatches_per_step=4)
    rows = [row for batch in load_stream(stream, Counting(), mesh=mesh) for m in rows_of(batch) for row in m if row]
    assert sorted(rows) == sorted(DATASET[i].tobytes() for i in range(len(DATASET)))
    assert_exactly_once(read, len(DATASET))


def test_a_stream_goes_on_after_the_last_batch_that_was_given():
    """The state after a batch, through JSON, gives the batches after it and no other."""

    def stream(state=None):
        return stream_batches(LENGTHS.tolist(), BUCKETS, microbatches_per_step=4, state=state)

    expected = [rows_of(batch) for batch in load_stream(stream(), DATASET)]
    assert len(expected) > 3
    for num_given in range(1, len(expected)):
        first = stream()
        given = [rows_of(batch) for batch in itertools.islice(load_stream(first, DATASET), num_given)]
        state = json.loads(json.dumps(first.state()))
        assert given + [rows_of(batch) for batch in load_stream(stream(state), DATASET)] == expected


def test_a_payload_of_another_length_than_the_stream_said_is_refused():
    stream = stream_batches(LENGTHS.tolist(), BUCKETS, microbatches_per_step=4)
    with pytest.raises(ValueError, match="planned"):
        list(load_stream(stream, {i: DATASET[i][:1] for i in range(len(DATASET))}))


def test_a_distributed_plan_loads_what_the_whole_plan_does():
    dataset = random_dataset(60, 30)
    lengths = [len(dataset[i]) for i in range(60)]
    buckets, mesh = [(2, 12), (1, 30)], data_mesh(2)
    options = {"microbatches_per_step": 4, "order": "shuffle", "seed": 3}
    plan = plan_distributed(lengths, buckets, mesh, **options)
    whole = make_plan(lengths, buckets, **options)
    batches, expected = list(load(plan, dataset, mesh=mesh)), list(load(whole, dataset, mesh=mesh))
    assert_same_batches(batches, expected)
    assert [leaf.sharding for leaf in jax.tree.leaves(batches)] == [leaf.sharding for leaf in jax.tree.leaves(expected)]
    with pytest.raises(ValueError, match="is not the one whose lengths were planned"):
        next(load(plan, [dataset[i][:1] for i in range(60)], mesh=mesh))
    with pytest.raises(ValueError, match=r"made for a mesh where this process has the microbatches \[0, 1\]"):
        load(dataclasses.replace(plan, microbatches=np.array([0, 1])), dataset, mesh=mesh)
