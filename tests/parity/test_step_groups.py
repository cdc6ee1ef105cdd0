"""Steps of a given number of samples or tokens, each in groups of several buckets."""

import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import torch_ref

from . import assert_same_plan, in_both, slow_steps
from .inputs import ORDERS, difficulties, moderate, seeds


@st.composite
def bucket_shapes(draw, longest, *, sides=1):
    """Draw buckets, some of one length with several numbers of rows, that hold all samples."""
    count = draw(st.integers(1, 4))
    lengths = {tuple(draw(st.integers(1, longest)) for _ in range(sides)) for _ in range(count)} | {(longest,) * sides}
    shapes = {(draw(st.integers(1, 4)), *each) for each in lengths for _ in range(draw(st.integers(1, 2)))}
    return sorted(shapes, key=lambda shape: (shape[1:], shape[0]))


class Ramp:
    """Sizes that depend on the step and on the tokens before it."""

    def __init__(self, least, growth):
        self.least, self.growth = least, growth

    def __call__(self, step, tokens_seen):
        return self.least + self.growth * step + tokens_seen % 5


@st.composite
def plan_arguments(draw, *, sides=1):
    longest = draw(st.sampled_from([3, 12]))
    one = st.integers(1, longest) if sides == 1 else st.tuples(st.integers(1, longest), st.integers(0, longest))
    lengths = draw(st.lists(one, min_size=1, max_size=40))
    name = draw(st.sampled_from(["sequences_per_step", "tokens_per_step"]))
    least = 1 if name == "sequences_per_step" else sides * longest
    number = st.integers(least, 6 * least + 6)
    size = draw(
        st.one_of(number, st.lists(number, min_size=80, max_size=80), st.builds(Ramp, number, st.integers(0, 2)))
    )
    return {
        "lengths": lengths,
        "buckets": draw(bucket_shapes(longest, sides=sides)),
        "num_microbatches": draw(st.integers(1, 3)),
        "order": draw(st.sampled_from(ORDERS)),
        "seed": draw(seeds),
        name: size,
    }


def size_of(size):
    """The size of any step, as a function of what came before."""
    if callable(size):
        return size
    return lambda step, tokens_seen: size[step] if isinstance(size, list) else size


def groups_of(plan):
    """The groups of every step, (bucket, ids)."""
    bounds = plan.group_offsets.tolist()
    groups = [
        (int(bucket), plan.sample_ids[bounds[g] : bounds[g + 1]].tolist()) for g, bucket in enumerate(plan.group_bucket)
    ]
    return [[groups[g] for g in plan.groups(step)] for step in range(plan.num_steps)]


@moderate
@given(arguments=st.one_of(plan_arguments(), plan_arguments(sides=2)))
def test_steps_have_the_groups_of_the_rule(package, arguments):
    """Cut in order, longest first, free rows filled with what is longest; equal to opening groups one by one."""
    plan = package.make_plan(**arguments)
    lengths, name = arguments["lengths"], "tokens_per_step" if "tokens_per_step" in arguments else "sequences_per_step"
    sizes = [length if isinstance(length, int) else sum(length) for length in lengths]
    order = package.sample_order(sizes, arguments["order"], seed=arguments["seed"]).tolist()
    expected = slow_steps.plan_steps(
        order,
        lengths,
        arguments["buckets"],
        arguments["num_microbatches"],
        size_of(arguments[name]),
        name == "tokens_per_step",
    )
    assert groups_of(plan) == expected
    assert plan.num_sequences.tolist() == [sum(len(ids) for _, ids in step) for step in expected]
    assert plan.num_tokens.tolist() == [sum(sizes[i] for _, ids in step for i in ids) for step in expected]
    for group, (bucket, ids) in enumerate(itertools.chain(*expected)):
        rows = plan.rows(group)
        assert rows.shape == (arguments["num_microbatches"], arguments["buckets"][bucket][0])
        assert rows.T.ravel()[: len(ids)].tolist() == ids
        assert (rows >= 0).sum() == len(ids)


@st.composite
def arranged_arguments(draw):
    """Draw arguments that decide which samples come and when, as well."""
    arguments = draw(st.one_of(plan_arguments(), plan_arguments(sides=2)))
    is_pairs = isinstance(arguments["lengths"][0], tuple)
    order = {
        "block_size": draw(st.one_of(st.none(), st.integers(1, 12))),
        "shuffle_steps": draw(st.booleans()),
        "longest_first": draw(st.booleans()),
    }
    if draw(st.booleans()):
        arguments["overlong"] = "drop" if is_pairs else draw(st.sampled_from(["drop", "truncate"]))
        arguments["lengths"] = [*arguments["lengths"], (13, 13) if is_pairs else 13]
    if not is_pairs:
        arguments["difficulty"] = draw(difficulties(arguments["lengths"]))
    return arguments | {"epoch": draw(st.integers(0, 3))}, order


@moderate
@given(drawn=arranged_arguments())
def test_both_cut_and_group_alike(drawn):
    """Integer for integer, digests included, in any epoch."""
    arguments, order = drawn

    def make(package):
        return package.make_plan(**arguments | {"order": package.Order(arguments["order"], **order)})

    assert_same_plan(*in_both(make))


@pytest.mark.parametrize("name", ["jvarlen", "torch_ref"])
def test_a_plan_of_groups_saved_by_one_package_loads_in_the_other(tmp_path, name):
    lengths = np.random.default_rng(0).integers(1, 9, 60)
    plans = in_both(lambda package: package.make_plan(lengths, [(2, 4), (1, 8), (3, 8)], sequences_per_step=17))
    saving = {"jvarlen": plans[0], "torch_ref": plans[1]}[name]
    saving.save(tmp_path / "plan.npz")
    for plan in in_both(lambda package: package.Plan.load(tmp_path / "plan.npz")):
        assert_same_plan(plan, saving)


def test_the_digest_of_groups_is_field_by_field(package):
    plan = package.make_plan([3, 1, 4, 2], [(1, 2), (1, 4)], sequences_per_step=3, order="dataset")
    numbers = [1, 2, 2, 4, 4, 1, 2, 1, 4]  # M, K, S, G, n, and the buckets
    fields = [np.array(numbers, "<i8"), np.array([0, 1, 1, 0], "<i4")]
    fields += [np.array(each, "<i8") for each in ([0, 3, 4], [0, 1, 2, 3, 4])]
    ids = hashlib.sha256(np.array([1, 0, 2, 3], "<i8").tobytes()).digest()
    content = b"jvarlen-groups-plan-1\0" + b"".join(field.tobytes() for field in fields) + ids
    assert plan.digest == hashlib.sha256(content).hexdigest()


def test_torch_ref_leaves_the_choice_of_shapes_to_jvarlen():
    with pytest.raises(ValueError, match="tokens_per_step takes given buckets"):
        torch_ref.make_plan([3, 1, 4, 2], max_tokens=8, tokens_per_step=8)


def test_samples_of_one_length_open_as_many_groups_as_they_fill(package):
    plan = package.make_plan([7] * 8, [(1, 8)], sequences_per_step=8, order="dataset")
    assert plan.num_steps == 1
    assert groups_of(plan) == [[(0, [sample]) for sample in range(8)]]


def test_free_rows_take_what_is_longest(package):
    """The rest of a length opens the least rows that hold it."""
    lengths = [2, 8, 3, 5, 8, 8, 1, 4]
    buckets = [(2, 4), (1, 8), (2, 8)]
    plan = package.make_plan(lengths, buckets, sequences_per_step=8, order="dataset")
    # 8, 5, 8, 8: two groups of 2×8. 2, 3, 1, 4: two of 2×4.
    assert groups_of(plan) == [[(0, [0, 2]), (0, [6, 7]), (2, [1, 3]), (2, [4, 5])]]
    plan = package.make_plan(lengths, [(2, 4), (3, 8)], sequences_per_step=8, order="dataset")
    # 8, 5, 8 fill a group; the fourth opens one with two free rows, for 4 and 3.
    assert groups_of(plan) == [[(0, [0, 6]), (1, [1, 3, 4]), (1, [2, 5, 7])]]


def test_steps_move_as_a_whole(package):
    """`shuffle_steps` by the keys after those of the samples, and `longest_first`."""
    lengths = np.random.default_rng(0).integers(1, 9, 50)
    lengths[33] = 12
    buckets = [(2, 4), (1, 8), (1, 12)]
    steps = groups_of(package.make_plan(lengths, buckets, sequences_per_step=8, order="dataset"))
    order = package.Order("dataset", longest_first=True)
    first = groups_of(package.make_plan(lengths, buckets, sequences_per_step=8, order=order))
    assert first == [steps[4], *steps[1:4], steps[0], *steps[5:]]
    order = package.Order("dataset", shuffle_steps=True)
    shuffled = groups_of(package.make_plan(lengths, buckets, sequences_per_step=8, order=order, seed=3, epoch=1))
    keys = np.random.Philox(key=np.array([3, 1], np.uint64)).random_raw(50 + len(steps))[50:] >> 32
    assert shuffled == [steps[step] for step in np.argsort(keys, kind="stable")]


@pytest.mark.parametrize("name", ["sequences_per_step", "tokens_per_step"])
def test_ramps_go_on_through_the_epochs(package, name):
    """An array has one size for each step of all epochs; a function sees the steps and tokens of all epochs."""
    lengths = np.random.default_rng(0).integers(1, 9, 60)
    sizes = [9 + step for step in range(100)]
    calls = []

    def ramp(step, tokens_seen):
        calls.append((step, tokens_seen))
        return sizes[step]

    first_step = 0
    for epoch in range(3):
        options = {"buckets": [(2, 4), (1, 8)], "seed": 1, "epoch": epoch}
        calls.clear()
        plan = package.make_plan(lengths, **options, **{name: ramp})
        assert package.make_plan(lengths, **options, **{name: sizes}).digest == plan.digest
        seen = int(lengths.sum()) * epoch + np.cumsum(plan.num_tokens) - plan.num_tokens
        assert calls[-plan.num_steps :] == list(zip(range(first_step, first_step + plan.num_steps), seen, strict=True))
        reached = plan.num_sequences if name == "sequences_per_step" else plan.num_tokens
        planned = sizes[first_step : first_step + plan.num_steps]
        assert (reached <= planned).all()
        if name == "sequences_per_step":
            assert reached[:-1].tolist() == planned[:-1]
        first_step += plan.num_steps


@pytest.mark.parametrize("name", ["sequences_per_step", "tokens_per_step"])
def test_sizes_are_integers_from_1_to_the_largest_int64(package, name):
    """They may be numbers, arrays of no axis, or what functions return."""
    lengths, buckets, largest = [3, 1, 4, 2], [(2, 4)], 2**63 - 1
    whole = package.make_plan(lengths, buckets, sequences_per_step=4).digest
    numbers = [largest, np.uint64(largest), np.array(largest)]
    for size in [*numbers, np.array([largest], np.uint64), *(lambda step, seen, n=n: n for n in numbers)]:
        assert package.make_plan(lengths, buckets, **{name: size}).digest == whole
    numbers = [largest + 1, 2**70, np.uint64(largest + 1), 0, True, 4.0, None]
    for size in [
        *numbers[:-1],
        np.array([2**63] * 4, np.uint64),
        *(lambda step, seen, n=n: n for n in [*numbers, [4]]),
    ]:
        with pytest.raises(ValueError, match=rf"{name}.* must be an integer"):
            package.make_plan(lengths, buckets, **{name: size})


def test_a_plan_of_one_group_a_step_is_what_it_was(package):
    """Its digest and its file are those of any other plan."""
    plan = package.make_plan([3, 1, 4, 2], [(1, 4)], num_microbatches=2, sequences_per_step=2, order="dataset")
    other = package.make_plan([3, 1, 4, 2], [(1, 4)], num_microbatches=2, order="dataset")
    assert not plan.has_many_groups
    assert plan.digest == other.digest
    assert plan.step_bucket.tolist() == [0, 0]


def test_dropped_samples_do_not_count_and_cut_ones_count_as_cut(package):
    lengths, buckets = [3, 9, 4, 2, 9, 1], [(1, 4)]
    dropped = package.make_plan(lengths, buckets, sequences_per_step=2, order="dataset", overlong="drop")
    assert groups_of(dropped) == [[(0, [0]), (0, [2])], [(0, [3]), (0, [5])]]
    assert dropped.num_dropped == 2
    cut = package.make_plan(lengths, buckets, tokens_per_step=8, order="dataset", overlong="truncate")
    assert [[ids for _, [ids] in step] for step in groups_of(cut)] == [[0, 1], [2, 3], [4, 5]]
    assert (cut.num_tokens.tolist(), cut.num_truncated) == ([7, 6, 5], 2)
    with pytest.raises(ValueError, match=r"id 1: 9.*, id 4: 9 \(limit 4\)"):
        package.make_plan(lengths, buckets, sequences_per_step=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sequences_per_step": 2, "tokens_per_step": 8}, "sequences_per_step and tokens_per_step"),
        ({"sequences_per_step": 2, "packing": "auto"}, '(?=.*packing="auto")(?=.*sequences_per_step).*"best_fit"'),
        ({"sequences_per_step": 0}, "sequences_per_step must be .* 0"),
        ({"sequences_per_step": 1.5}, "sequences_per_step must be .* 1.5"),
        ({"sequences_per_step": [1, 1]}, r"sequences_per_step has 2 values, .* step 2 .*epoch 0"),
        ({"sequences_per_step": [2, 2, 2], "epoch": 1}, r"sequences_per_step has 3 values, .* step 3 .*epoch 1"),
        ({"sequences_per_step": lambda step, tokens_seen: 2 - step}, r"sequences_per_step\(2, 8\) must be .* 0"),
        ({"tokens_per_step": 3}, r"id 2: 4 \(limit 3\)"),
        ({"tokens_per_step": 2}, r"id 0: 3.*, id 2: 4 \(limit 2\)"),
        ({"tokens_per_step": [4, 2, 9]}, r"step 1 .*epoch 0.*: id 2: 4 \(limit 2\)$"),
        (
            {"tokens_per_step": lambda step, tokens_seen: 4 if step < 4 else 3, "epoch": 1},
            r"step 4 .*epoch 1.*: id 2: 4 \(limit 3\)$",
        ),
        ({}, r"2×4 and 3×4|\(2, 4\) and \(3, 4\)"),
        ({"sequences_per_step": 2, "order": "spaced"}, "new_shape_every"),
    ],
)
def test_what_cuts_no_steps_is_refused(package, arguments, message):
    if arguments.get("order") == "spaced":
        arguments = arguments | {"order": package.Order("dataset", new_shape_every=2)}
    with pytest.raises(ValueError, match=message):
        package.make_plan([3, 1, 4, 2], [(2, 4), (3, 4)], **({"order": "dataset"} | arguments))
