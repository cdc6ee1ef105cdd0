"""Mixtures: several datasets as one map-style dataset, with exact counts of each."""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from torch_ref.checks import check_integer, check_number, known_keywords
from torch_ref.loading.weighted import reweight
from torch_ref.planning.order import random_keys

__all__ = ["Mixture", "mixture_counts"]

_MIXTURE_KEYS = 2**61


@known_keywords
def mixture_counts(
    num_samples: Sequence[int],
    weights: Sequence[float],
    total: int | None = None,
) -> NDArray[np.int64]:
    """Divide the samples of an epoch among datasets, as a parliament divides its seats among parties.

    Args:
        num_samples: [D] samples of each dataset.
        weights: [D] finite numbers >= 0 with a positive sum. A float stands for its decimal text: 0.1 is 1/10.
        total: samples of the epoch. None takes as many as leave every quota total * weight / sum(weights) within its
            dataset.

    Returns:
        int64[D] with the given sum: the floors of the quotas, and one more for the largest remainders, the lower index
        first among equals.

    Raises:
        ValueError: if the sizes differ, a weight is out of its range, all are 0, a dataset with a weight is empty, or
            the total is below 1.

    Example:
        >>> mixture_counts([10, 10, 10], [1, 1, 1], 11)
        array([4, 4, 3])
    """
    return _largest_remainders(_quotas(num_samples, weights, total))


def _quotas(num_samples: Sequence[int], weights: Sequence[float], total: int | None) -> list[Fraction]:
    """Return the quota of each dataset in an epoch."""
    ratios = [_ratio(number, weight) for number, weight in enumerate(weights)]
    if len(ratios) != len(num_samples):
        raise ValueError(f"weights must have one number a dataset, {len(num_samples)}, got {len(ratios)}")
    whole = sum(ratios)
    if not whole:
        raise ValueError("weights must not all be 0")
    empty = [number for number, size in enumerate(num_samples) if not size and ratios[number]]
    if empty:
        raise ValueError(f"datasets with a weight must have samples; these have none: {empty}")
    if total is None:
        total = int(min(size * whole / ratio for size, ratio in zip(num_samples, ratios, strict=True) if ratio))
    seats = check_integer("total", total)
    return [seats * ratio / whole for ratio in ratios]


def _largest_remainders(quotas: list[Fraction]) -> NDArray[np.int64]:
    divided = [divmod(quota, 1) for quota in quotas]
    left = int(sum(quotas)) - sum(int(floor) for floor, _ in divided)
    lucky = sorted(range(len(quotas)), key=lambda number: (-divided[number][1], number))[:left]
    return np.array([int(floor) + (number in lucky) for number, (floor, _) in enumerate(divided)], dtype=np.int64)


@known_keywords
class Mixture(Dataset[Any]):
    """Several map-style datasets as one.

    Sample i is sample `ids[i]` of dataset `source[i]`; both ascend, the source first.

    Args:
        datasets: the D datasets.
        weights: [D] as for `mixture_counts`. None takes every sample of each once.
        num_samples: samples of an epoch, the total of `mixture_counts`. Only with weights.
        seed: 0 <= seed < 2**63.
        epoch: 0 <= epoch < 2**63. Each dataset is shuffled once, by the seed alone; epoch e continues in that sequence
            where epoch e - 1 ended, and wraps around at its end.
        loss_weights: [D] finite numbers >= 0, not all 0, that the loss weights of each dataset's tokens are multiplied
            by; samples are then `WeightedTokens`, pairs with one as their target, or dicts with a field `weights`. None
            leaves all as they are.

    Attributes:
        counts: int64[D], samples of each dataset.
        source: int64[N], the dataset of each sample.
        ids: int64[N], its id there.

    Raises:
        ValueError: if `mixture_counts` refuses the arguments, a dataset is empty (with weights: and its weight is not
            0), the count of a dataset with a weight is 0, or the number of samples is given without
            weights.

    Example:
        >>> Mixture(["abc", "x"], [1, 1], num_samples=4).counts
        array([2, 2])
    """

    def __init__(
        self,
        datasets: Sequence[Any],
        weights: Sequence[float] | None = None,
        *,
        num_samples: int | None = None,
        seed: int = 0,
        epoch: int = 0,
        loss_weights: Sequence[float] | None = None,
    ) -> None:
        """Choose the samples of the epoch."""
        seed = check_integer("seed", seed, minimum=0)
        epoch = check_integer("epoch", epoch, minimum=0)
        if isinstance(datasets, Mapping):  # whose keys would be taken for the datasets
            raise ValueError(f"datasets must be a sequence, got the mapping {type(datasets).__name__}")
        if others := [type(dataset).__name__ for dataset in datasets if not hasattr(dataset, "__len__")]:
            raise ValueError(f"datasets must have a len(), got {', '.join(others)}: make a list of their samples")
        sizes = [len(dataset) for dataset in datasets]
        if weights is not None:
            self.counts = mixture_counts(sizes, weights, num_samples)
            never = [number for number, count in enumerate(self.counts.tolist()) if weights[number] and not count]
            if never:
                raise ValueError(
                    f"the quotas of these datasets round to 0 of {self.counts.sum()} samples in every epoch: {never}; "
                    "raise num_samples"
                )
        elif num_samples is not None:
            raise ValueError(f"num_samples can only be given together with weights, got {num_samples!r}")
        elif not sizes or not all(sizes):
            empty = [number for number, size in enumerate(sizes) if size == 0]
            raise ValueError(f"a mixture needs datasets, each with at least one sample; these have none: {empty}")
        else:
            self.counts = np.array(sizes, dtype=np.int64)
        before = [epoch * count for count in self.counts.tolist()]
        self._datasets = list(datasets)
        self._reweighs = loss_weights is not None
        factors = [1.0] * len(sizes) if loss_weights is None else list(loss_weights)
        if len(factors) != len(sizes):
            raise ValueError(f"loss_weights must be one for each of {len(sizes)} datasets, got {len(factors)}")
        self._factors = [check_number(f"loss weight {d}", factor) for d, factor in enumerate(factors)]
        drawn = sizes if weights is None else weights
        if not any(share and factor for share, factor in zip(drawn, self._factors, strict=True)):
            raise ValueError("loss_weights of the datasets with a weight must not all be 0: nothing would be learned")
        parts = [np.empty(0, dtype=np.int64)]
        for number, (size, count) in enumerate(zip(sizes, self.counts.tolist(), strict=True)):
            if count:
                parts.append(_stretch(_MIXTURE_KEYS + sum(sizes[:number]), size, count, seed, before[number]))
        self.ids = np.concatenate(parts)
        self.source = np.repeat(np.arange(len(sizes)), self.counts)

    def __len__(self) -> int:
        """Return the number of samples of the epoch."""
        return len(self.ids)

    def __getitem__(self, index: int) -> Any:
        """Return sample `index`; an IndexError for any other than 0 to N - 1."""
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} is outside the {len(self)} samples of the mixture")
        number = self.source[index]
        sample = self._datasets[number][int(self.ids[index])]
        return reweight(sample, self._factors[number]) if self._reweighs else sample


def _stretch(first_key: int, size: int, count: int, seed: int, first: int) -> NDArray[np.int64]:
    """Return the sorted ids at `count` places from the first on of one shuffled pass that repeats without end."""
    one_pass = np.argsort(random_keys(seed, 0, first_key, size), kind="stable").astype(np.int64)
    offset = first % size
    return np.sort(np.resize(one_pass, offset + count)[offset:])


def _ratio(number: int, weight: float) -> Fraction:
    check_number(f"the weight of dataset {number}", weight)
    return Fraction(Decimal(str(weight)))  # of a NumPy float32 the digits that it prints
