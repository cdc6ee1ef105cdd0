"""Mixtures: exact counts, every sample equally often over the epochs, and plans that train them so."""

import math
import pickle
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jvarlen import UserError
from jvarlen.data.measure import find_lengths
from jvarlen.data.mixtures import Mixture, mixture_counts
from jvarlen.data.samples import WeightedTokens
from jvarlen.data.tokens import Subset, TokenDataset
from jvarlen.planning.make_buckets import make_buckets
from jvarlen.planning.make_plan import make_plan

bounded = settings(deadline=None, max_examples=60)
weight = st.one_of(st.integers(0, 9), st.sampled_from([0.1, 0.2, 0.3, 0.7, 1e-9, 2.5e6, 1 / 3]))


@st.composite
def apportionments(draw):
    """Sizes, weights and a total."""
    weights = draw(st.lists(weight, min_size=1, max_size=5).filter(any))
    sizes = [draw(st.integers(1 if w else 0, 60)) for w in weights]
    return sizes, weights, draw(st.integers(1, 400))


def shares(weights, total):
    exact = [Fraction(str(w)) for w in weights]
    return [total * w / sum(exact) for w in exact]


@bounded
@given(apportionments())
def test_counts_sum_to_the_total_and_are_less_than_one_off_their_shares(given_):
    sizes, weights, total = given_
    counts = mixture_counts(sizes, weights, total)
    assert counts.dtype == np.int64
    assert sum(counts.tolist()) == total
    assert all(abs(c - share) < 1 for c, share in zip(counts.tolist(), shares(weights, total), strict=True))


@bounded
@given(apportionments())
def test_without_a_total_it_is_the_most_at_which_every_share_fits_its_dataset(given_):
    sizes, weights, _ = given_
    counts = mixture_counts(sizes, weights)
    total = sum(counts.tolist())

    def fits(some_total):
        return all(share <= n for share, n in zip(shares(weights, some_total), sizes, strict=True))

    assert fits(total)
    assert not fits(total + 1)
    assert (counts <= sizes).all()


def test_a_float_is_the_decimal_that_it_is_written_as():
    # In binary, 0.1 · 3 is above 0.3, and would get what is left.
    assert mixture_counts([9] * 4, [0.3, 0.1, 0.1, 0.1], 3).tolist() == [2, 1, 0, 0]
    assert mixture_counts([9] * 2, [np.float32(0.1), 0.1], 3).tolist() == [2, 1]


@pytest.mark.parametrize(
    ("sizes", "weights", "total", "named"),
    [
        ([3, 3], [1], 2, "2 datasets need as many weights, not 1"),
        ([3, 3, 3], [1, -1, np.nan], 2, "dataset 1: -1, dataset 2: nan"),
        ([3, 3, 3], [1, np.inf, True], 2, "dataset 1: inf, dataset 2: True"),
        ([3, 3], [0, 0], 2, "at least one dataset needs a weight"),
        ([0, 3, 0], [1, 1, 0], 2, "cannot have a weight: dataset 0$"),
        ([3], [1], 0, r"total \(0\)"),
    ],
)
def test_what_gives_no_counts_is_refused_by_name(sizes, weights, total, named):
    with pytest.raises(ValueError, match=named):
        mixture_counts(sizes, weights, total)


def datasets_of(*sizes):
    """Datasets of names: sample 2 of dataset 0 is "0:2"."""
    return [[f"{d}:{i}" for i in range(size)] for d, size in enumerate(sizes)]


def test_without_weights_every_sample_comes_once_and_in_order():
    mixture = Mixture(datasets_of(3, 2), seed=5, epoch=7)
    assert list(mixture) == ["0:0", "0:1", "0:2", "1:0", "1:1"]
    assert mixture.counts.tolist() == [3, 2]


@bounded
@given(apportionments(), st.integers(0, 3), st.integers(1, 8))
def test_samples_of_a_dataset_come_equally_often_to_within_one_in_an_epoch_and_over_all(given_, seed, num_epochs):
    sizes, weights, total = given_
    assume(all(n or not w for n, w in zip(mixture_counts(sizes, weights, total), weights, strict=True)))
    datasets = datasets_of(*sizes)
    seen: Counter = Counter()
    for epoch in range(num_epochs):
        mixture = Mixture(datasets, weights, num_samples=total, seed=seed, epoch=epoch)
        assert len(mixture) == total
        assert np.array_equal(np.bincount(mixture.source, minlength=len(sizes)), mixture.counts)
        assert np.array_equal(np.lexsort([mixture.ids, mixture.source]), np.arange(total))
        seen.update(mixture)
        now = Counter(mixture)
        for dataset, count in zip(datasets, mixture.counts.tolist(), strict=True):
            for times, places in ((seen, (epoch + 1) * count), (now, count)):
                exact = Fraction(places, len(dataset) or 1)
                assert {times[s] for s in dataset} <= {math.floor(exact), math.ceil(exact)}


def test_an_epoch_is_a_stretch_of_one_shuffled_sequence():
    def ids(count, epoch):
        return Mixture(datasets_of(20, 1), [1, 0], num_samples=count, seed=3, epoch=epoch).ids.tolist()

    sequence = [ids(1, epoch)[0] for epoch in range(20)]  # place by place
    assert sorted(sequence) == list(range(20)) != sequence
    for epoch in range(8):
        places = range(13 * epoch, 13 * epoch + 13)
        assert ids(13, epoch) == sorted(sequence[place % 20] for place in places)


def test_the_choice_follows_from_seed_and_epoch_only():
    datasets = datasets_of(40, 40)

    def chosen(**options):
        return Mixture(datasets, [1, 1], num_samples=20, **options).ids.tolist()

    assert chosen(seed=1, epoch=2) == chosen(seed=1, epoch=2)
    assert len({tuple(chosen(seed=s, epoch=e)) for s in range(2) for e in range(3)}) == 6
    ids = chosen()
    assert ids[:10] != ids[10:]  # equal datasets do not give the same places


def test_whole_passes_are_the_plain_datasets_repeated():
    mixture = Mixture(datasets_of(2, 3), [4, 3], num_samples=7, epoch=5)
    assert list(mixture) == ["0:0", "0:0", "0:1", "0:1", "1:0", "1:1", "1:2"]


def test_large_epochs_are_exact():
    far = Mixture(datasets_of(7), [1], num_samples=3, epoch=2**61)
    assert len(set(far)) == 3


@pytest.mark.parametrize("num_samples", [10**14, 2**62])
def test_an_epoch_that_no_memory_holds_is_refused_by_its_size(num_samples):
    with pytest.raises(UserError, match=f"{num_samples:,} samples, of 16 bytes each, do not fit into memory"):
        Mixture([["a"], ["b"]], [1, 1], num_samples=num_samples)


@pytest.mark.parametrize(
    ("weights", "options", "named"),
    [
        (None, {"num_samples": 3}, "num_samples needs weights"),
        ([1, 1], {"seed": -1}, "seed"),
        ([1, 1], {"epoch": 2**63}, "epoch"),
        ([1, 1], {"num_samples": 2.5}, "total"),
    ],
)
def test_arguments_that_make_no_mixture_are_refused(weights, options, named):
    with pytest.raises(ValueError, match=named):
        Mixture(datasets_of(2, 2), weights, **options)


@pytest.mark.parametrize("index", [-1, 3])
def test_what_is_no_sample_is_an_index_error(index):
    with pytest.raises(IndexError, match="of 3"):
        Mixture(datasets_of(3))[index]


def test_datasets_that_would_never_come_are_listed():
    with pytest.raises(ValueError, match="have no samples: dataset 1, dataset 3; leave"):
        Mixture(datasets_of(2, 0, 2, 0))
    with pytest.raises(ValueError, match=r"raise their weights: dataset 1: weight 1, 0.1 of 10 samples$"):
        Mixture(datasets_of(50, 5), [99, 1], num_samples=10)
    with pytest.raises(ValueError, match="at least one dataset"):
        Mixture([])


def token_dataset(*lengths):
    return TokenDataset.from_bytes([bytes([65 + i]) * n for i, n in enumerate(lengths)])


def test_lengths_are_those_of_the_samples_and_of_nobody_else():
    parts = [token_dataset(4, 2, 9), Subset(token_dataset(1, 7, 5), np.array([2, 1]))]
    mixture = Mixture(parts, [1, 3], num_samples=9)
    assert mixture.lengths.tolist() == list(map(len, mixture))
    assert not hasattr(Mixture([*parts, ["abc"]]), "lengths")


def test_it_reaches_a_worker_whole():
    mixture = Mixture([token_dataset(4, 2, 9), token_dataset(3)], [1, 1], num_samples=5)
    copy = pickle.loads(pickle.dumps(mixture))
    assert [sample.tobytes() for sample in copy] == [sample.tobytes() for sample in mixture]


@pytest.mark.parametrize("order", ["length", "shuffle"])
def test_a_plan_trains_each_dataset_with_its_exact_count(order):
    rng = np.random.default_rng(0)
    parts = [token_dataset(*rng.integers(1, 30, size)) for size in (50, 20, 7)]
    mixture = Mixture(parts, [0.5, 0.3, 0.2], num_samples=101, seed=4, epoch=2)
    lengths = find_lengths(mixture)
    buckets = make_buckets(lengths, 120, max_shapes=4, num_microbatches=2)
    plan = make_plan(lengths, buckets, num_microbatches=2, order=order)
    rows = np.concatenate([plan.rows(step).reshape(-1) for step in range(plan.num_steps)])
    trained = mixture.source[rows[rows >= 0]]
    assert np.bincount(trained).tolist() == mixture.counts.tolist() == [51, 30, 20]


def test_loss_weights_multiply_those_of_the_samples():
    plain = TokenDataset.from_bytes([b"ab", b"c"])
    weighted = [WeightedTokens([1, 2], [0, 1]), WeightedTokens([3], [0.5])]
    mixture = Mixture([plain, plain, weighted], loss_weights=[1, 0.5, 3])
    assert mixture[0].tobytes() == b"ab"
    assert [mixture[i].weights.tolist() for i in range(2, 6)] == [[0.5, 0.5], [0.5], [0, 3], [1.5]]
    assert mixture[2].tokens.tobytes() == b"ab"
    assert Mixture([plain, plain], loss_weights=[1, 0.5]).lengths.tolist() == [2, 1, 2, 1]
