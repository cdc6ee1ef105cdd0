"""Mixtures: several datasets as one, with exact counts of each.

Letters: D datasets, c samples that one of them gives to an epoch, N samples of the mixture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np
from jaxtyping import Int64

from jvarlen._common.checks import UserError, check_at_least_one, is_number, list_first
from jvarlen._common.keywords import check_keywords
from jvarlen.data.samples import Dataset, Sample, num_samples_of, scale_weights
from jvarlen.data.tokens import key_of_arrays
from jvarlen.planning.lengths import DataSource
from jvarlen.planning.order import check_seed, random_keys, stable_argsort

__all__ = ["Mixture", "mixture_counts"]

# Far beyond the keys of samples and steps, and before those of blocks. From here, sample i of dataset d has the key of
# its place in all datasets one after the other.
_FIRST_MIXTURE_KEY = 2**61


def mixture_counts(
    num_samples: Sequence[int], weights: Sequence[float], total: int | None = None
) -> Int64[np.ndarray, " D"]:
    """How many samples of each dataset are in an epoch of a mixture, by the largest remainder method.

    The share of dataset d is total · weight_d / Σ weights, computed exactly; a float counts as the decimal number that
    it prints as. Each dataset gets the integer part of its share, and the remaining samples go, one each, to the
    datasets with the largest fractions, the first ones among equals. All epochs have the same counts, so a dataset
    whose share rounds to 0 never comes; a `Mixture` refuses that.

    Args:
      num_samples: how many samples each of the D datasets has.
      weights: D numbers, finite, at least 0, not all 0; only their ratios matter. A dataset of weight 0 is left out.
      total: samples of the epoch. None: the most at which no sample comes twice; with more, small datasets repeat.

    Returns:
      int64[D], which sum to the total.

    Raises:
      ValueError: another number of weights than of datasets; weights that are not as described; an empty dataset with a
        weight above 0; a total below 1. Offenders are listed.

    Example:
      >>> mixture_counts([900, 50], [0.7, 0.3], 10)
      array([7, 3])
      >>> mixture_counts([900, 50], [2, 1])
      array([100,  50])

    References:
      Hamilton's method of apportionment: Balinski and Young 1982, "Fair Representation".
    """
    return np.array(_round_shares(_shares(num_samples, weights, total)), np.int64)


def _shares(num_samples: Sequence[int], weights: Sequence[float], total: int | None) -> list[Fraction]:
    """Samples of each dataset in an epoch before rounding; they sum to the total."""
    _check_numbers(num_samples, weights, "weights")
    if not any(weights):
        raise UserError("at least one dataset needs a weight above 0")
    if empty := [f"dataset {d}" for d, (n, w) in enumerate(zip(num_samples, weights, strict=True)) if w and not n]:
        raise UserError(f"datasets without samples cannot have a weight: {list_first(empty)}")
    exact = [Fraction(str(weight)) for weight in weights]  # of a NumPy float32, too, the decimal that is seen
    shares = [weight / sum(exact) for weight in exact]
    if total is None:
        total = min(math.floor(n / share) for n, share in zip(num_samples, shares, strict=True) if share)
    check_at_least_one(total=total)
    return [int(total) * share for share in shares]


def _round_shares(shares: list[Fraction]) -> list[int]:
    """Counts by the largest remainder."""
    counts = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda d: counts[d] - shares[d])  # stable: ties stay in order
    for d in by_remainder[: int(sum(shares)) - sum(counts)]:
        counts[d] += 1
    return counts


@check_keywords
class Mixture(Dataset):
    """Several datasets as one data source, without copying.

    Without weights it holds every sample of each dataset once, one dataset after the other. With weights, each epoch
    has exactly `counts[d]` samples of dataset d, the next ones of a shuffled sequence of its samples that repeats
    without end. So all samples of a dataset come equally often, to within one, in every epoch and over all epochs so
    far. Each epoch is another `Mixture`, with another plan.

    Samples are numbered by dataset, then by id; repeats are consecutive. The plan's order decides when each comes.

    Args:
      datasets: random access to the samples of each.
      weights: as for `mixture_counts`; None for every sample once.
      num_samples: samples of an epoch, the total of `mixture_counts`; needs weights.
      seed: 0 ≤ seed < 2**63.
      epoch: 0 ≤ epoch < 2**63.
      loss_weights: D numbers, finite, at least 0 and not all 0, by which the loss weights of each dataset's tokens are
        multiplied. Tokens, and the target of a pair, become `WeightedTokens` unless the factor is 1. Samples with named
        fields become dicts with the field `weights`, whatever the factor. None leaves all samples as they are.

    Attributes:
      counts: int64[D], samples of each dataset.
      source: int64[N], the dataset of every sample, ascending.
      ids: int64[N], the id of every sample in its dataset.

    Raises:
      ValueError: arguments or loss weights that `mixture_counts` rejects; without weights, an empty dataset; a dataset
        with a weight whose share rounds to 0, so that no epoch has a sample of it; `num_samples`
        without weights; seed or epoch out of range.

    Example:
      >>> mixture = Mixture([["a", "b", "c", "d"], ["x"]], [1, 1], num_samples=4)
      >>> mixture.counts, mixture.source
      (array([2, 2]), array([0, 0, 1, 1]))
      >>> [mixture[i] for i in (2, 3)]
      ['x', 'x']
    """

    def __init__(
        self,
        datasets: Sequence[DataSource],
        weights: Sequence[float] | None = None,
        *,
        num_samples: int | None = None,
        seed: int = 0,
        epoch: int = 0,
        loss_weights: Sequence[float] | None = None,
    ):
        check_seed(seed, epoch)
        if isinstance(datasets, Mapping):
            raise UserError("datasets must be a sequence: the samples of a mapping would be letters of its names")
        sizes = list(map(num_samples_of, datasets))
        before, counts = [0] * len(sizes), sizes
        if weights is None:
            if num_samples is not None:
                raise UserError("num_samples needs weights: without them every sample comes once")
            if not sizes:
                raise UserError("a mixture needs at least one dataset")
            if empty := [f"dataset {d}" for d, size in enumerate(sizes) if not size]:
                raise UserError(f"these datasets have no samples: {list_first(empty)}; leave them out")
        else:
            shares = _shares(sizes, weights, num_samples)
            counts = _round_shares(shares)
            unseen = [
                f"dataset {d}: weight {weight}, {float(share):.3g} of {sum(counts):,} samples"
                for d, (weight, share, count) in enumerate(zip(weights, shares, counts, strict=True))
                if weight and not count
            ]
            if unseen:
                raise UserError(
                    "no epoch would have a sample of these datasets, whose shares round to 0: mix more samples, or "
                    f"raise their weights: {list_first(unseen)}"
                )
            before = [int(epoch) * count for count in counts]
        if loss_weights is not None:
            _check_numbers(sizes, loss_weights, "loss weights")
            if not any(share and factor for share, factor in zip(weights or sizes, loss_weights, strict=True)):
                raise UserError("loss_weights of datasets that are drawn must not all be 0: nothing would be learned")
        self._loss_weights = loss_weights
        self.counts = np.array(counts, np.int64)
        starts = np.cumsum([0, *sizes]).tolist()[:-1]
        drawn = zip(starts, sizes, before, counts, strict=True)
        try:
            self.source = np.repeat(np.arange(len(sizes)), self.counts)
            self.ids = np.concatenate([_chosen_ids(*of_dataset, seed) for of_dataset in drawn])
        except (MemoryError, ValueError) as error:  # above 2**60 NumPy makes no array
            total = sum(counts)
            raise UserError(f"{total:,} samples, of 16 bytes each, do not fit into memory: mix fewer") from error
        self._datasets = list(datasets)

    def __len__(self) -> int:
        return len(self.ids)

    def _read(self, index: int) -> Sample:
        d = self.source.item(index)
        sample = self._datasets[d][self.ids.item(index)]
        if self._loss_weights is None:
            return sample
        return scale_weights(sample, self._loss_weights[d])

    @property
    def lengths(self) -> Int64[np.ndarray, " N"]:
        """Tokens of every sample; raises AttributeError if a dataset does not know them."""
        known = [np.asarray(dataset.lengths) for dataset in self._datasets]  # type: ignore[attr-defined]
        ids = np.split(self.ids, np.cumsum(self.counts)[:-1])
        return np.concatenate([lengths[chosen] for lengths, chosen in zip(known, ids, strict=True)], dtype=np.int64)

    @property
    def content_key(self) -> str:
        """Hex key of all that the samples hold; raises AttributeError if a dataset does not know its key."""
        keys = (dataset.content_key for dataset in self._datasets)  # type: ignore[attr-defined]
        return key_of_arrays(self.counts, self.ids, repr(self._loss_weights), *keys)


def _chosen_ids(start: int, size: int, first: int, count: int, seed: int) -> Int64[np.ndarray, " c"]:
    """The ids of a dataset at `count` places of its sequence from the first on, ascending."""
    if not count:
        return np.zeros(0, np.int64)
    num_passes, num_left = divmod(count, size)
    times = np.full(size, num_passes)
    if num_left:
        keys = random_keys(size, seed=seed, epoch=0, start=_FIRST_MIXTURE_KEY + start)
        places = (first % size + np.arange(num_left)) % size
        times[stable_argsort(keys)[places]] += 1
    return np.repeat(np.arange(size), times)


def _check_numbers(num_samples: Sequence[int], weights: Sequence[float], name: str) -> None:
    if len(weights) != len(num_samples):
        raise UserError(f"{len(num_samples)} datasets need as many {name}, not {len(weights)}")
    wrong = [f"dataset {d}: {w!r}" for d, w in enumerate(weights) if not is_number(w) or not 0 <= w < math.inf]
    if wrong:
        raise UserError(f"{name} must be finite and at least 0: {list_first(wrong)}")
