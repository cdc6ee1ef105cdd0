"""Buckets: both packages alike, "optimal" the best of all sets of edges."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from . import in_both, slow
from .inputs import (
    CLOSED_FORMS,
    as_arrays,
    bucket_arguments,
    dyadic_cost,
    limits,
    many,
    moderate,
    offenders,
    text_of,
    tile_bytes,
)

STRATEGIES = (*CLOSED_FORMS, "optimal")


def seconds_cost(rows, length):
    """Cost a microbatch in sums and products that round."""
    return 15.3e-6 + rows * length * (0.219e-6 * length + 1.7e-6)


def as_pairs(buckets):
    """Return buckets as plain pairs, checking that they are what the contract says."""
    assert isinstance(buckets.shapes, tuple)
    assert all(bucket == (bucket.rows, bucket.length) for bucket in buckets.shapes)
    return [(int(rows), int(length)) for rows, length in buckets.shapes]


def assert_both_choose_alike(arguments):
    one, other = in_both(lambda package: as_pairs(package.make_buckets(**as_arrays(arguments))))
    assert one == other


@moderate
@given(data=st.data(), compile_seconds=st.sampled_from([None, 0.0, 0.25, 1.5, 40.0]), is_cost=st.booleans())
def test_optimal_is_the_best_of_all_edge_sets(package, data, compile_seconds, is_cost):
    """Least positions, or least of a float cost without rounding; ties as the contract settles them."""
    arguments = data.draw(bucket_arguments(strategy="optimal", max_samples=14, longest=12))
    arguments |= {"cost": dyadic_cost, "compile_seconds": compile_seconds} if is_cost else {}
    expected = slow.choose_best_buckets(**{name: value for name, value in arguments.items() if name != "strategy"})
    assert as_pairs(package.make_buckets(**as_arrays(arguments))) == expected


@moderate
@given(data=st.data(), compile_seconds=st.sampled_from([None, 1e-5, 3e-4]))
def test_optimal_with_any_cost_reaches_the_least_total(package, data, compile_seconds):
    """Sums that round, from the shortest bucket up: rounding is monotone, so the least total is reached exactly."""
    arguments = data.draw(bucket_arguments(strategy="optimal", max_samples=14, longest=12))
    arguments |= {"cost": seconds_cost, "compile_seconds": compile_seconds, "overlong": "truncate"}
    found = [length for _, length in as_pairs(package.make_buckets(**as_arrays(arguments)))]

    def total(edges):
        names = ("lengths", "max_tokens", "num_microbatches", "row_multiple", "cost", "compile_seconds")
        lengths, *rest = (arguments[name] for name in names)
        return slow.fill_buckets([min(n, edges[-1]) for n in lengths], edges, *rest)[0]

    choices = ("lengths", "max_shapes", "max_length", "length_multiple")
    assert total(found) == min(map(total, slow.list_edge_sets(*(arguments[name] for name in choices))))


@many
@given(strategy=st.sampled_from(STRATEGIES), data=st.data(), is_limited=st.booleans())
def test_both_choose_alike(strategy, data, is_limited):
    """By every strategy, with and without limits of cost, bytes and rows."""
    sizes = {"max_samples": 14, "longest": 12} if strategy == "optimal" else {}
    arguments = data.draw(bucket_arguments(strategy=strategy, **sizes))
    if is_limited:
        arguments |= data.draw(limits(max(arguments["lengths"]) + 8))
    assert_both_choose_alike(arguments)


@st.composite
def given_edges(draw):
    """Draw arguments with edges in place of a strategy's name."""
    arguments = draw(bucket_arguments(strategy=""))
    edges = draw(st.lists(st.integers(1, 50), min_size=1, max_size=5, unique=True).map(sorted))
    top = slow.round_up(edges[-1], arguments["length_multiple"])
    drops = arguments["overlong"] == "drop" and min(arguments["lengths"]) <= top
    return arguments | {
        "strategy": edges,
        "max_length": draw(st.sampled_from([None, top, top + 3])),
        "max_tokens": max(arguments["max_tokens"], top),
        "overlong": "drop" if drops else "truncate",
    }


@moderate
@given(arguments=given_edges(), data=st.data())
def test_both_take_given_edges_alike(arguments, data):
    """Rounded up, deduplicated, the last one the limit; rows by the ordinary rule; also as an array."""
    if data.draw(st.booleans()):
        arguments |= data.draw(limits(60))
    assert_both_choose_alike(arguments)
    assert_both_choose_alike(arguments | {"strategy": np.array(arguments["strategy"])})


@pytest.mark.parametrize("strategy", ["pad_to_max", "optimal"])
def test_samples_above_max_length_follow_the_rule(package, strategy):
    """Counted as cut, not counted, or refused."""
    lengths = [2, 3, 10, 11]
    made = {
        rule: as_pairs(package.make_buckets(lengths, 40, strategy=strategy, max_shapes=1, max_length=5, overlong=rule))
        for rule in ("truncate", "drop")
    }
    assert made == {"truncate": [(4, 5)], "drop": [(2, 3)]}
    with pytest.raises(ValueError, match=offenders((2, 10), (3, 11), limit=5)):
        package.make_buckets(lengths, 40, strategy=strategy, max_length=5, overlong="error")
    with pytest.raises(ValueError, match=offenders((0, 2), (1, 3), limit=1)) as caught:
        package.make_buckets(lengths, 40, strategy=strategy, max_length=1, overlong="drop")
    assert 'overlong="drop" leaves no sample' in str(caught.value)


def test_what_is_dropped_need_not_fit(package):
    """A dropped sample is neither too long for the budget nor for the multiple; ids in errors stay the caller's."""
    assert as_pairs(package.make_buckets([4, 900, 3], 8, max_length=7, length_multiple=4, overlong="drop")) == [(2, 4)]
    with pytest.raises(ValueError, match=offenders((3, 60), limit=50)):
        package.make_buckets([4, 900, 3, 60], 50, max_length=100, overlong="drop")


@pytest.mark.parametrize("strategy", ["optimal", "pad_to_max", [3, 5, 20]])
def test_limits_that_leave_no_row_are_named(package, strategy):
    """Which limit it is, and the samples by original id."""
    lengths = [3, 20, 5, 20]
    with pytest.raises(ValueError, match=offenders((1, 20), (3, 20), limit=3)) as caught:
        package.make_buckets(lengths, 100, strategy=strategy, cost=lambda b, t: b * t / 4, max_cost=3)
    assert "max_cost" in str(caught.value)
    assert "max_bytes" not in str(caught.value)
    with pytest.raises(ValueError, match=offenders((1, 20), (3, 20), limit=3200)) as caught:
        package.make_buckets(lengths, 100, strategy=strategy, memory=tile_bytes, max_bytes=3200)
    assert "max_bytes" in str(caught.value)
    assert "max_cost" not in str(caught.value)


def test_functions_see_no_shape_above_the_budget(package):
    """The search for the most rows stays inside max_tokens, and calls with int64 arrays."""
    seen = []

    def cost(rows, length):
        assert rows.dtype == length.dtype == np.int64
        seen.append(int(np.max(rows * length)))
        assert np.min(rows) >= 1
        return rows * length * 1.0

    package.make_buckets([3, 5, 5, 8, 13], 40, max_shapes=3, cost=cost, max_cost=1e9, memory=cost, max_bytes=30)
    assert seen
    assert max(seen) <= 40


def test_buckets_are_named_tuples_of_rows_and_length(package):
    """`Bucket(rows, length)`."""
    bucket = package.make_buckets([3, 5], 12, strategy="pad_to_max").shapes[0]
    assert isinstance(bucket, package.Bucket)
    assert (bucket.rows, bucket.length) == bucket == (2, 5)
    assert package.Bucket(rows=4, length=8) == (4, 8)


def test_geometric_edges_are_exact_for_huge_lengths(package):
    """1, 3**10, 3**20, 3**30: a float root misses by one."""
    for shift in (-1, 0, 1):
        lengths = [1, 3**36 + shift]
        buckets = package.make_buckets(lengths, 2**60, strategy="geometric", max_shapes=3)
        edges = [length for _, length in buckets.shapes]
        for k, edge in enumerate(edges, start=1):
            assert edge**3 >= lengths[1] ** k > (edge - 1) ** 3


def test_cost_is_called_with_int64_arrays_that_broadcast(package):
    """What the contract promises a cost function, and that it never sees a shape above the budget."""
    seen = []

    def cost(rows, length):
        assert rows.dtype == length.dtype == np.int64
        seen.append(int(np.max(rows * length)))
        assert np.min(rows) >= 1
        return np.sqrt(rows.astype(np.float64)) * length

    package.make_buckets([3, 5, 5, 8, 13], 40, max_shapes=3, cost=cost)
    assert seen
    assert max(seen) <= 40


@pytest.mark.parametrize(
    "cost",
    [lambda b, t: -1.0 * b * t, lambda b, t: b * t * np.nan, lambda b, t: b * t * np.inf],
    ids=["negative", "nan", "infinite"],
)
def test_costs_that_are_not_finite_and_positive_are_refused(package, cost):
    """A cost below 0 or not finite is an error."""
    with pytest.raises(ValueError, match=r"cost"):
        package.make_buckets([1, 2, 3], 10, cost=cost)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"strategy": "best"}, "best"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_shapes": 0}, "max_shapes"),
        ({"num_microbatches": 0}, "num_microbatches"),
        ({"row_multiple": 0}, "row_multiple"),
        ({"max_sequences": 0}, "max_sequences"),
        ({"length_multiple": 0}, "length_multiple"),
        ({"max_length": 0}, "max_length"),
        ({"compile_seconds": 1.0}, "compile_seconds"),
        ({"compile_seconds": -1.0, "cost": dyadic_cost}, "compile_seconds"),
        ({"max_length": 7, "length_multiple": 4, "overlong": "truncate"}, "max_length"),
        ({"overlong": "ignore"}, "ignore"),
        ({"max_cost": 5.0}, "max_cost"),
        ({"max_cost": 0.0, "cost": dyadic_cost}, "max_cost"),
        ({"max_cost": float("nan"), "cost": dyadic_cost}, "max_cost"),
        ({"max_bytes": 5.0}, "max_bytes"),
        ({"max_bytes": -1, "memory": tile_bytes}, "max_bytes"),
        ({"max_bytes": 2**40, "memory": lambda b, t: b * t * float("nan")}, "memory"),
        ({"max_cost": 3.0, "cost": lambda b, t: -1.0 * b * t, "strategy": "pad_to_max"}, "cost"),
        ({"strategy": []}, r"\[\]|\(\)"),
        ({"strategy": [8, 5]}, "5"),
        ({"strategy": [0, 8]}, "0"),
        ({"strategy": [2.5, 8]}, "2.5"),
        ({"strategy": [5, 8], "max_length": 7}, "max_length"),
        ({"strategy": [5, 7], "max_length": 7, "length_multiple": 4}, "max_length"),
        ({"lengths": []}, "length"),
    ],
    ids=text_of,
)
def test_bad_arguments_are_refused_by_name(package, arguments, named):
    """Everything outside its range is a ValueError that says what."""
    valid = {"lengths": [3, 5, 8], "max_tokens": 64}
    with pytest.raises(ValueError, match=named):
        package.make_buckets(**(valid | arguments))


def test_samples_above_the_budget_are_listed(package):
    """By id, value and limit; the rounded length counts."""
    lengths = np.full(500, 10)
    lengths[[123, 456]] = [1001, 2002]
    with pytest.raises(ValueError, match=offenders((123, 1001), (456, 2002), limit=1000)):
        package.make_buckets(lengths, 1000)
    with pytest.raises(ValueError, match=r"\b0\D+(9|16)\b"):
        package.make_buckets([9, 3], 15, length_multiple=16)
    assert package.make_buckets(lengths, 1000, max_length=1000, overlong="truncate").shapes[-1].length == 1000


@moderate
@given(strategy=st.sampled_from(STRATEGIES), data=st.data(), multiple=st.integers(1, 9))
def test_lengths_of_buckets_have_the_given_form(strategy, data, multiple):
    """24n frames for 8n + 1 latents: each is a multiple plus the offset, and the last the least that holds all."""
    offset = data.draw(st.integers(0, multiple - 1))
    arguments = data.draw(bucket_arguments(strategy=strategy, max_samples=14, longest=30))
    for name in ("max_length", "overlong"):
        arguments.pop(name)
    arguments |= {"length_multiple": multiple, "length_offset": offset, "max_tokens": 200}
    found, other = in_both(lambda package: as_pairs(package.make_buckets(**as_arrays(arguments))))
    assert found == other
    assert all(length % multiple == offset for _, length in found)
    assert found[-1][1] == slow.round_up(max(arguments["lengths"]), multiple, offset)
    if strategy == "optimal":
        assert found == slow.choose_best_buckets(**{k: v for k, v in arguments.items() if k != "strategy"})
