"""Datasets in memory: in goes the running interpreter's standard library or any data source, out come data sources.

The built-in corpus holds the source text of every outermost function or method of the standard library: a real
long-tailed distribution of lengths that is present on every machine, so nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Int64, Integer

from jvarlen.checks import list_offenders
from jvarlen.files import default_cache_dir, write_atomically
from jvarlen.interrupts import raise_if_interrupted
from jvarlen.lengths import DataSource, check_lengths
from jvarlen.measure_samples import measure_lengths
from jvarlen.source_texts import read_functions

__all__ = [
    "Split",
    "Subset",
    "TokenDataset",
    "as_data_source",
    "check_tokens",
    "known_lengths",
    "sample_hash",
    "split_held_out",
    "stdlib_functions",
    "to_tokens",
]

_CACHE_VERSION = 1
_HASH_BITS = 62


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
            raise ValueError(f"offsets must ascend from 0 to the number of tokens, {len(tokens)}")
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
    """Some samples of a dataset, in an order of their own: a data source that copies nothing.

    Args:
      dataset: random access to the samples.
      ids: int64[n], those to keep; sample i is `dataset[ids[i]]`.

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
        """Tokens of every sample; an AttributeError where the dataset does not know them."""
        return self._dataset.lengths[self._ids]  # type: ignore[attr-defined]


class _Tokens:
    """The samples of any dataset as arrays of tokens."""

    def __init__(self, dataset: DataSource):
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Integer[np.ndarray, " L"]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return to_tokens(self._dataset[index])

    @property
    def lengths(self) -> Int64[np.ndarray, " N"]:
        """Those that the dataset knows; an AttributeError where it knows none."""
        return self._dataset.lengths  # type: ignore[attr-defined]


class Split(NamedTuple):
    """Two datasets that share no sample.

    Attributes:
      train: the samples to train on.
      held_out: the samples that are never trained on.
    """

    train: DataSource
    held_out: DataSource


def as_data_source(dataset: DataSource) -> DataSource:
    """Any random-access dataset as a data source whose samples are 1-D integer arrays.

    A list, a Grain `RandomAccessDataSource` or a map-style `torch.utils.data.Dataset` are such. Where their samples are
    arrays, lists or tensors already, `load` takes them as they are; here, strings and bytes become arrays as well.

    Args:
      dataset: has `len()` and integer indexing. An attribute `lengths`, where it has one, counts the tokens of samples
        as `to_tokens` makes them.

    Returns:
      A data source that converts a sample when it is asked for, with `to_tokens`.

    Raises:
      ValueError: no random access: a stream, for example, which `stream_batches` takes.

    Example:
      >>> as_data_source(["ab", [300, 301]])[1]
      array([300, 301])
    """
    if not isinstance(dataset, DataSource):
        raise ValueError(
            f"a dataset needs len() and integer indexing, which {type(dataset).__name__} has not; samples that only "
            "come one after the other are for stream_batches"
        )
    return _Tokens(dataset)


def to_tokens(sample: Any) -> Integer[np.ndarray, " L"]:
    """The tokens of a sample.

    Args:
      sample: a string, which becomes its UTF-8; bytes; or integers as a list, an array, or a tensor in host memory.

    Returns:
      integers[L], of length L: uint8 of strings and bytes, else of the dtype it has. Nothing is copied needlessly.

    Raises:
      ValueError: none of these.

    Example:
      >>> to_tokens("ö")
      array([195, 182], dtype=uint8)
    """
    if isinstance(sample, str):
        return np.frombuffer(sample.encode(), np.uint8)
    if isinstance(sample, bytes | bytearray | memoryview):
        return np.frombuffer(sample, np.uint8)
    try:
        tokens = np.asarray(sample)
    except Exception as error:  # of any library: a tensor on a device, or a ragged list
        raise ValueError(f"no tokens, but {type(sample).__name__}: {error}") from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        kind = f"{type(sample).__name__} ({tokens.ndim}-D {tokens.dtype})"
        raise ValueError(f"a sample must be text, bytes or 1-D integers, not {kind}")
    return tokens


def check_tokens(parts: Sequence[TokenDataset], num_values: int | None) -> list[TokenDataset]:
    """Checks samples that lie in several flat arrays, one after the other, and narrows them.

    Args:
      parts: the samples.
      num_values: tokens must lie below it; None for no limit.

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
        raise ValueError("it holds no samples: at least one is needed")
    empty = np.concatenate(
        [np.flatnonzero(part.lengths == 0) + start for part, start in zip(parts, starts, strict=False)]
    )
    if len(empty):
        raise ValueError(f"samples must not be empty: {list_offenders(empty)}")
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
        raise ValueError(f"tokens must be at least 0{limit}; these samples have others: {listed}")
    if num_values is None or num_values > 256:
        return list(parts)
    return [TokenDataset(part.tokens.astype(np.uint8, copy=False), part.offsets) for part in parts]


def known_lengths(dataset: DataSource, *, progress: bool = True) -> Int64[np.ndarray, " N"]:
    """The lengths that a dataset knows itself, in its attribute `lengths`; else they are measured, sample by sample.

    Args:
      dataset: random access to samples that have a `len()`.
      progress: whether measuring shows a progress bar.

    Returns:
      int64[N], checked by `check_lengths`.

    Raises:
      ValueError: an empty dataset, or lengths below 1.
      RuntimeError: a sample cannot be read; see `measure_lengths`.

    Example:
      >>> known_lengths(TokenDataset.from_bytes([b"ab", b"c"]))
      array([2, 1])
    """
    if hasattr(dataset, "lengths"):
        return check_lengths(dataset.lengths)
    return measure_lengths(dataset, progress=progress)


def stdlib_functions(*, cache_dir: Path | None = None, progress: bool = True) -> TokenDataset:
    """The source of every outermost function and method in the standard library of the running interpreter.

    Decorators are left out, whole lines are kept, test directories are skipped, equal texts are kept once. The order is
    by file path, then by line. The first scan takes some seconds and is cached.

    Args:
      cache_dir: where the scan is kept; `default_cache_dir()` if None.
      progress: whether the scan shows a progress bar.

    Returns:
      A `TokenDataset` of about 15,000 samples of 15 to about 17,000 bytes.

    Raises:
      FileNotFoundError: the standard library of this interpreter has no source files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    interpreter = hashlib.sha256(f"{_CACHE_VERSION} {sys.version} {root}".encode()).hexdigest()[:16]
    cache = (cache_dir or default_cache_dir()) / f"stdlib-functions-{interpreter}.npz"
    if cache.exists():
        try:
            # NumPy leaves a file that it opened itself open when the file is damaged.
            with cache.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                return TokenDataset(stored["tokens"], stored["offsets"])
        except Exception as error:  # whatever it is, the scan makes the file anew
            warnings.warn(f"{cache} is damaged ({error}) and is made anew", stacklevel=2)
    dataset = TokenDataset.from_bytes(read_functions(root, progress))
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(cache) as out:
            np.savez_compressed(out, tokens=dataset.tokens, offsets=dataset.offsets)
    except OSError as error:
        warnings.warn(f"the corpus is not kept for the next time: {error}", stacklevel=2)
    return dataset


def split_held_out(dataset: DataSource, fraction: float) -> Split:
    """Holds samples out by the hash of their content, so that the same text is always on the same side.

    The same tokens have one hash in whatever they are held, but for uint8, which are the bytes of texts.

    Args:
      dataset: the samples to split, each as `to_tokens` takes it.
      fraction: the share of samples to hold out, between 0 and 1.

    Returns:
      `Split(train, held_out)`, two `Subset`s; each keeps the order of the dataset.

    Raises:
      ValueError: `fraction` is not between 0 and 1, or one side would be empty; or a sample is not of tokens.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"the held-out fraction must lie between 0 and 1, not {fraction}")
    is_held_out = _hashes_of(dataset) / 2**_HASH_BITS < fraction
    if is_held_out.all() or not is_held_out.any():
        raise ValueError(f"a held-out fraction of {fraction} leaves one side of {len(dataset)} samples empty")
    return Split(Subset(dataset, np.flatnonzero(~is_held_out)), Subset(dataset, np.flatnonzero(is_held_out)))


def sample_hash(sample: Any) -> int:
    """A hash of the tokens of a sample, whatever holds them: the first 62 bits of SHA-256 of bytes, or of int64.

    Args:
      sample: as `to_tokens` takes it.

    Returns:
      0 ≤ hash < 2**62.

    Example:
      >>> sample_hash("ab") == sample_hash(b"ab") == sample_hash(np.array([97, 98], np.uint8)) != sample_hash([97, 98])
      True
    """
    tokens = to_tokens(sample)
    content = tokens.astype(np.uint8 if tokens.dtype == np.uint8 else "<i8", copy=False).tobytes()
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") >> (64 - _HASH_BITS)


def _hashes_of(dataset: DataSource) -> Int64[np.ndarray, " N"]:
    """Those that a dataset knows itself, in its attribute `sample_hashes`; else they are made, sample by sample."""
    if hasattr(dataset, "sample_hashes"):
        return dataset.sample_hashes
    hashes = np.zeros(len(dataset), np.int64)
    for sample_id in range(len(dataset)):
        raise_if_interrupted()
        hashes[sample_id] = sample_hash(dataset[sample_id])
    return hashes
