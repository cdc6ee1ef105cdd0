"""Values of samples in files: what one stage of planning writes and the next one reads, in pieces."""

from __future__ import annotations

import collections
import math
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from jaxtyping import Int64, Integer, Shaped

__all__ = ["Column", "Columns", "PartFiles", "mapped_file", "read_slice", "run_ahead", "write_values"]

_T = TypeVar("_T")

_NUM_AHEAD = 2  # threads; each holds a piece of the work in memory

Columns = dict[str, Shaped[np.ndarray, " n"]]  # values by name, of the same samples


class Column:
    """A file of numbers of one type, written and read at any place.

    Args:
      path: the file; made if missing.
      dtype: of the values.
      num_values: how many there will be.

    Attributes:
      dtype: likewise.
    """

    def __init__(self, path: Path, dtype: npt.DTypeLike, num_values: int):
        self._path = path
        self.dtype = np.dtype(dtype)
        with path.open("ab") as file:
            file.truncate(num_values * self.dtype.itemsize)

    def write(self, start: int, values: Shaped[np.ndarray, " m"]) -> None:
        """Writes consecutive values from place `start` on."""
        write_values(self._path, values.astype(self.dtype, copy=False), start * self.dtype.itemsize)

    def read(self, start: int, stop: int) -> Shaped[np.ndarray, " m"]:
        """The values from place `start` to `stop`."""
        return np.fromfile(self._path, self.dtype, stop - start, offset=start * self.dtype.itemsize)

    def read_segments(
        self, starts: Int64[np.ndarray, " T"], sizes: Int64[np.ndarray, " T"]
    ) -> Shaped[np.ndarray, " m"]:
        """Joins segments of these numbers of values; a memory map would keep all pages near them in memory."""
        values = np.empty(int(sizes.sum()), self.dtype)
        ends = np.cumsum(sizes) * self.dtype.itemsize
        buffer = memoryview(values.data).cast("B")
        with self._path.open("rb", buffering=0) as file:
            descriptor, first = file.fileno(), 0
            for offset, end in zip((starts * self.dtype.itemsize).tolist(), ends.tolist(), strict=True):
                os.preadv(descriptor, [buffer[first:end]], offset)
                first = end
        return values


class PartFiles:
    """Columns of samples, appended by part: each part has one file for each column.

    Args:
      directory: of the files; made if missing.
      dtypes: of the columns, by name.
      num_parts: how many parts.

    Attributes:
      sizes: int64[num_parts], samples of each part.
    """

    def __init__(self, directory: Path, dtypes: Mapping[str, npt.DTypeLike], num_parts: int):
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self._dtypes = {name: np.dtype(dtype) for name, dtype in dtypes.items()}
        self.sizes = np.zeros(num_parts, np.int64)

    def append(self, columns: Columns, counts: Integer[np.ndarray, " parts"]) -> None:
        """Appends samples that are grouped by part.

        Args:
          columns: values of the samples, those of part 0 first.
          counts: integers[num_parts], samples of each part.
        """
        ends = np.cumsum(counts)
        for part in np.flatnonzero(counts).tolist():
            of_part = slice(ends[part] - counts[part], ends[part])
            for name, dtype in self._dtypes.items():
                values = columns[name][of_part].astype(dtype, copy=False)
                write_values(self._path(name, part), values, int(self.sizes[part]) * dtype.itemsize)
        self.sizes += counts

    def read(self, part: int, start: int, stop: int) -> Columns:
        """The columns of the samples `start` to `stop` of a part."""
        return {
            name: np.fromfile(self._path(name, part), dtype, stop - start, offset=start * dtype.itemsize)
            for name, dtype in self._dtypes.items()
        }

    def delete(self) -> None:
        """Deletes the files."""
        shutil.rmtree(self._directory)

    @property
    def row_bytes(self) -> int:
        """Bytes of a sample."""
        return sum(dtype.itemsize for dtype in self._dtypes.values())

    def _path(self, name: str, part: int) -> Path:
        return self._directory / f"{name}-{part:05}"


def write_values(path: Path, values: Shaped[np.ndarray, " m *rest"], offset: int) -> None:
    """Writes all bytes of an array at a place of a file, which is made if missing."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb", buffering=0) as file:
        file.seek(offset)
        left = memoryview(np.ascontiguousarray(values).data).cast("B")
        while left:
            left = left[file.write(left) :]


def run_ahead(work: Callable[[int], _T], items: Iterable[int]) -> Iterator[_T]:
    """Yields `work(item)` for each item, in their order; the next ones are computed in threads meanwhile."""
    with ThreadPoolExecutor(_NUM_AHEAD) as threads:
        waiting: collections.deque[Future[_T]] = collections.deque()
        try:
            for item in items:
                waiting.append(threads.submit(work, item))
                if len(waiting) > _NUM_AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def mapped_file(array: np.ndarray) -> Path | None:
    """The file that a memory-mapped array maps; None for other arrays, parts of a map and private copies."""
    is_whole = isinstance(array, np.memmap) and isinstance(array.base, mmap.mmap) and array.flags.c_contiguous
    if not is_whole or array.mode == "c" or array.filename is None:  # type: ignore[attr-defined]
        return None
    return Path(array.filename)  # type: ignore[attr-defined]


def read_slice(array: Shaped[np.ndarray, " N *rest"], start: int, stop: int) -> Shaped[np.ndarray, " n *rest"]:
    """`array[start:stop]`; of a memory-mapped file it is read, since pages of the map would stay in memory."""
    path = mapped_file(array)
    if path is None:
        return array[start:stop]
    row = array.itemsize * math.prod(array.shape[1:])
    num_values = (stop - start) * math.prod(array.shape[1:])
    read = np.fromfile(path, array.dtype, num_values, offset=array.offset + start * row)  # type: ignore[attr-defined]
    return read.reshape(stop - start, *array.shape[1:])
