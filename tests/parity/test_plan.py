"""Plans: which samples form which step, in which order steps come, and the digest."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given

from . import assert_same_plan, find, in_both
from .inputs import ORDERS, for_plan, make_plan, moderate, offenders, plan_arguments, steps_of


@moderate
@given(arguments=plan_arguments())
def test_both_plan_alike(arguments):
    """Steps in order, the digest, row j in microbatch j mod M at slot j // M, counts of cut lengths, and dtypes."""
    plan, other = in_both(lambda package: make_plan(package, arguments))
    assert_same_plan(plan, other)
    buckets, num_microbatches = arguments["buckets"], arguments["num_microbatches"]
    assert plan.num_microbatches == num_microbatches
    assert [tuple(bucket) for bucket in plan.buckets.shapes] == buckets
    steps = steps_of(plan)
    for step, (bucket, ids) in enumerate(steps):
        placed = plan.rows(step)
        assert placed.dtype == np.int64
        assert placed.shape == (num_microbatches, buckets[bucket][0])
        assert [int(placed[j % num_microbatches, j // num_microbatches]) for j in range(len(ids))] == ids
        assert (placed >= 0).sum() == len(ids)
    tokens = [sum(min(arguments["lengths"][i], buckets[-1][1]) for i in ids) for _, ids in steps]
    positions = sum(buckets[k][0] * buckets[k][1] * num_microbatches for k, _ in steps)
    assert plan.num_tokens.tolist() == tokens
    assert plan.padding == pytest.approx(1 - sum(tokens) / positions, abs=1e-12)
    names = ("step_bucket", "step_offsets", "sample_ids", "num_sequences", "num_tokens")
    dtypes = [getattr(plan, name).dtype for name in names]
    assert dtypes == [np.int32, np.int64, np.int64, np.int64, np.int64]


@moderate
@given(arguments=plan_arguments())
def test_every_sample_appears_exactly_once(package, arguments):
    """All samples, or those of the order array, less the dropped ones."""
    plan = make_plan(package, arguments)
    lengths, order, longest = arguments["lengths"], arguments["order"], arguments["buckets"][-1][1]
    ids = range(len(lengths)) if isinstance(order, str) else order
    too_long = [i for i in ids if lengths[i] > longest]
    kept = set(ids) - set(too_long) if arguments["overlong"] == "drop" else set(ids)
    found = np.concatenate([plan.rows(step).ravel() for step in range(plan.num_steps)])
    assert sorted(found[found >= 0].tolist()) == sorted(kept)
    assert plan.num_dropped == (len(too_long) if arguments["overlong"] == "drop" else 0)
    assert plan.num_truncated == (len(too_long) if arguments["overlong"] == "truncate" else 0)
    assert plan.overlong == arguments["overlong"]


@pytest.mark.parametrize("order", ORDERS)
def test_difficulty_equal_to_lengths_changes_nothing(package, order):
    """Only a difficulty other than length makes steps come by arrival."""
    lengths = np.random.default_rng(0).integers(1, 50, 200)
    buckets = package.make_buckets(lengths, 300, max_shapes=5)
    plain = package.make_plan(lengths, buckets, order=order, seed=3)
    for difficulty in (lengths, lengths.astype(np.uint16), lengths.astype(np.float64)):
        assert package.make_plan(lengths, buckets, order=order, seed=3, difficulty=difficulty).digest == plain.digest
    other = lengths.copy()
    other[17] += 1
    changed = package.make_plan(lengths, buckets, order=order, seed=3, difficulty=other)
    assert (changed.digest == plain.digest) == (order == "dataset")


def test_shapes_appear_one_by_one(package):
    """The earliest step left of the shapes whose turn has come; early, once nothing else is left; then all in order."""
    lengths = [5, 1, 9, 5, 1, 9, 5, 5]
    buckets = [(1, 1), (1, 5), (1, 9)]
    expected = {
        1: [0, 1, 2, 3, 4, 5, 6, 7],
        2: [0, 3, 1, 4, 2, 5, 6, 7],
        3: [0, 3, 6, 1, 4, 7, 2, 5],
        5: [0, 3, 6, 7, 1, 4, 2, 5],
        2**63 - 1: [0, 3, 6, 7, 1, 4, 2, 5],
    }
    for spacing, ids in expected.items():
        order = package.Order("dataset", new_shape_every=spacing)
        assert package.make_plan(lengths, buckets, order=order).sample_ids.tolist() == ids
    # The swap of the longest to the front comes first, and makes its shape the first.
    order = package.Order("dataset", longest_first=True, new_shape_every=2)
    both = package.make_plan(lengths, buckets, order=order)
    assert both.sample_ids.tolist() == [2, 5, 1, 4, 0, 3, 6, 7]


def test_the_report_names_the_first_steps_of_spaced_shapes(package):
    """A column more, without a number for a bucket without steps."""
    lengths = np.random.default_rng(0).integers(1, 30, 400)
    buckets = [(8, 10), (4, 20), (2, 30), (1, 40)]
    plan = package.make_plan(lengths, buckets, order=package.Order("shuffle", new_shape_every=7))
    header, *rows = plan.report().splitlines()[:5]
    assert header.endswith("first step")
    assert sorted(row.split()[-1] for row in rows[:3]) == ["0", "14", "7"]
    assert rows[3].split()[-1] in "-–"
    assert "first step" not in package.make_plan(lengths, buckets, order="shuffle").report()


def test_digest_hashes_ids_in_chunks():
    """More than 2**20 samples take more than one chunk."""
    options = {"order": "length", "num_microbatches": 2}
    plans = in_both(lambda package: package.make_plan(np.ones(2**20 + 5, np.int64), [(2**17, 1)], **options))
    assert plans[0].digest == plans[1].digest
    assert plans[0].num_steps == 5


def test_dropped_and_truncated_samples_follow_the_rule(package):
    """Truncated samples are ordered by their original length and counted with their cut one."""
    lengths = [7, 3, 9, 8, 2]
    buckets = [(2, 3), (2, 6)]
    cut = package.make_plan(lengths, buckets, order="length", overlong="truncate")
    assert steps_of(cut) == [(0, [4, 1]), (1, [0, 3]), (1, [2])]
    assert (cut.num_truncated, cut.num_dropped, cut.num_tokens.tolist()) == (3, 0, [5, 12, 6])
    dropped = package.make_plan(lengths, buckets, order="length", overlong="drop")
    assert steps_of(dropped) == [(0, [4, 1])]
    assert (dropped.num_truncated, dropped.num_dropped) == (0, 3)


def test_overlong_samples_are_listed(package):
    """By id, value and limit."""
    lengths = np.full(700, 10)
    lengths[[234, 567]] = [1001, 2002]
    with pytest.raises(ValueError, match=offenders((234, 1001), (567, 2002), limit=500)):
        package.make_plan(lengths, [(2, 10), (1, 500)], order="length")
    with pytest.raises(ValueError, match=r"\b234\D+1001\b"):
        package.make_plan(lengths, [(2, 10), (1, 500)], order="shuffle")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"buckets": [(1.5, 9)]}, "1.5"),
        ({"buckets": [(1, 9, 9)]}, "9"),
        ({"buckets": [2, 9]}, "2"),
        ({"num_microbatches": 0}, "num_microbatches"),
        ({"overlong": "ignore"}, "ignore"),
        ({"order": "random"}, "random"),
        ({"difficulty": [1.0, float("nan"), 2.0]}, "1"),
        ({"seed": -1}, "seed"),
        ({"block_size": 0}, "block_size"),
        ({"new_shape_every": -3}, "new_shape_every.*-3"),
        ({"new_shape_every": True}, "new_shape_every.*True"),
        ({"lengths": [1, -77, 2]}, "-77"),
        ({"lengths": []}, "length"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_by_name(package, arguments, named):
    """Everything outside its range is a ValueError that says what."""
    valid = {"lengths": [3, 5, 8], "buckets": [(2, 4), (1, 9)]}
    with pytest.raises(ValueError, match=named):
        package.make_plan(**for_plan(package, valid | arguments))


@pytest.mark.parametrize("settings", [{}, {"packing": "best_fit"}, {"packing": "wrapped"}], ids=str)
@pytest.mark.parametrize("buckets", [{"buckets": [(1, 8)]}, {"max_tokens": 8}], ids=str)
def test_samples_in_place_of_their_lengths_are_refused(package, buckets, settings):
    """Not in NumPy's words."""
    with pytest.raises(ValueError, match=r"lengths must be .*samples"):
        package.make_plan([np.ones(1, int), np.ones(3, int)], **buckets, **settings)


def test_buckets_are_chosen_by_a_budget_where_none_are_given(package):
    """By its fields as keywords or by itself; of pairs and of packed rows, too."""
    lengths = np.random.default_rng(0).integers(1, 50, 200) * 4
    fields = {"max_shapes": 4, "num_microbatches": 2, "row_multiple": 2}
    budget = package.Budget(max_tokens=1000, **fields)
    buckets = package.make_buckets(lengths, 1000, **fields)
    expected = package.make_plan(lengths, buckets, num_microbatches=2)
    assert package.make_plan(lengths, max_tokens=1000, **fields).digest == expected.digest
    assert package.make_plan(lengths, budget).digest == expected.digest
    assert package.make_plan(lengths, package.Budget(max_tokens=1000), **fields).digest == expected.digest
    shuffled = package.make_plan(lengths, buckets, num_microbatches=2, order=package.Order())
    assert shuffled.digest == expected.digest
    cut = {"max_length": 50, "overlong": "truncate"}
    buckets = package.make_buckets(lengths, 1000, **cut)
    assert package.make_plan(lengths, max_tokens=1000, **cut).num_truncated == (lengths > 50).sum()
    assert package.make_plan(lengths, max_tokens=1000, **cut).buckets == buckets
    pairs = np.stack([lengths, lengths[::-1]], axis=1)
    buckets = package.make_buckets(pairs, 2000, **fields)
    assert package.make_plan(pairs, max_tokens=2000, **fields).buckets == buckets
    rows = package.pack_samples(lengths, [128, 256], order="shuffle")
    buckets = package.make_buckets(rows.num_tokens, 1000, strategy=[128, 256], **fields)
    assert package.make_plan(lengths, budget, packing="best_fit", row_lengths=[128, 256]).buckets == buckets
    for refused in ({"packing": "padded"}, {"buckets": [(4, 256)], "packing": "best_fit"}):
        with pytest.raises(ValueError, match="row_lengths"):
            package.make_plan(lengths, row_lengths=[256], **{"buckets": budget} | refused)


def test_buckets_know_the_microbatches_that_they_are_for(package):
    """A plan, or another epoch's, takes M from them; plain shapes are for one microbatch."""
    lengths = np.random.default_rng(0).integers(1, 128, 5_000) * 8
    pairs = np.stack([lengths, lengths[::-1]], axis=1)[:60]
    buckets = package.make_buckets(lengths, 8192, max_shapes=8, num_microbatches=8)
    plan = package.make_plan(lengths, buckets)
    assert plan.num_microbatches == buckets.num_microbatches == 8
    assert plan.digest == package.make_plan(lengths, list(buckets.shapes), num_microbatches=8).digest
    assert (plan.num_steps, package.make_plan(lengths, buckets.shapes).num_steps) == (48, 384)
    for same in (plan.buckets, pickle.loads(pickle.dumps(buckets)), copy.copy(plan.buckets)):
        assert package.make_plan(lengths, same, epoch=1).num_steps == plan.num_steps
    of_pairs = package.make_buckets(pairs, 8192, max_shapes=4, num_microbatches=4)
    assert package.make_plan(pairs, of_pairs).num_microbatches == 4
    stream = package.stream_batches(iter(lengths), buckets)
    assert next(stream).ids.shape[0] == 8
    assert package.make_plan(lengths, stream.buckets).digest == plan.digest


def test_what_is_made_from_buckets_does_not_forget_their_microbatches(package):
    """No list, slice or part of a tuple, which would plan 384 steps in place of 48."""
    buckets = package.make_buckets([3, 5, 8], 16, max_shapes=2, num_microbatches=8)
    made = (list, tuple, iter, sorted, lambda each: each[:1], lambda each: each[0], lambda each: [*each])
    for make in made:
        with pytest.raises(ValueError, match=r"not a sequence.*num_microbatches\D*8"):
            make(buckets)
    with pytest.raises(ValueError, match="not a sequence"):
        package.make_plan([3, 5], [*buckets])


def test_buckets_are_equal_where_they_plan_alike(package):
    """By shapes, M and what pairs count; never to a tuple, whose M is 1."""
    make = find(package, "Buckets")
    buckets = make([(2, 4), (1, 8)], 8)
    assert buckets == make(((2, 4), (1, 8)), 8)
    assert len({buckets, make(buckets.shapes, 8), make(buckets.shapes, 4)}) == 2
    assert buckets != buckets.shapes
    assert buckets != make(buckets.shapes)
    pairs = [(2, 4, 4), (1, 8, 8)]
    assert make(pairs, 8) != make(pairs, 8, "larger")
    assert make(pairs).num_microbatches == 1


@pytest.mark.parametrize(
    ("shapes", "others", "message"),
    [
        ([], {}, "at least one"),
        ([(2, 4), (1, 4)], {}, "ascend"),
        ([(0, 4)], {}, "at least 1|>= 1|from 1"),
        ([(2, 4), (1, 8, 8)], {}, "rows, first"),
        ([(2, 4)], {"num_microbatches": 0}, "num_microbatches"),
        ([(2, 4)], {"size": "larger"}, "one"),
        ([(2, 4, 4)], {"size": "sums"}, "size"),
    ],
    ids=str,
)
def test_buckets_are_checked_where_they_are_made(package, shapes, others, message):
    """As given ones are by a plan."""
    make = find(package, "Buckets")
    with pytest.raises(ValueError, match=message):
        make(shapes, **others)


def test_a_budget_and_given_buckets_exclude_each_other(package):
    """One of them is needed; with buckets only M is left to say."""
    with pytest.raises(ValueError, match="max_tokens"):
        package.make_plan([3, 5])
    with pytest.raises(ValueError, match="max_shapes"):
        package.make_plan([3, 5], [(1, 5)], max_shapes=2)
    for unknown in (
        lambda: package.make_plan([3, 5], max_tokens=8, max_token=8),
        lambda: package.make_plan([3, 5], max_token=8),
        lambda: package.make_plan([3, 5], [(1, 5)], max_token=8),
        lambda: package.make_buckets([3, 5], 8, max_token=8),
        lambda: package.stream_batches([3, 5], max_token=8),
    ):
        with pytest.raises((TypeError, ValueError), match="max_token"):
            unknown()
    with pytest.raises(ValueError, match="buckets of several lengths"):
        package.make_plan([[3, 5]], max_tokens=8, cost=lambda rows, length: rows * length, max_cost=8.0)


def test_report_names_every_shape_and_the_totals(package):
    """A table to read: its numbers are the plan's."""
    lengths = np.random.default_rng(0).integers(100, 400, 1234)
    buckets = package.make_buckets(lengths, 4000, max_shapes=3)
    plan = package.make_plan(lengths, buckets, order="length")
    report = plan.report().replace(",", "")
    assert isinstance(report, str)
    assert all(str(rows) in report and str(length) in report for rows, length in buckets.shapes)
    assert "1234" in report
    assert str(plan.num_steps) in report


LONG = [8] * 5 + [23]
PAIRS = [[3, 4], [2, 2]]
PACKED = {"packing": "best_fit"}


@pytest.mark.parametrize(
    ("lengths", "arguments", "message"),
    [
        (LONG, {"max_tokens": 16, "row_lengths": [32], **PACKED}, "max_tokens.16 leaves no row of 32 tokens$"),
        (LONG, {"max_tokens": 64, "row_lengths": 16, **PACKED}, "row_lengths must be.* 16$"),
        (LONG, {"max_tokens": 64, "row_lengths": [16, 8], **PACKED}, r"row_lengths must be.* \[16, 8\]$"),
        (LONG, {"buckets": 16}, r"did you mean max_tokens=16\?"),
        (LONG, {"max_tokens": 64, "row_lengths": [16], **PACKED}, '"drop", "truncate" or "split"'),
        (LONG, {"max_tokens": 64, "max_length": 16, **PACKED}, '"drop", "truncate" or "split"'),
        (LONG, {"max_tokens": 64, "max_length": 16}, 'overlong="drop" or "truncate"'),
        (PAIRS, {"max_tokens": 64, "row_lengths": [2, 4], **PACKED}, 'overlong="drop" or "truncate"'),
        (PAIRS, {"buckets": [(2, 2, 4)]}, 'overlong="drop"($| allows)'),
    ],
)
def test_errors_name_what_was_given_and_what_helps(package, lengths, arguments, message):
    with pytest.raises(ValueError, match=message):
        package.make_plan(lengths, **arguments)


def test_a_packing_is_refused_by_its_name(package):
    """In place of the lengths and of the method."""
    packing = package.pack_samples(LONG, 32)
    for arguments in ({"lengths": packing}, {"lengths": LONG, "packing": packing}):
        with pytest.raises(ValueError, match=r"takes no Packing.*packing=.best_fit"):
            package.make_plan(max_tokens=64, **arguments)
