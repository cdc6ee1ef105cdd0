"""Held-out samples: a share that leaves a side empty is named, with shares that do not."""

import re

import pytest

from jvarlen import UserError
from jvarlen.data.split import split_held_out

SAMPLES = [f"sample {i}" for i in range(10)]


@pytest.mark.parametrize(
    ("fraction", "said"),
    [
        (1e-9, "leaves none of 10 samples to evaluate on: take a larger one, between"),
        (1 - 1e-9, "leaves none of 10 samples to train on: take a smaller one, between"),
    ],
)
def test_a_share_that_leaves_nothing_is_named_with_one_that_does(fraction, said):
    with pytest.raises(UserError, match=f"held-out fraction of .* {said}") as error:
        split_held_out(SAMPLES, fraction)
    low, high = map(float, re.findall(r"between (\S+) and (\S+)", str(error.value))[0])
    assert all(map(len, split_held_out(SAMPLES, (low + high) / 2)))


def test_samples_that_are_all_alike_cannot_be_split():
    with pytest.raises(UserError, match=r"leaves none of 3 samples to \w+ on: they are all alike$"):
        split_held_out(["same"] * 3, 0.5)
