"""Arrow files: in goes a column of a Parquet or Arrow file, out come its tokens and where each sample begins.

Needs pyarrow, the extra `data`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64, Integer

from jvarlen.lengths import list_first, list_offenders

__all__ = ["TokenColumn", "read_column"]

_ARROW_FILE_MAGIC = b"ARROW1"  # what has none is a stream


class TokenColumn(NamedTuple):
    """The rows of a column, one after the other.

    Attributes:
      tokens: integers[total]; uint8 of strings, their UTF-8 bytes.
      offsets: int64[N+1], from 0, ascending; row i is `tokens[offsets[i]:offsets[i+1]]`.
    """

    tokens: Integer[np.ndarray, " total"]
    offsets: Int64[np.ndarray, " N_plus_1"]


def read_column(path: Path, field: str) -> TokenColumn:
    """Reads a column of strings, bytes or lists of integers.

    Parquet is decoded into memory. Arrow (a file or a stream; also "Feather") is mapped, and stays on disk where the
    column is uncompressed and in one chunk.

    Args:
      path: the file; its ending says which of the two it is.
      field: the name of the column.

    Returns:
      `TokenColumn`.

    Raises:
      ValueError: pyarrow is missing; a damaged file; no such column, or one of another type; rows or tokens that are
        null, the first of which are listed.

    References:
      The Arrow columnar format, https://arrow.apache.org/docs/format/Columnar.html
    """
    try:
        import pyarrow as pa  # here: an extra
    except ModuleNotFoundError:
        raise ValueError(f"{path} can only be read with pyarrow: pip install 'jvarlen[data]'") from None

    try:
        array = _read(path, field)
    except Exception as error:  # pyarrow has errors of many types
        raise ValueError(f"{path}: no readable column {field!r}: {error}") from None
    kind = array.type
    is_bytes = any(
        is_kind(kind)
        for is_kind in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    )
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not is_bytes and not (is_list and pa.types.is_integer(kind.value_type)):
        raise ValueError(f"{path}: column {field!r} must hold strings, bytes or lists of integers, not {kind}")
    if array.null_count:
        null_rows = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))
        raise ValueError(f"{path}: column {field!r} must not hold nulls: {list_offenders(null_rows)}")
    column, null_rows = _flatten(array)
    if len(null_rows):
        raise ValueError(f"{path}: column {field!r} must not hold null tokens: {list_offenders(null_rows)}")
    return column


def _flatten(array: Any) -> tuple[TokenColumn, Int64[np.ndarray, " n"]]:
    """The rows of an Arrow array of bytes or of lists, none of them null, and which of them hold null tokens."""
    import pyarrow as pa

    nowhere = np.zeros(0, np.int64)
    if not len(array):  # which may have no offsets at all
        return TokenColumn(np.zeros(0, np.uint8), np.zeros(1, np.int64)), nowhere
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        offsets = array.offsets.to_numpy().astype(np.int64)
        flat = array.values[offsets[0] : offsets[-1]]
        offsets -= offsets[0]
        null_tokens = np.flatnonzero(flat.is_null().to_numpy(zero_copy_only=False)) if flat.null_count else nowhere
        null_rows = np.unique(np.searchsorted(offsets, null_tokens, side="right") - 1)
        return TokenColumn(flat.to_numpy(zero_copy_only=not len(null_tokens)), offsets), null_rows
    is_large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    _, ends, values = array.buffers()
    own = slice(array.offset, array.offset + len(array) + 1)
    offsets = np.frombuffer(ends, np.int64 if is_large else np.int32)[own].astype(np.int64)
    tokens = np.frombuffer(values or b"", np.uint8)[offsets[0] : offsets[-1]]
    return TokenColumn(tokens, offsets - offsets[0]), nowhere


def _read(path: Path, field: str) -> Any:
    """The column as one Arrow array."""
    import pyarrow as pa
    from pyarrow import parquet

    if path.suffix == ".parquet":
        with parquet.ParquetFile(path, memory_map=True) as file:
            _check_field(file.schema_arrow.names, field)
            column = file.read(columns=[field]).column(field)
    else:
        with pa.memory_map(str(path)) as file:
            is_file = file.read(len(_ARROW_FILE_MAGIC)) == _ARROW_FILE_MAGIC
            file.seek(0)
            table = (pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)).read_all()
        _check_field(table.column_names, field)
        column = table.column(field)
    column.validate(full=True)  # before anything follows an offset or an index in it
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _check_field(names: list[str], field: str) -> None:
    if names.count(field) != 1:
        raise ValueError(f"the columns are {list_first(map(repr, names))}")
