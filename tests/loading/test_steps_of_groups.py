"""Steps of several groups: their batches are those of the groups, each of its own bucket, read as one step."""

import dataclasses

import jax
import numpy as np
import pytest

from jvarlen import load, make_plan
from jvarlen.batches import StepBatch
from jvarlen.loading import grain_dataset
from jvarlen.loading.plan_source import PlanSource
from tests.conftest import random_dataset
from tests.support.meshes import data_mesh
from tests.support.same_batches import assert_same_batches

DATASET = random_dataset(60, 20)
LENGTHS = np.diff(DATASET.offsets)
PAIRS = [(DATASET[i], DATASET[59 - i]) for i in range(60)]
RECORDS = [
    {"tokens": DATASET[i], "label": np.float32(i), "near": np.full((len(DATASET[i]),) * 2, i)} for i in range(60)
]


def count_samples(step):
    """A collate function of one's own."""
    return {"ids": step.ids, "count": np.float32(step.num_sequences), "sizes": np.full(len(step.ids), step.num_tokens)}


def plan_of(kind="padded", order="shuffle", **options):
    """Each step is one group of two microbatches."""
    options |= {"order": order, "num_microbatches": 2}
    if kind == "pairs":
        return make_plan(np.stack([LENGTHS, LENGTHS[::-1]], axis=1), [(2, 9, 9), (3, 20, 20)], **options)
    if kind == "split":
        return make_plan(LENGTHS, [(2, 9), (1, 14)], packing="best_fit", overlong="split", **options)
    packing = {"packed": "best_fit"}.get(kind, "padded")
    return make_plan(LENGTHS, [(3, 6), (2, 12), (1, 20)], packing=packing, **options)


def in_groups(plan):
    """The plan with its steps joined to steps of one to three groups."""
    ends = np.cumsum(np.resize([2, 1, 3], plan.num_steps))
    return dataclasses.replace(plan, step_groups=np.array([0, *ends[ends < plan.num_steps], plan.num_steps]))


def assert_groups_are_steps(batches, expected, plan):
    """Steps of the plan have the batches of the steps that were joined."""
    given = list(batches)
    assert all(type(step) is StepBatch for step in given)
    assert [len(step.groups) for step in given] == np.diff(plan.step_groups).tolist()[-len(given) :]
    assert [float(step.num_sequences) for step in given] == plan.num_sequences.tolist()[-len(given) :]
    assert_same_batches([group for step in given for group in step.groups], expected)


SAMPLES_AND_OPTIONS = {
    "padded": (DATASET, {"lengths": LENGTHS}),
    "packed": (DATASET, {}),
    "split": (DATASET, {"lengths": LENGTHS}),
    "pairs": (PAIRS, {"padding_rows": "repeat"}),
    "fields": (RECORDS, {"padding_rows": "repeat"}),
    "collate": (DATASET, {"collate": count_samples}),
}


@pytest.mark.parametrize("layout", [None, 2])
@pytest.mark.parametrize("kind", SAMPLES_AND_OPTIONS)
def test_a_step_has_the_batch_of_each_of_its_groups(kind, layout):
    samples, options = SAMPLES_AND_OPTIONS[kind]
    options |= {"layout": None if layout is None else data_mesh(layout)}
    plan = plan_of(kind)
    joined = in_groups(plan)
    batches, expected = load(joined, samples, **options), load(plan, samples, **options)
    specs = batches.specs
    assert specs == expected.specs
    steps = list(batches)
    assert_groups_are_steps(steps, expected, joined)
    assert (batches.num_samples, batches.num_without_target) == (expected.num_samples, expected.num_without_target)
    groups = [group for step in steps for group in step.groups]
    for group, bucket in zip(groups, joined.group_bucket.tolist(), strict=True):
        told = specs[joined.buckets.shapes[bucket]]
        assert jax.tree.map(jax.typeof, group) == jax.tree.map(jax.typeof, told)


def test_a_source_is_a_sequence_of_steps_and_reads_groups_alone():
    plan = plan_of()
    joined = in_groups(plan)
    source, alone = PlanSource(joined, DATASET), PlanSource(plan, DATASET)
    assert len(source) == joined.num_steps < joined.num_groups
    assert_groups_are_steps(
        map(source.__getitem__, range(len(source))), map(alone.__getitem__, range(len(alone))), joined
    )
    assert_same_batches(map(source.read_group, range(joined.num_groups)), map(alone.read_group, range(plan.num_steps)))
    with pytest.raises(IndexError, match=f"step {joined.num_steps} of a plan of {joined.num_steps} steps"):
        source[joined.num_steps]


def test_groups_have_the_rows_and_names_of_another_loop():
    """Those of steps of one group; the counts of the step are beside them."""
    options = {"microbatches": False, "rename_fields": {"tokens": "inputs", "ids": "ids"}}
    plan = plan_of()
    joined, expected = in_groups(plan), list(load(plan, DATASET, **options))
    assert expected[0]["inputs"].ndim == 2
    for read in (load, grain_dataset):
        assert_groups_are_steps(read(joined, DATASET, **options), expected, joined)


def test_loading_starts_at_any_step_and_knows_its_place():
    joined = in_groups(plan_of())
    batches = load(joined, DATASET, start_step=2)
    first = int(joined.step_groups[2])
    assert len(next(batches).groups) == joined.step_groups[3] - first
    assert batches.place == (0, 3)
    assert_groups_are_steps(load(joined, DATASET, start_step=2), list(load(plan_of(), DATASET))[first:], joined)


class Damaged:
    """Some samples cannot be read, and some have another length."""

    def __init__(self, gone=(), longer=()):
        self.gone, self.longer = gone, longer

    def __len__(self):
        return 60

    def __getitem__(self, i):
        if i in self.gone:
            raise OSError(f"{i} is gone")
        return np.append(DATASET[i], 1) if i in self.longer else DATASET[i]


def of_the_first_step(plan):
    """A sample of its first and one of its last group, and how many groups it has."""
    groups = plan.groups(0)
    first, last = (int(plan.sample_ids[plan.group_offsets[group]]) for group in (groups[0], groups[-1]))
    return first, last, len(groups)


def test_samples_of_other_lengths_are_listed_over_the_groups_of_a_step():
    joined = in_groups(plan_of())
    first, last, num_groups = of_the_first_step(joined)
    assert num_groups > 1
    with pytest.raises(ValueError, match=f"id {first}: .*id {last}: ") as raised:
        next(load(joined, Damaged(longer=(first, last)), lengths=LENGTHS))
    assert raised.value.__notes__ == ["while reading step 0"]


@pytest.mark.parametrize("how", ["skip", "adjust"])
def test_bad_samples_are_left_out_of_their_group_and_counted_with_their_step(how):
    plan = plan_of()
    joined = in_groups(plan)
    first, last, _ = of_the_first_step(joined)
    options = {"lengths": LENGTHS, "max_bad_fraction": 0.1}
    if how == "skip":
        options["on_bad_sample"], dataset = "skip", Damaged(gone=(last,), longer=(first,))
    else:
        options["on_mismatch"], dataset = "adjust", Damaged(longer=(first, last))
    batches, alone = load(joined, dataset, **options), load(plan, dataset, **options)
    step = next(batches)
    assert float(step.num_sequences) == joined.num_sequences[0]
    assert [each.id for each in batches.skipped_in_batch] == ([first, last] if how == "skip" else [])
    assert {each.step for each in batches.skipped_in_batch} <= {0}
    assert_groups_are_steps([step, *batches], alone, joined)
    counts = ("num_samples", "num_adjusted", "num_skipped")
    assert [getattr(batches, name) for name in counts] == [getattr(alone, name) for name in counts]
    assert batches.num_skipped + batches.num_adjusted == 2


class Iterable:
    def __iter__(self):
        return (DATASET[i] for i in range(60))


def test_what_can_only_be_iterated_is_read_forward_for_steps_of_consecutive_samples():
    """Samples of a step that go to its groups by length are held, however many they are."""
    plan = make_plan(LENGTHS, [(12, 6), (24, 20)], order="length", num_microbatches=1)
    joined = dataclasses.replace(plan, step_groups=np.array([0, plan.num_steps]))
    (step,) = load(joined, Iterable())
    assert_same_batches(step.groups, load(plan, DATASET))
    order = np.roll(np.arange(60), 30)
    small = make_plan(LENGTHS, [(1, 20)], order=order, num_microbatches=1)
    apart = dataclasses.replace(small, step_groups=np.arange(0, 62, 2))
    with pytest.raises(
        ValueError, match=r"32 would wait in memory, and at most 2 may, a group of each bucket or a step"
    ):
        load(apart, Iterable())


@pytest.mark.slow
@pytest.mark.multiprocess
def test_workers_read_whole_steps():
    plan = plan_of("packed")
    assert_groups_are_steps(load(in_groups(plan), DATASET, num_workers=2), load(plan, DATASET), in_groups(plan))


def test_shapes_of_several_epochs_have_room_for_the_steps_of_all():
    plan = plan_of(sequences_per_step=6)
    rows = [plan.of_epoch(epoch).rows_per_step for epoch in range(6)]
    assert max(rows) > rows[0]
    for num_epochs in (2, 6):
        assert load(plan, DATASET, num_epochs=num_epochs).shapes.most_rows == max(rows[:num_epochs])
    batches = load(plan.of_epoch, DATASET)
    assert batches.shapes.most_rows == rows[0]
    batches.close()


def test_shapes_of_one_group_a_step_are_for_several_groups_where_later_epochs_may_have_them():
    plan = make_plan(LENGTHS, [(60, 20)], sequences_per_step=60)
    assert not plan.has_many_groups
    of = {num_epochs: load(plan, DATASET, num_epochs=num_epochs).shapes for num_epochs in (None, 1, 2)}
    assert {each: shapes.may_have_many_groups for each, shapes in of.items()} == {None: False, 1: False, 2: True}
    assert not load(plan_of(), DATASET, num_epochs=2).shapes.may_have_many_groups
