"""Opens files or directories of text or tokens as datasets with known lengths and a content key.

Files are untrusted: nothing in them is unpickled or evaluated, and bad content is a `ValueError` that says where it is.
Nothing is skipped silently: an empty sample is an error.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64, Integer

from jvarlen._common.checks import UserError, check_at_least_one
from jvarlen.data.arrow_files import ColumnDataset, ColumnRecords, holds_messages, saved_shards
from jvarlen.data.chat_templates import ChatTemplate
from jvarlen.data.content_key import combine_keys, content_key
from jvarlen.data.find_files import DataFile, find_files, is_remote
from jvarlen.data.length_cache import cached_hashes, cached_lengths
from jvarlen.data.line_files import LineDataset, LineRecords, first_record
from jvarlen.data.marked_text import MarkedBytes
from jvarlen.data.records import RecordFormat, RecordTexts
from jvarlen.data.token_files import open_indexed_tokens, open_token_file
from jvarlen.data.tokenized import TokenizedDataset
from jvarlen.data.tokens import Joined, TokenDataset, check_tokens
from jvarlen.planning.lengths import DataSource
from jvarlen.planning.samples import WeightedTokens

__all__ = ["StoredDataset", "open_data"]

_MAX_LISTED = 5
_NUM_BYTES = 256
_COLUMN_ENDINGS = (".parquet", ".arrow", ".feather", ".csv", ".tsv")


class StoredDataset:
    """Samples in files: a data source with known lengths.

    Attributes:
      lengths: int64[N], tokens of every sample.
      num_values: all tokens are below it: 256 for bytes of text, otherwise the number of ids of the tokenizer; None if
        unknown.
      is_bytes: whether the tokens are the bytes of text.
    """

    def __init__(
        self,
        path: Path | str,
        samples: DataSource,
        lengths: Int64[np.ndarray, " N"],
        num_values: int | None,
        is_bytes: bool,
        read_key: Callable[[], str],
        name_of: Callable[[int], str],
        read_hashes: Callable[[], Int64[np.ndarray, " N"]],
    ):
        """`name_of` returns the name of a sample for errors, `read_key` and `read_hashes` the values of properties."""
        self._read_key = read_key
        self._read_hashes = read_hashes
        self._path = path
        self._samples = samples
        self._name_of = name_of
        self.lengths = lengths
        self.num_values = num_values
        self.is_bytes = is_bytes

    @functools.cached_property
    def content_key(self) -> str:
        """Hex key of everything that decides the samples: file contents, field, tokenizer.

        Files with the same content have the same key, wherever they are. They are read for it once, when it is first
        needed.
        """
        return self._read_key()

    @functools.cached_property
    def sample_hashes(self) -> Int64[np.ndarray, " N"]:
        """The `sample_hash` of every sample, kept beside the data; see `cached_hashes`."""
        return self._read_hashes()

    def __getstate__(self) -> dict[str, Any]:
        of_parent = ("_read_key", "_read_hashes", "sample_hashes")
        return {name: value for name, value in vars(self).items() if name not in of_parent}

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Integer[np.ndarray, " L"] | WeightedTokens:
        try:
            return self._samples[index]
        except ValueError as error:  # it was read once, when the lengths were measured
            raise UserError(f"{self._path} has changed: {self._name_of(index)}: {error}") from None


def open_data(
    path: Path | str,
    *,
    field: str | Sequence[str] = "text",
    template: str | None = None,
    loss_on: Sequence[str] = (),
    tokenizer: Path | None = None,
    num_values: int | None = None,
    end_token: int | None = None,
    block_length: int = 1024,
    num_workers: int = 0,
    progress: bool = True,
) -> StoredDataset:
    r"""Opens files of samples by their extension, or a directory saved by Hugging Face datasets.

    - `.txt`: a sample is a line; its tokens are its bytes, without the end of the line.
    - `.jsonl`: an object a line; the UTF-8 bytes of the string in `field`.
    - `.csv`, `.tsv`: the UTF-8 bytes of the column `field`; the first line names the columns.
    - `.npz`: `tokens[offsets[i]:offsets[i+1]]`, from integers[total] and offsets[N+1].
    - `.bin`: uint16 or uint32 tokens; a document that `end_token` ends, or a block. See `open_token_file`.
    - `.bin` beside an `.idx` of the same name: a document of Megatron-LM. See `open_indexed_tokens`.
    - `.parquet`, `.arrow`, `.feather`: a row of the column `field`; the bytes of a string, or the integers of a list.
    - A directory with `state.json`: likewise, over all its Arrow files.

    `.txt`, `.jsonl`, `.csv` and `.tsv` may also end with `.gz` or `.zst`. A directory or a glob stands for all its
    files, in the order of their names. URLs such as `s3://bucket/train.jsonl` are read through fsspec. Downloads and
    decompressed files are kept in the user's caches.

    With a tokenizer, text becomes token ids; see `TokenizedDataset`.

    Text may come from several fields, or from a list of messages with `role` and `content`; see `RecordFormat`. A chat
    is written by the `chat_template` beside the tokenizer file, if there is one. With `loss_on`, samples are
    `WeightedTokens`.

    Lines, `.bin` and uncompressed Arrow columns stay on disk until they are read. Arrays of an `.npz`, Parquet and CSV
    are held in memory. Columns and `.zst` need pyarrow, tokenizers need the package tokenizers and URLs need fsspec,
    all in the extra `data`.

    For the lengths of JSON lines and of tokenized text, every sample must be read. They are measured once and cached
    beside the data under the key of its content, or in the user's caches; see `cached_lengths`.

    Args:
      path: a file, a directory, a glob or a URL.
      field: the name of the JSON field that holds the text, or of the column; or the names of several.
      template: text with names of fields in braces; None joins the fields by newlines.
      loss_on: fields, or roles of messages, that are learned; all others have loss weight 0. Empty: all are learned.
      tokenizer: a file of the package `tokenizers`; None for the bytes of the text.
      num_values: tokens must be below it; None for no limit. Up to 256, the samples are uint8.
      end_token: the token that ends every document of a `.bin`; None for blocks.
      block_length: tokens of a block of a `.bin`.
      num_workers: processes that measure lengths, if there are thousands of samples; 0 measures in this process.
      progress: whether downloading, decompressing, and measuring lengths show a progress bar.

    Returns:
      A `StoredDataset`: a data source of 1-D integer arrays, or of `WeightedTokens`, with known lengths.

    Raises:
      FileNotFoundError: there is no such file or directory.
      ValueError: another extension; a package is needed and missing; a damaged or truncated file; no samples, or empty
        ones; a line that is not a JSON object with a string in `field`; a record that lacks a field or has nothing to
        learn; a template that does not fit the fields; messages that the chat template rejects; arrays that do not
        match; a column of another type or with nulls; tokens out of range; a file that is not a tokenizer, a tokenizer
        for data that is not text, or one with more ids than `num_values`. The first offending lines or samples are
        listed.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = Path(folder, "two.jsonl")
      ...     _ = path.write_text('{"text": "one"}\n{"text": "seven"}')
      ...     dataset = open_data(path, progress=False)
      >>> dataset.lengths, dataset[1].tobytes()
      (array([3, 5]), b'seven')
    """
    check_at_least_one(block_length=block_length)
    record_format = RecordFormat([field] if isinstance(field, str) else field, template, loss_on)
    tokenized = None if tokenizer is None else TokenizedDataset([], tokenizer)
    limit = num_values if tokenized is None else None
    opened = _Opening(record_format, tokenized, limit, end_token, block_length, progress).open(path)
    read_content = functools.cache(lambda: content_key(*opened.files))
    choice = opened.choice
    if tokenized is not None:
        if not opened.is_text:
            raise UserError(f"{path} holds tokens, not text: the tokenizer {tokenizer} has nothing to do")
        if num_values is not None and tokenized.num_values > num_values:
            raise UserError(f"{tokenizer} has {tokenized.num_values:,} ids; at most {num_values:,} are allowed")
        tokenized = tokenized.with_texts(opened.samples)
        opened = opened._replace(samples=tokenized, lengths=None, num_values=tokenized.num_values)
    elif opened.is_marked:
        opened = opened._replace(samples=MarkedBytes(opened.samples))

    def read_key() -> str:
        return combine_keys(read_content(), choice, tokenized.key if tokenized is not None else None)

    def read_lengths_key() -> str:
        return combine_keys(read_content(), choice, tokenized.lengths_key if tokenized is not None else None)

    beside = _place_of_caches(path, opened.files)
    lengths = opened.lengths
    if lengths is None:
        lengths = cached_lengths(opened.samples, beside, read_lengths_key(), num_workers=num_workers, progress=progress)
    _refuse_empty(path, opened, lengths)
    # Of bytes and of wider integers hashes differ, and which they are `num_values` decides.
    width = "bytes" if opened.num_values is not None and opened.num_values <= _NUM_BYTES else "integers"

    def read_hashes() -> Int64[np.ndarray, " N"]:
        return cached_hashes(opened.samples, beside, combine_keys(read_lengths_key(), width), progress=progress)

    is_bytes = opened.is_text and tokenizer is None
    return StoredDataset(
        path, opened.samples, lengths, opened.num_values, is_bytes, read_key, opened.name_of, read_hashes
    )


def _place_of_caches(path: Path | str, files: list[Path]) -> Path:
    """The file or directory beside which lengths are kept: the data, or its copy in the user's caches."""
    local = Path(path)
    if not is_remote(path) and local.exists():
        return local
    return files[0] if len(files) == 1 else Path(os.path.commonpath([file.parent for file in files]))


class _Opened(NamedTuple):
    """Samples of files.

    Attributes:
      files: all files that hold them.
      choice: what else decides which samples they hold: the field, or how tokens are cut; None if there is no choice.
      samples: a ValueError says why there is no sample under an id.
      lengths: int64[N], 0 for a missing sample; None if they must be measured.
      is_text: whether they are bytes of text.
      num_values: all tokens are below it; None if unknown.
      wanted: what every sample must be.
      name_of: returns the name of a sample.
      is_marked: whether samples are `MarkedText`.
    """

    files: list[Path]
    choice: str | None
    samples: DataSource
    lengths: Int64[np.ndarray, " N"] | None
    is_text: bool
    num_values: int | None
    wanted: str
    name_of: Callable[[int], str]
    is_marked: bool = False


class _Opening(NamedTuple):
    """How files are opened; the fields are those of `open_data`, with a tokenizer of no texts yet."""

    format: RecordFormat
    tokenized: TokenizedDataset | None
    num_values: int | None
    end_token: int | None
    block_length: int
    progress: bool

    @property
    def field(self) -> str:
        """The only field of plain text."""
        return self.format.fields[0]

    def open(self, path: Path | str) -> _Opened:
        """The samples of a path, one file after the other."""
        if not is_remote(path) and any((Path(path) / name).is_file() for name in ("state.json", "dataset_dict.json")):
            shards = saved_shards(Path(path))
            files = [DataFile(str(shard), shard, ".arrow", shard) for shard in shards]
        else:
            files = find_files(path, progress=self.progress)
        if not self.format.is_plain or self._holds_messages(files[0]):
            return self._open_records(files)
        if files[0].ending in _COLUMN_ENDINGS:
            columns = self._open_columns([file.path for file in files])
            return columns._replace(files=[file.source for file in files])
        return _join(files, [self._open_file(file) for file in files])

    def _holds_messages(self, file: DataFile) -> bool:
        """Whether the only field of a file holds chats, by its type or by the first line."""
        if file.ending in _COLUMN_ENDINGS:
            return len(self.format.fields) == 1 and holds_messages(file.path, self.field)
        if file.ending != ".jsonl" or len(self.format.fields) > 1:
            return False
        try:
            return isinstance(first_record(file.path).get(self.field), list)
        except ValueError:  # which reading the lines will tell
            return False

    def _open_records(self, files: Sequence[DataFile]) -> _Opened:
        if files[0].ending != ".jsonl" and files[0].ending not in _COLUMN_ENDINGS:
            raise UserError(
                f"{files[0].name} has no fields: fields, template and loss_on go with JSON lines and columns"
            )
        record_format = self.format
        tokenized = self.tokenized
        if tokenized is not None and record_format.takes_chat_template and self._holds_messages(files[0]):
            chat = ChatTemplate.beside(tokenized.path, tokenized.special_tokens)
            record_format = record_format.with_chat_template(chat)
        what = ", ".join(map(repr, record_format.fields))
        wanted = f"every record must have text or messages in {what}"

        def opened(records: DataSource, of_files: Sequence[DataFile], name_of: Callable[[int], str]) -> _Opened:
            texts = RecordTexts(records, record_format)
            sources = [file.source for file in of_files]
            return _Opened(sources, record_format.key, texts, None, True, _NUM_BYTES, wanted, name_of, True)

        if files[0].ending in _COLUMN_ENDINGS:
            return opened(ColumnRecords([file.path for file in files], record_format.fields), files, _id)
        return _join(files, [opened(LineRecords(file.path), [file], _line) for file in files])

    def _open_file(self, file: DataFile) -> _Opened:
        path = file.path
        if file.ending == ".npz":
            dataset = _open_arrays(path, self.num_values)
            return _Opened([path], None, dataset, dataset.lengths, False, self.num_values, "tokens", _id)
        if file.ending == ".bin":
            return self._open_tokens(path)
        files = [file.source]
        lines = LineDataset(path, self.field if file.ending == ".jsonl" else None)
        if file.ending == ".txt":
            return _Opened(files, None, lines, lines.line_lengths, True, _NUM_BYTES, "every line must be text", _line)
        wanted = f"every line must be a JSON object with text in the field {self.field!r}"
        return _Opened(files, self.field, lines, None, True, _NUM_BYTES, wanted, _line)

    def _open_tokens(self, path: Path) -> _Opened:
        index = path.with_suffix(".idx")
        if index.is_file():
            dataset = open_indexed_tokens(path, num_values=self.num_values, progress=self.progress)
            return _Opened([path, index], None, dataset, dataset.lengths, False, self.num_values, "tokens", _id)
        dataset = open_token_file(
            path,
            end_token=self.end_token,
            block_length=self.block_length,
            num_values=self.num_values,
            progress=self.progress,
        )
        choice = f"blocks of {self.block_length}" if self.end_token is None else f"documents by {self.end_token}"
        return _Opened([path], choice, dataset, dataset.lengths, False, self.num_values, "tokens", _id)

    def _open_columns(self, paths: list[Path]) -> _Opened:
        columns = ColumnDataset(paths, self.field, self.num_values)
        num_values = _NUM_BYTES if columns.is_text else self.num_values
        wanted = f"every row of the column {self.field!r} must be text"
        return _Opened(paths, self.field, columns, columns.lengths, columns.is_text, num_values, wanted, _id)


def _join(files: Sequence[DataFile], opened: Sequence[_Opened]) -> _Opened:
    """Several files of one format as one."""
    if len(opened) == 1:
        return opened[0]
    samples = Joined([each.samples for each in opened])
    known = [each.lengths for each in opened if each.lengths is not None]
    return opened[0]._replace(
        files=[path for each in opened for path in each.files],
        samples=samples,
        lengths=np.concatenate(known) if known else None,
        name_of=functools.partial(_name_in, [file.name for file in files], opened[0].name_of, samples.locate),
    )


def _name_in(
    names: list[str], name_of: Callable[[int], str], locate: Callable[[int], tuple[int, int]], index: int
) -> str:
    d, own = locate(index)
    return f"{names[d]} {name_of(own)}"


def _line(index: int) -> str:
    return f"line {index + 1}"


def _id(index: int) -> str:
    return f"id {index}"


def _refuse_empty(path: Path | str, opened: _Opened, lengths: Int64[np.ndarray, " N"]) -> None:
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
