"""The most rows that fit: found in a few tries, whatever the shape of what they need."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jvarlen.compiling.measure import most_rows


@given(
    constant=st.integers(0, 10**7),
    per_row=st.integers(1, 10**6),
    jump=st.integers(0, 10**5),
    limit=st.integers(0, 10**9),
    start=st.integers(1, 300),
    multiple=st.sampled_from([1, 3, 8]),
    max_rows=st.sampled_from([1, 7, 100, 2**24]),
)
def test_it_fits_and_the_next_does_not(constant, per_row, jump, limit, start, multiple, max_rows):
    tried = []

    def bytes_of(rows):
        tried.append(rows)
        return constant + per_row * rows + jump * (rows // 7)

    rows = most_rows(bytes_of, limit, start=start, multiple=multiple, max_rows=max_rows)
    assert rows % multiple == 0
    assert rows == 0 or bytes_of(rows) <= limit
    assert rows + multiple > max_rows or bytes_of(rows + multiple) > limit
    assert all(0 < r <= max_rows and r % multiple == 0 for r in tried)
    assert len(tried) - 2 <= 6 + 24


@pytest.mark.parametrize("bytes_at", [lambda rows: 7, lambda rows: 1000 * (rows // 64), lambda rows: 10**9])
def test_bytes_that_do_not_rise_with_every_row_lead_to_an_end_soon(bytes_at):
    tried = []

    def bytes_of(rows):
        tried.append(rows)
        return bytes_at(rows)

    rows = most_rows(bytes_of, 5_000, start=64, max_rows=2**16)
    assert rows == {7: 2**16, 10**9: 0}.get(bytes_at(1), 6 * 64 - 1)
    assert len(tried) <= 25


@pytest.mark.parametrize("start", [1, 64, 5000])
def test_a_straight_line_takes_few_tries(start):
    tried = []

    def bytes_of(rows):
        tried.append(rows)
        return 5_000_000 + 40_000 * rows

    assert most_rows(bytes_of, 100_000_000, start=start, max_rows=2**24) == 2375
    assert len(tried) <= 5
