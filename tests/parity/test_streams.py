"""Streams: steps as they fill, bounded waiting, and states that resume after any step."""

import itertools
import json
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from . import in_both, slow
from .inputs import dyadic_cost, moderate, offenders, seeds, stepped_cost


@st.composite
def stream_arguments(draw):
    """Draw a stream that ends, with given buckets."""
    given_lengths = draw(st.lists(st.integers(1, 40), max_size=60))
    overlong = draw(st.sampled_from(["error", "drop", "truncate"]))
    edges = set(draw(st.lists(st.integers(1, 40), min_size=1, max_size=4)))
    if overlong == "error":
        edges.add(40)
    return {
        "lengths": given_lengths,
        "buckets": [(draw(st.integers(1, 4)), edge) for edge in sorted(edges)],
        "num_microbatches": draw(st.integers(1, 3)),
        "max_waiting": draw(st.one_of(st.none(), st.integers(1, 12))),
        "shuffle_buffer": draw(st.one_of(st.none(), st.integers(1, 12), st.just(1000))),
        "seed": draw(seeds),
        "epoch": draw(seeds),
        "overlong": overlong,
    }


@st.composite
def estimated_arguments(draw):
    """Draw a stream that chooses its own buckets; the first ones say little about the rest."""
    multiple = draw(st.sampled_from([1, 1, 2, 4]))
    max_length = draw(st.one_of(st.none(), st.integers(1, 40)))
    top = slow.round_up(12 if max_length is None else max_length, multiple)
    drawn = {
        "lengths": draw(st.lists(st.integers(1, 12), min_size=1, max_size=40)),
        "max_tokens": draw(st.integers(top, 5 * top)),
        "num_estimate": draw(st.integers(1, 12)),
        "max_shapes": draw(st.integers(1, 4)),
        "max_length": max_length,
        "num_microbatches": draw(st.integers(1, 3)),
        "row_multiple": draw(st.integers(1, 3)),
        "length_multiple": multiple,
    }
    if draw(st.booleans()):
        drawn["max_sequences"] = draw(st.sampled_from([1, 2, 5]))
    if draw(st.booleans()):
        drawn |= {"cost": draw(st.sampled_from([dyadic_cost, stepped_cost]))}
        drawn |= {"compile_seconds": draw(st.sampled_from([None, 0.25, 4.0, 40.0]))}
    if max_length is not None and draw(st.booleans()):
        given_lengths = sorted({max(1, max_length // 2), max_length // multiple * multiple or 1})
        strategies = ["pad_to_max", "powers_of_two", "geometric", "quantile", "equal_tokens", given_lengths[:1]]
        drawn["strategy"] = draw(st.sampled_from(strategies))
    return drawn


def read(package, arguments):
    """All of a stream: its buckets, steps and counts."""
    steps = package.stream_batches(**(arguments | {"lengths": iter(arguments["lengths"])}))
    assert isinstance(steps, Iterator)
    buckets, found = [tuple(bucket) for bucket in steps.buckets.shapes], list(steps)
    assert all(step.ids.dtype == step.lengths.dtype == np.int64 for step in found)
    assert next(steps, None) is None
    counts = steps.num_read, steps.num_dropped, steps.num_truncated
    of_steps = [(step.bucket_index, tuple(step.bucket), step.ids.tolist(), step.lengths.tolist()) for step in found]
    return buckets, of_steps, counts


@moderate
@given(arguments=stream_arguments())
def test_both_stream_alike(arguments):
    """Step by step; the counts at the end."""
    one, other = in_both(lambda package: read(package, arguments))
    assert one == other
    buckets, _, counts = one
    assert buckets == arguments["buckets"]
    too_long = sum(length > arguments["buckets"][-1][1] for length in arguments["lengths"])
    dropped, truncated = (too_long * (arguments["overlong"] == word) for word in ("drop", "truncate"))
    assert counts == (len(arguments["lengths"]), dropped, truncated)


@moderate
@given(arguments=estimated_arguments())
def test_both_choose_buckets_alike(arguments):
    """The lengths that make_buckets finds for the first samples, as many rows as the budget holds."""
    one, other = in_both(lambda package: read(package, arguments | {"overlong": "truncate"}))
    assert one == other


@moderate
@given(arguments=stream_arguments(), data=st.data())
def test_a_state_goes_on_after_any_step(package, arguments, data):
    """Through JSON, from the stream's beginning, to the same steps and counts."""
    steps = package.stream_batches(**arguments)
    whole = list(steps)
    num_taken = data.draw(st.integers(0, len(whole)))
    first = package.stream_batches(**arguments)
    list(itertools.islice(first, num_taken))
    state = json.loads(json.dumps(first.state()))
    resumed = package.stream_batches(arguments["lengths"], state=state)
    assert (resumed.num_read, resumed.num_dropped, resumed.num_truncated) == (
        first.num_read,
        first.num_dropped,
        first.num_truncated,
    )
    assert resumed.buckets == first.buckets
    # Resumed once more from where it stands, nothing is lost either.
    for stream in (package.stream_batches(arguments["lengths"], state=resumed.state()), resumed, first):
        rest = list(stream)
        assert len(rest) == len(whole) - num_taken
        for one, other in zip(rest, whole[num_taken:], strict=True):
            assert one.bucket_index == other.bucket_index
            assert np.array_equal(one.ids, other.ids)
            assert np.array_equal(one.lengths, other.lengths)
        assert stream.num_read == len(arguments["lengths"])
        assert (stream.num_dropped, stream.num_truncated) == (steps.num_dropped, steps.num_truncated)


def test_an_endless_stream_is_read_no_further_than_needed(package):
    """A step comes as soon as it is full."""
    drawn = []

    def lengths():
        for number in itertools.count():
            drawn.append(number)
            yield 1 + number % 7

    steps = package.stream_batches(lengths(), [(2, 3), (1, 7)])
    assert drawn == []
    assert next(steps).ids.tolist() == [[0, 1]]
    assert len(drawn) == 2
    assert next(steps).ids.tolist() == [[3]]
    chosen = package.stream_batches(lengths(), max_tokens=14, num_estimate=50)
    assert chosen.buckets.shapes[-1] == (2, 7)
    assert next(chosen).ids.min() >= 0


def test_a_shuffle_buffer_is_all_that_is_read_ahead(package):
    """For an endless stream; no sample comes before it can be in the buffer, and the order changes."""
    drawn = []

    def lengths():
        for number in itertools.count():
            drawn.append(number)
            yield 4

    steps = package.stream_batches(lengths(), [(8, 4)], shuffle_buffer=32, seed=1)
    ids = [i for step in itertools.islice(steps, 20) for i in step.ids[0].tolist()]
    assert len(drawn) == len(ids) + 31 == steps.num_read
    assert all(i < place + 32 for place, i in enumerate(ids))
    assert ids != sorted(ids)
    again = package.stream_batches(lengths(), [(8, 4)], shuffle_buffer=32, seed=1, epoch=1)
    assert ids != [i for step in itertools.islice(again, 20) for i in step.ids[0].tolist()]


def test_the_longest_bucket_holds_max_length(package):
    """Whatever the first samples are."""
    steps = package.stream_batches([2, 2, 9, 30], max_tokens=40, num_estimate=2, max_length=20, overlong="truncate")
    assert steps.buckets.shapes == ((20, 2), (2, 20))
    assert [(step.ids[0, :2].tolist(), step.lengths[0, :2].tolist()) for step in steps] == [
        ([2, 3], [9, 20]),
        ([0, 1], [2, 2]),
    ]
    with pytest.raises(ValueError, match=r"max_length.*\b20\b|\b20\b.*max_length"):
        package.stream_batches([2, 2], max_tokens=15, max_length=20)


@pytest.mark.parametrize(
    ("options", "num_shapes", "most"),
    [
        ({"max_shapes": 4}, 4, 1.33),
        ({}, 16, 1.25),
        ({"max_shapes": 2}, 2, 2.0),
        ({"max_shapes": 4, "strategy": "quantile"}, 4, 1.4),
        ({"max_shapes": 4, "strategy": "geometric"}, 4, 1.7),
        ({"strategy": "powers_of_two"}, 7, 1.5),
        ({"strategy": [100, 200]}, 3, 1.6),
    ],
    ids=str,
)
def test_a_cap_far_above_the_first_samples_does_not_pad_them_to_it(package, options, num_shapes, most):
    """With 4 shapes 1.33 tokens with padding for each real one; in place of the last bucket they were 23.09."""
    lengths = np.random.default_rng(0).integers(5, 199, 15_000)
    steps = package.stream_batches(iter(lengths.tolist()), max_tokens=16_384, max_length=8192, **options)
    assert steps.buckets.shapes[-1] == (2, 8192)
    assert len(steps.buckets.shapes) == num_shapes
    assert sum(step.ids.size * step.bucket.length for step in steps) / lengths.sum() < most


def test_a_cap_that_no_shape_is_left_for_replaces_the_last_bucket(package):
    """With one shape; or where the samples of that bucket pay less for it than for one bucket fewer."""
    lengths = [1] * 50 + [9] * 50 + [20]
    assert package.stream_batches(lengths, max_tokens=48, max_length=24, max_shapes=1).buckets.shapes == ((2, 24),)
    three = package.stream_batches(lengths, max_tokens=48, max_length=24, max_shapes=3).buckets.shapes
    assert [bucket.length for bucket in three] == [1, 9, 24]


def test_overlong_and_broken_lengths_are_named(package):
    """By id, value and limit, when they are read."""
    steps = package.stream_batches([3, 2, 71, 1], [(2, 8)])
    assert next(steps).ids.tolist() == [[0, 1]]
    with pytest.raises(ValueError, match=offenders((2, 71), limit=8)) as raised:
        next(steps)
    assert "max_length=" in str(raised.value)
    for bad in (0, -3, 2.5, "7", None, True):
        steps = package.stream_batches([3, 2, bad, 1], [(2, 8)], overlong="truncate")
        next(steps)
        with pytest.raises(ValueError, match=r"\b2\b"):
            next(steps)
    with pytest.raises(ValueError, match=r"\b2\D+-3\b"):
        next(package.stream_batches([3, 2, -3, 1], max_tokens=10))


@pytest.mark.parametrize("num_taken", [0, 1, 2])
def test_a_second_pass_over_a_stream_at_its_end_is_refused(package, num_taken):
    stream = package.stream_batches([3, 1, 2], [(1, 4)])
    assert len(list(itertools.islice(stream, num_taken))) == num_taken
    assert len(list(stream)) == 3 - num_taken
    with pytest.raises(ValueError, match=r"this stream is at its end.*call stream_batches again"):
        list(stream)
    assert next(stream, None) is None
    assert list(package.stream_batches([3, 1, 2], [(1, 4)], state=stream.state())) == []


def test_a_stream_without_samples_has_no_steps(package):
    """Given buckets; without them there is nothing to choose them by."""
    assert list(package.stream_batches([], [(2, 4)])) == []
    with pytest.raises(ValueError, match=r"length|stream"):
        package.stream_batches(iter([]), max_tokens=10)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"buckets": None}, "max_tokens"),
        ({"max_tokens": 10}, "max_tokens"),
        ({"buckets": []}, "bucket"),
        ({"buckets": [(1, 9, 9)]}, "9"),
        ({"num_microbatches": 0}, "num_microbatches"),
        ({"overlong": "ignore"}, "ignore"),
        ({"max_waiting": -1}, "max_waiting"),
        ({"shuffle_buffer": 0}, "shuffle_buffer"),
        ({"shuffle_buffer": 3, "seed": -1}, "seed"),
        ({"buckets": None, "max_tokens": 0}, "max_tokens"),
        ({"buckets": None, "max_tokens": 10, "num_estimate": 0}, "num_estimate"),
        ({"buckets": None, "max_tokens": 10, "max_sequences": 0}, "max_sequences"),
        ({"buckets": None, "max_tokens": 7}, "7"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_by_name(package, arguments, named):
    """Everything outside its range is a ValueError that says what."""
    valid = {"lengths": [3, 5, 8], "buckets": [(2, 8)]}
    with pytest.raises(ValueError, match=named):
        package.stream_batches(**(valid | arguments))


def test_what_is_no_state_is_refused(package):
    """Each key missing, each value of another type, and things that are no state at all."""
    lengths = [3, 5, 2, 7, 4, 1]
    steps = package.stream_batches(lengths, [(2, 4), (2, 8)], num_microbatches=2)
    next(steps)
    state = json.loads(json.dumps(steps.state()))
    assert next(package.stream_batches(lengths, state=state)).ids.shape == (2, 2)
    broken = [{}, {"step": 3}, [1, 2], "state", 7]
    broken += [{key: value for key, value in state.items() if key != name} for name in state]
    broken += [state | {name: {"a": "b"}} for name in state]
    for other in broken:
        with pytest.raises(ValueError, match="state"):
            package.stream_batches(lengths, state=other)
