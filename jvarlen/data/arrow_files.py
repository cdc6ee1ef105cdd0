"""Datasets in a column of Parquet, Arrow, CSV or TSV files.

Directories saved by Hugging Face datasets hold such files. Needs pyarrow, in the extra `data`.
"""

from __future__ import annotations

import itertools
import reprlib
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, Integer

from jvarlen._common.checks import UserError, list_first, list_offenders
from jvarlen._common.interrupts import raise_if_interrupted
from jvarlen.data.line_files import read_json
from jvarlen.data.token_files import check_tokens
from jvarlen.data.tokens import TokenDataset
from jvarlen.planning.samples import Dataset

__all__ = ["ColumnDataset", "ColumnRecords", "holds_messages", "saved_shards"]

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_ARROW_FILE_MAGIC = b"ARROW1"  # what has none is a stream


class _Reopened(Dataset):
    """A dataset of files that pickles as its arguments, and is refused by a worker if the files have changed."""

    def __init__(self, paths: Sequence[Path], *arguments: Any):
        self._arguments = list(paths), *arguments
        self._num_bytes = [path.stat().st_size for path in paths]

    def __getstate__(self) -> tuple[Any, list[int]]:
        return self._arguments, self._num_bytes

    def __setstate__(self, state: tuple[Any, list[int]]) -> None:
        arguments, num_bytes = state
        for path, expected in zip(arguments[0], num_bytes, strict=True):
            if path.stat().st_size != expected:
                raise UserError(f"{path} has changed: it had {expected:,} bytes")
        type(self).__init__(self, *arguments)


class ColumnDataset(_Reopened):
    """Rows of a column of strings, bytes or lists of integers in files of one format: a data source.

    Parquet, CSV and TSV are decoded into memory. The first line of CSV and TSV names the columns, and every value is a
    string, in quotes where it holds a delimiter or a newline. Arrow (a file or a stream; also "Feather") is
    memory-mapped, and uncompressed columns stay on disk. Worker processes open the files themselves.

    References:
      The Arrow columnar format, https://arrow.apache.org/docs/format/Columnar.html
    """

    def __init__(self, paths: Sequence[Path], field: str, num_values: int | None = None):
        super().__init__(paths, field, num_values)
        arrays = [array for path in paths for array in _read_arrays(path, field)]
        name = _name(paths)
        kinds = {str(array.type) for array in arrays}
        if len({_is_bytes(array.type) for array in arrays}) > 1:
            raise UserError(f"{name}: column {field!r} must be of one type, not {', '.join(sorted(kinds))}")
        self.is_text = any(_is_bytes(array.type) for array in arrays)
        starts = [0, *itertools.accumulate(map(len, arrays))]
        nulls = [_null_places(array) for array in arrays]
        _refuse_rows(name, field, "nulls", nulls, starts)
        columns, null_rows = [], []
        for array in arrays:
            raise_if_interrupted()
            column, null_tokens = _flatten(array)
            columns.append(column)
            null_rows.append(null_tokens)
        _refuse_rows(name, field, "null tokens", null_rows, starts)
        try:
            self._parts = check_tokens(columns, num_values)
        except ValueError as error:
            raise UserError(f"{name}: {error}") from None
        self._starts = starts
        self.lengths: Int64[np.ndarray, " N"] = np.concatenate([part.lengths for part in self._parts])

    def __len__(self) -> int:
        return len(self.lengths)

    def _read(self, index: int) -> Integer[np.ndarray, " L"]:
        part = bisect_right(self._starts, index) - 1
        return self._parts[part]._read(index - self._starts[part])


class ColumnRecords(_Reopened):
    """Rows of several columns, read as by `ColumnDataset` but of any type: a data source of dicts."""

    def __init__(self, paths: Sequence[Path], fields: Sequence[str]):
        super().__init__(paths, list(fields))
        self._files = [{field: _read_column(path, field) for field in fields} for path in paths]
        self._starts = [0, *itertools.accumulate(len(next(iter(columns.values()))) for columns in self._files)]
        if not len(self):
            raise UserError(f"{_name(paths)} holds no rows: at least one is needed")

    def __len__(self) -> int:
        return self._starts[-1]

    def _read(self, index: int) -> dict[str, Any]:
        file = bisect_right(self._starts, index) - 1
        own = index - self._starts[file]
        return {field: column[own].as_py() for field, column in self._files[file].items()}


def holds_messages(path: Path, field: str) -> bool:
    """Whether a column of a file holds lists of records, such as the messages of chats; False for a damaged file."""
    try:
        import pyarrow as pa  # here: an extra
        from pyarrow import parquet

        if path.suffix in _DELIMITERS:
            return False
        if path.suffix == ".parquet":
            kind = parquet.read_schema(path).field(field).type
        else:
            kind = _read_arrow(path).schema.field(field).type
        return (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_struct(kind.value_type)
    except Exception:  # which reading the column will tell
        return False


def saved_shards(directory: Path) -> list[Path]:
    """The Arrow files of a dataset that Hugging Face `Dataset.save_to_disk` has saved, in their order.

    A format set on the dataset (`set_format`) does not change the files and has no effect here. Raises ValueError for
    several datasets, files that are missing or outside the directory, and rows that a file of indices selects.
    """
    if (directory / "dataset_dict.json").is_file():
        splits = read_json(directory / "dataset_dict.json").get("splits")
        names = [str(directory / name) for name in splits if isinstance(name, str)] if isinstance(splits, list) else []
        raise UserError(f"{directory} holds several datasets; take one of them: {list_first(names) or 'none is named'}")
    if not (directory / "state.json").is_file():
        raise UserError(f"{directory} is no dataset that save_to_disk has saved: it holds no state.json")
    state = read_json(directory / "state.json")
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise UserError(
            f"{directory} picks its rows by a file of indices: load it with datasets, then save it once more after "
            "flatten_indices()"
        )
    files = state.get("_data_files")
    if not isinstance(files, list) or not all(isinstance(file, dict) for file in files) or not files:
        raise UserError(f"{directory / 'state.json'} names no files of data")
    names = [file.get("filename") for file in files]
    outside = [name for name in names if not isinstance(name, str) or name in ("", "..") or Path(name).name != name]
    if outside:
        listed = list_first(map(reprlib.repr, outside))
        raise UserError(f"{directory / 'state.json'} must name files of its own directory, not {listed}")
    paths = [directory / name for name in names]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise UserError(f"{directory} lacks files of its data: {list_first(map(repr, missing))}")
    return paths


def _name(paths: Sequence[Path]) -> str:
    return str(paths[0] if len(paths) == 1 else paths[0].parent)


def _refuse_rows(name: str, field: str, what: str, rows: list[Int64[np.ndarray, " n"]], starts: Sequence[int]) -> None:
    """Raises ValueError where there are any rows of any chunk."""
    if any(map(len, rows)):
        listed = list_offenders(np.concatenate([own + start for own, start in zip(rows, starts, strict=False)]))
        raise UserError(f"{name}: column {field!r} must not hold {what}: {listed}")


def _null_places(array: Any) -> Int64[np.ndarray, " n"]:
    if not array.null_count:
        return np.zeros(0, np.int64)
    return np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))


def _is_bytes(kind: Any) -> bool:
    import pyarrow as pa

    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(is_kind(kind) for is_kind in kinds)


def _read_column(path: Path, field: str) -> Any:
    """The column as a chunked Arrow array; raises ValueError that names the file."""
    try:
        import pyarrow  # noqa: F401  # here: an extra
    except ModuleNotFoundError:
        raise UserError(f"{path} can only be read with pyarrow: pip install 'jvarlen[data]'") from None

    raise_if_interrupted()
    try:
        return _read(path, field)
    except Exception as error:  # pyarrow has errors of many types
        raise UserError(f"{path}: no readable column {field!r}: {error}") from None


def _read_arrays(path: Path, field: str) -> list[Any]:
    """The column as Arrow arrays of bytes or of lists of integers, one after the other."""
    column = _read_column(path, field)
    import pyarrow as pa  # after the column, which tells if it is missing

    kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not _is_bytes(kind) and not (is_list and pa.types.is_integer(kind.value_type)):
        raise UserError(f"{path}: column {field!r} must hold strings, bytes or lists of integers, not {kind}")
    return column.chunks


def _flatten(array: Any) -> tuple[TokenDataset, Int64[np.ndarray, " n"]]:
    """The rows of an Arrow array of bytes or of lists, none of them null, and which of them hold null tokens."""
    import pyarrow as pa

    if not len(array):  # which may have no offsets at all
        return TokenDataset(np.zeros(0, np.uint8), np.zeros(1, np.int64)), np.zeros(0, np.int64)
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        offsets = array.offsets.to_numpy().astype(np.int64)
        flat = array.values[offsets[0] : offsets[-1]]
        offsets -= offsets[0]
        null_tokens = _null_places(flat)
        null_rows = np.unique(np.searchsorted(offsets, null_tokens, side="right") - 1)
        return TokenDataset(flat.to_numpy(zero_copy_only=not len(null_tokens)), offsets), null_rows
    is_large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    _, ends, values = array.buffers()
    own = slice(array.offset, array.offset + len(array) + 1)
    offsets = np.frombuffer(ends, np.int64 if is_large else np.int32)[own].astype(np.int64)
    tokens = np.frombuffer(values or b"", np.uint8)[offsets[0] : offsets[-1]]
    return TokenDataset(tokens, offsets - offsets[0]), np.zeros(0, np.int64)


def _read(path: Path, field: str) -> Any:
    """The column as a chunked Arrow array."""
    import pyarrow as pa
    from pyarrow import parquet

    if path.suffix == ".parquet":
        with parquet.ParquetFile(path, memory_map=True) as file:
            _check_field(file.schema_arrow.names, field)
            column = file.read(columns=[field]).column(field)
    elif path.suffix in _DELIMITERS:
        column = _read_csv(path, field)
    else:
        table = _read_arrow(path)
        _check_field(table.column_names, field)
        column = table.column(field)
    column.validate(full=True)  # before anything follows an offset or an index in it
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return column


def _read_arrow(path: Path) -> Any:
    import pyarrow as pa

    with pa.memory_map(str(path)) as file:
        is_file = file.read(len(_ARROW_FILE_MAGIC)) == _ARROW_FILE_MAGIC
        file.seek(0)
        return (pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)).read_all()


def _read_csv(path: Path, field: str) -> Any:
    import pyarrow as pa
    from pyarrow import csv

    parsing = csv.ParseOptions(delimiter=_DELIMITERS[path.suffix], newlines_in_values=True)
    with csv.open_csv(path, parse_options=parsing) as reader:
        _check_field(reader.schema.names, field)
    return csv.read_csv(
        path,
        parse_options=parsing,
        convert_options=csv.ConvertOptions(column_types={field: pa.large_string()}, include_columns=[field]),
    ).column(field)


def _check_field(names: list[str], field: str) -> None:
    if names.count(field) != 1:
        raise UserError(f"the columns are {list_first(map(repr, names))}")
