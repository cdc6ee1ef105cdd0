"""A dataset of Grain has the batches of `load` for each epoch, whoever reads them, and from any step."""

import itertools

import cloudpickle
import grain
import jax
import numpy as np
import pytest

from jvarlen import load, make_plan
from jvarlen.loading import PlanSource, grain_dataset

RNG = np.random.default_rng(0)
SAMPLES = [RNG.integers(1, 90, length) for length in RNG.integers(1, 30, 60)]
LENGTHS = np.array([len(sample) for sample in SAMPLES])
PLAN = make_plan(LENGTHS, max_tokens=120, max_shapes=3, num_microbatches=2, order="shuffle", seed=5)


def assert_same(batches, expected):
    batches, expected = list(batches), list(expected)
    assert len(batches) == len(expected) > 1
    for one, other in zip(batches, expected, strict=True):
        assert jax.tree.structure(one) == jax.tree.structure(other)
        assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(one))
        jax.tree.map(np.testing.assert_array_equal, one, other)


def test_each_pass_is_the_next_epoch_however_it_is_asked_for():
    expected = list(load(PLAN, SAMPLES, num_epochs=3))
    num_steps = PLAN.num_steps
    assert_same(grain_dataset(PLAN, SAMPLES), expected[:num_steps])
    assert_same(grain_dataset(PLAN, SAMPLES).repeat(3), expected)
    assert_same(grain_dataset(PLAN.of_epoch, SAMPLES, num_epochs=3), expected)
    assert_same(grain_dataset(PLAN, SAMPLES, epoch=1, num_epochs=3), expected[num_steps:])
    assert_same(grain_dataset(PLAN, SAMPLES, epoch=1).repeat(2), expected[num_steps:])
    assert_same(grain_dataset(PLAN, SAMPLES, epoch=2), expected[2 * num_steps :])
    dataset = grain_dataset(PLAN, SAMPLES)
    assert_same([dataset[-1], dataset[2]], [expected[num_steps - 1], expected[2]])
    assert_same(dataset[1::2].repeat(2), expected[1:num_steps:2] + expected[num_steps + 1 : 2 * num_steps : 2])


def test_epochs_of_other_numbers_of_steps_are_counted_in_advance():

    def plan_of(epoch):
        return make_plan(LENGTHS, [(2 + epoch, 30)], order="shuffle", epoch=epoch)

    epochs = [list(load(plan_of(epoch), SAMPLES)) for epoch in range(3)]
    assert list(map(len, epochs)) == [30, 20, 15]
    assert_same(grain_dataset(plan_of, SAMPLES, num_epochs=3), itertools.chain(*epochs))
    with pytest.raises(ValueError, match=r"epoch 1 has 20 steps, and epoch 0 30: give grain_dataset num_epochs="):
        list(grain_dataset(plan_of, SAMPLES).repeat(3))


def noisy(sample, rng):
    return (sample + rng.integers(0, 1000)).astype(np.int32)


class AtOnce(list):
    def __getitems__(self, ids):
        return [self[i] for i in ids]


def test_a_transform_draws_by_seed_epoch_and_sample_alone():
    shards = [grain_dataset(PLAN, SAMPLES, noisy, seed=3, num_epochs=2, shard=(i, 2)) for i in range(2)]
    whole = grain_dataset(PLAN, AtOnce(SAMPLES), noisy, seed=3, num_epochs=2, microbatches=False)
    seen = {}
    for step in reversed(range(len(whole))):
        epoch = step // PLAN.num_steps
        for batch in (shards[0][step], shards[1][step], whole[step]):
            tokens, lengths, ids = (
                array.reshape(-1, *array.shape[batch.ids.ndim :]) for array in (batch.tokens, batch.lengths, batch.ids)
            )
            for row, length, i in zip(tokens, lengths, ids, strict=True):
                if i >= 0:
                    expected = noisy(SAMPLES[i], np.random.default_rng((3, epoch, i)))
                    np.testing.assert_array_equal(row[:length], expected)
                    seen[epoch, i] = row[0]
    assert len(seen) == 2 * len(SAMPLES)
    assert sum(seen[0, i] == seen[1, i] for i in range(len(SAMPLES))) < len(SAMPLES) / 2


def test_a_state_resumes_at_its_step_on_another_number_of_processes():
    """Each process has its part of the rows; a state has the step alone."""
    options = {"microbatches": False, "rename_fields": {"tokens": "inputs", "ids": "ids"}}
    plan = make_plan(LENGTHS, [(4, 30)], order="shuffle")
    whole = list(PlanSource(plan, SAMPLES, **options))
    iterators = [iter(grain_dataset(plan, SAMPLES, shard=(i, 2), **options).to_iter_dataset()) for i in range(2)]
    states = []
    for _ in range(3):
        step = [next(iterator) for iterator in iterators]
        states.append([iterator.get_state() for iterator in iterators])
    np.testing.assert_array_equal(np.concatenate([each["inputs"] for each in step]), whole[2]["inputs"])
    assert states[-1][0] == states[-1][1] != states[0][0]
    resumed = []
    for i in range(4):
        iterator = iter(grain_dataset(plan, SAMPLES, shard=(i, 4), **options).to_iter_dataset())
        iterator.set_state(states[-1][i % 2])
        resumed.append(list(iterator))
    for parts, expected in zip(zip(*resumed, strict=True), whole[3:], strict=True):
        for name in expected:
            np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), expected[name])


def test_a_plan_of_a_later_epoch_is_that_epoch():
    """Its transform draws the numbers of that epoch, and passes go on from there."""
    expected = list(grain_dataset(PLAN, SAMPLES, noisy, seed=3, num_epochs=4))
    of_epoch = [expected[PLAN.num_steps * epoch : PLAN.num_steps * (epoch + 1)] for epoch in range(4)]
    later = PLAN.of_epoch(2)
    assert_same(grain_dataset(later, SAMPLES, noisy, seed=3).repeat(2), of_epoch[2] + of_epoch[3])
    assert_same(grain_dataset(later, SAMPLES, noisy, seed=3, epoch=1), of_epoch[1])
    assert_same(grain_dataset(later, SAMPLES, noisy, seed=3, num_epochs=1), of_epoch[0])
    assert_same(grain_dataset(lambda _: later, SAMPLES, noisy, seed=3, epoch=2), of_epoch[2])
    shuffled = make_plan(LENGTHS, PLAN.buckets, num_microbatches=2, order="shuffle", seed=5, epoch=2)
    assert_same(grain_dataset(shuffled, SAMPLES, noisy, seed=3), of_epoch[2])


def test_worker_processes_and_threads_of_grain_read_all_epochs():
    dataset = grain_dataset(PLAN, SAMPLES, lambda sample, rng: noisy(sample, rng), seed=3).repeat(3)
    expected = list(dataset)
    assert_same(cloudpickle.loads(cloudpickle.dumps(dataset)), expected)  # as Grain sends it to a worker
    assert_same(dataset.to_iter_dataset(grain.ReadOptions(num_threads=8)), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_epochs": 2, "epoch": 2}, "epoch=2 is after the last one of num_epochs=2"),
        ({"seed": -1}, "seed"),
        ({"shard": (0, 7)}, "7 shards do not divide"),
        ({"rename_fields": {"token": "x"}}, "names 'token'"),
        ({"fields": {"tokens": "length"}}, "fields= are those of mappings"),
    ],
)
def test_wrong_arguments_are_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        grain_dataset(PLAN, SAMPLES, **options)


def test_a_plan_from_a_file_has_one_epoch(tmp_path):
    PLAN.save(tmp_path / "plan.npz")
    dataset = grain_dataset(PLAN.load(tmp_path / "plan.npz"), SAMPLES)
    assert_same(dataset, load(PLAN, SAMPLES))
    with pytest.raises(ValueError, match="does not know the lengths of its samples"):
        list(dataset.repeat(2))
