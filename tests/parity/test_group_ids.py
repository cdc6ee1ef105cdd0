"""Samples of one group id share a step."""

import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from . import assert_same_plan, in_both, slow_steps, test_step_packing
from .inputs import moderate
from .test_step_groups import arranged_arguments, groups_of, plan_arguments, size_of

LENGTHS = np.random.default_rng(0).integers(1, 13, 60)
BUCKETS = [(1, 4), (2, 4), (3, 12)]
GROUP_IDS = np.random.default_rng(1).permutation(np.repeat([50, 2**62, *range(8)], 6))


def draw_group_ids(data, num_samples):
    most = data.draw(st.sampled_from([3, 12, 60]))
    return data.draw(st.lists(st.integers(0, most), min_size=num_samples, max_size=num_samples))


def steps_of(plan):
    """The samples of every step."""
    return [plan.sample_ids[i:j] for i, j in itertools.pairwise(plan.step_offsets)]


def assert_whole(plan, group_ids):
    """Every step has all samples of its group ids that the plan has."""
    group_ids = np.asarray(group_ids)
    for ids in steps_of(plan):
        others = np.setdiff1d(plan.sample_ids, ids)
        assert not np.isin(group_ids[others], group_ids[ids]).any()


@moderate
@given(data=st.data(), arguments=st.one_of(plan_arguments(), plan_arguments(sides=2)))
def test_samples_of_a_group_id_come_together_and_share_a_step(package, data, arguments):
    """At the place of the first of them; equal to taking one group id after the other, or refused like it."""
    lengths, name = arguments["lengths"], "tokens_per_step" if "tokens_per_step" in arguments else "sequences_per_step"
    group_ids = draw_group_ids(data, len(lengths))
    as_tuples = [length if isinstance(length, tuple) else (length,) for length in lengths]
    sizes = [sum(each) for each in as_tuples]
    order = package.sample_order(sizes, arguments["order"], seed=arguments["seed"]).tolist()
    together = [[i for i in order if group_ids[i] == g] for g in dict.fromkeys(group_ids[i] for i in order)]
    tokens = [sum(sizes[i] for i in ids) for ids in together]
    try:
        counted = tokens if name == "tokens_per_step" else [*map(len, together)]
        steps = slow_steps.cut_steps(counted, size_of(arguments[name]), tokens)
    except AssertionError:
        with pytest.raises(ValueError, match=rf"{name}(?s:.*)group id \d+: "):
            package.make_plan(**arguments, group_ids=group_ids)
        return
    planned = groups_of(package.make_plan(**arguments, group_ids=group_ids))
    for step, places in zip(planned, steps, strict=True):
        ids = [*itertools.chain(*(together[place] for place in places))]
        groups = slow_steps.group_step(
            [as_tuples[i] for i in ids], [sizes[i] for i in ids], arguments["buckets"], arguments["num_microbatches"]
        )
        assert step == [(bucket, [ids[place] for place in group]) for bucket, group in groups]


@moderate
@given(
    data=st.data(), drawn=st.one_of(arranged_arguments(), st.tuples(test_step_packing.plan_arguments(), st.just({})))
)
def test_both_keep_samples_together_alike(data, drawn):
    """Integer for integer, in any epoch, order and packing, of samples that are dropped, cut and split as well."""
    arguments, order = drawn
    arguments = arguments | {"group_ids": draw_group_ids(data, len(arguments["lengths"]))}

    def make(package):
        try:
            return package.make_plan(**arguments | {"order": package.Order(arguments["order"], **order)})
        except ValueError as error:
            return str(error)

    one, other = in_both(make)
    if isinstance(one, str):
        assert "group id" in one
        assert "group id" in other
    else:
        assert_same_plan(one, other)
        assert_whole(one, arguments["group_ids"])


@pytest.mark.parametrize(
    "arguments",
    [
        {"sequences_per_step": 15},
        {"tokens_per_step": 110, "packing": "best_fit"},
        {"tokens_per_step": 110, "packing": "best_fit", "overlong": "split", "buckets": [(2, 9)]},
        {"sequences_per_step": 6, "buckets": [(6, 12)]},
    ],
)
def test_a_plan_saved_by_one_package_loads_in_the_other(package, tmp_path, arguments):
    """Its group ids too, which make the digest another one."""
    arguments = {"lengths": LENGTHS, "buckets": BUCKETS} | arguments
    plan = package.make_plan(**arguments, group_ids=GROUP_IDS)
    plan.save(tmp_path / "plan.npz")
    without = [package.make_plan(**arguments | {"order": plan.sample_ids})] if "packing" not in arguments else []
    assert plan.digest not in [each.digest for each in without]
    for loaded in in_both(lambda package: package.Plan.load(tmp_path / "plan.npz")):
        assert_same_plan(loaded, plan)
        assert loaded.group_ids.tolist() == GROUP_IDS.tolist()


@pytest.mark.parametrize("per_step", [4, 3])
def test_the_digest_has_the_group_ids(package, per_step):
    """Field by field, of steps of one group and of several."""
    plan = package.make_plan(
        [3, 1, 4, 2], [(3, 4), (4, 4)], sequences_per_step=per_step, order="dataset", group_ids=[8, 9, 8, 9]
    )
    assert plan.sample_ids.tolist() == [0, 2, 1, 3]
    ids = hashlib.sha256(np.array(plan.sample_ids, "<i8").tobytes()).digest()
    numbers, buckets, offsets = [1, 2, 1, 4], [3, 4, 4, 4], [0, 4]
    fields = [*numbers, *buckets], [1], offsets, [4, 8, 9, 8, 9]
    if per_step == 3:
        fields = [1, 2, 2, 4, *buckets], [0, 0], [0, 2, 4], [4, 8, 9, 8, 9]
    types = "<i8", "<i4", "<i8", "<i8"
    content = b"".join(np.array(values, kind).tobytes() for values, kind in zip(fields, types, strict=True))
    assert plan.digest == hashlib.sha256(b"jvarlen-group-ids-plan-1\0" + content + ids).hexdigest()


def test_the_digest_of_several_groups_has_the_group_ids(package):
    plan = package.make_plan([3, 1], [(1, 2), (1, 4)], sequences_per_step=2, order="dataset", group_ids=[1, 1])
    numbers = [1, 2, 1, 2, 2, 1, 2, 1, 4]  # M, K, S, G, n, and the buckets
    fields = [np.array(numbers, "<i8"), np.array([0, 1], "<i4")]
    fields += [np.array(each, "<i8") for each in ([0, 2], [0, 1, 2], [2, 1, 1])]
    ids = hashlib.sha256(np.array([1, 0], "<i8").tobytes()).digest()
    content = b"jvarlen-group-ids-groups-plan-1\0" + b"".join(field.tobytes() for field in fields) + ids
    assert plan.digest == hashlib.sha256(content).hexdigest()


def test_a_file_whose_steps_share_a_group_id_is_refused(package, tmp_path):
    """However well it is sealed; and one that lacks the group ids of some of its samples."""
    plan = package.make_plan(LENGTHS, BUCKETS, sequences_per_step=15, group_ids=GROUP_IDS)
    for group_ids, message in ((np.roll(plan.group_ids, 1), "in several steps"), (plan.group_ids[:59], "group_ids")):
        package.Plan(**{**arrays_of(plan), "group_ids": group_ids}).save(tmp_path / "plan.npz")
        with pytest.raises(ValueError, match=rf"plan.npz.*{message}"):
            package.Plan.load(tmp_path / "plan.npz")


def arrays_of(plan):
    names = "buckets num_microbatches group_bucket group_offsets group_tokens step_groups sample_ids"
    return {name: getattr(plan, name) for name in names.split()}


def test_whole_steps_move_and_other_epochs_keep_samples_together(package):
    order = package.Order("shuffle", shuffle_steps=True, longest_first=True)
    for sizes in ({"sequences_per_step": 13}, {"tokens_per_step": lambda step, seen: 100 + 10 * step + seen % 7}):
        plan = package.make_plan(LENGTHS, BUCKETS, order=order, **sizes, group_ids=GROUP_IDS)
        epochs = [plan, plan.of_epoch(1), plan.of_epoch(2)]
        assert len({each.digest for each in epochs}) == 3
        for each in epochs:
            assert_whole(each, GROUP_IDS)
            assert sorted(each.sample_ids.tolist()) == list(range(60))


def test_samples_that_are_dropped_leave_the_others_of_their_group_id(package):
    """They take no room in a step, and still decide where the others come."""
    options = {"sequences_per_step": 2, "order": "dataset", "overlong": "drop", "group_ids": [1, 0, 1, 0, 2]}
    plan = package.make_plan([9, 1, 2, 3, 4], [(1, 4)], **options)
    assert [ids.tolist() for ids in steps_of(plan)] == [[2], [1, 3], [4]]
    assert plan.num_dropped == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sequences_per_step": 2}, r"sequences_per_step(?s:.*)group id 7: 3 .*limit 2"),
        ({"tokens_per_step": 6}, r"tokens_per_step(?s:.*)group id 7: 8.*group id 0: 7 .*limit 6"),
        ({"sequences_per_step": [3, 1, 1]}, r"step 1 .*epoch 0.*group id 0: 2 .*limit 1"),
        ({"sequences_per_step": lambda step, seen: 3 - step}, r"step 2 .*epoch 0.*group id 9: 2 \(limit 1\)"),
        ({}, "group_ids .*sequences_per_step or tokens_per_step"),
        ({"tokens_per_step": 20, "packing": "wrapped", "buckets": [(1, 4)]}, 'group_ids.*"best_fit"'),
        ({"sequences_per_step": 8, "group_ids": [0, 1]}, "group_ids must be .*integers"),
        ({"sequences_per_step": 8, "group_ids": [[0] * 7]}, "group_ids must be .*integers"),
        ({"sequences_per_step": 8, "group_ids": [True] * 7}, "group_ids must be .*integers.* bool"),
        ({"sequences_per_step": 8, "group_ids": [0.0] * 7}, "group_ids must be .*integers.* float64"),
        (
            {"sequences_per_step": 8, "group_ids": [0, -1, 1, 2, -3, 0, 1]},
            "group_ids must be from 0 .*id 1: -1.*id 4: -3",
        ),
        ({"sequences_per_step": 8, "group_ids": np.array([2**63] * 7, np.uint64)}, "group_ids must be from 0 "),
    ],
)
def test_what_cannot_share_a_step_is_refused(package, arguments, message):
    options = {"buckets": [(2, 2), (1, 4)], "order": "dataset", "group_ids": [7, 0, 7, 0, 7, 9, 9]} | arguments
    with pytest.raises(ValueError, match=message):
        package.make_plan([3, 3, 4, 4, 1, 1, 1], **options)


def test_loaded_steps_have_all_rollouts_of_their_prompts(package):
    """So that rewards can be normalised over those of a prompt, in the step, also of packed rows."""
    samples = [np.arange(1, length + 1) for length in LENGTHS]
    rewards = np.random.default_rng(2).normal(size=60)
    by_prompt = rewards - np.array([rewards[prompt == GROUP_IDS].mean() for prompt in GROUP_IDS])
    for packing in ("padded", "best_fit"):
        plan = package.make_plan(LENGTHS, BUCKETS, packing=packing, sequences_per_step=16, group_ids=GROUP_IDS)
        for batch in package.load(plan, samples):
            ids = np.concatenate([np.asarray(group.ids).reshape(-1) for group in batch.groups])
            ids = ids[ids >= 0]
            _, prompt, count = np.unique(GROUP_IDS[ids], return_inverse=True, return_counts=True)
            assert (count == 6).all()
            advantages = rewards[ids] - (np.bincount(prompt, rewards[ids]) / count)[prompt]
            np.testing.assert_allclose(advantages, by_prompt[ids], atol=1e-12)
