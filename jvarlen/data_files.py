"""Data files: in goes a file of text, JSON lines, token arrays or columns, out comes a data source with known lengths.

Files are untrusted: nothing in them is unpickled or evaluated, and what they should not hold is a `ValueError` that
says where it is. Nothing is left out in silence: an empty sample is an error.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, Integer, UInt8
from tqdm import tqdm

from jvarlen.arrow_files import read_column
from jvarlen.datasets import TokenDataset
from jvarlen.interrupts import raise_if_interrupted
from jvarlen.lengths import DataSource, list_first, list_offenders

__all__ = ["LineDataset", "open_data_file"]

_CHUNK_BYTES = 1 << 24
_NEWLINE, _RETURN = b"\n\r"
_MAX_LISTED = 5


def open_data_file(
    path: Path, *, field: str = "text", num_values: int | None = None, progress: bool = True
) -> DataSource:
    r"""Opens a file of samples by the ending of its name.

    | ending | a sample | its tokens |
    |---|---|---|
    | .txt | a line | its bytes, without the end of the line |
    | .jsonl | an object a line | the UTF-8 bytes of the string in `field` |
    | .npz | `tokens[offsets[i]:offsets[i+1]]` | integers[total], beside offsets[N+1] |
    | .parquet, .arrow, .feather | a row of the column `field` | the bytes of a string, or the integers of a list |

    Lines stay on disk and are read when they are asked for; only where they begin and how long they are is held. Arrays
    of an `.npz` and columns are held in memory, but for Arrow columns that are uncompressed and in one chunk. Columns
    need pyarrow, the extra `data`.

    Args:
      path: the file.
      field: the name of the field that holds the text of a JSON line, or of the column.
      num_values: tokens must lie below it; None for no limit. Up to 256, the samples are uint8.
      progress: whether checking JSON lines shows a progress bar.

    Returns:
      A data source of 1-D integer arrays, with an attribute `lengths`, int64[N].

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: another ending; pyarrow is needed and missing; a damaged file; no samples; empty samples; what is no
        JSON object with a string in `field`; arrays that do not fit together; a column of another type or with nulls;
        tokens out of range. The first lines or samples are listed.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = Path(folder, "two.jsonl")
      ...     _ = path.write_text('{"text": "one"}\n{"text": "seven"}')
      ...     dataset = open_data_file(path, progress=False)
      >>> dataset.lengths, dataset[1].tobytes()
      (array([3, 5]), b'seven')
    """
    openers: dict[str, Callable[[], DataSource]] = {
        ".txt": lambda: LineDataset(path),
        ".jsonl": lambda: LineDataset(path, field, progress=progress),
        ".npz": lambda: _open_arrays(path, num_values),
        **dict.fromkeys(
            (".parquet", ".arrow", ".feather"), lambda: _checked_tokens(path, *read_column(path, field), num_values)
        ),
    }
    if path.suffix not in openers:
        raise ValueError(f"{path} is no data file: its name must end with {', '.join(openers)}")
    if not path.is_file():
        raise FileNotFoundError(f"there is no data file {path}")
    return openers[path.suffix]()


class LineDataset:
    """Lines of a memory-mapped file: a data source of bytes whose lengths are known.

    Worker processes map the file themselves.

    Args:
      path: the file; it must not change while it is in use.
      field: the name of the string in the JSON object that every line is; None where the line itself is the sample. All
        JSON lines are parsed once here, to be checked and measured.
      progress: whether that shows a progress bar.

    Attributes:
      lengths: int64[N], bytes of every sample.

    Raises:
      OSError: the file cannot be read.
      ValueError: it has no lines, or lines that are no samples; the first are listed.
    """

    def __init__(self, path: Path, field: str | None = None, *, progress: bool = True):
        self._path = path
        self._field = field
        self._num_bytes = path.stat().st_size
        if not self._num_bytes:
            raise ValueError(f"{path} is empty: at least one line is needed")
        self._bytes = _map(path)
        self._starts, self._ends = _find_lines(self._bytes)
        if field is None:
            self._ends -= self._bytes[self._ends - 1] == _RETURN
            self._ends = np.maximum(self._ends, self._starts)
            self.lengths = self._ends - self._starts
            self._refuse(np.flatnonzero(self.lengths == 0), ["empty"] * _MAX_LISTED)
        else:
            self.lengths = self._measure(field, progress)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> UInt8[np.ndarray, " length"]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        line = self._bytes[self._starts[index] : self._ends[index]]
        if self._field is None:
            return line
        try:
            return np.frombuffer(_parse(line.tobytes(), self._field), np.uint8)
        except ValueError as error:
            raise ValueError(f"{self._path} has changed: line {index + 1}: {error}") from None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_bytes"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._path.stat().st_size != self._num_bytes:
            raise ValueError(f"{self._path} has changed: it had {self._num_bytes:,} bytes")
        self._bytes = _map(self._path)

    def _measure(self, field: str, progress: bool) -> Int64[np.ndarray, " N"]:
        lengths = np.zeros(len(self), np.int64)
        reasons: list[str] = []
        for index in tqdm(range(len(self)), desc="JSON", unit="line", disable=not progress):
            raise_if_interrupted()
            try:
                lengths[index] = len(_parse(self._bytes[self._starts[index] : self._ends[index]].tobytes(), field))
            except ValueError as error:
                if len(reasons) < _MAX_LISTED:
                    reasons.append(str(error))
        self._refuse(np.flatnonzero(lengths == 0), reasons)
        return lengths

    def _refuse(self, indices: Int64[np.ndarray, " n"], reasons: list[str]) -> None:
        """Raises ValueError where any lines are given; the reasons are those of the first."""
        if not len(indices):
            return
        first = [f"line {i + 1}: {reason}" for i, reason in zip(indices.tolist(), reasons, strict=False)]
        more = f" and {len(indices) - len(first):,} more" if len(indices) > len(first) else ""
        wanted = "a JSON object with text in the field" + f" {self._field!r}" if self._field else "text"
        raise ValueError(f"{self._path}: every line must be {wanted}; mend or remove {'; '.join(first)}{more}")


def _map(path: Path) -> UInt8[np.ndarray, " total"]:
    return np.memmap(path, np.uint8, "r").view(np.ndarray)  # slices of a memmap are slow


def _find_lines(data: UInt8[np.ndarray, " total"]) -> tuple[Int64[np.ndarray, " N"], Int64[np.ndarray, " N"]]:
    """Where every line starts, and where its newline is; the last line needs none."""
    chunks = range(0, len(data), _CHUNK_BYTES)
    newlines = np.concatenate([np.flatnonzero(data[i : i + _CHUNK_BYTES] == _NEWLINE) + i for i in chunks])
    ends = newlines if data[-1] == _NEWLINE else np.append(newlines, len(data))
    return np.concatenate([[0], ends[:-1] + 1]), ends


def _parse(line: bytes, field: str) -> bytes:
    """The text of a JSON line; raises ValueError with the reason why there is none, which is short and of one line."""
    try:
        record = json.loads(line.decode())
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from None
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError:
        raise ValueError("a number of too many digits") from None
    if not isinstance(record, dict):
        raise ValueError("no JSON object")
    if field not in record:
        raise ValueError(f"no such field, but {list_first(map(reprlib.repr, record)) or 'none'}")
    text = record[field]
    if not isinstance(text, str):
        raise ValueError(f"no string, but {reprlib.repr(text)}")
    if not text:
        raise ValueError("empty")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ValueError("half a surrogate pair, which has no UTF-8") from None


def _open_arrays(path: Path, num_values: int | None) -> TokenDataset:
    with path.open("rb") as file:  # NumPy leaves a file that it opened itself open when the file is damaged
        try:
            stored = np.load(file, allow_pickle=False)
            tokens, offsets = stored["tokens"], stored["offsets"]
        except Exception as error:  # damage shows in many ways: as zip, as compressed data, as array
            raise ValueError(f"{path} is no readable .npz of the arrays tokens and offsets: {error}") from None
    for name, array in (("tokens", tokens), ("offsets", offsets)):
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"{path}: {name} must be 1-D integers, not {array.dtype}{list(array.shape)}")
    return _checked_tokens(path, tokens, offsets.astype(np.int64), num_values)


def _checked_tokens(
    path: Path, tokens: Integer[np.ndarray, " total"], offsets: Int64[np.ndarray, " N_plus_1"], num_values: int | None
) -> TokenDataset:
    try:
        dataset = TokenDataset(tokens, offsets)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not len(dataset):
        raise ValueError(f"{path} holds no samples: at least one is needed")
    is_empty = dataset.lengths == 0
    if is_empty.any():
        raise ValueError(f"{path}: samples must not be empty: {list_offenders(np.flatnonzero(is_empty))}")
    is_outside = tokens < 0
    if num_values is not None:
        is_outside |= tokens >= num_values
    if is_outside.any():
        places = np.flatnonzero(is_outside)
        ids, first = np.unique(np.searchsorted(offsets, places, side="right") - 1, return_index=True)
        limit = "" if num_values is None else f" and below {num_values}"
        listed = list_offenders(ids, tokens[places[first]])
        raise ValueError(f"{path}: tokens must be at least 0{limit}; these samples have others: {listed}")
    return TokenDataset(tokens.astype(np.uint8), offsets) if num_values is not None and num_values <= 256 else dataset
