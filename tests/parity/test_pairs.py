"""Pairs of source and target: their buckets against all chains and nested sets, and their plans."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from . import find, slow, slow_pairs
from .inputs import ORDERS, arrangements, difficulties, for_plan, many, moderate, seeds, steps_of


def pairs(longest, max_size):
    """Draw the lengths of sources and targets."""
    return st.lists(st.tuples(st.integers(1, longest), st.integers(1, longest)), min_size=1, max_size=max_size)


@st.composite
def pair_bucket_arguments(draw):
    """Draw arguments of `make_pair_buckets` that all sets of edges can be tried for; some fit nothing."""
    return {
        "lengths": draw(pairs(9, 9)),
        "max_tokens": draw(st.integers(8, 60)),
        "budget": draw(st.sampled_from(["sum", "larger"])),
        "max_shapes": draw(st.integers(1, 5)),
        "max_candidates": draw(st.integers(1, 4)),
        "microbatches_per_step": draw(st.integers(1, 3)),
        "row_multiple": draw(st.integers(1, 3)),
        "length_multiple": draw(st.sampled_from([1, 1, 2, 4])),
        "max_sequences": draw(st.sampled_from([1, 2, 5, 1000])),
    }


@st.composite
def pair_plan_arguments(draw):
    """Draw valid arguments of `make_plan` for pairs, for which at least one sample remains."""
    given_lengths = draw(pairs(12, 30))
    shapes = set(draw(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), max_size=4)))
    overlong = draw(st.sampled_from(["error", "drop"]))
    shapes.add((12, 12) if overlong == "error" else given_lengths[0])
    order = draw(st.sampled_from(ORDERS))
    if draw(st.integers(0, 4)) == 0:
        order = [0, *draw(st.permutations(range(1, len(given_lengths))))]
    return {
        "lengths": given_lengths,
        "buckets": [(draw(st.integers(1, 3)), *shape) for shape in sorted(shapes)],
        "microbatches_per_step": draw(st.integers(1, 3)),
        "order": order,
        "difficulty": draw(difficulties([source + target for source, target in given_lengths])),
        "seed": draw(seeds),
        "overlong": overlong,
    } | draw(arrangements(order))


def make_plan(package, arguments):
    return package.make_plan(**for_plan(package, arguments) | {"lengths": np.array(arguments["lengths"])})


@many
@given(arguments=pair_bucket_arguments())
def test_pair_buckets_are_the_best_of_all_sets(package, arguments):
    """Fewest positions over chains and nested sets; ties as the contract settles them; refused where nothing fits."""
    expected = slow_pairs.make_pair_buckets(**arguments)
    call = arguments | {"lengths": np.array(arguments["lengths"])}
    if expected is None:
        with pytest.raises(ValueError, match=rf"\b{arguments['max_tokens']}\b"):
            package.make_pair_buckets(**call)
        return
    buckets = package.make_pair_buckets(**call)
    assert isinstance(buckets, tuple)
    assert [tuple(map(int, bucket)) for bucket in buckets] == expected


def test_pair_buckets_are_named_tuples(package):
    """`PairBucket(rows, source_length, target_length)`."""
    bucket = package.make_pair_buckets([[3, 5], [2, 4]], 24, max_shapes=1)[0]
    assert isinstance(bucket, find(package, "PairBucket"))
    assert (bucket.rows, bucket.source_length, bucket.target_length) == bucket == (2, 3, 5)
    assert find(package, "PairBucket")(rows=4, source_length=8, target_length=9) == (4, 8, 9)


def test_the_budget_counts_both_sides_or_the_larger(package):
    """Six positions of each pair, or four."""
    lengths = [[2, 4]] * 24
    assert package.make_pair_buckets(lengths, 24) == ((4, 2, 4),)
    assert package.make_pair_buckets(lengths, 24, budget="larger") == ((6, 2, 4),)


def test_both_families_win_somewhere(package):
    """Sides that grow together make a chain; sides that do not make a set in which targets are cut anew."""
    together = package.make_pair_buckets([[k, k] for k in (1, 5, 9) for _ in range(20)], 40)
    assert [bucket[1:] for bucket in together] == [(1, 1), (5, 5), (9, 9)]
    crossed = package.make_pair_buckets([(s, t) for s in (1, 9) for t in (1, 9) for _ in range(20)], 40)
    assert [bucket[1:] for bucket in crossed] == [(1, 1), (1, 9), (9, 1), (9, 9)]


@moderate
@given(arguments=pair_bucket_arguments())
def test_the_plan_of_pair_buckets_takes_the_positions_they_were_chosen_for(package, arguments):
    """Every sample fits, every bucket holds some, and no step is empty."""
    arguments |= {"max_tokens": 60}
    buckets = package.make_pair_buckets(**arguments)
    num_microbatches = arguments["microbatches_per_step"]
    plan = package.make_plan(arguments["lengths"], buckets, order="length", microbatches_per_step=num_microbatches)
    assert len(buckets) <= arguments["max_shapes"]
    assert set(plan.step_bucket.tolist()) == set(range(len(buckets)))
    for k, (rows, source, target) in enumerate(buckets):
        held = int(plan.num_sequences[plan.step_bucket == k].sum())
        size = source + target if arguments["budget"] == "sum" else max(source, target)
        limit = min(arguments["max_tokens"] // size, arguments["max_sequences"])
        expected = slow.capped_rows_and_steps(held, limit, num_microbatches, arguments["row_multiple"])
        assert (rows, int((plan.step_bucket == k).sum())) == expected


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"lengths": []}, "length"),
        ({"lengths": [[1, 2, 3]]}, "length"),
        ({"lengths": [[1.0, 2.0]]}, "length"),
        ({"lengths": [[1, 2], [3, 0]]}, r"\b1\D+3\D+0\b"),
        ({"budget": "product"}, "product"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_candidates": 0}, "max_candidates"),
        ({"microbatches_per_step": 0}, "microbatches_per_step"),
        ({"max_sequences": 0}, "max_sequences"),
        ({"max_length": 7}, r"max_length.*\b1\D+8\D+2\b.*7|max_length=7.*\b1\D+8\D+2\b"),
        ({"max_length": 2, "overlong": "drop"}, "drop.* no sample"),
        ({"overlong": "truncate"}, "truncate"),
        ({"lengths": [[1, 2], [30, 35], [3, 4]]}, r"\b1\D+30\D+35\b"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_by_name(package, arguments, named):
    """Everything outside its range is a ValueError that says what; pairs are listed as such."""
    valid = {"lengths": [[3, 5], [8, 2]], "max_tokens": 64}
    with pytest.raises(ValueError, match=named):
        package.make_pair_buckets(**(valid | arguments))


def test_pairs_above_max_length_are_dropped_on_request(package):
    """Of the rest the buckets are those that they have alone, and the plan counts the dropped ones."""
    pairs = np.random.default_rng(0).integers(1, 300, (400, 2))
    kept = pairs[(pairs <= 200).all(axis=1)]
    cut = {"max_length": 200, "overlong": "drop"}
    assert package.make_pair_buckets(pairs, 2000, **cut) == package.make_pair_buckets(kept, 2000)
    for plan in (
        package.make_plan(pairs, max_tokens=2000, **cut),
        package.make_plan(pairs, package.make_pair_buckets(pairs, 2000, **cut), overlong="drop"),
    ):
        assert plan.num_dropped == len(pairs) - len(kept) > 0
        assert sorted(plan.sample_ids) == np.flatnonzero((pairs <= 200).all(axis=1)).tolist()


# Plans


@moderate
@given(arguments=pair_plan_arguments())
def test_plans_of_pairs_match_the_contract(package, tmp_path_factory, arguments):
    """Each pair in the first bucket that holds both sides, ordered by the sum; counts of both; three columns a file."""
    plan = make_plan(package, arguments)
    steps, lengths = slow.make_steps(**arguments), arguments["lengths"]
    buckets, num_microbatches = arguments["buckets"], arguments["microbatches_per_step"]
    assert steps_of(plan) == steps
    assert plan.digest == slow.digest(steps, buckets, num_microbatches)
    for step, (bucket, ids) in enumerate(steps):
        assert plan.rows(step).tolist() == slow.step_rows(ids, buckets[bucket][0], num_microbatches)
    tokens = [sum(sum(lengths[i]) for i in ids) for _, ids in steps]
    positions = sum(buckets[k][0] * sum(buckets[k][1:]) * num_microbatches for k, _ in steps)
    assert plan.num_tokens.tolist() == tokens
    assert plan.padding == pytest.approx(1 - sum(tokens) / positions, abs=1e-12)
    assert plan.num_sequences.tolist() == [len(ids) for _, ids in steps]
    assert plan.num_dropped == len(lengths) - plan.num_samples
    assert plan.num_truncated == 0
    assert plan.row_offsets is None
    assert [tuple(bucket) for bucket in plan.buckets] == buckets
    report = plan.report().replace(",", "")
    assert all(str(number) in report for bucket in buckets for number in bucket)
    path = tmp_path_factory.mktemp("pairs") / "plan.npz"
    plan.save(path)
    with np.load(path, allow_pickle=False) as archive:
        assert archive["buckets"].dtype == np.int64
        assert archive["buckets"].tolist() == [list(bucket) for bucket in buckets]
    loaded = package.Plan.load(path)
    assert (loaded.digest, loaded.buckets, loaded.padding) == (plan.digest, plan.buckets, plan.padding)
    assert all(isinstance(bucket, find(package, "PairBucket")) for bucket in (*plan.buckets, *loaded.buckets))


def test_the_longest_pair_of_edges_comes_first(package):
    """By the sum of both, and among equals the last in bucket order."""
    lengths = [[1, 9], [5, 5], [9, 1], [9, 1], [2, 2]]
    buckets = [(1, 2, 2), (1, 2, 9), (1, 5, 6), (1, 9, 2)]
    plain = steps_of(package.make_plan(lengths, buckets, order="dataset"))
    assert plain == [(1, [0]), (2, [1]), (3, [2]), (3, [3]), (0, [4])]
    swapped = steps_of(package.make_plan(lengths, buckets, order=package.Order("dataset", longest_first=True)))
    assert swapped == [plain[2], plain[1], plain[0], plain[3], plain[4]]


def test_pairs_that_no_bucket_holds_are_listed(package):
    """By id and both lengths: a pair may fit no bucket though each side fits some."""
    lengths = np.full((500, 2), 3)
    lengths[123], lengths[456] = (9, 4), (4, 77)
    buckets = [(2, 4, 9), (2, 9, 3)]
    with pytest.raises(ValueError, match=r"(?s)\b123\D+9\D+4\b.*\b456\D+4\D+77\b"):
        package.make_plan(lengths, buckets, order="shuffle")
    dropped = package.make_plan(lengths, buckets, order="length", overlong="drop")
    assert dropped.num_dropped == 2
    assert sorted(dropped.sample_ids.tolist()) == [i for i in range(500) if i not in (123, 456)]
    with pytest.raises(ValueError, match="drop"):
        package.make_plan(lengths[[123, 456]], buckets, order="length", overlong="drop")
    with pytest.raises(ValueError, match="truncate"):
        package.make_plan(lengths, buckets, order="length", overlong="truncate")


@pytest.mark.parametrize(
    ("lengths", "buckets", "named"),
    [
        ([[1, 2], [3, 4]], [(2, 4)], "bucket"),
        ([[1, 2], [3, 4]], [(2, 4, 4), (1, 9)], "bucket"),
        ([[1, 2], [3, 4]], [(2, 4, 4, 4)], "bucket"),
        ([[1, 2], [3, 4]], [(2, 4, 4), (1, 4, 4)], "4"),
        ([[1, 2], [3, 4]], [(2, 4, 5), (1, 4, 4)], "4"),
        ([[1, 2], [3, 4]], [(1, 4, 0)], "0"),
        ([[1, 2, 3]], [(1, 4, 5)], "length"),
    ],
    ids=str,
)
def test_widths_that_do_not_match_are_refused(package, lengths, buckets, named):
    """Pairs need buckets of two lengths, single lengths buckets of one, strictly ascending."""
    with pytest.raises(ValueError, match=named):
        package.make_plan(lengths, buckets, order="length")


def test_a_packing_does_not_go_into_pair_buckets(package):
    """Rows have one length."""
    with pytest.raises(ValueError, match="bucket"):
        package.make_plan(package.pack_samples([1, 2, 3], 4), [(2, 4, 4)], order="length")
