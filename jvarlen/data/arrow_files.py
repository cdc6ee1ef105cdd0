"""Columns of Parquet, Arrow, CSV or TSV files, as Hugging Face datasets saves them too; needs pyarrow."""

from __future__ import annotations

import csv
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Int64, Integer

from jvarlen._common.checks import UserError, list_first, list_offenders
from jvarlen._common.interrupts import raise_if_interrupted
from jvarlen.data.line_files import read_json, size_of_mark
from jvarlen.data.samples import Record
from jvarlen.data.token_files import as_narrow, check_tokens
from jvarlen.data.tokens import Concatenated, FileDataset, TokenDataset

__all__ = ["ColumnDataset", "ColumnRecords", "message_columns", "saved_shards"]

ArrowArray: TypeAlias = Any  # of pyarrow, which has no types, and may be missing
ArrowType: TypeAlias = Any
ArrowTable: TypeAlias = Any

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_ARROW_FILE_MAGIC = b"ARROW1"  # what has none is a stream
_ARROW_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


class ColumnDataset(FileDataset):
    """Rows of a column of strings, bytes or lists of integers: a data source."""

    def __init__(self, path: Path, field: str, num_values: int | None = None):
        self._field, self._num_values = field, num_values
        super().__init__(path)
        self.lengths = np.concatenate([np.zeros(0, np.int64), *(part.lengths for part in self._opened.parts)])

    def _open(self) -> Concatenated:
        column = _read_column(self._path, self._field)
        import pyarrow as pa  # after the column, whose error says if it is missing

        kind, name = column.type, f"{self._path}: column {self._field!r}"
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        self.is_text = not is_list
        if not (pa.types.is_integer(kind.value_type) if is_list else _is_bytes(kind)):
            raise UserError(f"{name} must hold strings, bytes or lists of integers, not {kind}")
        if column.null_count:
            raise UserError(
                f"{name} must not hold nulls: {list_offenders(np.flatnonzero(column.is_null().to_numpy()))}"
            )
        parts: list[TokenDataset] = []
        start = 0
        for array in column.chunks:
            raise_if_interrupted()
            part, null_rows = _flatten(array)
            if len(null_rows):
                raise UserError(f"{name} must not hold null tokens: {list_offenders(null_rows + start)}")
            check_tokens(part, self._num_values, self._path, first_id=start)
            parts.append(TokenDataset(as_narrow(part.tokens, self._num_values), part.offsets))
            start += len(part)
        return Concatenated(parts)

    def __len__(self) -> int:
        return len(self.lengths)

    def _read(self, index: int) -> Integer[np.ndarray, " L"]:
        return self._opened._read(index)


class ColumnRecords(FileDataset):
    """Rows of several columns, read as by `ColumnDataset` but of any type: a data source of dicts."""

    is_text = True

    def __init__(self, path: Path, fields: Sequence[str]):
        self._fields = fields
        super().__init__(path)

    def _open(self) -> dict[str, ArrowArray]:
        return {field: _read_column(self._path, field) for field in self._fields}

    def __len__(self) -> int:
        return len(self._opened[self._fields[0]])

    def _read(self, index: int) -> Record:
        return {field: column[index].as_py() for field, column in self._opened.items()}


def message_columns(path: Path) -> dict[str, bool]:
    """The columns of a file, and whether they hold lists of records, such as the messages of chats; none if damaged."""
    try:
        import pyarrow as pa  # here: an extra
        from pyarrow import parquet

        if path.suffix in _DELIMITERS:
            return {}
        schema = parquet.read_schema(path) if path.suffix == ".parquet" else _read_arrow(path).schema
        kinds = {column.name: column.type for column in schema}
        is_list = {name: pa.types.is_list(kind) or pa.types.is_large_list(kind) for name, kind in kinds.items()}
        return {name: is_list[name] and pa.types.is_struct(kind.value_type) for name, kind in kinds.items()}
    except Exception:  # reading a column reports it
        return {}


def saved_shards(directory: Path) -> list[Path]:
    """The Arrow files of a dataset that Hugging Face `Dataset.save_to_disk` has saved, in their order."""
    if (directory / "dataset_dict.json").is_file():
        splits = read_json(directory / "dataset_dict.json").get("splits")
        names = [str(directory / name) for name in splits if isinstance(name, str)] if isinstance(splits, list) else []
        raise UserError(f"{directory} holds several datasets; take one of them: {list_first(names) or 'none is named'}")
    state = read_json(directory / "state.json")
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise UserError(
            f"{directory} picks its rows by a file of indices: load it with datasets, then save it once more after "
            "flatten_indices()"
        )
    files = state.get("_data_files")
    names = [str(file.get("filename")) for file in files if isinstance(file, dict)] if isinstance(files, list) else []
    if not names:
        raise UserError(f"{directory / 'state.json'} names no files of data")
    if wrong := [name for name in names if Path(name).name != name or not (directory / name).is_file()]:
        listed = list_first(map(reprlib.repr, wrong))
        raise UserError(f"{directory / 'state.json'} must name files of its own directory, not {listed}")
    return [directory / name for name in names]


def _is_bytes(kind: ArrowType) -> bool:
    import pyarrow as pa

    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(is_kind(kind) for is_kind in kinds)


def _read_column(path: Path, field: str) -> ArrowArray:
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


def _flatten(array: ArrowArray) -> tuple[TokenDataset, Int64[np.ndarray, " n"]]:
    """The rows of an Arrow array of bytes or of lists, none of them null, and which of them hold null tokens."""
    import pyarrow as pa

    no_rows = np.zeros(0, np.int64)
    if not len(array):  # an empty array may have no offsets
        return TokenDataset(np.zeros(0, np.uint8), np.zeros(1, np.int64)), no_rows
    if _is_bytes(array.type):
        array = array.cast(pa.large_binary())
        _, ends, values = array.buffers()
        offsets = np.frombuffer(ends, np.int64)[array.offset : array.offset + len(array) + 1]
        tokens = np.frombuffer(values or b"", np.uint8)[offsets[0] : offsets[-1]]
        return TokenDataset(tokens, offsets - offsets[0]), no_rows
    offsets = array.offsets.to_numpy().astype(np.int64)
    flat = array.values[offsets[0] : offsets[-1]]
    offsets -= offsets[0]
    nulls = np.flatnonzero(flat.is_null().to_numpy(zero_copy_only=False)) if flat.null_count else no_rows
    null_rows = np.unique(np.searchsorted(offsets, nulls, side="right") - 1)
    return TokenDataset(flat.to_numpy(zero_copy_only=not len(nulls)), offsets), null_rows


def _read(path: Path, field: str) -> ArrowArray:
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


def _read_arrow(path: Path) -> ArrowTable:
    import pyarrow as pa

    with pa.memory_map(str(path)) as file:
        is_file = file.read(len(_ARROW_FILE_MAGIC)) == _ARROW_FILE_MAGIC
        file.seek(0)
        if is_file:
            return pa.ipc.open_file(file).read_all()
        table, size = pa.ipc.open_stream(file).read_all(), file.size()
        if (
            file.tell() != size
            or file.read_at(len(_ARROW_STREAM_END), size - len(_ARROW_STREAM_END)) != _ARROW_STREAM_END
        ):
            raise UserError(f"the stream does not end where the file does, after {size:,} bytes: it may be cut short")
        return table


def _read_csv(path: Path, field: str) -> ArrowArray:
    import pyarrow as pa

    size_of_mark(path)  # of other encodings than UTF-8 is an error
    csv.field_size_limit(2**31 - 1)
    values, wrong, line, num_blank = [], [], 1, 0
    # Not by pyarrow, which reads on after a quote that closes in the middle of a value.
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, delimiter=_DELIMITERS[path.suffix], strict=True)
        try:
            names = next(rows, [])
            _check_field(names, field)
            place, line = names.index(field), rows.line_num + 1
            for row in rows:
                line = rows.line_num + 1
                if not row:  # of one column an empty value, unless at the end
                    num_blank += len(names) == 1
                elif len(row) == len(names):
                    values += [*num_blank * [""], row[place]]
                    num_blank = 0
                else:
                    wrong.append(f"line {rows.line_num:,} has {len(row)} values")
        except csv.Error as error:
            raise UserError(f"line {line:,}: a quote is missing, or one in the text is not doubled ({error})") from None
    if wrong:
        raise UserError(f"{list_first(wrong)}, and there are {len(names)} columns")
    return pa.chunked_array([pa.array(values, pa.large_string())])


def _check_field(names: list[str], field: str) -> None:
    if names.count(field) != 1:
        raise UserError(f"the columns are {list_first(map(repr, names)) or 'none'}")
