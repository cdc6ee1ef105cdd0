"""Opens files or directories of text or tokens as datasets with known lengths and a content key.

Files are untrusted: nothing in them is unpickled or evaluated, and bad content is a `ValueError` that says where it is.
Nothing is skipped silently: an empty sample is an error.
"""

from __future__ import annotations

import functools
import itertools
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64, Integer

from jvarlen._common.checks import UserError, check_at_least_one
from jvarlen.data.arrow_files import ColumnDataset, ColumnRecords, holds_messages, saved_shards
from jvarlen.data.find_files import DataFile, find_files, is_remote
from jvarlen.data.length_cache import cached_hashes, cached_lengths, combine_keys, content_key
from jvarlen.data.line_files import LineDataset, parse_record
from jvarlen.data.records import ChatTemplate, MarkedText, RecordFormat
from jvarlen.data.token_files import open_arrays, open_indexed_tokens, open_token_file
from jvarlen.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from jvarlen.planning.samples import Dataset, WeightedTokens

__all__ = ["StoredDataset", "open_data"]

_MAX_LISTED = 5
_NUM_BYTES = 256
_COLUMN_ENDINGS = (".parquet", ".arrow", ".feather", ".csv", ".tsv")


class StoredDataset(Dataset):
    """Samples in files: a data source with known lengths.

    Attributes:
      lengths: int64[N], tokens of every sample.
      num_values: all tokens are below it: 256 for bytes of text, otherwise the number of ids of the tokenizer; None if
        unknown.
      is_bytes: whether the tokens are the bytes of text.
    """

    def __init__(
        self, path: Path | str, opened: _Opened, tokenizer: FileTokenizer | None, num_workers: int, progress: bool
    ):
        self._path = path
        self._files, self._choice = opened.files, opened.choice
        self._samples = _Samples(opened, tokenizer)
        is_plain = len(opened.parts) == 1 and opened.format is None and tokenizer is None
        self._read_sample: Callable[[int], Any] = opened.parts[0]._read if is_plain else self._samples._read
        self._tokenizer = tokenizer
        self._progress = progress
        self.num_values = opened.num_values if tokenizer is None else tokenizer.num_values
        self.is_bytes = opened.is_text and tokenizer is None
        if opened.lengths is not None and tokenizer is None:
            self.lengths = np.concatenate(opened.lengths)
        else:
            self.lengths = cached_lengths(
                self._samples, self._place_of_caches(), self._lengths_key(), num_workers=num_workers, progress=progress
            )
        self._refuse_empty(opened.wanted)

    @functools.cached_property
    def content_key(self) -> str:
        """Hex key of everything that decides the samples: file contents, field, tokenizer.

        Files with the same content have the same key, wherever they are. They are read for it once, when it is first
        needed.
        """
        return combine_keys(self._files_key, self._choice, self._tokenizer.key if self._tokenizer else None)

    @functools.cached_property
    def sample_hashes(self) -> Int64[np.ndarray, " N"]:
        """The `sample_hash` of every sample, kept beside the data; see `cached_hashes`."""
        # Of bytes and of wider integers hashes differ, and which they are `num_values` decides.
        width = "bytes" if self.num_values is not None and self.num_values <= _NUM_BYTES else "integers"
        key = combine_keys(self._lengths_key(), width)
        return cached_hashes(self._samples, self._place_of_caches(), key, progress=self._progress)

    def __len__(self) -> int:
        return len(self.lengths)

    def _read(self, index: int) -> Integer[np.ndarray, " L"] | WeightedTokens:
        try:
            return self._read_sample(index)
        except ValueError as error:  # it was read once, when the lengths were measured
            raise UserError(f"{self._path} has changed: {self._samples.name_of(index)}: {error}") from None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "sample_hashes"}

    @functools.cached_property
    def _files_key(self) -> str:
        return content_key(*self._files)

    def _lengths_key(self) -> str:
        return combine_keys(self._files_key, self._choice, self._tokenizer.lengths_key if self._tokenizer else None)

    def _place_of_caches(self) -> Path:
        """The file or directory beside which lengths are kept: the data, or its copy in the user's caches."""
        if not is_remote(self._path) and Path(self._path).exists():
            return Path(self._path)
        files = self._files
        return files[0] if len(files) == 1 else Path(os.path.commonpath([file.parent for file in files]))

    def _refuse_empty(self, wanted: str) -> None:
        """Raises ValueError that lists the samples which are none, and why the first are none."""
        refused = np.flatnonzero(self.lengths == 0)
        if not len(refused):
            return
        first = []
        for index in refused[:_MAX_LISTED].tolist():
            try:
                self._samples._read(index)
            except ValueError as error:
                first.append(f"{self._samples.name_of(index)}: {error}")
        more = f" and {len(refused) - len(first):,} more" if len(refused) > len(first) else ""
        raise UserError(f"{self._path}: {wanted}; mend or remove {'; '.join(first)}{more}")


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

    With a tokenizer, text becomes token ids; see `FileTokenizer`.

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
    from_file = None if tokenizer is None else FileTokenizer(tokenizer)
    if not is_remote(path) and any((Path(path) / name).is_file() for name in ("state.json", "dataset_dict.json")):
        files = [DataFile(str(shard), shard, ".arrow", shard) for shard in saved_shards(Path(path))]
    else:
        files = find_files(path, progress=progress)
    is_chat = _holds_messages(files[0], record_format)
    if is_chat or not record_format.is_plain:
        opened = _open_records(files, record_format, is_chat, from_file)
    elif files[0].ending in (".npz", ".bin"):
        opened = _open_tokens(files, None if from_file else num_values, end_token, block_length, progress)
    else:
        opened = _open_text(files, record_format.fields[0], None if from_file else num_values)
    if from_file is not None:
        if not opened.is_text:
            raise UserError(f"{path} holds tokens, not text: the tokenizer {tokenizer} has nothing to do")
        if num_values is not None and from_file.num_values > num_values:
            raise UserError(f"{tokenizer} has {from_file.num_values:,} ids; at most {num_values:,} are allowed")
    return StoredDataset(path, opened, from_file, num_workers, progress)


class _Opened(NamedTuple):
    """Samples of files.

    Attributes:
      files: all files that hold them.
      names: the name of each part, for errors.
      parts: data sources of records, of the bytes of text or of tokens, one after the other. A ValueError says why
        there is no sample under an id.
      choice: what else decides which samples they hold: the field, or how tokens are cut; None if there is no choice.
      is_text: whether they are text.
      num_values: all tokens are below it; None if unknown.
      wanted: what every sample must be.
      lengths: int64[n] of each part, 0 for a missing sample; None if they must be measured.
      is_lines: whether samples are counted from 1, as lines are.
      format: of records; None for text or tokens.
    """

    files: list[Path]
    names: list[str]
    parts: Sequence[Any]
    choice: str | None
    is_text: bool
    num_values: int | None
    wanted: str
    lengths: list[Int64[np.ndarray, " n"]] | None = None
    is_lines: bool = False
    format: RecordFormat | None = None


class _Samples(Dataset):
    """The samples of files, one file after the other, as tokens."""

    def __init__(self, opened: _Opened, tokenizer: FileTokenizer | None):
        self._parts, self._names, self._is_lines = opened.parts, opened.names, opened.is_lines
        self._starts = [0, *itertools.accumulate(map(len, opened.parts))]
        self._to_sample: Callable[[Any], Any] | None = None
        if opened.format is not None:
            self._to_sample = functools.partial(_render, opened.format, tokenizer or ByteTokenizer())
        elif tokenizer is not None:
            self._to_sample = functools.partial(_tokenize, tokenizer)

    def __len__(self) -> int:
        return self._starts[-1]

    def _read(self, index: int) -> Any:
        part = bisect_right(self._starts, index) - 1
        sample = self._parts[part]._read(index - self._starts[part])
        return sample if self._to_sample is None else self._to_sample(sample)

    def name_of(self, index: int) -> str:
        """The name of a sample, for errors."""
        part = bisect_right(self._starts, index) - 1
        own = index - self._starts[part]
        name = f"line {own + 1}" if self._is_lines else f"id {own}"
        return name if len(self._parts) == 1 else f"{self._names[part]} {name}"

    def lengths_of(self, samples: range) -> list[int] | None:
        """The lengths of consecutive samples, 0 where there is none; None if they cannot be read at once."""
        if self._to_sample is not None or not all(hasattr(part, "lengths_of") for part in self._parts):
            return None
        lengths: list[int] = []
        for part, start in zip(self._parts, self._starts, strict=False):
            own = range(max(samples.start - start, 0), min(samples.stop - start, len(part)))
            lengths += part.lengths_of(own) if own else []
        return lengths


def _tokenize(tokenizer: FileTokenizer, text: Integer[np.ndarray, " L"]) -> Any:
    """The sample of the bytes of a text."""
    try:
        return tokenizer.sample(MarkedText(text.tobytes().decode()))
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 at byte {error.start}") from None


def _render(record_format: RecordFormat, tokenizer: Tokenizer, record: Any) -> Any:
    """The sample of a record, or of its line of JSON."""
    if isinstance(record, np.ndarray):
        record = parse_record(record.tobytes())
    return tokenizer.sample(record_format.render(record))


def _holds_messages(file: DataFile, record_format: RecordFormat) -> bool:
    """Whether the only field of a file holds chats, by its type or by the first line."""
    (field, *others) = record_format.fields
    if others or file.ending not in (*_COLUMN_ENDINGS, ".jsonl"):
        return False
    if file.ending in _COLUMN_ENDINGS:
        return holds_messages(file.path, field)
    try:
        with file.path.open("rb") as lines:
            return isinstance(parse_record(lines.readline()).get(field), list)
    except ValueError:  # which reading the lines will tell
        return False


def _open_records(
    files: Sequence[DataFile], record_format: RecordFormat, is_chat: bool, tokenizer: FileTokenizer | None
) -> _Opened:
    ending = files[0].ending
    if ending != ".jsonl" and ending not in _COLUMN_ENDINGS:
        raise UserError(f"{files[0].name} has no fields: fields, template and loss_on go with JSON lines and columns")
    if tokenizer is not None and record_format.takes_chat_template and is_chat:
        chat = ChatTemplate.beside(tokenizer.path, tokenizer.special_tokens)
        record_format = record_format.with_chat_template(chat)
    paths, sources, names = (
        [file.path for file in files],
        [file.source for file in files],
        [file.name for file in files],
    )
    is_lines, key = ending == ".jsonl", record_format.key
    parts = [LineDataset(path) for path in paths] if is_lines else [ColumnRecords(paths, record_format.fields)]
    wanted = f"every record must have text or messages in {', '.join(map(repr, record_format.fields))}"
    return _Opened(sources, names, parts, key, True, _NUM_BYTES, wanted, None, is_lines, record_format)


def _open_text(files: Sequence[DataFile], field: str, num_values: int | None) -> _Opened:
    paths, sources, names = (
        [file.path for file in files],
        [file.source for file in files],
        [file.name for file in files],
    )
    if files[0].ending in _COLUMN_ENDINGS:
        columns = ColumnDataset(paths, field, num_values)
        wanted = f"every row of the column {field!r} must be text"
        most = _NUM_BYTES if columns.is_text else num_values
        return _Opened(sources, names, [columns], field, columns.is_text, most, wanted, [columns.lengths])
    if files[0].ending == ".txt":
        texts = [LineDataset(path) for path in paths]
        lengths = [lines.line_lengths for lines in texts]
        return _Opened(sources, names, texts, None, True, _NUM_BYTES, "every line must be text", lengths, True)
    lines = [LineDataset(path, field) for path in paths]
    wanted = f"every line must be a JSON object with text in the field {field!r}"
    return _Opened(sources, names, lines, field, True, _NUM_BYTES, wanted, None, True)


def _open_tokens(
    files: Sequence[DataFile], num_values: int | None, end_token: int | None, block_length: int, progress: bool
) -> _Opened:
    sources: list[Path] = []
    parts: list[Any] = []
    choices: list[str | None] = []
    for file in files:
        path, index = file.path, file.path.with_suffix(".idx")
        sources.append(path)
        choices.append(None)
        if file.ending == ".npz":
            parts.append(open_arrays(path, num_values))
        elif index.is_file():
            sources.append(index)
            parts.append(open_indexed_tokens(path, num_values=num_values, progress=progress))
        else:
            choices[-1] = f"blocks of {block_length}" if end_token is None else f"documents by {end_token}"
            parts.append(
                open_token_file(
                    path, end_token=end_token, block_length=block_length, num_values=num_values, progress=progress
                )
            )
    lengths = [part.lengths for part in parts]
    names = [file.name for file in files]
    return _Opened(sources, names, parts, choices[0], False, num_values, "tokens", lengths)
