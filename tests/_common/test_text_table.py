"""Text tables: every cell is there, and the cells of a column end or begin at the same place."""

import re

from hypothesis import given
from hypothesis import strategies as st

from jvarlen._common.terminal import text_table

CELLS = st.text("abc1,", min_size=1, max_size=9)


@given(st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(CELLS, min_size=n, max_size=n), min_size=1, max_size=6)))
def test_the_cells_of_a_column_stand_below_each_other(rows):
    lines = text_table(rows).splitlines()
    assert [line.split() for line in lines] == rows
    assert all(line.startswith(row[0]) for line, row in zip(lines, rows, strict=True))
    assert len({len(line) for line in lines}) == 1 or len(rows[0]) == 1
    ends = {tuple(match.end() for match in re.finditer(r"\S+", line))[1:] for line in lines}
    assert len(ends) == 1


def test_columns_are_as_wide_as_asked_for_or_as_their_widest_cell():
    assert text_table([["a", "b"], ["12345", "6"]], align=">", least_widths=(3, 4), gap=" ") == "    a    b\n12345    6"


def test_a_short_row_ends_in_words_and_a_long_one_goes_on():
    rows = [["name", "n", "m"], ["x", "1", "2", "← best"], ["y", "not possible"]]
    assert text_table(rows) == "name  n  m\nx     1  2  ← best\ny     not possible"
