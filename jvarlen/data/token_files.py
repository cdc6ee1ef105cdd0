"""Files of tokens: `.npz`, and as other trainers write them flat `.bin` files, and Megatron's `.bin` with an `.idx`.

`.bin` files are memory-mapped. All are untrusted: what does not fit together is a ValueError with the path.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from jaxtyping import Int64, Integer

from jvarlen._common.checks import UserError, list_offenders
from jvarlen._common.interrupts import raise_if_interrupted
from jvarlen._common.progress import progress_bar
from jvarlen.data.tokens import TokenDataset

__all__ = ["TokenFile", "check_tokens", "open_arrays", "open_indexed_tokens", "open_token_file"]

_CHUNK_TOKENS = 1 << 24
_DETECTED_WORDS = 1 << 16
_MOST_HIGH_WORD = 16  # of a 32-bit token: vocabularies stay below 2**20
_LEAST_WORDS = 64
_INDEX_HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the dtype, sequences, entries of documents
_INDEX_MAGIC = b"MMIDIDX\0\0"
_INDEX_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class TokenFile(TokenDataset):
    """Samples of a memory-mapped file of tokens, which worker processes map themselves; uint8 if `num_values` ≤ 256."""

    def __init__(
        self,
        path: Path,
        dtype: npt.DTypeLike,
        offsets: Int64[np.ndarray, " N_plus_1"],
        num_values: int | None = None,
        progress: bool = True,
    ):
        super().__init__(_map(path, dtype), offsets)
        self._path = path
        self._num_bytes = path.stat().st_size
        self._is_narrow = num_values is not None and num_values <= 256
        _check_values(self, path, num_values, progress)

    def _read(self, index: int) -> Integer[np.ndarray, " L"]:
        tokens = super()._read(index)
        return tokens.astype(np.uint8, copy=False) if self._is_narrow else tokens

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "tokens": self.tokens.dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._path.stat().st_size != self._num_bytes:
            raise UserError(f"{self._path} has changed: it had {self._num_bytes:,} bytes")
        self.tokens = _map(self._path, state["tokens"])


def check_tokens(parts: Sequence[TokenDataset], num_values: int | None) -> list[TokenDataset]:
    """The samples of several flat arrays, uint8 if `num_values` ≤ 256; raises ValueError that lists bad samples."""
    starts = np.cumsum([0, *map(len, parts)])[:-1]
    if not sum(map(len, parts)):
        raise UserError("it holds no samples: at least one is needed")
    empty = [np.flatnonzero(part.lengths == 0) + start for part, start in zip(parts, starts, strict=True)]
    if any(map(len, empty)):
        raise UserError(f"samples must not be empty: {list_offenders(np.concatenate(empty))}")
    ids, values = [], []
    for part, start in zip(parts, starts, strict=True):
        raise_if_interrupted()
        if part.tokens.dtype == np.uint8 and (num_values is None or num_values >= 256):
            continue
        is_outside = part.tokens < 0
        if num_values is not None:
            is_outside |= part.tokens >= num_values
        places = np.flatnonzero(is_outside)
        own, first = np.unique(np.searchsorted(part.offsets, places, side="right") - 1, return_index=True)
        ids.append(own + start)
        values.append(part.tokens[places[first]])
    if any(map(len, ids)):
        limit = "" if num_values is None else f" and below {num_values}"
        listed = list_offenders(np.concatenate(ids), np.concatenate(values))
        raise UserError(f"tokens must be at least 0{limit}; these samples have others: {listed}")
    if num_values is None or num_values > 256:
        return list(parts)
    return [TokenDataset(part.tokens.astype(np.uint8, copy=False), part.offsets) for part in parts]


def open_token_file(
    path: Path,
    *,
    end_token: int | None = None,
    block_length: int = 1024,
    num_values: int | None = None,
    progress: bool = True,
) -> TokenFile:
    """Opens a file of nothing but little-endian uint16 or uint32 tokens, as nanoGPT writes it.

    The file does not tell which of the two. They are taken as uint32 if in the beginning of the file every second
    16-bit word is below 16, as in ids below 2**20, and the other words are not.

    Samples are documents with the `end_token` that ends each, or without one blocks, the last of which may be shorter.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = Path(folder, "train.bin")
      ...     np.array([5, 6, 0, 7, 0], np.uint16).tofile(path)
      ...     documents, blocks = open_token_file(path, end_token=0), open_token_file(path, block_length=4)
      >>> documents.lengths, blocks.lengths
      (array([3, 2]), array([4, 1]))
    """
    num_bytes = path.stat().st_size
    if num_bytes % 2 or not num_bytes:
        raise UserError(f"{path} holds {num_bytes:,} bytes, which are no 16-bit or 32-bit tokens: it may be cut short")
    words = _map(path, "<u2")
    low, high = words[:_DETECTED_WORDS:2], words[1:_DETECTED_WORDS:2]
    is_wide = len(words) >= _LEAST_WORDS and high.max() < _MOST_HIGH_WORD <= low.max()
    dtype = "<u4" if is_wide else "<u2"
    if num_bytes % np.dtype(dtype).itemsize:
        raise UserError(f"{path} holds 32-bit tokens, but {num_bytes:,} bytes: it may be cut short")
    tokens = _map(path, dtype)
    if end_token is None:
        offsets = np.append(np.arange(0, len(tokens), block_length), len(tokens))
    else:
        offsets = _document_offsets(tokens, end_token, path, progress)
    return TokenFile(path, dtype, offsets, num_values, progress)


def open_indexed_tokens(path: Path, *, num_values: int | None = None, progress: bool = True) -> TokenFile:
    """Opens a `.bin` of tokens by the `.idx` beside it, as Megatron-LM writes the two.

    A sample is a document, with all of its sequences; documents without tokens are left out.

    References:
      Megatron-LM, `megatron/core/datasets/indexed_dataset.py`, version 1 of the format.
    """
    index = path.with_suffix(".idx")
    dtype, ends = _read_index(index)
    num_bytes = path.stat().st_size
    if num_bytes != (ends[-1] if len(ends) else 0) * dtype.itemsize:
        raise UserError(
            f"{index} is damaged or of another file: {path.name} holds {num_bytes:,} bytes, not "
            f"{(ends[-1] if len(ends) else 0):,} tokens of {dtype.name}"
        )
    if not num_bytes:
        raise UserError(f"{path} holds no tokens: at least one sample is needed")
    return TokenFile(path, dtype, np.unique(np.append(0, ends)), num_values, progress)


def open_arrays(path: Path, num_values: int | None) -> TokenDataset:
    """Opens an `.npz` of `tokens` and `offsets`; raises ValueError if they do not fit together."""
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


def _map(path: Path, dtype: npt.DTypeLike) -> Integer[np.ndarray, " total"]:
    return np.memmap(path, dtype, "r").view(np.ndarray)  # slices of a memmap are slow


def _document_offsets(
    tokens: Integer[np.ndarray, " total"], end_token: int, path: Path, progress: bool
) -> Int64[np.ndarray, " N_plus_1"]:
    ends = [np.zeros(1, np.int64)]
    with progress_bar(total=len(tokens), desc=f"documents of {path}", unit="token", progress=progress) as shown:
        for start in range(0, len(tokens), _CHUNK_TOKENS):
            raise_if_interrupted()
            chunk = tokens[start : start + _CHUNK_TOKENS]
            ends.append(np.flatnonzero(chunk == end_token) + start + 1)
            shown.update(len(chunk))
    offsets = np.concatenate(ends)
    if len(offsets) == 1:
        raise UserError(f"{path} holds no end token {end_token}: choose another, or none for blocks")
    return offsets if offsets[-1] == len(tokens) else np.append(offsets, len(tokens))


def _check_values(dataset: TokenDataset, path: Path, num_values: int | None, progress: bool) -> None:
    tokens = dataset.tokens
    limits = np.iinfo(tokens.dtype)
    if limits.min >= 0 and (num_values is None or limits.max < num_values):
        return
    most = limits.max if num_values is None else num_values - 1
    with progress_bar(total=len(tokens), desc=f"tokens of {path}", unit="token", progress=progress) as shown:
        for start in range(0, len(tokens), _CHUNK_TOKENS):
            raise_if_interrupted()
            chunk = tokens[start : start + _CHUNK_TOKENS]
            if chunk.min() < 0 or chunk.max() > most:
                places = np.flatnonzero((chunk < 0) | (chunk > most))
                ids, first = np.unique(
                    np.searchsorted(dataset.offsets, places + start, side="right") - 1, return_index=True
                )
                limit = (
                    ""
                    if num_values is None
                    else f" and below the vocabulary size {num_values:,} (--decoder.vocab-size)"
                )
                raise UserError(
                    f"{path}: tokens must be at least 0{limit}; samples with others, in the first part that has any: "
                    f"{list_offenders(ids, chunk[places[first]])}"
                )
            shown.update(len(chunk))


def _read_index(path: Path) -> tuple[np.dtype, Int64[np.ndarray, " D"]]:
    """The dtype of the tokens, and the token after each document; raises ValueError for an index that is damaged."""
    content = np.memmap(path, np.uint8, "r").view(np.ndarray) if path.stat().st_size else np.zeros(0, np.uint8)
    if len(content) < _INDEX_HEADER.size:
        raise UserError(f"{path} is damaged: {len(content)} bytes are no index")
    magic, version, code, num_sequences, num_documents = _INDEX_HEADER.unpack(content[: _INDEX_HEADER.size].tobytes())
    if magic != _INDEX_MAGIC or version != 1:
        raise UserError(f"{path} is no index of Megatron-LM of version 1")
    if code not in _INDEX_DTYPES:
        raise UserError(f"{path} is damaged, or of data that are no tokens: its dtype has the code {code}")
    dtype = np.dtype(_INDEX_DTYPES[code])
    needed = _INDEX_HEADER.size + 12 * num_sequences + 8 * num_documents
    if len(content) not in (needed, needed + num_sequences):  # a mode each, of several modalities
        raise UserError(
            f"{path} is damaged: {num_sequences:,} sequences and {num_documents:,} documents take {needed:,} bytes, "
            f"it has {len(content):,}"
        )
    start = _INDEX_HEADER.size
    lengths = content[start : start + 4 * num_sequences].view("<i4")
    pointers = content[start + 4 * num_sequences : start + 12 * num_sequences].view("<i8")
    documents = content[start + 12 * num_sequences : needed].view("<i8")
    ends = np.cumsum(lengths, dtype=np.int64)
    is_wrong = lengths < 0
    is_wrong |= pointers != (ends - lengths) * dtype.itemsize
    if is_wrong.any():
        raise UserError(
            f"{path} is damaged: sequences must lie one after the other: {list_offenders(np.flatnonzero(is_wrong))}"
        )
    ascends = num_documents >= 1 and documents[0] == 0 and documents[-1] == num_sequences
    if not ascends or (documents[1:] < documents[:-1]).any():
        raise UserError(f"{path} is damaged: documents must ascend from 0 to the {num_sequences:,} sequences")
    return dtype, np.append(0, ends)[documents[1:]]
