"""The stages of planning on disk: sort, group into buckets, and put into the order of the steps, each in pieces.

Letters: N samples, n of them in the plan, m of a piece, S steps, K buckets.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Int64, Integer, Shaped

from jvarlen.experimental.large_plans.columns import Column, Columns, PartFiles, read_slice
from jvarlen.planning.grouping import BucketTable, sum_segments
from jvarlen.planning.lengths import LengthHistogram
from jvarlen.planning.order import random_keys, stable_argsort

__all__ = [
    "PIECE", "Grouped", "Pieces", "Source", "Stage", "cut_steps", "group", "id_dtype", "sort_by_block",
    "sort_by_length",
]  # fmt: skip

PIECE = 2**24  # samples; the memory of a stage is some tens of bytes for each


class Pieces(Protocol):
    """Samples in an order, in pieces."""

    @property
    def starts(self) -> Int64[np.ndarray, " pieces_plus_1"]:
        """Where each piece begins in the order; the last is N."""
        ...

    def read(self, piece: int) -> Columns:
        """The columns of a piece: "id", "length", and perhaps "key", a random one."""
        ...


class Stage(NamedTuple):
    """What is done with each piece of samples.

    Attributes:
      name: of the stage.
      pieces: what it reads.
      work: from the number of a piece to the samples by group, and how many each group has; it can run in a thread.
      files: what these are appended to, in the order of the pieces.
    """

    name: str
    pieces: Pieces
    work: Callable[[int], tuple[Columns, Int64[np.ndarray, " groups"]]]
    files: PartFiles | Grouped


def id_dtype(num_samples: int) -> np.dtype:
    """The smallest type of sample ids, and of places."""
    return np.min_scalar_type(num_samples)


class Source:
    """Samples by id, with random keys where an order needs them."""

    def __init__(self, lengths: Integer[np.ndarray, " N"], dtype: np.dtype, random: tuple[int, int] | None):
        """`dtype`: of lengths; `random`: seed and epoch, None for no keys."""
        self._lengths, self._dtype, self._random = lengths, dtype, random
        self.starts = np.append(np.arange(0, len(lengths), PIECE), len(lengths))

    def read(self, piece: int) -> Columns:
        """The columns of consecutive ids."""
        start, stop = self.starts[piece : piece + 2].tolist()
        columns: Columns = {
            "id": np.arange(start, stop, dtype=id_dtype(len(self._lengths))),
            "length": read_slice(self._lengths, start, stop).astype(self._dtype, copy=False),
        }
        if self._random is not None:
            seed, epoch = self._random
            columns["key"] = random_keys(stop - start, seed=seed, epoch=epoch, start=start).astype(np.uint32)
        return columns


class _Parts:
    """Samples that are distributed to parts, each of which is sorted when it is read.

    Parts of a single key are in order already, and are read in pieces, however large they are.
    """

    def __init__(self, files: PartFiles, is_single: Shaped[np.ndarray, " parts"], argsort: Callable[[Columns], Any]):
        self._files, self._is_single, self._argsort = files, is_single, argsort

    @functools.cached_property
    def _slices(self) -> list[tuple[int, int, int]]:
        slices = []
        for part, size in enumerate(self._files.sizes.tolist()):
            length = PIECE if self._is_single[part] else max(1, size)
            slices += [(part, start, min(start + length, size)) for start in range(0, size, length)]
        return slices

    @property
    def starts(self) -> Int64[np.ndarray, " pieces_plus_1"]:
        return np.cumsum([0, *(stop - start for _, start, stop in self._slices)])

    def read(self, piece: int) -> Columns:
        part, start, stop = self._slices[piece]
        columns = self._files.read(part, start, stop)
        if self._is_single[part]:
            return columns
        order = self._argsort(columns)
        return {name: values[order] for name, values in columns.items()}


def _distribute(
    name: str,
    pieces: Pieces,
    files: PartFiles,
    part_of: Callable[[Columns], Integer[np.ndarray, " m"]],
    add: Callable[[Columns, int], Columns],
) -> Stage:
    """The stage that appends each sample to its part."""

    def work(piece: int) -> tuple[Columns, Int64[np.ndarray, " parts"]]:
        columns = add(pieces.read(piece), piece)
        return _group(columns, part_of(columns), len(files.sizes))

    return Stage(name, pieces, work, files)


def _group(
    columns: Columns, group: Integer[np.ndarray, " m"], num_groups: int
) -> tuple[Columns, Int64[np.ndarray, " groups"]]:
    """The samples by group, otherwise as they come, and how many each group has."""
    counts = np.bincount(group, minlength=num_groups)
    if np.count_nonzero(counts) > 1 and (group[1:] < group[:-1]).any():
        order = np.argsort(group.astype(np.min_scalar_type(num_groups), copy=False), kind="stable")  # radix sort
        columns = {name: values[order] for name, values in columns.items()}
    return columns, counts


def sort_by_length(
    pieces: Pieces, directory: Path, histogram: LengthHistogram, *, descending: bool, dtypes: dict[str, Any]
) -> tuple[Stage, Pieces]:
    """Sorts samples by length, ties as they come.

    Args:
      pieces: the samples.
      directory: for files of the parts.
      histogram: of all lengths.
      descending: whether the longest come first.
      dtypes: of the columns.

    Returns:
      The stage that distributes them, and the sorted pieces once it is done.
    """
    lengths, counts = histogram
    ordered = counts[::-1] if descending else counts
    before = np.cumsum(ordered) - ordered
    is_large = ordered > PIECE
    begins = np.diff(before // PIECE, prepend=-1) > 0
    begins[1:] |= is_large[1:] | is_large[:-1]
    part_of_rank = np.cumsum(begins) - 1
    num_parts = int(part_of_rank[-1]) + 1
    is_single = np.bincount(part_of_rank, minlength=num_parts) == 1
    part_of_length = part_of_rank[::-1] if descending else part_of_rank
    last_of_part = np.append(np.flatnonzero(np.diff(part_of_length)), len(lengths) - 1)
    # Parts by ascending length, whatever their order: the table looks lengths up.
    table = BucketTable(lengths[last_of_part], "error")

    def part_of(columns: Columns) -> Integer[np.ndarray, " m"]:
        part = table(columns["length"])
        return num_parts - 1 - part if descending else part

    def argsort(columns: Columns) -> Int64[np.ndarray, " m"]:
        keys = columns["length"]
        return stable_argsort(int(keys.max()) - keys.astype(np.int64) if descending else keys)

    files = PartFiles(directory, dtypes, num_parts)
    stage = _distribute("sort by length", pieces, files, part_of, lambda columns, piece: columns)
    return stage, _Parts(files, is_single, argsort)


def sort_by_block(
    pieces: Pieces,
    directory: Path,
    num_samples: int,
    block_size: int,
    ranks: Int64[np.ndarray, " blocks"] | None,
    *,
    is_by_id: bool,
    dtypes: dict[str, Any],
) -> tuple[Stage, Pieces]:
    """Shuffles samples within blocks of their places by (random key, id).

    Args:
      pieces: the samples, with their keys.
      directory: for files of the parts.
      num_samples: N.
      block_size: places of a block.
      ranks: int64[blocks], the place of each block among all; None leaves them in order.
      is_by_id: whether samples come by id, which then breaks ties already.
      dtypes: of the columns.

    Returns:
      The stage that distributes them, and the sorted pieces once it is done.
    """
    num_blocks = -(-num_samples // block_size)
    num_parts = -(-num_blocks * block_size // PIECE)

    def add_ranks(columns: Columns, piece: int) -> Columns:
        if num_blocks == 1:
            return columns
        block = np.arange(*pieces.starts[piece : piece + 2].tolist()) // block_size
        return columns | {"rank": block if ranks is None else ranks[block]}

    def part_of(columns: Columns) -> Int64[np.ndarray, " m"]:
        # About the place that the sample will have: it never falls as (rank, key) grows.
        place = (columns["key"] * (block_size / 2**32)).astype(np.int64)
        if num_blocks > 1:
            place += columns["rank"] * block_size
        return np.minimum(place // PIECE, num_parts - 1)

    def argsort(columns: Columns) -> Int64[np.ndarray, " m"]:
        order = stable_argsort(columns["key"]) if is_by_id else np.lexsort([columns["id"], columns["key"]])
        return order if num_blocks == 1 else order[stable_argsort(columns["rank"][order])]

    rank_dtypes = {"rank": id_dtype(num_blocks)} if num_blocks > 1 else {}
    files = PartFiles(directory, dtypes | rank_dtypes, num_parts)
    stage = _distribute("shuffle", pieces, files, part_of, add_ranks)
    return stage, _Parts(files, np.zeros(num_parts, bool), argsort)


class Grouped:
    """The samples of a plan by bucket, and in order within a bucket.

    Args:
      directory: of the files.
      num_samples: int64[K], samples of each bucket.
      num_places: N.
      max_length: longer samples are cut to it.
      has_places: whether the place of each in the order is kept.

    Attributes:
      has_places: likewise.
      max_length: likewise.
      sizes: int64[K], samples of each bucket so far.
    """

    def __init__(
        self, directory: Path, num_samples: Int64[np.ndarray, " K"], num_places: int, max_length: int, has_places: bool
    ):
        directory.mkdir(exist_ok=True)
        self.has_places, self.max_length = has_places, max_length
        length_dtype = np.min_scalar_type(max_length)
        self._starts = np.cumsum(num_samples) - num_samples
        total = int(num_samples.sum())
        self._ids = Column(directory / "ids", id_dtype(num_places), total)
        self._lengths = Column(directory / "lengths", length_dtype, total)
        self._places = Column(directory / "places", id_dtype(num_places), total) if has_places else None
        self.sizes = np.zeros(len(num_samples), np.int64)

    def append(self, columns: Columns, counts: Int64[np.ndarray, " K"]) -> None:
        """Appends samples that are grouped by bucket."""
        ends = np.cumsum(counts)
        for k in np.flatnonzero(counts).tolist():
            of_bucket = slice(ends[k] - counts[k], ends[k])
            start = int(self._starts[k] + self.sizes[k])
            self._ids.write(start, columns["id"][of_bucket])
            self._lengths.write(start, columns["length"][of_bucket])
            if self._places is not None:
                self._places.write(start, columns["place"][of_bucket])
        self.sizes += counts

    def last_places(self, offsets: Int64[np.ndarray, " S_plus_1"]) -> Int64[np.ndarray, " S"] | None:
        """The place of the last sample of each step; None where places are not kept."""
        if self._places is None:
            return None
        last = np.empty(len(offsets) - 1, np.int64)
        for first, end in itertools.pairwise(cut_steps(offsets).tolist()):
            places = self._places.read(offsets[first], offsets[end])
            last[first:end] = places[offsets[first + 1 : end + 1] - 1 - offsets[first]]
        return last

    def num_tokens(self, offsets: Int64[np.ndarray, " S_plus_1"]) -> Int64[np.ndarray, " S"]:
        """int64[S], the tokens of each step."""
        sums = np.empty(len(offsets) - 1, np.int64)
        cuts = cut_steps(offsets)
        for first, last in itertools.pairwise(cuts.tolist()):
            start, end = offsets[first], offsets[last]
            sums[first:last] = sum_segments(self._lengths.read(start, end), offsets[first : last + 1] - start)
        return sums

    def ids_of(
        self, offsets: Int64[np.ndarray, " S_plus_1"], taken: Int64[np.ndarray, " T"]
    ) -> Int64[np.ndarray, " m"]:
        """The sample ids of some steps, one after the other."""
        if (np.diff(taken) == 1).all():
            return self._ids.read(offsets[taken[0]], offsets[taken[-1] + 1]).astype(np.int64)
        return self._ids.read_segments(offsets[taken], np.diff(offsets)[taken]).astype(np.int64)

    @property
    def row_bytes(self) -> int:
        """Bytes of a sample."""
        columns = (self._ids, self._lengths, self._places)
        return sum(column.dtype.itemsize for column in columns if column is not None)


def group(pieces: Pieces, files: Grouped, table: BucketTable) -> Stage:
    """The stage that groups ordered samples by bucket; those that no bucket holds are left out."""
    num_buckets = len(files.sizes)

    def work(piece: int) -> tuple[Columns, Int64[np.ndarray, " K"]]:
        columns = pieces.read(piece)
        bucket, lengths = table(columns["length"]), columns["length"]
        if lengths.max() > files.max_length:
            lengths = np.minimum(lengths, files.max_length)
        places = np.arange(*pieces.starts[piece : piece + 2].tolist()) if files.has_places else columns["id"]
        columns, counts = _group({"id": columns["id"], "length": lengths, "place": places}, bucket, num_buckets + 1)
        return columns, counts[:num_buckets]

    return Stage("group by bucket", pieces, work, files)


def cut_steps(offsets: Int64[np.ndarray, " S_plus_1"]) -> Int64[np.ndarray, " cuts"]:
    """Ascending steps, from 0 to S, between which there are about `PIECE` samples."""
    cuts = np.searchsorted(offsets, np.arange(0, offsets[-1], PIECE))
    return np.unique(np.append(cuts, len(offsets) - 1))
