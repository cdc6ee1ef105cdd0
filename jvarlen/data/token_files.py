"""Files of tokens: `.npz`, and flat `.bin` files as other trainers write them.

`.bin` files are memory-mapped. All are untrusted: what does not fit together is a ValueError with the path.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from jaxtyping import Int64, Integer

from jvarlen._common.checks import UserError, list_offenders
from jvarlen._common.interrupts import raise_if_interrupted
from jvarlen._common.terminal import progress_bar
from jvarlen.data.tokens import FileDataset, TokenDataset

__all__ = ["TokenFile", "as_narrow", "check_tokens", "open_arrays", "open_token_file"]

_CHUNK_TOKENS = 1 << 24
_DETECTED_WORDS = 1 << 16
_MOST_HIGH_WORD = 16  # of a 32-bit token: vocabularies stay below 2**20
_LEAST_WORDS = 64


class TokenFile(FileDataset):
    """Samples of a memory-mapped file of tokens; uint8 if `num_values` ≤ 256."""

    def __init__(
        self, path: Path, dtype: str, offsets: Int64[np.ndarray, " N_plus_1"], num_values: int | None, progress: bool
    ):
        self._dtype, self._offsets, self._num_values = dtype, offsets, num_values
        super().__init__(path)
        check_tokens(self._opened, num_values, path, progress)

    def _open(self) -> TokenDataset:
        return TokenDataset(_map(self._path, self._dtype), self._offsets)

    def __len__(self) -> int:
        return len(self._opened)

    @property
    def lengths(self) -> Int64[np.ndarray, " N"]:
        """Tokens of every sample."""
        return self._opened.lengths

    def _read(self, index: int) -> Integer[np.ndarray, " L"]:
        return as_narrow(self._opened._read(index), self._num_values)


def as_narrow(tokens: Integer[np.ndarray, " L"], num_values: int | None) -> Integer[np.ndarray, " L"]:
    """Tokens as uint8 if all are below 256."""
    return tokens if num_values is None or num_values > 256 else tokens.astype(np.uint8, copy=False)


def check_tokens(
    dataset: TokenDataset, num_values: int | None, path: Path, progress: bool = False, first_id: int = 0
) -> None:
    """Raises ValueError that lists samples with negative tokens, or tokens that are not below `num_values`."""
    tokens = dataset.tokens
    limits = np.iinfo(tokens.dtype)
    if limits.min >= 0 and (num_values is None or limits.max < num_values):
        return
    most = limits.max if num_values is None else num_values - 1
    limit = "" if num_values is None else f" and below {num_values:,}, by --decoder.vocab-size or --model"
    for start, chunk in _chunks(tokens, f"tokens of {path}", progress):
        if chunk.min() < 0 or chunk.max() > most:
            where = np.flatnonzero((chunk < 0) | (chunk > most))
            ids, first = np.unique(np.searchsorted(dataset.offsets, where + start, side="right") - 1, return_index=True)
            raise UserError(
                f"{path}: tokens must be at least 0{limit}; the first samples with others: "
                f"{list_offenders(ids + first_id, chunk[where[first]])}"
            )


def _chunks(tokens: Integer[np.ndarray, " total"], text: str, progress: bool) -> Iterator[tuple[int, np.ndarray]]:
    """Parts of tokens and where they start, with a progress bar."""
    with progress_bar(total=len(tokens), desc=text, unit="token", progress=progress) as shown:
        for start in range(0, len(tokens), _CHUNK_TOKENS):
            raise_if_interrupted()
            chunk = tokens[start : start + _CHUNK_TOKENS]
            yield start, chunk
            shown.update(len(chunk))


def open_token_file(
    path: Path, *, end_token: int | None, block_length: int, num_values: int | None, progress: bool
) -> TokenFile:
    """Opens a flat file of little-endian uint16 or uint32 tokens: documents that `end_token` ends, or else blocks."""
    # The file does not name its dtype. It is uint32 if at its beginning every second 16-bit word is below 16, as in ids
    # below 2**20, and the other words are not.
    num_bytes = path.stat().st_size
    if num_bytes % 2 or not num_bytes:
        raise UserError(f"{path} holds {num_bytes:,} bytes, which are not 16-bit or 32-bit tokens: it may be cut short")
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


def open_arrays(path: Path, num_values: int | None) -> TokenDataset:
    """Opens an `.npz` of `tokens` and `offsets`; raises ValueError if they do not fit together."""
    with path.open("rb") as file:  # NumPy leaves a file that it opened itself open when the file is damaged
        try:
            stored = np.load(file, allow_pickle=False)
            tokens, offsets = stored["tokens"], stored["offsets"]
        except Exception as error:  # damage shows in many ways: as zip, as compressed data, as array
            raise UserError(f"{path} is not a readable .npz of the arrays tokens and offsets: {error}") from None
    for name, array in (("tokens", tokens), ("offsets", offsets)):
        if not isinstance(array, np.ndarray):  # NumPy gives the bytes of what else lies in the archive
            raise UserError(f"{path}: {name} is not an array")
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise UserError(f"{path}: {name} must be 1-D integers, not {array.dtype}{list(array.shape)}")
    try:
        dataset = TokenDataset(tokens, offsets.astype(np.int64))
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    check_tokens(dataset, num_values, path)
    return TokenDataset(as_narrow(tokens, num_values), dataset.offsets)


def _map(path: Path, dtype: npt.DTypeLike) -> Integer[np.ndarray, " total"]:
    return np.memmap(path, dtype, "r").view(np.ndarray)  # slices of a memmap are slow


def _document_offsets(
    tokens: Integer[np.ndarray, " total"], end_token: int, path: Path, progress: bool
) -> Int64[np.ndarray, " N_plus_1"]:
    ends = [np.zeros(1, np.int64)]
    for start, chunk in _chunks(tokens, f"documents of {path}", progress):
        ends.append(np.flatnonzero(chunk == end_token) + start + 1)
    offsets = np.concatenate(ends)
    if len(offsets) == 1:
        raise UserError(f"{path} holds no end token {end_token}: choose another, or none for blocks")
    return offsets if offsets[-1] == len(tokens) else np.append(offsets, len(tokens))
