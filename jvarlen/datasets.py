"""Datasets in memory: in goes the running interpreter's standard library or any data source, out come data sources.

The built-in corpus holds the source text of every outermost function or method of the standard library: a real
long-tailed distribution of lengths that is present on every machine, so nothing is downloaded.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Int64, Integer
from tqdm import tqdm

from jvarlen.files import default_cache_dir, write_atomically
from jvarlen.interrupts import raise_if_interrupted
from jvarlen.lengths import DataSource, check_lengths
from jvarlen.measure_samples import measure_lengths

__all__ = ["Split", "Subset", "TokenDataset", "known_lengths", "split_held_out", "stdlib_functions"]

_CACHE_VERSION = 1
_NOT_CORPUS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


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

    def __getitem__(self, index: int) -> Integer[np.ndarray, " length"]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> Int64[np.ndarray, " N"]:
        """Tokens of every sample."""
        return np.diff(self.offsets)

    @classmethod
    def from_bytes(cls, samples: list[bytes]) -> TokenDataset:
        """Joins byte strings into one dataset."""
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


class Split(NamedTuple):
    """Two datasets that share no sample."""

    train: DataSource
    held_out: DataSource


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
    dataset = TokenDataset.from_bytes(_scan(root, progress))
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(cache) as out:
            np.savez_compressed(out, tokens=dataset.tokens, offsets=dataset.offsets)
    except OSError as error:
        warnings.warn(f"the corpus is not kept for the next time: {error}", stacklevel=2)
    return dataset


def split_held_out(dataset: DataSource, fraction: float) -> Split:
    """Holds samples out by the hash of their content, so that the same text is always on the same side.

    Args:
      dataset: the samples to split, each an array of integers.
      fraction: the share of samples to hold out, between 0 and 1.

    Returns:
      `Split(train, held_out)`, two `Subset`s; each keeps the order of the dataset.

    Raises:
      ValueError: `fraction` is not between 0 and 1, or one side would be empty.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"the held-out fraction must lie between 0 and 1, not {fraction}")
    is_held_out = np.zeros(len(dataset), bool)
    for sample_id in range(len(dataset)):
        raise_if_interrupted()
        is_held_out[sample_id] = _hash_fraction(dataset[sample_id].tobytes()) < fraction
    if is_held_out.all() or not is_held_out.any():
        raise ValueError(f"a held-out fraction of {fraction} leaves one side of {len(dataset)} samples empty")
    return Split(Subset(dataset, np.flatnonzero(~is_held_out)), Subset(dataset, np.flatnonzero(is_held_out)))


def _hash_fraction(sample: bytes) -> float:
    return int.from_bytes(hashlib.sha256(sample).digest()[:8], "big") / 2**64


def _scan(root: Path, progress: bool) -> list[bytes]:
    files = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in _NOT_CORPUS]
        files += [Path(directory, name) for name in names if name.endswith(".py")]
    if not files:
        raise FileNotFoundError(f"the standard library at {root} holds no source files to build the corpus from")
    samples: dict[bytes, None] = {}  # a dict keeps the first of equal texts, in order
    for path in tqdm(sorted(files), desc="corpus", unit="file", disable=not progress):
        raise_if_interrupted()
        source = path.read_bytes()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # old sources hold invalid escapes
                tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue  # templates and deliberately broken files
        lines = source.splitlines(keepends=True)
        for function in _outermost_functions(tree):
            samples[b"".join(lines[function.lineno - 1 : function.end_lineno])] = None
    samples.pop(b"", None)
    return list(samples)


def _outermost_functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _outermost_functions(node)
