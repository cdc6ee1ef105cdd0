"""The bookkeeping of asynchronous runs: bounds hold and runs end, whatever the workers' speeds."""

import heapq
import itertools

from hypothesis import given
from hypothesis import strategies as st

from jvarlen.experimental.asynchronous.train import Part, StalenessSchedule


def simulate(schedule, seconds, deaths=(), last_opening=None):
    """Workers that take these seconds a microbatch; the n-th microbatches handed out in `deaths` are lost.

    After `last_opening` updates no step is opened.

    Returns the updates, (step, versions), and the microbatches whose gradients came.
    """
    updates, arrived = [], []
    idle, busy = list(range(len(seconds))), []
    now, numbers = 0.0, itertools.count()
    while not schedule.is_done:
        while idle and (part := schedule.next_part()) is not None:
            worker = idle.pop(0)
            heapq.heappush(busy, (now + seconds[worker], next(numbers), worker, part))
        now, number, worker, part = heapq.heappop(busy)  # fails where nothing goes on
        idle.append(worker)
        if number in deaths:
            schedule.lose(part)
            continue
        arrived.append(part)
        schedule.arrive(part)
        while (applied := schedule.next_update()) is not None:
            updates.append(applied)
        if last_opening is not None and len(updates) >= last_opening:
            schedule.open_no_more()
    return updates, arrived


@given(
    st.integers(0, 12),
    st.integers(1, 4),
    st.none() | st.integers(0, 5),
    st.lists(st.integers(1, 20), min_size=1, max_size=6),
    st.sets(st.integers(0, 30), max_size=5),
)
def test_no_gradient_is_staler_than_the_bound_and_every_microbatch_comes_once(steps, m, bound, seconds, deaths):
    schedule = StalenessSchedule(range(3, 3 + steps), m, bound)
    updates, arrived = simulate(schedule, seconds, deaths)
    assert sorted(arrived) == [Part(3 + step, i) for step in range(steps) for i in range(m)]
    assert sorted(step for step, _ in updates) == list(range(3, 3 + steps))
    for update, (_, versions) in enumerate(updates):
        assert len(versions) == m
        assert all(0 <= update - version <= (steps if bound is None else bound) for version in versions)


@given(
    st.integers(0, 6),
    st.integers(1, 4),
    st.none() | st.integers(0, 5),
    st.lists(st.integers(1, 20), min_size=1, max_size=6),
    st.sets(st.integers(0, 30), max_size=5),
)
def test_a_run_that_opens_no_more_steps_ends_with_the_first_ones(last_opening, m, bound, seconds, deaths):
    schedule = StalenessSchedule(range(3, 15), m, bound)
    updates, arrived = simulate(schedule, seconds, deaths, last_opening)
    assert sorted(step for step, _ in updates) == list(range(3, 3 + len(updates)))
    assert len(arrived) == m * len(updates)
    assert last_opening <= len(updates) <= last_opening + m * len(seconds)  # beside updates that come at once
