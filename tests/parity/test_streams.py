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
    """Draw a stream that ends, with given buckets, of samples or pairs, padded or packed."""
    is_packed, is_pairs = draw(st.booleans()), draw(st.booleans())
    lengths = st.integers(1, 40) if not is_pairs else st.tuples(st.integers(1, 40), st.integers(0, 40))
    rules = ["error", "drop", "truncate", "truncate_start", "truncate_random"]
    overlong = draw(st.sampled_from(rules[: 2 if is_pairs and not is_packed else None]))
    ends = set(draw(st.lists(st.integers(1, 40), min_size=1, max_size=4)))
    if overlong == "error":
        ends.add(40)
    shapes = [(draw(st.integers(1, 4)), end) for end in sorted(ends)]
    if is_pairs:
        shapes = [(rows, end, 40 if overlong == "error" else draw(st.integers(1, 40))) for rows, end in shapes]
    drawn = {
        "lengths": draw(st.lists(lengths, max_size=60)),
        "buckets": shapes[-1:] if is_packed and is_pairs else shapes,
        "num_microbatches": draw(st.integers(1, 3)),
        "max_waiting": draw(st.one_of(st.none(), st.integers(1, 12))),
        "shuffle_buffer": draw(st.one_of(st.none(), st.integers(1, 12), st.just(1000))),
        "seed": draw(seeds),
        "epoch": draw(seeds),
        "overlong": overlong,
    }
    return drawn | ({"packing": "best_fit", "samples_per_row": draw(st.integers(1, 5))} if is_packed else {})


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
    for step in found:
        if (whole := getattr(step, "whole_lengths", None)) is not None:  # of jvarlen, which loads streams
            is_sample = step.ids >= 0
            assert np.array_equal(whole[is_sample], np.array(arguments["lengths"])[step.ids[is_sample]])
    of_steps = [
        (step.bucket_index, tuple(step.bucket), *(None if each is None else each.tolist() for each in step[2:5]))
        for step in found
    ]
    return buckets, of_steps, counts


def cut(length, bucket):
    """The lengths of a sample, each at most that of a bucket."""
    lengths = length if isinstance(length, tuple) else (length,)
    return tuple(map(min, lengths, bucket[1:]))


def fits(length, bucket):
    return cut(length, bucket) == (length if isinstance(length, tuple) else (length,))


@moderate
@given(arguments=stream_arguments())
def test_both_stream_alike(arguments):
    """Step by step; the counts at the end."""
    one, other = in_both(lambda package: read(package, arguments))
    assert one == other
    buckets, steps, counts = one
    lengths, last = arguments["lengths"], arguments["buckets"][-1]
    assert buckets == arguments["buckets"]
    is_long = [not any(fits(length, bucket) for bucket in buckets) for length in lengths]
    dropped, truncated = (sum(is_long) * arguments["overlong"].startswith(word) for word in ("drop", "truncate"))
    assert counts == (len(lengths), dropped, truncated)
    # Every sample once, with its length; no row is too long or holds too many; padding comes last.
    held = []
    for k, bucket, ids, cut_lengths, _ in steps:
        ids, cut_lengths = np.array(ids), np.array(cut_lengths)
        ids = ids if "packing" in arguments else ids[..., None]
        cut_lengths = cut_lengths.reshape(*ids.shape, len(bucket) - 1)
        assert bucket == buckets[k]
        assert ids.shape == (
            arguments["num_microbatches"],
            bucket[0],
            min(arguments.get("samples_per_row", 1), bucket[1]),
        )
        assert (cut_lengths.sum(axis=2) <= bucket[1:]).all()
        assert (np.diff((ids >= 0).astype(int), axis=2) <= 0).all()
        is_filled = (ids >= 0).any(axis=2).swapaxes(0, 1).ravel()
        assert (np.diff(is_filled.astype(int)) <= 0).all()
        assert (cut_lengths[ids < 0] == 0).all()
        for i, each in zip(ids[ids >= 0].tolist(), cut_lengths[ids >= 0].tolist(), strict=True):
            assert tuple(each) == cut(lengths[i], last if is_long[i] else (0, *(41 for _ in each)))
            held.append(i)
    assert sorted(held) == [i for i in range(len(lengths)) if not (is_long[i] and dropped)]


def packed_by_hand(lengths, shapes, num_microbatches, most, max_waiting):
    """The rule for packed rows, as the contract states it."""
    capacities, held, steps = [num_microbatches * rows * length for rows, length in shapes], [], []
    coming = list(enumerate(lengths))
    while held or coming:
        while coming and (
            len(held) <= max_waiting if max_waiting else sum(length for _, length in held) < 4 * max(capacities)
        ):
            held.append(coming.pop(0))
        fill = [
            sum(n for _, n in held if n <= end) / capacity
            for capacity, (_, end) in zip(capacities, shapes, strict=True)
        ]
        k = max((k for k in range(len(shapes)) if held[0][1] <= shapes[k][1]), key=lambda k: (min(fill[k], 2), -k))
        rows = []
        while len(rows) < num_microbatches * shapes[k][0] and any(length <= shapes[k][1] for _, length in held):
            row = [next(sample for sample in held if sample[1] <= shapes[k][1])]
            while True:
                left = [sample for sample in held if sample not in row]
                fitting = [s for s in left if s[1] <= shapes[k][1] - sum(length for _, length in row)]
                if not fitting or len(row) == min(most, shapes[k][1]):
                    break
                row.append(max(fitting, key=lambda sample: sample[1]))
            held = [sample for sample in held if sample not in row]
            rows.append([i for i, _ in row])
        steps.append((k, rows))
    return steps


@moderate
@given(
    lengths=st.lists(st.integers(1, 20), max_size=60),
    ends=st.sets(st.integers(1, 19), max_size=3),
    num_microbatches=st.integers(1, 3),
    most=st.integers(1, 6),
    max_waiting=st.one_of(st.none(), st.integers(1, 30)),
    data=st.data(),
)
def test_packed_steps_are_those_of_the_rule_by_hand(package, lengths, ends, num_microbatches, most, max_waiting, data):
    """In the order of the steps, of their rows and of the samples in them; and no more samples wait than may."""
    shapes = [(data.draw(st.integers(1, 4)), end) for end in [*sorted(ends), 20]]
    options = {"num_microbatches": num_microbatches, "max_waiting": max_waiting}
    stream = package.stream_batches(lengths, shapes, packing="best_fit", samples_per_row=most, **options)
    found, num_given = [], 0
    for step in stream:
        rows = step.ids.swapaxes(0, 1).reshape(-1, step.ids.shape[2])
        found.append((step.bucket_index, [row[row >= 0].tolist() for row in rows if row[0] >= 0]))
        num_given += (step.ids >= 0).sum()
        assert stream.num_read - num_given <= (max_waiting or np.inf)
    assert found == packed_by_hand(lengths, shapes, num_microbatches, most, max_waiting)


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
            assert np.array_equal(one.starts, other.starts)
        assert stream.num_read == len(arguments["lengths"])
        assert (stream.num_dropped, stream.num_truncated) == (steps.num_dropped, steps.num_truncated)


@moderate
@given(arguments=estimated_arguments(), target=st.integers(0, 12), most=st.one_of(st.none(), st.integers(1, 4)))
def test_both_choose_packed_rows_and_buckets_of_pairs_alike(arguments, target, most):
    """Those of the first samples, as many rows as the budget holds."""
    arguments = {name: value for name, value in arguments.items() if name != "strategy"}
    lengths, max_length = arguments["lengths"], arguments["max_length"] or 40
    packed = {"packing": "best_fit", "samples_per_row": most, "overlong": "truncate"}
    one, other = in_both(lambda package: read_or_refuse(package, arguments | packed))
    assert one == other
    pairs = [(length, min(target + i % 5, max_length)) for i, length in enumerate(lengths)]
    unfit = {"cost", "compile_seconds"}
    arguments = {name: value for name, value in arguments.items() if name not in unfit}
    arguments |= {"lengths": pairs, "max_tokens": 2 * arguments["max_tokens"] + 60}
    for options in (packed, {"overlong": "drop"}):
        one, other = in_both(lambda package: read_or_refuse(package, arguments | options))  # noqa: B023
        assert one == other


def read_or_refuse(package, arguments):
    """What `read` gives; True where there are no such shapes."""
    try:
        return read(package, arguments)
    except ValueError:
        return True


def test_a_packed_stream_has_hardly_more_padding_than_the_packed_plan(package):
    """At most 2 points; a padded one has many."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.5, 1.0, 3000), 1, 2048).astype(int)
    plan = package.make_plan(lengths, max_tokens=8192, packing="best_fit")

    def padding(**options):
        stream = package.stream_batches(iter(lengths.tolist()), max_tokens=8192, max_length=2048, **options)
        return 1 - lengths.sum() / sum(
            stream.buckets.num_microbatches * step.bucket.rows * step.bucket.length for step in stream
        )

    assert padding(packing="best_fit") <= plan.padding + 0.02
    assert padding() > 0.1


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
    for bad in ((0, 3), (3, -1), (3, 2.5), (3, True), (3,), (3, 4, 5), 7, None, "ab"):
        steps = package.stream_batches([(3, 0), [2, 8], bad], [(2, 8, 8)])
        assert next(steps).lengths.tolist() == [[[3, 0], [2, 8]]]
        with pytest.raises(ValueError, match=r"id 2\b"):
            next(steps)
    for options in ({}, {"packing": "best_fit", "samples_per_row": 2}):
        with pytest.raises(ValueError, match=r"id 1: [(\[]3, 9[)\]].*8"):
            list(package.stream_batches([(3, 8), (3, 9)], [(2, 8, 8)], **options))


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
        ({"num_microbatches": 0}, "num_microbatches"),
        ({"overlong": "ignore"}, "ignore"),
        ({"max_waiting": -1}, "max_waiting"),
        ({"shuffle_buffer": 0}, "shuffle_buffer"),
        ({"shuffle_buffer": 3, "seed": -1}, "seed"),
        ({"buckets": None, "max_tokens": 0}, "max_tokens"),
        ({"buckets": None, "max_tokens": 10, "num_estimate": 0}, "num_estimate"),
        ({"buckets": None, "max_tokens": 10, "max_sequences": 0}, "max_sequences"),
        ({"buckets": None, "max_tokens": 7}, "7"),
        ({"packing": "wrapped"}, "wrapped"),
        ({"samples_per_row": 2}, "samples_per_row"),
        ({"packing": "best_fit"}, "samples_per_row"),
        ({"packing": "best_fit", "samples_per_row": 0}, "samples_per_row"),
        ({"packing": "best_fit", "samples_per_row": [1, 2]}, "samples_per_row"),
        ({"packing": "best_fit", "samples_per_row": 1, "buckets": [(1, 2**61)]}, "tokens"),
        ({"packing": "best_fit", "samples_per_row": 1, "buckets": [(1, 8, 8), (1, 9, 9)]}, "pairs"),
        ({"packing": "best_fit", "samples_per_row": 1, "buckets": [(1, 8, 8)], "size": "larger"}, "larger"),
        ({"buckets": [(1, 8, 8)], "overlong": "truncate"}, "truncate"),
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
    packed = package.stream_batches(lengths, [(1, 9)], packing="best_fit", samples_per_row=3).state()
    assert next(package.stream_batches(lengths, state=packed)).ids.shape == (1, 1, 3)
    broken = [{}, {"step": 3}, [1, 2], "state", 7]
    broken += [{key: value for key, value in state.items() if key != name} for name in state]
    broken += [state | {name: {"a": "b"}} for name in state]
    for other in broken:
        with pytest.raises(ValueError, match="state"):
            package.stream_batches(lengths, state=other)
