"""Mixtures: both packages choose the same samples of the same datasets."""

import dataclasses
import importlib
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from . import PACKAGES, find
from .inputs import few, seeds

weights = st.lists(
    st.one_of(st.integers(0, 9), st.sampled_from([0.1, 0.3, 1e-9, 2.5e6, 1 / 3])), min_size=1, max_size=5
).filter(any)


@pytest.fixture(scope="session", params=PACKAGES)
def mixtures(request):
    package = {"jvarlen": "jvarlen.data", "torch_ref": "torch_ref.loading"}[request.param]
    return importlib.import_module(f"{package}.mixtures")


@pytest.fixture(scope="session")
def reference():
    return importlib.import_module("torch_ref.loading.mixtures")


@few
@given(data=st.data(), shares=weights, total=st.one_of(st.none(), st.integers(1, 500)), seed=seeds)
def test_counts_sources_and_ids_are_identical(mixtures, reference, data, shares, total, seed):
    """In three consecutive epochs, and in a distant one."""
    sizes = [data.draw(st.integers(1 if share else 0, 50)) for share in shares]
    datasets = [range(size) for size in sizes]
    unseen = [n for n, w in zip(reference.mixture_counts(sizes, shares, total), shares, strict=True) if w and not n]
    for epoch in (0, 1, 2, 10**12):
        if unseen:  # they would never come
            with pytest.raises(ValueError, match="round to 0"):
                mixtures.Mixture(datasets, shares, num_samples=total, seed=seed, epoch=epoch)
            return
        one, other = (
            module.Mixture(datasets, shares, num_samples=total, seed=seed, epoch=epoch)
            for module in (mixtures, reference)
        )
        assert len(one) == len(other)
        for name in ("counts", "source", "ids"):
            assert getattr(one, name).dtype == np.int64
            assert np.array_equal(getattr(one, name), getattr(other, name))
        assert [one[i] for i in range(len(one))] == one.ids.tolist()


def test_the_choice_is_fixed_for_good(mixtures):
    """A run that is resumed after an upgrade trains on the same samples."""
    mixture = mixtures.Mixture([range(9), range(4)], [0.5, 0.5], num_samples=11, seed=7, epoch=3)
    assert mixture.counts.tolist() == [6, 5]
    assert mixture.ids.tolist() == [0, 2, 3, 6, 7, 8, 0, 1, 2, 3, 3]


def test_without_weights_datasets_follow_each_other(mixtures):
    """Every sample once, whatever the epoch."""
    mixture = mixtures.Mixture([range(3), range(2)], seed=1, epoch=4)
    assert mixture.source.tolist() == [0, 0, 0, 1, 1]
    assert mixture.ids.tolist() == [0, 1, 2, 0, 1]
    nested = mixtures.Mixture([mixture, range(7, 9)])
    assert [nested[i] for i in range(len(nested))] == [0, 1, 2, 0, 1, 7, 8]


@pytest.mark.parametrize("index", [-1, np.int64(-1), -5, 5])
def test_only_its_own_ids_are_samples(mixtures, index):
    """-1, a padding row, is not the last sample; in a mixture of mixtures neither."""
    mixture = mixtures.Mixture([range(3), range(2)])
    for dataset in (mixture, mixtures.Mixture([mixture, range(9)], [1, 0])):
        with pytest.raises(IndexError, match=str(index)):
            dataset[index]


def test_datasets_by_name_are_refused(mixtures):
    """The letters of their names would be the samples."""
    with pytest.raises(ValueError, match="sequence"):
        mixtures.Mixture({"web": range(3), "code": range(2)})


@pytest.mark.parametrize(
    ("sizes", "shares", "named"),
    [([3, 0, 2], None, 1), ([3, 0, 2], [1, 2, 3], 1), ([50, 5], [99, 1], 1), ([50, 5, 5], [99, 0, 0.4], 2)],
)
def test_a_dataset_that_would_never_come_is_named(mixtures, sizes, shares, named):
    """It is empty, or its share of every epoch rounds to 0; of weight 0 it may."""
    datasets = [range(size) for size in sizes]
    total = None if shares is None else 10
    with pytest.raises(ValueError, match=rf"\b{named}\b"):
        mixtures.Mixture(datasets, shares, num_samples=total)
    kept = [0 if d == named else 1 for d in range(len(sizes))]
    assert mixtures.Mixture(datasets, kept, num_samples=total).counts[named] == 0


@pytest.mark.parametrize(
    ("sizes", "shares", "options"),
    [
        ([2, 2], [1], {}),
        ([2, 2], [1, -1], {}),
        ([2, 2], [1, np.nan], {}),
        ([2, 2], [1, np.inf], {}),
        ([2, 2], [1, "x"], {}),
        ([2, 2], [1, "1"], {}),
        ([2, 2], [1, None], {}),
        ([], None, {}),
        ([2, 2], [1, True], {}),
        ([2, 2], [0, 0], {}),
        ([2, 0], [1, 1], {}),
        ([0, 0], None, {}),
        ([2, 2], None, {"num_samples": 3}),
        ([2, 2], [1, 1], {"num_samples": 0}),
        ([2, 2], None, {"loss_weights": [1]}),
        ([2, 2], None, {"loss_weights": [1, -1]}),
        ([2, 2], [1, 1], {"loss_weights": [1, np.inf]}),
        ([2, 2], None, {"loss_weights": [0, 0]}),
        ([2, 2], [1, 0], {"loss_weights": [0, 1]}),
        ([2, 2], [1, 1], {"epoch": -1}),
        ([2, 2], [1, 1], {"seed": -1}),
        ([2, 2], [1, 1], {"epoch": 2**63}),
    ],
    ids=str,
)
def test_what_is_no_mixture_is_refused(mixtures, sizes, shares, options):
    """By both, with a ValueError."""
    with pytest.raises(ValueError, match=r"\w"):
        mixtures.Mixture([range(size) for size in sizes], shares, **options)


def test_loss_weights_go_into_the_fields_of_samples(package):
    """For dicts and dataclasses, times the samples' weights; with a factor of 1 too, so that all have the field."""

    @dataclasses.dataclass
    class Sample:
        tokens: list
        weights: list

    named = [{"tokens": [1, 2]}, {"tokens": [3]}]
    weighted = [Sample([4, 5], [0.5, 2.0]), Sample([6], [1.0])]
    mixture = package.Mixture([named, weighted, named], loss_weights=[1, 0.5, 4])
    assert [set(mixture[i]) for i in range(6)] == [{"tokens", "weights"}] * 6
    assert [np.asarray(mixture[i]["weights"]).tolist() for i in range(6)] == [1, 1, [0.25, 1], [0.5], 4, 4]
    assert package.Mixture([named, weighted])[0] is named[0]


class Pair(NamedTuple):
    """Two arrays, which could be a pair or fields."""

    source: np.ndarray
    target: np.ndarray


@dataclasses.dataclass
class Labelled:
    """A sample that is no dict."""

    tokens: list
    y: int


def weighted_rows(package, mixture, lengths, fields, packing):
    """The weights of all tokens, by sample."""
    plan = package.make_plan(lengths, [(4, *[16] * np.ndim(lengths))], order="dataset", packing=packing)
    (batch,) = package.load(plan, mixture, fields=fields)
    values = batch if isinstance(batch, dict) else batch._asdict()
    values = {name: np.asarray(value) for name, value in values.items() if value is not None}
    weights = values["weights"].ravel()
    if packing == "padded":
        return [row[row > 0].tolist() for row in values["weights"][0]]
    segments = values.get("target_segment_ids", values.get("segment_ids")).ravel()
    by_id = {i: weights[segments == p + 1].tolist() for p, i in enumerate(values["ids"][0, 0]) if i >= 0}
    return [by_id[i] for i in sorted(by_id)]


@pytest.mark.parametrize("packing", ["padded", "best_fit"])
@pytest.mark.parametrize("fields", [None, {"tokens": "length", "y": "row"}], ids=["found", "named"])
@pytest.mark.parametrize("kind", [Labelled, dict])
def test_loss_weights_of_mixtures_count_whoever_names_the_fields(package, kind, fields, packing):
    """Those of all tokens of a sample, and of samples that have some already, one a token."""
    one, other = ([kind(tokens=[1] * n, y=n) for n in sizes] for sizes in ((2, 3), (3, 1)))
    mixture = package.Mixture([one, other], [1, 1], loss_weights=[1.0, 0.5])
    expected = [[1.0] * 2, [1.0] * 3, [0.5] * 3, [0.5]]
    assert weighted_rows(package, mixture, [2, 3, 3, 1], fields, packing) == expected
    weighted = [{"tokens": [1] * 3, "y": 3, "weights": [0.5, 2, 4]}, {"tokens": [1], "y": 1, "weights": 3}]
    expected[2:] = [[0.25, 1.0, 2.0], [1.5]]
    mixture = package.Mixture([one, weighted], loss_weights=[1, 0.5])
    assert weighted_rows(package, mixture, [2, 3, 3, 1], fields, packing) == expected
    expected[2:] = [[0.5, 2.0, 4.0], [3.0]]
    mixture = package.Mixture([one, weighted])  # whose first samples have none
    assert weighted_rows(package, mixture, [2, 3, 3, 1], fields, packing) == expected


@pytest.mark.parametrize("packing", ["padded", "best_fit"])
def test_loss_weights_of_mixtures_are_those_of_the_targets_of_pairs(package, packing):
    """As they are, or with weights; what is no pair and has no names is refused."""
    lengths = np.array([[2, 3], [1, 2], [3, 1], [1, 1]])
    pairs = [([1] * n, [1] * m) for n, m in lengths.tolist()]
    pairs[3] = ([1], find(package, "WeightedTokens")([1], [3.0]))
    mixture = package.Mixture([pairs[:2], pairs[2:]], loss_weights=[1.0, 0.5])
    plan = package.make_plan(lengths, [(4, 16, 16)], packing=packing, order="dataset")
    (batch,) = package.load(plan, mixture)
    weights = np.asarray(batch.weights)[0].ravel()
    assert sorted(weights[weights > 0].tolist()) == [0.5] + [1.0] * 5 + [1.5]
    with pytest.raises(ValueError, match="int"):
        package.Mixture([[(np.arange(3), 1)]], loss_weights=[0.5])[0]
    with pytest.raises(ValueError, match="Pair"):
        package.Mixture([[Pair(np.arange(3), np.arange(2))]], loss_weights=[0.5])[0]


def test_a_dataset_that_can_only_be_iterated_is_refused(package):
    with pytest.raises(ValueError, match=r"len\(\).* list"):
        package.Mixture([iter([[1], [2]])])
