"""Datasets of tokens in memory, and subsets of datasets."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from jaxtyping import Int, Int64, Integer

from jvarlen._common.checks import UserError, list_first, list_offenders
from jvarlen._common.interrupts import raise_if_interrupted
from jvarlen.planning.lengths import DataSource
from jvarlen.planning.samples import WeightedTokens, to_tokens

__all__ = [
    "Joined",
    "Subset",
    "TokenDataset",
    "WeightedSamples",
    "as_data_source",
    "check_tokens",
]


class TokenDataset:
    """Samples of different lengths in one flat array: a random-access data source.

    Args:
      tokens: integers[total], the samples one after the other; uint8 where they are bytes.
      offsets: int64[N+1], ascending; sample i is `tokens[offsets[i]:offsets[i+1]]`.

    Example:
      >>> dataset = TokenDataset(np.frombuffer(b"abcde", np.uint8), np.array([0, 2, 5]))
      >>> len(dataset), dataset[1].tobytes()
      (2, b'cde')
    """

    def __init__(self, tokens: Integer[np.ndarray, " total"], offsets: Int[np.ndarray, " N_plus_1"]):
        # Compared, not subtracted: differences of offsets out of a file can overflow.
        is_descending = (offsets[1:] < offsets[:-1]).any()
        if len(offsets) < 1 or offsets[0] != 0 or offsets[-1] != len(tokens) or is_descending:
            raise UserError(f"offsets must ascend from 0 to the number of tokens, {len(tokens)}")
        self.tokens = tokens
        self.offsets = offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Integer[np.ndarray, " L"]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> Int64[np.ndarray, " N"]:
        """Tokens of every sample."""
        return np.diff(self.offsets)

    @classmethod
    def from_bytes(cls, samples: list[bytes]) -> TokenDataset:
        """Joins byte strings into one dataset.

        Args:
          samples: the bytes of each.

        Returns:
          A dataset of uint8 tokens.
        """
        lengths = np.fromiter(map(len, samples), np.int64, len(samples))
        tokens = np.frombuffer(b"".join(samples), np.uint8)
        return cls(tokens, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))


class Subset:
    """Some samples of a dataset, in any order, without copying: a data source.

    Args:
      dataset: random access to the samples.
      ids: int64[n], the samples to keep; sample i is `dataset[ids[i]]`.

    Example:
      >>> subset = Subset(["a", "b", "c"], np.array([2, 0]))
      >>> len(subset), subset[0]
      (2, 'c')
    """

    def __init__(self, dataset: DataSource, ids: Int64[np.ndarray, " n"]):
        self._dataset = dataset
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self._dataset[int(self._ids[index])]

    @property
    def lengths(self) -> Int64[np.ndarray, " n"]:
        """Tokens of every sample; raises AttributeError if the dataset does not know them."""
        return self._dataset.lengths[self._ids]  # type: ignore[attr-defined]


class WeightedSamples:
    """A dataset whose samples count differently in the loss, without copying: a data source of `WeightedTokens`.

    Args:
      dataset: random access to the samples; each is tokens, as for `to_tokens`, or `WeightedTokens`.
      sample_weights: a number for all samples, or numbers[N], finite and at least 0. The loss weights of a sample's
        tokens, 1 where it has none, are multiplied by that of the sample.

    Raises:
      ValueError: another number of weights than of samples, or weights that are not as described; they are listed.

    Example:
      >>> weighted = WeightedSamples([[5, 6], [7]], [0.5, 2.0])
      >>> weighted[0]
      WeightedTokens(tokens=[5, 6], weights=[0.5, 0.5])
    """

    def __init__(self, dataset: DataSource, sample_weights: npt.ArrayLike):
        weights: np.ndarray = np.asarray(sample_weights, np.float64)
        if weights.shape not in ((), (len(dataset),)):
            raise UserError(f"{len(dataset)} samples need one weight, or as many, not {weights.shape}")
        is_wrong = np.atleast_1d(~((weights >= 0) & (weights < np.inf)))
        if is_wrong.any():
            wrong = zip(np.flatnonzero(is_wrong).tolist(), np.atleast_1d(weights)[is_wrong].tolist(), strict=True)
            listed = list_first(f"id {i}: {weight}" for i, weight in wrong)
            raise UserError(f"sample weights must be finite and at least 0: {listed}")
        self._dataset = dataset
        self._weights = weights

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> WeightedTokens:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        sample, weight = self._dataset[index], float(self._weights[index] if self._weights.ndim else self._weights)
        if isinstance(sample, WeightedTokens):
            return WeightedTokens(sample.tokens, sample.weights * weight)
        tokens = to_tokens(sample)
        return WeightedTokens(tokens, np.full(len(tokens), weight, np.float32))

    @property
    def lengths(self) -> Int64[np.ndarray, " N"]:
        """Tokens of every sample; raises AttributeError if the dataset does not know them."""
        return self._dataset.lengths  # type: ignore[attr-defined]

    @property
    def content_key(self) -> str:
        """SHA-256 in hex of the dataset's key and the weights; raises AttributeError if the dataset has none."""
        key: str = self._dataset.content_key  # type: ignore[attr-defined]
        return hashlib.sha256(key.encode() + self._weights.astype("<f8").tobytes()).hexdigest()


class Joined:
    """Datasets one after the other, without copying: a data source.

    Args:
      datasets: random access to the samples of each; sample ids continue from one to the next.

    Example:
      >>> joined = Joined([["a", "b"], [], ["c"]])
      >>> len(joined), joined[2], joined.locate(2)
      (3, 'c', (2, 0))
    """

    def __init__(self, datasets: Sequence[DataSource]):
        self._datasets = tuple(datasets)
        self._starts = np.cumsum([0, *map(len, datasets)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        d, own = self.locate(index)
        return self._datasets[d][own]

    def locate(self, index: int) -> tuple[int, int]:
        """Where a sample is.

        Args:
          index: its id.

        Returns:
          The number of its dataset, and its id there.
        """
        d = int(np.searchsorted(self._starts, index, side="right")) - 1
        return d, index - int(self._starts[d])

    def lengths_of(self, samples: range) -> list[int] | None:
        """The lengths of consecutive samples, if all datasets read them at once.

        Args:
          samples: their ids.

        Returns:
          A list of integers, 0 where there is no sample; None if a dataset has no such method.
        """
        if not all(hasattr(dataset, "lengths_of") for dataset in self._datasets):
            return None
        lengths: list[int] = []
        while len(lengths) < len(samples):
            d, own = self.locate(samples.start + len(lengths))
            end = min(len(self._datasets[d]), own + len(samples) - len(lengths))
            lengths += self._datasets[d].lengths_of(range(own, end))  # type: ignore[attr-defined]
        return lengths


class _Tokens:
    """The samples of any dataset as arrays of tokens."""

    def __init__(self, dataset: DataSource):
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Integer[np.ndarray, " L"] | WeightedTokens:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        sample = self._dataset[index]
        return sample if isinstance(sample, WeightedTokens) else to_tokens(sample)

    @property
    def lengths(self) -> Int64[np.ndarray, " N"]:
        """The lengths that the dataset knows; raises AttributeError if it knows none."""
        return self._dataset.lengths  # type: ignore[attr-defined]


def as_data_source(dataset: DataSource) -> DataSource:
    """Any random-access dataset as a data source whose samples are 1-D integer arrays, or `WeightedTokens`.

    It takes a list, a Grain `RandomAccessDataSource` or a map-style `torch.utils.data.Dataset`. If their samples are
    already arrays, lists or tensors, `load` takes the dataset directly; here, strings and bytes become arrays as well.

    Args:
      dataset: has `len()` and integer indexing. If it has an attribute `lengths`, this must count the tokens of
        `to_tokens`.

    Returns:
      A data source that converts a sample with `to_tokens` when it is read.

    Raises:
      ValueError: it has no random access, such as a stream; use `stream_batches` for these.

    Example:
      >>> as_data_source(["ab", [300, 301]])[1]
      array([300, 301])
    """
    if not isinstance(dataset, DataSource):
        raise UserError(
            f"a dataset needs len() and integer indexing, which {type(dataset).__name__} has not; samples that only "
            "come one after the other are for stream_batches"
        )
    return _Tokens(dataset)


def check_tokens(parts: Sequence[TokenDataset], num_values: int | None) -> list[TokenDataset]:
    """Checks samples that lie in several flat arrays, one after the other, and narrows them.

    Args:
      parts: the samples.
      num_values: tokens must be below it; None for no limit.

    Returns:
      The same samples; uint8 where `num_values` is at most 256.

    Raises:
      ValueError: no samples, empty ones, or tokens out of range; the first are listed.

    Example:
      >>> [part.tokens.dtype.name for part in check_tokens([TokenDataset(np.array([7]), np.array([0, 1]))], 256)]
      ['uint8']
    """
    starts = np.cumsum([0, *map(len, parts)])
    if not starts[-1]:
        raise UserError("it holds no samples: at least one is needed")
    empty = np.concatenate(
        [np.flatnonzero(part.lengths == 0) + start for part, start in zip(parts, starts, strict=False)]
    )
    if len(empty):
        raise UserError(f"samples must not be empty: {list_offenders(empty)}")
    ids, values = [], []
    for part, start in zip(parts, starts, strict=False):
        raise_if_interrupted()
        if part.tokens.dtype == np.uint8 and (num_values is None or num_values >= 256):
            continue
        is_outside = part.tokens < 0
        if num_values is not None:
            is_outside |= part.tokens >= num_values
        places = np.flatnonzero(is_outside)
        own, first = np.unique(np.searchsorted(part.offsets, places, side="right") - 1, return_index=True)
        ids.append(own + start)
        values.append(part.tokens[places[first]])
    if any(map(len, ids)):
        limit = "" if num_values is None else f" and below {num_values}"
        listed = list_offenders(np.concatenate(ids), np.concatenate(values))
        raise UserError(f"tokens must be at least 0{limit}; these samples have others: {listed}")
    if num_values is None or num_values > 256:
        return list(parts)
    return [TokenDataset(part.tokens.astype(np.uint8, copy=False), part.offsets) for part in parts]
