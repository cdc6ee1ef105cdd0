"""Held-out samples: at least one on each side, whatever the share."""

import pytest

from jvarlen import UserError
from jvarlen.data.split import sample_hash, split_held_out

SAMPLES = [f"sample {i}" for i in range(10)]


@pytest.mark.parametrize("num_samples", [2, 3, 10])
@pytest.mark.parametrize("fraction", [1e-9, 0.02, 1 - 1e-9])
def test_each_side_has_a_sample_whatever_the_share(num_samples, fraction):
    split = split_held_out(SAMPLES[:num_samples], fraction)
    train, held_out = ([sample_hash(each) for each in side] for side in split)
    assert len(train) + len(held_out) == num_samples
    assert max(held_out) < min(train)
    assert min(len(train), len(held_out)) == 1 or fraction == 0.02


def test_samples_with_fields_are_told_to_be_divided_by_their_owner():
    with pytest.raises(
        UserError, match=r"not dict with the keys 'mel', 'text': divide them, Split\(train, held_out\)$"
    ):
        split_held_out([{"mel": [[0.5]], "text": [1]}] * 3, 0.5)


@pytest.mark.parametrize(("num_samples", "said"), [(0, "0"), (1, "1"), (3, "3 that are all alike")])
def test_samples_that_are_all_alike_cannot_be_split(num_samples, said):
    with pytest.raises(
        UserError, match=f"^there must be two different samples at least to hold one out from training, not {said}$"
    ):
        split_held_out(["same"] * num_samples, 0.5)
