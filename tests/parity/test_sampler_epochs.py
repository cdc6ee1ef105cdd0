"""The sampler of `torch_ref` over epochs: another plan each, states, and microbatches that fill up steps."""

import pickle
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import torch_ref

LENGTHS = [1 + (7 * i) % 11 for i in range(37)]
SAMPLES = [np.full(length, i) for i, length in enumerate(LENGTHS)]


def plan_of(**keywords):
    defaults = {"order": "shuffle", "num_microbatches": 2}
    return torch_ref.make_plan(LENGTHS, [(2, 5), (3, 11)], **(defaults | keywords))


def many_groups(**keywords):
    return plan_of(sequences_per_step=9, **keywords)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=[pytest.mark.multiprocess, pytest.mark.slow])])
def test_each_epoch_is_its_own_plan_in_persistent_workers_too(num_workers):
    """The second epoch has every sample once, in the second plan's steps, with the counts of those."""
    plan = plan_of()
    sampler = torch_ref.PlanBatchSampler(plan.of_epoch, 1, 2)
    planned = torch_ref.PlannedDataset(sampler, SAMPLES)
    loader = DataLoader(
        planned,
        batch_sampler=sampler,
        collate_fn=planned.collate,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        multiprocessing_context="forkserver" if num_workers else None,
    )
    for epoch in range(2):
        planned.set_epoch(epoch)
        expected = torch_ref.load(plan.of_epoch(epoch), SAMPLES, rank=1, num_replicas=2)
        for batch, other in zip(loader, expected, strict=True):
            assert batch.ids.tolist() == other.ids.tolist()
            assert batch.num_sequences == other.num_sequences
    assert plan.of_epoch(1).digest != plan.digest


def test_reading_an_epoch_twice_without_setting_the_next_is_refused():
    sampler = torch_ref.PlanBatchSampler(plan_of().of_epoch)
    first = list(sampler)
    with pytest.raises(ValueError, match="epoch 0 was read to its end: call set_epoch"):
        list(sampler)
    with pytest.raises(ValueError, match=r"epoch 0 was read to its end.*loader\.set_epoch\(1\)"):
        sampler.set_epoch(0)
    sampler.load_state_dict(sampler.state_dict(0))
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert sorted(chain(*sampler)) == [*range(37)]


def test_another_epoch_that_is_set_while_one_is_read_is_refused():
    """As Lightning does with a resumed run whose workers read ahead."""
    sampler = torch_ref.PlanBatchSampler(plan_of().of_epoch)
    reader = iter(sampler)
    next(reader)
    sampler.set_epoch(1)
    with pytest.raises(ValueError, match=r"set_epoch\(1\) came while epoch 0 is read.*train_dataloader"):
        list(reader)
    assert sorted(chain(*sampler)) == [*range(37)]


def test_a_place_is_that_of_the_epoch_whose_iterator_was_made():
    """As Lightning does without workers: nothing was read yet when the epoch is set."""
    plan = plan_of()
    sampler = torch_ref.PlanBatchSampler(plan.of_epoch)
    sampler.load_state_dict(sampler.state_dict(3))
    reader = iter(sampler)
    sampler.set_epoch(1)
    with pytest.raises(ValueError, match=r"set_epoch\(1\) came while epoch 0 is read"):
        next(reader)
    assert list(sampler) == list(torch_ref.PlanBatchSampler(plan.of_epoch(1)))


def test_one_plan_is_no_other_epoch_unless_they_are_the_same():
    sampler = torch_ref.PlanBatchSampler(plan_of())
    assert list(sampler) == list(sampler)
    with pytest.raises(ValueError, match=r"not that of epoch 1.*plan\.of_epoch"):
        sampler.set_epoch(1)
    sampler = torch_ref.PlanBatchSampler(plan_of(order="length"))
    sampler.set_epoch(1)
    assert len(list(sampler)) == len(sampler)


def test_a_state_goes_on_at_its_step_in_another_number_of_replicas():
    plan = plan_of()
    sampler = torch_ref.PlanBatchSampler(plan.of_epoch)
    sampler.set_epoch(1)
    state = pickle.loads(pickle.dumps(sampler.state_dict(3)))
    for rank in range(2):
        resumed = torch_ref.PlanBatchSampler(plan.of_epoch, rank, 2)
        resumed.load_state_dict(state)
        with pytest.raises(ValueError, match=r"of epoch 1, and the loop begins with epoch 0"):
            resumed.set_epoch(0)
        resumed.set_epoch(1)
        whole = torch_ref.PlanBatchSampler(plan.of_epoch(1), rank, 2)
        assert len(resumed) == len(whole)
        assert list(resumed) == list(whole)[3:]
        resumed.set_epoch(2)
        assert len(list(resumed)) == len(whole)
    with pytest.raises(ValueError, match="make the plan from the same lengths"):
        torch_ref.PlanBatchSampler(plan_of(seed=1).of_epoch).load_state_dict(state)
    with pytest.raises(ValueError, match="step"):
        sampler.state_dict(plan.num_steps + 1)


@pytest.mark.parametrize("padding_rows", ["omit", "repeat"])
def test_empty_microbatches_fill_every_step_up_to_a_constant_number(padding_rows):
    plan = many_groups()
    most = max(len(plan.groups(step)) for step in range(plan.num_steps))
    assert most > min(len(plan.groups(step)) for step in range(plan.num_steps))
    held, positions = [], 0
    for rank in range(2):
        sampler = torch_ref.PlanBatchSampler(plan, rank, 2, num_microbatches=most, padding_rows=padding_rows)
        planned = torch_ref.PlannedDataset(sampler, SAMPLES)
        batches = list(DataLoader(planned, batch_sampler=sampler, collate_fn=planned.collate))
        assert len(sampler) == len(batches) == most * plan.num_steps
        assert {batch.num_microbatches for batch in batches} == {most}
        for step in range(plan.num_steps):
            of_step = batches[most * step : most * (step + 1)]
            assert {batch.num_sequences for batch in of_step} == {plan.num_sequences[step]}
            held += [int(i) for batch in of_step for i in batch.ids[batch.is_real]]
        positions += sum(batch.tokens.numel() for batch in batches)
    assert sorted(held) == [*range(37)]
    assert sampler.padding == pytest.approx(1 - sum(LENGTHS) / positions)
    assert torch_ref.PlanBatchSampler(plan).padding == plan.padding
    with pytest.raises(ValueError, match=rf"num_microbatches={most - 1} are fewer than .*step \d+: {most}"):
        torch_ref.PlanBatchSampler(plan, 0, 2, num_microbatches=most - 1)


def test_a_loop_that_asks_once_for_the_length_is_told_that_another_epoch_has_more_steps():
    plans = [plan_of(order=np.arange(count)) for count in (20, 37)]
    sampler = torch_ref.PlanBatchSampler(plans.__getitem__)
    assert len(sampler) == len(list(sampler))
    sampler.set_epoch(1)
    with pytest.raises(ValueError, match=r"epoch 1 has \d+ batches, and the loop was told of \d+"):
        list(sampler)
    assert len(sampler) == len(list(sampler))


def test_other_indices_than_those_of_a_sampler_are_refused():
    sampler = torch_ref.PlanBatchSampler(plan_of())
    planned = torch_ref.PlannedDataset(sampler, SAMPLES)
    with pytest.raises(ValueError, match=r"none of a PlanBatchSampler.*split_batches=False"):
        list(DataLoader(planned, batch_size=2))
    with pytest.raises(ValueError, match="none of a PlanBatchSampler"):
        planned[0]
    with pytest.raises(ValueError, match="must be the PlanBatchSampler"):
        torch_ref.PlannedDataset(plan_of(), SAMPLES)


class Shard:
    """Reads a sampler as accelerate's BatchSamplerShard does."""

    def __init__(self, batch_sampler, num_processes):
        self.batch_sampler, self.num_processes = batch_sampler, num_processes

    def __iter__(self):
        yield from enumerate(self.batch_sampler)


SHARDED = {
    "twice": (lambda: torch_ref.PlanBatchSampler(plan_of(), 0, 2), "sharded twice.*without rank and num_replicas"),
    "in steps of another number": (
        lambda: torch_ref.PlanBatchSampler(plan_of(num_microbatches=3)),
        "do not share steps of 3 microbatches evenly: plan with num_microbatches=2",
    ),
    "filled to another number": (
        lambda: torch_ref.PlanBatchSampler(many_groups(), num_microbatches=9),
        "do not share steps of 9 microbatches",
    ),
    "with another number in each step": (
        lambda: torch_ref.PlanBatchSampler(many_groups()),
        "counts on the same number in each: give num_microbatches=4",
    ),
}


@pytest.mark.parametrize("is_own", [True, False], ids=["alike", "accelerate"])
@pytest.mark.parametrize("how", SHARDED)
def test_what_is_sharded_wrong_is_refused(how, is_own):
    shard = Shard if is_own else pytest.importorskip("accelerate.data_loader").BatchSamplerShard
    make, message = SHARDED[how]
    with pytest.raises(ValueError, match=message):
        list(shard(make(), 2))
    assert len(list(shard(torch_ref.PlanBatchSampler(plan_of()), 2))) == (1 + is_own) * plan_of().num_steps


def test_one_of_several_processes_is_told_to_share_or_to_read_all(monkeypatch):
    """Each of them would read every sample, with rates of other steps, and no error."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    sampler = torch_ref.PlanBatchSampler(plan_of())
    with pytest.raises(ValueError, match=r"each of 2 processes would read all.*prepare.*rank=0, num_replicas=1"):
        list(sampler)
    assert len(list(Shard(sampler, 2))) == len(list(torch_ref.PlanBatchSampler(plan_of(), 0, 1)))
    assert len(list(torch_ref.PlanBatchSampler(plan_of(), 1, 2))) == plan_of().num_steps
    with pytest.raises(ValueError, match=r"rank and num_replicas, or neither: got rank=None, num_replicas=2"):
        torch_ref.PlanBatchSampler(plan_of(), num_replicas=2)


def test_batches_that_accelerate_dispatches_are_refused():
    """It joins microbatches on one process, and there a share would be dealt out again."""
    data_loader = pytest.importorskip("accelerate.data_loader")
    sampler = torch_ref.PlanBatchSampler(plan_of(), 0, 2)
    planned = torch_ref.PlannedDataset(sampler, SAMPLES)
    loader = data_loader.DataLoaderDispatcher(planned, batch_sampler=sampler, collate_fn=planned.collate)
    with pytest.raises(ValueError, match="dispatch_batches=False"):
        next(iter(loader))
