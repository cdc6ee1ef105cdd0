"""Streams: every sample once, in static shapes, the same in every process and after every interruption."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvarlen import make_plan
from jvarlen.planning import streams
from jvarlen.planning.streams import stream_batches

BUCKETS = [(3, 4), (2, 9), (1, 20)]
LONGEST = 20


def plain(step):
    return step.bucket_index, tuple(step.bucket), step.ids.tolist(), step.lengths.tolist()


@settings(deadline=None)  # planning compiles on its first call
@given(st.lists(st.integers(1, LONGEST), min_size=1, max_size=60), st.integers(1, 3))
def test_without_a_limit_on_waiting_a_stream_is_the_plan_in_dataset_order(lengths, num_microbatches):
    plan = make_plan(lengths, BUCKETS, order="dataset", num_microbatches=num_microbatches)
    steps = list(stream_batches(lengths, BUCKETS, num_microbatches=num_microbatches))
    assert [step.bucket_index for step in steps] == plan.step_bucket.tolist()
    assert [step.ids.tolist() for step in steps] == [plan.rows(t).tolist() for t in range(plan.num_steps)]


def test_a_state_does_not_change_with_its_stream():
    lengths = [20, 1, 5, 20, 1]
    batches = stream_batches(lengths, BUCKETS)
    for _ in range(2):
        next(batches)
    state = batches.state()
    before = json.dumps(state)
    assert state["waiting_lengths"] == [[1], [5], []]
    list(batches)
    assert json.dumps(state) == before
    list(stream_batches(lengths, state=state))
    assert json.dumps(state) == before


def test_a_stream_that_broke_off_goes_on_where_it_broke():
    def broken():
        yield from [1, 5, 1]
        raise OSError("the connection was lost")

    whole = [1, 5, 1, 1, 6, 20]
    batches = stream_batches(broken(), BUCKETS)
    with pytest.raises(OSError, match="lost"):
        next(batches)
    assert batches.num_read == 3
    resumed = stream_batches(whole, state=batches.state())
    assert [plain(step) for step in resumed] == [plain(step) for step in stream_batches(whole, BUCKETS)]


def test_arrays_lists_and_numpy_integers_are_the_same_stream(monkeypatch):
    monkeypatch.setattr(streams, "_LENGTHS_PER_SLICE", 7)
    lengths = np.random.default_rng(0).integers(1, 21, 100)
    expected = [plain(step) for step in stream_batches(lengths.tolist(), BUCKETS)]
    for same in (lengths, iter(lengths), lengths.astype(np.uint8)):
        steps = list(stream_batches(same, BUCKETS))
        assert [plain(step) for step in steps] == expected


LENGTHS = [1, 2, 20, 8, 30, 3, 4]


def state_in_the_middle():
    """After a step of id 2 and one of ids 0, 1 and 5: id 3 waits, 4 was dropped, 6 was not read."""
    batches = stream_batches(LENGTHS, BUCKETS, max_waiting=6, overlong="drop")
    next(batches)
    next(batches)
    return batches.state()


def test_a_state_of_another_version_or_with_more_is_refused():
    for changed, said in (({"version": 2}, "version 2"), ({"surplus": 1}, "surplus")):
        with pytest.raises(ValueError, match=f"not a state of a stream: .*{said}"):
            stream_batches(LENGTHS, state=state_in_the_middle() | changed)


def test_options_beside_a_state_are_those_of_the_state():
    state = state_in_the_middle()
    expected = [plain(step) for step in stream_batches(LENGTHS, state=state)]
    resumed = stream_batches(LENGTHS, max_tokens=7, num_microbatches=5, overlong="error", state=state)
    assert [plain(step) for step in resumed] == expected
    assert resumed.num_microbatches == 1


def test_a_state_of_another_stream_is_refused_where_it_shows():
    state = state_in_the_middle()
    with pytest.raises(ValueError, match=r"lengths differ: id 3: 7 \(was 8\)"):
        list(stream_batches([1, 2, 20, 7, 30, 3, 4], state=state))
    with pytest.raises(ValueError, match="ends before id 5, and the state has read 6 samples"):
        list(stream_batches(LENGTHS[:5], state=state))
    with pytest.raises(ValueError, match="ends before id 3, and the state has read 6 samples"):
        list(stream_batches(LENGTHS[:3], state=state))
