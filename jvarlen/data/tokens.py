"""Datasets: of tokens in memory, of files, and some samples of others."""

from __future__ import annotations

import hashlib
import itertools
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Int, Int64, Integer

from jvarlen._common.checks import UserError, list_offenders
from jvarlen.data.samples import AnyDataset, Dataset, Sample, samples_at_once
from jvarlen.planning.lengths import DataSource

__all__ = ["Concatenated", "FileDataset", "State", "Subset", "TokenDataset", "key_of_arrays"]

State: TypeAlias = dict[str, Any]
"""The attributes of an object that is pickled."""

Opened: TypeAlias = Any
"""What a `FileDataset` reads samples from."""


def key_of_arrays(*parts: np.ndarray | str) -> str:
    """SHA-256 in hex of arrays, their types and shapes, and of other keys."""
    whole = hashlib.sha256()
    for part in parts:
        about, content = (str, part.encode()) if isinstance(part, str) else ((part.dtype.str, part.shape), part)
        whole.update(f"{about} ".encode())
        whole.update(content if isinstance(content, bytes) else np.ascontiguousarray(content).data)
    return whole.hexdigest()


class TokenDataset(Dataset):
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

    def _read(self, index: int) -> Integer[np.ndarray, " L"]:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> Int64[np.ndarray, " N"]:
        """Tokens of every sample."""
        return np.diff(self.offsets)

    @property
    def content_key(self) -> str:
        """Hex key of all that the samples hold."""
        return key_of_arrays(self.tokens, self.offsets)

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


class Subset(Dataset):
    """Some samples of a dataset, in any order, without copying: a data source.

    Args:
      dataset: random access to the samples.
      ids: int64[n], the samples to keep, each from 0 to N − 1; sample i is `dataset[ids[i]]`.

    Raises:
      ValueError: ids that are not integers, or out of range; the first are listed.

    Example:
      >>> subset = Subset(["a", "b", "c"], np.array([2, 0]))
      >>> len(subset), subset[0]
      (2, 'c')
    """

    def __init__(self, dataset: DataSource, ids: Int64[np.ndarray, " n"]):
        if ids.dtype.kind not in "iu":  # of a mask, say
            raise UserError(f"ids of samples must be integers, not {ids.dtype}")
        if (is_none := (ids < 0) | (ids >= len(dataset))).any():  # −1 would read the last sample of a list
            raise UserError(f"the dataset has no such samples: {list_offenders(ids[is_none], limit=len(dataset) - 1)}")
        self.dataset: DataSource = dataset
        self.ids: Int64[np.ndarray, " n"] = ids
        if isinstance(dataset, Subset):  # so that a sample is looked up once
            self.dataset, self.ids = dataset.dataset, dataset.ids[ids]

    def __len__(self) -> int:
        return len(self.ids)

    def _read(self, index: int) -> Sample:
        return self.dataset[self.ids.item(index)]

    def __getitems__(self, indices: list[int]) -> list[Sample]:
        """Several samples, which the dataset reads at once if it can."""
        return samples_at_once(self.dataset, self.ids[indices].tolist())

    @property
    def lengths(self) -> Int64[np.ndarray, " n"]:
        """Tokens of every sample; raises AttributeError if the dataset does not know them."""
        return self.dataset.lengths[self.ids]  # type: ignore[attr-defined]

    @property
    def content_key(self) -> str:
        """Hex key of all that the samples hold; raises AttributeError if the dataset does not know its key."""
        return key_of_arrays(self.ids, self.dataset.content_key)  # type: ignore[attr-defined]


class Concatenated(Dataset):
    """The samples of several datasets, one after the other."""

    def __init__(self, parts: Sequence[AnyDataset]):
        self.parts = parts
        self._starts = [0, *itertools.accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self._starts[-1]

    def find(self, index: int) -> tuple[int, int]:
        """The dataset that holds a sample, and the id there."""
        part = bisect_right(self._starts, index) - 1
        return part, index - self._starts[part]

    def _read(self, index: int) -> Sample:
        part, index_there = self.find(index)
        return self.parts[part]._read(index_there)


class FileDataset(Dataset):
    """Samples of a file, which each worker process opens itself, and rejects if its size has changed."""

    def __init__(self, path: Path):
        self._path = path
        self._num_bytes = path.stat().st_size
        self._opened = self._open()

    @abstractmethod
    def _open(self) -> Opened:
        """The content of the file, or a view of it; it is not pickled."""

    def __getstate__(self) -> State:
        return {**vars(self), "_opened": None}

    def __setstate__(self, state: State) -> None:
        vars(self).update(state)
        if self._path.stat().st_size != self._num_bytes:
            raise UserError(f"{self._path} has changed: it had {self._num_bytes:,} bytes")
        self._opened = self._open()
