"""Opens files or directories of text or tokens as datasets with known lengths and a content key.

Files are untrusted: nothing in them is unpickled or evaluated, and bad content is a `ValueError` that says where it is.
Nothing is skipped silently: an empty sample is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64, Integer

from jvarlen._common.checks import UserError
from jvarlen.data.arrow_files import ColumnDataset, saved_shards
from jvarlen.data.content_key import combine_keys, content_key
from jvarlen.data.length_cache import cached_hashes, cached_lengths
from jvarlen.data.line_files import LineDataset
from jvarlen.data.tokenized import TokenizedDataset
from jvarlen.data.tokens import TokenDataset, check_tokens
from jvarlen.planning.lengths import DataSource

__all__ = ["StoredDataset", "open_data"]

_MAX_LISTED = 5
_NUM_BYTES = 256
_COLUMN_ENDINGS = (".parquet", ".arrow", ".feather")
_ENDINGS = (".txt", ".jsonl", ".npz", *_COLUMN_ENDINGS)


class StoredDataset:
    """Samples in files: a data source with known lengths.

    Attributes:
      lengths: int64[N], tokens of every sample.
      num_values: all tokens are below it: 256 for bytes of text, otherwise the number of ids of the tokenizer; None if
        unknown.
      is_bytes: whether the tokens are the bytes of text.
      content_key: hex key of everything that decides the samples: file contents, field, tokenizer. Files with the same
        content have the same key, wherever they are.
    """

    def __init__(
        self,
        path: Path,
        samples: DataSource,
        lengths: Int64[np.ndarray, " N"],
        num_values: int | None,
        is_bytes: bool,
        content_key: str,
        name_of: Callable[[int], str],
        read_hashes: Callable[[], Int64[np.ndarray, " N"]],
    ):
        """`name_of` returns the name of a sample for errors, `read_hashes` the value of `sample_hashes`."""
        self._read_hashes = read_hashes
        self._path = path
        self._samples = samples
        self._name_of = name_of
        self.lengths = lengths
        self.num_values = num_values
        self.is_bytes = is_bytes
        self.content_key = content_key

    @functools.cached_property
    def sample_hashes(self) -> Int64[np.ndarray, " N"]:
        """The `sample_hash` of every sample, kept beside the data; see `cached_hashes`."""
        return self._read_hashes()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_read_hashes", "sample_hashes")}

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Integer[np.ndarray, " L"]:
        try:
            return self._samples[index]
        except ValueError as error:  # it was read once, when the lengths were measured
            raise UserError(f"{self._path} has changed: {self._name_of(index)}: {error}") from None


def open_data(
    path: Path,
    *,
    field: str = "text",
    tokenizer: Path | None = None,
    num_values: int | None = None,
    num_workers: int = 0,
    progress: bool = True,
) -> StoredDataset:
    r"""Opens a file of samples by its extension, or a directory saved by Hugging Face datasets.

    - `.txt`: a sample is a line; its tokens are its bytes, without the end of the line.
    - `.jsonl`: an object a line; the UTF-8 bytes of the string in `field`.
    - `.npz`: `tokens[offsets[i]:offsets[i+1]]`, from integers[total] and offsets[N+1].
    - `.parquet`, `.arrow`, `.feather`: a row of the column `field`; the bytes of a string, or the integers of a list.
    - A directory with `state.json`: likewise, over all its Arrow files.

    With a tokenizer, text becomes token ids; see `TokenizedDataset`.

    Lines and uncompressed Arrow columns stay on disk until they are read. Arrays of an `.npz`, and Parquet, are held in
    memory. Columns need pyarrow and tokenizers need the package tokenizers, both in the extra `data`.

    For the lengths of JSON lines and of tokenized text, every sample must be read. They are measured once and cached
    beside the data under the key of its content, or in the user's caches; see `cached_lengths`.

    Args:
      path: the file or directory.
      field: the name of the JSON field that holds the text, or of the column.
      tokenizer: a file of the package `tokenizers`; None for the bytes of the text.
      num_values: tokens must be below it; None for no limit. Up to 256, the samples are uint8.
      num_workers: processes that measure lengths, if there are thousands of samples; 0 measures in this process.
      progress: whether measuring lengths shows a progress bar.

    Returns:
      A `StoredDataset`: a data source of 1-D integer arrays with known lengths.

    Raises:
      FileNotFoundError: there is no such file or directory.
      ValueError: another extension; pyarrow or tokenizers is needed and missing; a damaged file; no samples, or empty
        ones; a line that is not a JSON object with a string in `field`; arrays that do not match; a column of another
        type or with nulls; tokens out of range; a file that is not a tokenizer, a tokenizer for data that is not text,
        or one with more ids than `num_values`. The first offending lines or samples are listed.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = Path(folder, "two.jsonl")
      ...     _ = path.write_text('{"text": "one"}\n{"text": "seven"}')
      ...     dataset = open_data(path, progress=False)
      >>> dataset.lengths, dataset[1].tobytes()
      (array([3, 5]), b'seven')
    """
    opened = _open(path, field, num_values if tokenizer is None else None)
    content = content_key(*opened.files)
    key = lengths_key = combine_keys(content, opened.field, None)
    if tokenizer is not None:
        if not opened.is_text:
            raise UserError(f"{path} holds tokens, not text: the tokenizer {tokenizer} has nothing to do")
        tokenized = TokenizedDataset(opened.samples, tokenizer)
        if num_values is not None and tokenized.num_values > num_values:
            raise UserError(f"{tokenizer} has {tokenized.num_values:,} ids; at most {num_values:,} are allowed")
        key = combine_keys(content, opened.field, tokenized.key)
        lengths_key = combine_keys(content, opened.field, tokenized.lengths_key)
        opened = opened._replace(samples=tokenized, lengths=None, num_values=tokenized.num_values)
    lengths = opened.lengths
    if lengths is None:
        lengths = cached_lengths(opened.samples, path, lengths_key, num_workers=num_workers, progress=progress)
    _refuse_empty(path, opened, lengths)
    # Of bytes and of wider integers hashes differ, and which they are `num_values` decides.
    width = "bytes" if opened.num_values is not None and opened.num_values <= _NUM_BYTES else "integers"
    read_hashes = functools.partial(
        cached_hashes, opened.samples, path, combine_keys(lengths_key, width), progress=progress
    )
    return StoredDataset(
        path,
        opened.samples,
        lengths,
        opened.num_values,
        opened.is_text and tokenizer is None,
        key,
        opened.name_of,
        read_hashes,
    )


class _Opened(NamedTuple):
    """Samples of files.

    Attributes:
      files: all files that hold them.
      field: the field or column that they are in; None if there is no choice.
      samples: a ValueError says why there is no sample under an id.
      lengths: int64[N], 0 for a missing sample; None if they must be measured.
      is_text: whether they are bytes of text.
      num_values: all tokens are below it; None if unknown.
      wanted: what every sample must be.
      name_of: returns the name of a sample.
    """

    files: list[Path]
    field: str | None
    samples: DataSource
    lengths: Int64[np.ndarray, " N"] | None
    is_text: bool
    num_values: int | None
    wanted: str
    name_of: Callable[[int], str]


def _open(path: Path, field: str, num_values: int | None) -> _Opened:
    if not path.exists():
        raise FileNotFoundError(f"there is no data file {path}")
    if path.is_dir():
        return _open_columns(saved_shards(path), field, num_values)
    if path.suffix not in _ENDINGS or not path.is_file():
        raise UserError(f"{path} is no data file: its name must end with {', '.join(_ENDINGS)}")
    if path.suffix in _COLUMN_ENDINGS:
        return _open_columns([path], field, num_values)
    if path.suffix == ".npz":
        dataset = _open_arrays(path, num_values)
        return _Opened([path], None, dataset, dataset.lengths, False, num_values, "tokens", _id)
    lines = LineDataset(path, field if path.suffix == ".jsonl" else None)
    if path.suffix == ".txt":
        return _Opened([path], None, lines, lines.line_lengths, True, _NUM_BYTES, "every line must be text", _line)
    wanted = f"every line must be a JSON object with text in the field {field!r}"
    return _Opened([path], field, lines, None, True, _NUM_BYTES, wanted, _line)


def _open_columns(paths: list[Path], field: str, num_values: int | None) -> _Opened:
    columns = ColumnDataset(paths, field, num_values)
    num_values = _NUM_BYTES if columns.is_text else num_values
    wanted = f"every row of the column {field!r} must be text"
    return _Opened(paths, field, columns, columns.lengths, columns.is_text, num_values, wanted, _id)


def _line(index: int) -> str:
    return f"line {index + 1}"


def _id(index: int) -> str:
    return f"id {index}"


def _refuse_empty(path: Path, opened: _Opened, lengths: Int64[np.ndarray, " N"]) -> None:
    """Raises ValueError that lists the samples which are none, and why the first are none."""
    refused = np.flatnonzero(lengths == 0)
    if not len(refused):
        return
    first = []
    for index in refused[:_MAX_LISTED].tolist():
        try:
            opened.samples[index]
        except ValueError as error:
            first.append(f"{opened.name_of(index)}: {error}")
    more = f" and {len(refused) - len(first):,} more" if len(refused) > len(first) else ""
    raise UserError(f"{path}: {opened.wanted}; mend or remove {'; '.join(first)}{more}")


def _open_arrays(path: Path, num_values: int | None) -> TokenDataset:
    with path.open("rb") as file:  # NumPy leaves a file that it opened itself open when the file is damaged
        try:
            stored = np.load(file, allow_pickle=False)
            tokens, offsets = stored["tokens"], stored["offsets"]
        except Exception as error:  # damage shows in many ways: as zip, as compressed data, as array
            raise UserError(f"{path} is no readable .npz of the arrays tokens and offsets: {error}") from None
    for name, array in (("tokens", tokens), ("offsets", offsets)):
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise UserError(f"{path}: {name} must be 1-D integers, not {array.dtype}{list(array.shape)}")
    try:
        (dataset,) = check_tokens([TokenDataset(tokens, offsets.astype(np.int64))], num_values)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    return dataset
