"""Reports and pages show the figures of before, in whatever words, order and company."""

import collections

import pytest

from . import figures
from .shorten import read

GOLDEN = read("figures")


@pytest.fixture(scope="module")
def shown():
    return figures.recorded()


@pytest.mark.parametrize("name", GOLDEN)
def test_every_row_of_figures_is_still_shown(shown, name):
    expected, found = (collections.Counter(map(tuple, rows[name])) for rows in (GOLDEN, shown))
    assert not expected - found
