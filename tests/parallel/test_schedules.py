"""Pipeline schedules: every action once, after what it needs; the figures of the papers; buffers that suffice."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvarlen import UserError
from jvarlen.parallel import make_schedule

MODES = ("synchronous", "mpmd")
SIZES = [(1, 1), (1, 4), (2, 3), (4, 8), (4, 2), (3, 3), (8, 20), (5, 1)]


@st.composite
def schedules(draw):
    s, m, more = draw(st.integers(1, 6)), draw(st.integers(1, 9)), draw(st.integers(1, 4))
    simple = st.sampled_from(["gpipe", "1f1b", "eager_1f1b", "zero_bubble"]).map(lambda name: make_schedule(name, s, m))
    return draw(simple) if draw(st.booleans()) else make_schedule("interleaved", s, s * draw(st.integers(1, 3)), more)


def named_actions(schedule):
    """For each stage, (kind, part of the model, microbatch) in order."""
    return [
        [("FBW"[kind], virtual * schedule.num_stages + s, m) for kind, m, virtual in of_stage.tolist()]
        for s, of_stage in enumerate(schedule.actions)
    ]


def needed_by(action, num_parts):
    """What must have ended before an action starts."""
    kind, part, m = action
    if kind == "F":
        return [("F", part - 1, m)] * (part > 0)
    if kind == "W":
        return [("B", part, m)]
    return [("F", part, m)] + [("B", part + 1, m)] * (part + 1 < num_parts)


@settings(max_examples=60, deadline=None)
@given(schedules(), st.integers(0, 2**32 - 1))
def test_every_action_happens_once_and_after_what_it_needs(schedule, seed):
    orders = named_actions(schedule)
    num_parts = schedule.num_stages * schedule.num_virtual
    every = {
        (kind, part, m)
        for kind in schedule.kinds
        for part in range(num_parts)
        for m in range(schedule.num_microbatches)
    }
    assert sum(map(len, orders)) == len(every)
    assert {action for of_stage in orders for action in of_stage} == every
    rng = np.random.default_rng(seed)
    costs = {kind: rng.integers(0, 9, schedule.num_stages) for kind in schedule.kinds}
    for mode in MODES:
        timeline = schedule.simulate(costs, mode)
        start, end = (
            {action: times[s, a] for s, of_stage in enumerate(orders) for a, action in enumerate(of_stage)}
            for times in (timeline.starts, timeline.ends)
        )
        for action in every:
            assert all(end[needed] <= start[action] for needed in needed_by(action, num_parts))
            assert end[action] - start[action] == costs[action[0]][action[1] % schedule.num_stages]
        assert (timeline.ends[:, :-1] <= timeline.starts[:, 1:]).all()
        assert timeline.makespan >= timeline.ends.max()
        if mode == "mpmd":  # no action could start earlier
            assert timeline.makespan == timeline.ends.max()
            for s, of_stage in enumerate(orders):
                for a, action in enumerate(of_stage):
                    causes = [end[needed] for needed in needed_by(action, num_parts)]
                    assert start[action] == max([0, *causes, *timeline.ends[s, :a][-1:]])
    synchronous, mpmd = (schedule.simulate(costs, mode).makespan for mode in MODES)
    assert mpmd <= synchronous


def run_tables(schedule, tables):
    """Runs the tables with names in place of arrays, and asserts that each action reads what it needs."""
    num_stages = schedule.num_stages
    num_parts = num_stages * schedule.num_virtual
    activations, last_outputs = (
        [[None] * size for _ in range(num_stages)] for size in (tables.num_activations, tables.num_outputs)
    )
    held = {"F": [None] * num_stages, "B": [None] * num_stages}  # what arrived, and then what the action made of it
    done = []
    for t in range(len(tables.kind)):
        for s in range(num_stages):
            kind, m, virtual = (int(each[t, s]) for each in (tables.kind, tables.microbatch, tables.virtual))
            kept, of_output = (int(each[t, s]) for each in (tables.activation_slot, tables.output_slot))
            if kind < 0:
                assert (m, virtual, kept, of_output) == (-1,) * 4
                continue
            part = virtual * num_stages + s
            assert (of_output >= 0) == (part == num_parts - 1 and kind < 2)
            done.append((kind, part, m))
            if kind == 0:
                assert part == 0 or held["F"][s] == ("F", part - 1, m)
                held["F"][s] = ("F", part, m)
                assert activations[s][kept] is None
                activations[s][kept] = ("kept", part, m)
                if of_output >= 0:
                    assert last_outputs[s][of_output] is None
                    last_outputs[s][of_output] = ("F", part, m)
            else:
                assert activations[s][kept] == ("kept", part, m)
                if of_output >= 0:
                    assert last_outputs[s][of_output] == ("F", part, m)
                    last_outputs[s][of_output] = None
                if kind == len(schedule.kinds) - 1:
                    activations[s][kept] = None
                if kind == 1:
                    assert part == num_parts - 1 or held["B"][s] == ("B", part + 1, m)
                    held["B"][s] = ("B", part, m)
        for kind, (name, step, arriving) in enumerate(
            (("F", 1, tables.arriving_input), ("B", -1, tables.arriving_gradient))
        ):
            sent = [held[name][(s - step) % num_stages] for s in range(num_stages)]
            for s in np.flatnonzero(arriving[t] >= 0).tolist():
                source = (s - step) % num_stages
                assert tables.kind[t, source] == kind, "what arrives is the result of this tick"
                assert sent[s][2] == arriving[t, s]
                held[name][s] = sent[s]
    assert len(done) == len(set(done)) == schedule.actions[..., 0].size
    assert not any(any(slots) for buffer in (activations, last_outputs) for slots in buffer)


@settings(max_examples=40, deadline=None)
@given(schedules())
def test_a_program_finds_in_its_buffers_what_it_needs(schedule):
    tables = schedule.tables()
    run_tables(schedule, tables)
    assert tables.num_activations == schedule.simulate(dict.fromkeys(schedule.kinds, 1)).peak_activations.max()
    assert all(values.dtype == np.int32 for values in vars(tables).values() if np.ndim(values))


@pytest.mark.parametrize("name", ["activation_slot", "output_slot"])
def test_slots_that_are_shared_too_early_are_found(name):
    """By the program of the test above."""
    schedule = make_schedule("gpipe", 2, 4)
    tables = schedule.tables()
    shared = np.minimum(getattr(tables, name), 0)
    assert (shared != getattr(tables, name)).any()
    with pytest.raises(AssertionError):
        run_tables(schedule, dataclasses.replace(tables, **{name: shared}))


@pytest.mark.parametrize(("s", "m"), SIZES)
def test_bubbles_and_activations_are_those_of_the_papers(s, m):
    bubble, stages = (s - 1) / (m + s - 1), np.arange(s)
    classic = make_schedule("1f1b", s, m).simulate({"F": 1, "B": 2}, "mpmd")
    assert classic.bubble == bubble
    assert classic.peak_activations.tolist() == np.minimum(m, s - stages).tolist()
    for mode in MODES:
        simple, eager = (make_schedule(name, s, m).simulate({"F": 1, "B": 2}, mode) for name in ("gpipe", "eager_1f1b"))
        assert simple.bubble == eager.bubble == bubble
        assert simple.makespan == eager.makespan == (m + s - 1) * 3
        assert simple.peak_activations.tolist() == [m] * s
        assert eager.peak_activations.tolist() == np.minimum(m, 2 * (s - stages) - 1).tolist()


@pytest.mark.parametrize(
    ("s", "m", "v"), [(1, 1, 1), (1, 3, 2), (2, 4, 3), (3, 9, 4), (4, 4, 2), (4, 8, 2), (8, 16, 4)]
)
def test_interleaving_makes_the_bubble_v_times_smaller(s, m, v):
    for mode in MODES:
        timeline = make_schedule("interleaved", s, m, v).simulate({"F": 1, "B": 2}, mode)
        assert timeline.bubble == (s - 1) / (v * m + s - 1)
        at_most = 2 * (s - np.arange(s) - 1) + (v - 1) * s + 1
        assert timeline.peak_activations.tolist() == np.minimum(m * v, at_most).tolist()


@pytest.mark.parametrize(("s", "m"), [(1, 1), (1, 5), (2, 2), (2, 7), (4, 4), (4, 8), (8, 8), (8, 20)])
def test_weight_gradients_fill_bubbles(s, m):
    for mode in ("synchronous", "mpmd"):
        timeline = make_schedule("zero_bubble", s, m).simulate({"F": 1, "B": 1, "W": 1}, mode)
        assert timeline.makespan == 3 * m + s - 1
        assert timeline.bubble == (s - 1) / (3 * m + s - 1)
        assert timeline.peak_activations.tolist() == [s] * s  # of 1F1B, the first stage holds as many
    few = make_schedule("zero_bubble", 4, 2).simulate({"F": 1, "B": 1, "W": 1})
    assert few.makespan == 3 * 2 + 4 - 1 + 2
    assert few.peak_activations.tolist() == [2] * 4


def test_synchronous_ticks_take_as_long_as_the_slowest_stage_of_each_tick():
    costs = {"F": 15, "B": 30}
    makespans = [make_schedule(name, 4, 8).simulate(costs).makespan for name in ("gpipe", "eager_1f1b", "1f1b")]
    assert makespans == [495, 495, 600]
    assert make_schedule("interleaved", 4, 8, 2).simulate({"F": 7.5, "B": 15}).makespan == 427.5


def test_costs_differ_by_stage():
    per_stage = {"F": [1, 2, 1], "B": np.array([2, 4, 2])}
    timeline = make_schedule("gpipe", 3, 4).simulate(per_stage, "mpmd")
    assert timeline.makespan == (1 + 4 * 2 + 1) + (2 + 4 * 4 + 2)
    durations = timeline.ends - timeline.starts
    assert durations.sum(axis=1).tolist() == [12, 24, 12]
    assert timeline.bubble == (3 * timeline.makespan - 48) / (3 * timeline.makespan)


def test_arrays_cannot_be_changed():
    for name in ("gpipe", "eager_1f1b"):
        for array in (make_schedule(name, 2, 2).actions, make_schedule(name, 2, 2).ticks):
            assert array.dtype == np.int32
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0


def test_bad_input_is_named():
    for name in ("gpipe", "1f1b", "eager_1f1b", "zero_bubble"):
        with pytest.raises(UserError, match=r"at least 1 .*: num_stages \(0\), num_microbatches \(-1\)"):
            make_schedule(name, 0, -1)
    with pytest.raises(UserError, match=r"at least 1 .*: num_virtual \(0\)"):
        make_schedule("interleaved", 2, 2, 0)
    with pytest.raises(UserError, match=r"multiple of num_stages \(4\) microbatches, not num_microbatches \(6\)"):
        make_schedule("interleaved", 4, 6, 2)
    with pytest.raises(UserError, match=r"costs of gpipe must be of the kinds F, B, not \['B', 'F', 'W'\]"):
        make_schedule("gpipe", 2, 2).simulate({"F": 1, "B": 1, "W": 1})
    with pytest.raises(UserError, match=r"of zero_bubble must be of the kinds F, B, W, not \['F'\]"):
        make_schedule("zero_bubble", 2, 2).simulate({"F": 1})
    with pytest.raises(ValueError, match=r"\(2,\)"):
        make_schedule("gpipe", 2, 2).simulate({"F": 1, "B": [1, 2, 3]})
    with pytest.raises(UserError, match=r"mode \('fast'\) must be one of 'synchronous', 'mpmd'"):
        make_schedule("gpipe", 2, 2).simulate({"F": 1, "B": 1}, "fast")
