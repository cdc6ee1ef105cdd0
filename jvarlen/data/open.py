"""Opens files of text or tokens as datasets with known lengths and a content key.

Files are untrusted: nothing in them is unpickled or evaluated, and bad content is a `ValueError` that says where it is.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, Integer, UInt8

from jvarlen._common.checks import UserError, check_at_least_one, check_choices, list_first
from jvarlen._common.keywords import check_keywords
from jvarlen.data.arrow_files import ColumnDataset, ColumnRecords, message_columns, saved_shards
from jvarlen.data.chat_template import ChatTemplate
from jvarlen.data.find_files import DataFile, find_files, is_remote, without_credentials
from jvarlen.data.length_cache import cached_hashes, cached_lengths, combine_keys, content_key
from jvarlen.data.line_files import LineDataset, parse_record
from jvarlen.data.records import RecordFormat
from jvarlen.data.samples import Dataset, MarkedText, OnBadSample, Record, Sample, WeightedTokens
from jvarlen.data.token_files import open_arrays, open_token_file
from jvarlen.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from jvarlen.data.tokens import Concatenated, Subset

__all__ = ["NUM_BYTES", "StoredDataset", "open_data", "open_stored", "roles_error"]

_MAX_LISTED = 5
NUM_BYTES = 256
_COLUMN_ENDINGS = (".parquet", ".arrow", ".feather", ".csv", ".tsv")


class StoredDataset(Dataset):
    """Samples in files: a data source with known lengths.

    Attributes:
      lengths: int64[N], tokens of every sample.
      num_values: all tokens are below it: 256 for bytes, otherwise the tokenizer's number of ids; None if unknown.
      skipped: name and reason of every record that was left out as not a sample, such as `("line 7", "not JSON …")`.
    """

    def __init__(
        self,
        path: Path | str,
        samples: _Samples,
        sources: list[Path],
        choice: str | None,
        num_values: int | None,
        tokenizer: FileTokenizer | None,
        num_workers: int,
        progress: bool,
    ):
        self._path, self._samples, self._sources = path, samples, sources
        self._choice, self._tokenizer, self._progress = choice, tokenizer, progress
        self.num_values = num_values if tokenizer is None else tokenizer.num_values
        self.skipped: tuple[tuple[str, str], ...] = ()
        self._kept: Int64[np.ndarray, " N"] | None = None  # None: all
        self._roles: _Roles | None = None
        if not len(samples):
            raise UserError(f"{path} holds no samples: at least one is needed")
        if samples.to_sample is None and all(hasattr(part, "lengths") for part in samples.parts):
            self.lengths = np.concatenate([part.lengths for part in samples.parts])
        else:
            self.lengths = cached_lengths(
                samples, self._place_of_caches(), self._lengths_key(), num_workers=num_workers, progress=progress
            )

    @functools.cached_property
    def content_key(self) -> str:
        """Hex key of all that decides the samples: contents of files, wherever they are, field and tokenizer."""
        return combine_keys(self._files_key, self._choice, self._tokenizer.key if self._tokenizer else None)

    @functools.cached_property
    def sample_hashes(self) -> Int64[np.ndarray, " N"]:
        """The `sample_hash` of every sample, kept beside the data."""
        # Hashes of bytes differ from those of wider integers; `num_values` decides which samples are.
        width = "bytes" if self.num_values is not None and self.num_values <= NUM_BYTES else "integers"
        key = combine_keys(self._lengths_key(), width)
        samples = self._samples if self._kept is None else Subset(self._samples, self._kept)
        return cached_hashes(samples, self._place_of_caches(), key, progress=self._progress)

    def __len__(self) -> int:
        return len(self.lengths)

    def _leave_out_bad(self, wanted: str, on_bad_sample: OnBadSample, max_bad_fraction: float) -> None:
        """Leaves out the records that are not samples, or raises ValueError that lists the first of them."""
        is_bad, num_records = self.lengths == 0, len(self.lengths)
        if not (num_bad := int(is_bad.sum())):
            return
        is_error = on_bad_sample == "error" or num_bad > max_bad_fraction * num_records or num_bad == num_records
        listed_bad = []
        for index in np.flatnonzero(is_bad)[: _MAX_LISTED if is_error else None].tolist():
            reason = "empty"
            try:
                self._samples._read(index)
            except ValueError as error:
                reason = str(error)
            listed_bad.append((self._samples.name_of(index), reason))
        if is_error:
            more = f" and {num_bad - len(listed_bad):,} more" if num_bad > len(listed_bad) else ""
            listed = "; ".join(f"{name}: {reason}" for name, reason in listed_bad) + more
            share = f"{num_bad:,} of {num_records:,}"
            refused = UserError(f"{self._path}: every sample must have {wanted}; mend or remove {share}: {listed}")
            limit = f", up to max_bad_fraction={max_bad_fraction:g}"
            refused.add_note(f'on_bad_sample="skip" leaves them out{limit * (on_bad_sample == "skip")}')
            raise refused
        self.skipped, self._kept = tuple(listed_bad), np.flatnonzero(~is_bad)
        self.lengths = self.lengths[self._kept]

    def _read(self, index: int) -> Integer[np.ndarray, " L"] | WeightedTokens:
        index = index if self._kept is None else self._kept.item(index)
        try:
            return self._samples._read(index)
        except ValueError as error:  # it was read once, when the lengths were measured
            raise UserError(f"{self._path} has changed: {self._samples.name_of(index)}: {error}") from None

    @functools.cached_property
    def _files_key(self) -> str:
        return content_key(*self._sources)

    def _lengths_key(self) -> str:
        return combine_keys(self._files_key, self._choice, self._tokenizer.lengths_key if self._tokenizer else None)

    def _place_of_caches(self) -> Path:
        """The file or directory beside which lengths are kept: the data, or its copy in the user's caches."""
        parents = [source.parent for source in self._sources]
        return self._sources[0] if len(parents) == 1 else Path(os.path.commonpath(parents))


@check_keywords
def open_data(
    path: Path | str,
    *,
    field: str | Sequence[str] = "text",
    template: str | None = None,
    loss_on: Sequence[str] = (),
    tokenizer: Path | str | None = None,
    num_values: int | None = None,
    end_token: int | None = None,
    block_length: int = 1024,
    num_workers: int = 0,
    progress: bool = True,
    on_bad_sample: OnBadSample = "error",
    max_bad_fraction: float = 0.01,
) -> StoredDataset:
    r"""Opens files of samples by their extension, or a directory saved by Hugging Face datasets.

    - `.txt`: a sample is a line; its tokens are its bytes, without the end of the line.
    - `.jsonl`: an object a line; the UTF-8 bytes of the string in `field`.
    - `.csv`, `.tsv`: the UTF-8 bytes of the column `field`; the first line names the columns.
    - `.npz`: `tokens[offsets[i]:offsets[i+1]]`, from integers[total] and offsets[N+1].
    - `.bin`: uint16 or uint32 tokens, as nanoGPT writes them; a document that `end_token` ends, or a block.
    - `.parquet`, `.arrow`, `.feather`: a row of the column `field`; the bytes of a string, or the integers of a list.
    - A directory with `state.json`: the same over all its Arrow files.

    `.txt`, `.jsonl`, `.csv` and `.tsv` may also end with `.gz` or `.zst`. A directory or a glob stands for all its
    files, in the order of their names. URLs such as `s3://bucket/train.jsonl` are read through fsspec. Downloads and
    decompressed files are kept in the user's caches.

    Text may also fill a `template`, or be a chat: a list of messages with `role` and `content`, each written as
    `"{role}: {content}\n"`, by the `template`, or by the `chat_template` beside the tokenizer file.

    Lengths of JSON lines and of tokenized text are measured once and cached beside the data under the key of its
    content, or in the user's caches. Columns and `.zst` need pyarrow, tokenizers the package tokenizers, and URLs
    fsspec, all in the extra `data`.

    Args:
      path: a file, a directory, a glob or a URL.
      field: the name of the JSON field or the column that holds the text; or the names of several. Records without
        `text` may have a chat in `messages`.
      template: text with names of fields in braces; None joins the fields by newlines.
      loss_on: fields, or roles of messages, that are learned, with what follows the last field; all others have loss
        weight 0, and samples are `WeightedTokens`. By a chat template, a turn of the assistant is learned from the end
        of the prompt before it to the token that ends it. Empty: all are learned.
      tokenizer: a file of the package `tokenizers`, which turns text into ids; None for the bytes of the text.
      num_values: tokens must be below it; None for no limit. Up to 256, the samples are uint8.
      end_token: the token that ends every document of a `.bin`; None for blocks.
      block_length: tokens of a block of a `.bin`.
      num_workers: processes that measure lengths, if there are thousands of samples; 0 measures in this process.
      progress: whether downloading, decompressing, and measuring lengths show a progress bar.
      on_bad_sample: what happens to a record that is not a sample: an empty text, a line that is not JSON, a missing
        field, another type, nothing to learn. `"skip"` leaves it out, and later samples move up.
      max_bad_fraction: the most records that may be skipped, as a share of all.

    Returns:
      A `StoredDataset`: a data source of 1-D integer arrays, or of `WeightedTokens`, with known lengths.

    Raises:
      FileNotFoundError: there is no such file or directory.
      ValueError: a file that cannot be opened or is damaged; a package that is missing; records that are not samples,
        if they are not skipped; a template or messages that do not fit; roles of `loss_on` that no message has; tokens
        out of range. The first are listed.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = Path(folder, "two.jsonl")
      ...     _ = path.write_text('{"text": "one"}\n{"text": "seven"}')
      ...     dataset = open_data(path, progress=False)
      >>> dataset.lengths, dataset[1].tobytes()
      (array([3, 5]), b'seven')
    """
    dataset = open_stored(
        path, field, template, loss_on, tokenizer, num_values, end_token, block_length,
        num_workers, progress, on_bad_sample, max_bad_fraction,
    )  # fmt: skip
    if (error := roles_error([dataset])) is not None:
        raise error
    return dataset


def open_stored(
    path: Path | str,
    field: str | Sequence[str],
    template: str | None,
    loss_on: Sequence[str],
    tokenizer: Path | str | None,
    num_values: int | None,
    end_token: int | None,
    block_length: int,
    num_workers: int,
    progress: bool,
    on_bad_sample: OnBadSample,
    max_bad_fraction: float,
) -> StoredDataset:
    """Opens files as `open_data` does; `roles_error` checks that each role of `loss_on` is there."""
    check_at_least_one(block_length=block_length)
    check_choices(on_bad_sample=(on_bad_sample, OnBadSample))
    record_format = RecordFormat([field] if isinstance(field, str) else field, template, loss_on)
    from_file = None if tokenizer is None else FileTokenizer(tokenizer)
    if not is_remote(path) and any((Path(path) / name).is_file() for name in ("state.json", "dataset_dict.json")):
        files = [DataFile(str(shard), shard, ".arrow", shard) for shard in saved_shards(Path(path))]
    else:
        files = find_files(path, progress=progress)
        path = without_credentials(path)
    record_format, is_plain = _fit_format(record_format, template, loss_on, files[0], from_file)
    limit = None if from_file else num_values
    open_tokens = functools.partial(
        open_token_file, end_token=end_token, block_length=block_length, num_values=limit, progress=progress
    )
    parts = [_open_part(file, record_format.fields, is_plain, limit, open_tokens) for file in files]
    is_text = getattr(parts[0], "is_text", False)
    if any(getattr(part, "is_text", False) != is_text for part in parts):
        raise UserError(f"{path}: column {field!r} must be of one type, text or lists of tokens, in all files")
    if from_file is not None:
        if not is_text:
            raise UserError(f"{path} holds tokens, not text: the tokenizer {tokenizer} has nothing to do")
        if num_values is not None and from_file.num_values > num_values:
            raise UserError(f"{tokenizer} has {from_file.num_values:,} ids; at most {num_values:,} are allowed")
    to_sample: Callable[[Sample], Sample] | None = None
    if not is_plain:
        to_sample = functools.partial(_render, record_format, from_file or ByteTokenizer())
    elif from_file is not None:
        to_sample = functools.partial(_tokenize, from_file)
    samples = _Samples(parts, [file.name for file in files], to_sample)
    sources, choice = [file.source for file in files], None
    wanted = "text" if is_text else "tokens"
    if files[0].ending in (".jsonl", *_COLUMN_ENDINGS):
        choice = record_format.fields[0] if is_plain else record_format.key
        wanted += f" in {', '.join(map(repr, record_format.fields))}"
    elif files[0].ending == ".bin":
        choice = f"blocks of {block_length}" if end_token is None else f"documents by {end_token}"
    most = NUM_BYTES if is_text else limit
    dataset = StoredDataset(path, samples, sources, choice, most, from_file, num_workers, progress)
    if len(record_format.fields) == 1 and loss_on:
        dataset._roles = _find_roles(samples, record_format, loss_on)
    try:
        dataset._leave_out_bad(wanted, on_bad_sample, max_bad_fraction)
    except UserError as error:
        raise roles_error([dataset]) or error from None
    return dataset


def _fit_format(
    record_format: RecordFormat,
    template: str | None,
    loss_on: Sequence[str],
    file: DataFile,
    tokenizer: FileTokenizer | None,
) -> tuple[RecordFormat, bool]:
    """The format of the records in a file, which may be chats; and whether texts are those of a single field."""
    holds_messages, fields = _holds_messages(file), record_format.fields
    if fields == ("text",) and "text" not in holds_messages and holds_messages.get("messages"):
        fields = ("messages",)
        record_format = RecordFormat(fields, template, loss_on)
    is_chat = len(fields) == 1 and holds_messages.get(fields[0], False)
    is_plain = record_format.is_plain and not is_chat
    if tokenizer is not None and is_chat and record_format.takes_chat_template:
        chat = ChatTemplate.beside(tokenizer.path, tokenizer.special_tokens)
        record_format = record_format.with_chat_template(chat)
    return record_format, is_plain


def roles_error(datasets: Sequence[StoredDataset]) -> UserError | None:
    """The error for roles of `loss_on` that no message of any of these datasets has; None if there are none."""
    found = [dataset._roles for dataset in datasets if dataset._roles is not None]
    absent = set.intersection(*(each.absent for each in found)) if found else set()
    if not absent:
        return None
    roles = sorted(set().union(*(each.roles for each in found)))
    known = f"messages of the roles {list_first(map(repr, roles))}" if roles else "texts and no messages"
    names, fields = list_first(map(repr, sorted(absent))), dict.fromkeys(repr(each.field) for each in found)
    paths = list_first(str(dataset._path) for dataset in datasets)
    return UserError(f"{paths}: no message has a role of loss_on, {names}: {list_first(fields)} holds {known}")


def _open_part(
    file: DataFile,
    fields: Sequence[str],
    is_plain: bool,
    num_values: int | None,
    open_tokens: Callable[[Path], Dataset],
) -> Dataset:
    """The samples of a file: records, the bytes of text, or tokens. A ValueError says why an id has none."""
    path = file.path
    if file.ending == ".jsonl":
        return LineDataset(path, fields[0] if is_plain else None)
    if file.ending in _COLUMN_ENDINGS:
        return ColumnDataset(path, fields[0], num_values) if is_plain else ColumnRecords(path, fields)
    if not is_plain:
        raise UserError(f"{file.name} has no fields: fields, template and loss_on go with JSON lines and columns")
    if file.ending == ".txt":
        return LineDataset(path)
    if file.ending == ".npz":
        return open_arrays(path, num_values)
    return open_tokens(path)


class _Samples(Concatenated):
    """The samples of files, one file after the other, as tokens."""

    def __init__(self, parts: Sequence[Dataset], names: list[str], to_sample: Callable[[Sample], Sample] | None):
        super().__init__(parts)
        self.to_sample = to_sample
        self._names = names

    def record(self, index: int) -> Record | Sample:
        """The record that a sample is made from."""
        return super()._read(index)

    def _read(self, index: int) -> Sample:
        sample = self.record(index)
        return sample if self.to_sample is None else self.to_sample(sample)

    def name_of(self, index: int) -> str:
        """The name of a sample, for errors."""
        part, i = self.find(index)
        name = f"line {i + 1}" if isinstance(self.parts[part], LineDataset) else f"id {i}"
        return name if len(self.parts) == 1 else f"{self._names[part]} {name}"

    def lengths_of(self, samples: range) -> list[int] | None:
        """The lengths of consecutive samples, 0 where there is none; None if they cannot be read at once."""
        if self.to_sample is not None or not all(hasattr(part, "lengths_of") for part in self.parts):
            return None
        lengths: list[int] = []
        for part, start in zip(self.parts, self._starts, strict=False):
            there = range(max(samples.start - start, 0), min(samples.stop - start, len(part)))
            lengths += part.lengths_of(there) if there else []
        return lengths


def _tokenize(tokenizer: FileTokenizer, text: Integer[np.ndarray, " L"]) -> Sample:
    """The sample of the bytes of a text."""
    try:
        return tokenizer.sample(MarkedText(text.tobytes().decode()))
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 at byte {error.start}") from None


def _render(record_format: RecordFormat, tokenizer: Tokenizer, record: Record | UInt8[np.ndarray, " L"]) -> Sample:
    """The sample of a record, or of its line of JSON."""
    return tokenizer.sample(record_format.render(_parse(record)))


def _parse(record: Record | UInt8[np.ndarray, " L"]) -> Record:
    """The record itself, or parsed from a line of JSON."""
    return parse_record(record.tobytes()) if isinstance(record, np.ndarray) else record


class _Roles(NamedTuple):
    """The roles of the messages in a field."""

    field: str
    roles: set[str]
    absent: set[str]  # of `loss_on`, those that no message has


def _find_roles(samples: _Samples, record_format: RecordFormat, loss_on: Sequence[str]) -> _Roles:
    """Reads records until all roles of `loss_on` are found."""
    (field,) = record_format.fields
    wanted, roles = {*loss_on} - {field}, set[str]()
    for index in range(len(samples)):
        if wanted <= roles:
            break
        with contextlib.suppress(UserError):  # measuring the lengths reports it
            roles |= record_format.roles(_parse(samples.record(index)))
    return _Roles(field, roles, wanted - roles)


def _holds_messages(file: DataFile) -> dict[str, bool]:
    """The fields of a file, and whether they hold chats, by their types or by the first line; none if it is damaged."""
    if file.ending in _COLUMN_ENDINGS:
        return message_columns(file.path)
    if file.ending != ".jsonl":
        return {}
    try:
        with file.path.open("rb") as lines:
            first = lines.readline().removeprefix(codecs.BOM_UTF8)
            return {name: isinstance(value, list) for name, value in parse_record(first).items()}
    except ValueError:  # reading the lines reports it
        return {}
