"""Mixtures: both packages choose the same samples of the same datasets."""

import importlib
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from . import PACKAGES
from .inputs import few, seeds

weights = st.lists(
    st.one_of(st.integers(0, 9), st.sampled_from([0.1, 0.3, 1e-9, 2.5e6, 1 / 3])), min_size=1, max_size=5
).filter(any)


@pytest.fixture(scope="session", params=PACKAGES)
def mixtures(request: pytest.FixtureRequest) -> ModuleType:
    """Return a package's module of mixtures."""
    return importlib.import_module(f"{request.param}.mixtures")


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    """Return the module that the others are held against."""
    return importlib.import_module("torch_ref.mixtures")


@few
@given(data=st.data(), shares=weights, total=st.one_of(st.none(), st.integers(1, 500)), seed=seeds)
def test_counts_sources_and_ids_are_identical(
    mixtures: ModuleType, reference: ModuleType, data: st.DataObject, shares: list[Any], total: int | None, seed: int
) -> None:
    """Of three epochs in a row, and of one that is far away."""
    sizes = [data.draw(st.integers(1 if share else 0, 50)) for share in shares]
    datasets = [range(size) for size in sizes]
    for epoch in (0, 1, 2, 10**12):
        one, other = (
            module.Mixture(datasets, shares, num_samples=total, seed=seed, epoch=epoch)
            for module in (mixtures, reference)
        )
        assert len(one) == len(other)
        for name in ("counts", "source", "ids"):
            assert getattr(one, name).dtype == np.int64
            assert np.array_equal(getattr(one, name), getattr(other, name))
        assert [one[i] for i in range(len(one))] == one.ids.tolist()


def test_the_choice_is_fixed_for_good(mixtures: ModuleType) -> None:
    """A run that is resumed after an upgrade trains on the same samples."""
    mixture = mixtures.Mixture([range(9), range(4)], [0.5, 0.5], num_samples=11, seed=7, epoch=3)
    assert mixture.counts.tolist() == [6, 5]
    assert mixture.ids.tolist() == [0, 2, 3, 6, 7, 8, 0, 1, 2, 3, 3]


def test_without_weights_datasets_follow_each_other(mixtures: ModuleType) -> None:
    """Every sample once, whatever the epoch."""
    mixture = mixtures.Mixture([range(3), range(0), range(2)], seed=1, epoch=4)
    assert mixture.source.tolist() == [0, 0, 0, 2, 2]
    assert mixture.ids.tolist() == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    ("sizes", "shares", "options"),
    [
        ([2, 2], [1], {}),
        ([2, 2], [1, -1], {}),
        ([2, 2], [1, np.nan], {}),
        ([2, 2], [1, np.inf], {}),
        ([2, 2], [1, "x"], {}),
        ([2, 2], [1, True], {}),
        ([2, 2], [0, 0], {}),
        ([2, 0], [1, 1], {}),
        ([0, 0], None, {}),
        ([2, 2], None, {"num_samples": 3}),
        ([2, 2], [1, 1], {"num_samples": 0}),
        ([2, 2], [1, 1], {"seed": -1}),
        ([2, 2], [1, 1], {"epoch": 2**63}),
    ],
    ids=str,
)
def test_what_is_no_mixture_is_refused(mixtures: ModuleType, sizes: Any, shares: Any, options: dict[str, Any]) -> None:
    """By both, with a ValueError."""
    with pytest.raises(ValueError, match=r"\w"):
        mixtures.Mixture([range(size) for size in sizes], shares, **options)
