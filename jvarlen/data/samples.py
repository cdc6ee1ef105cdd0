"""Samples: 1-D integers, or tokens with loss weights; random access to them."""

from __future__ import annotations

import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
from jaxtyping import Float32, Integer

from jvarlen._common.checks import UserError
from jvarlen._common.keywords import check_keywords
from jvarlen._common.types import Array, JsonObject

__all__ = [
    "AnyDataset", "Dataset", "MarkedText", "OnBadSample", "Record", "Sample", "WeightedTokens", "describe_error",
    "describe_fields", "has_fields", "is_named_tuple", "join_marked", "named_values", "num_samples_of",
    "samples_at_once", "scale_weights", "to_tokens",
]  # fmt: skip

OnBadSample = Literal["error", "skip"]

Sample: TypeAlias = Any
"""A sample: tokens, a pair of them, or named fields, in any form that the documentation of `load` lists."""

Record: TypeAlias = JsonObject
"""An object of a JSON line, a row of several columns, or a message of a chat."""

AnyDataset: TypeAlias = Any
"""A dataset that reads samples by their ids, at once or one by one, or can only be iterated."""

_MOST_SHOWN = 500  # characters of why a sample is refused
_MAX_FIELDS = 64  # of a list or tuple; a longer one is not a record


@check_keywords
class WeightedTokens:
    """A sample whose tokens have loss weights.

    Datasets return it in place of an array of tokens. It has the length of its tokens; a slice is a part of it.

    Args:
      tokens: integers[L].
      weights: numbers[L], finite and at least 0: by how much the prediction of each token counts in the loss.

    Attributes:
      tokens: integers[L].
      weights: float32[L].

    Raises:
      ValueError: other weights, or another number of them than of tokens.

    Example:
      >>> answer = WeightedTokens(np.array([7, 8, 9]), [0, 0, 1])
      >>> len(answer), answer[1:]
      (3, WeightedTokens(tokens=[8, 9], weights=[0.0, 1.0]))
    """

    __slots__ = ("tokens", "weights")

    def __init__(self, tokens: npt.ArrayLike, weights: npt.ArrayLike):
        self.tokens: Integer[np.ndarray, " L"] = to_tokens(tokens)
        self.weights: Float32[np.ndarray, " L"] = np.asarray(weights, np.float32)
        if self.weights.shape != self.tokens.shape:
            raise UserError(f"{self.tokens.shape} tokens need as many weights, not {self.weights.shape}")
        if len(self.weights) and not (0 <= self.weights.min() <= self.weights.max() < np.inf):
            raise UserError("loss weights must be finite and at least 0")

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, part: slice) -> WeightedTokens:
        return WeightedTokens(self.tokens[part], self.weights[part])

    def __array__(self, dtype: object = None, copy: object = None) -> NoReturn:
        raise UserError("give the tokens of WeightedTokens as a field, and their weights as the field 'weights'")

    def __repr__(self) -> str:
        return f"WeightedTokens(tokens={self.tokens.tolist()}, weights={self.weights.tolist()})"


def to_tokens(sample: Sample) -> Integer[np.ndarray, " L"]:
    """The tokens of a sample.

    Args:
      sample: a string, which becomes its UTF-8; bytes; 1-D integers of any library; or `WeightedTokens`.

    Returns:
      integers[L], uint8 for strings and bytes; copied only if needed.

    Raises:
      ValueError: any other sample.

    Example:
      >>> to_tokens("ö")
      array([195, 182], dtype=uint8)
    """
    if isinstance(sample, WeightedTokens):
        return sample.tokens
    if isinstance(sample, str):
        return np.frombuffer(sample.encode(), np.uint8)
    if isinstance(sample, bytes | bytearray | memoryview):
        return np.frombuffer(sample, np.uint8)
    try:
        tokens = np.asarray(sample)
    except Exception as error:  # of any library: a tensor on a device, or a ragged list
        raise UserError(f"no tokens, but {type(sample).__name__}: {error}") from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        kind = f"{type(sample).__name__} ({tokens.ndim}-D {tokens.dtype})"
        raise UserError(f"a sample must be text, bytes or 1-D integers, not {kind}")
    return tokens


def describe_fields(sample: Sample) -> str | None:
    """Words for the fields of a sample whose `len` is their number; None if `len` counts tokens."""
    if isinstance(sample, list | tuple):
        first = sample[:_MAX_FIELDS]
        are_words = all(isinstance(each, str | bytes | bytearray) for each in first) and not hasattr(sample, "_fields")
        if not are_words and any(getattr(field, "ndim", 1) for field in first if hasattr(field, "__len__")):
            return f"{type(sample).__name__} of {', '.join(type(field).__name__ for field in sample[:8])}"
    elif isinstance(sample, Mapping):
        return f"{type(sample).__name__} with the keys {', '.join(map(repr, itertools.islice(sample, 8)))}"
    return None


def has_fields(sample: Sample) -> bool:
    """Whether a sample has named fields: a mapping or a dataclass."""
    return isinstance(sample, Mapping) or (dataclasses.is_dataclass(sample) and not isinstance(sample, type))


def is_named_tuple(sample: Sample) -> bool:
    """Whether a sample is a named tuple, whose entries are fields or a pair."""
    return isinstance(sample, tuple) and hasattr(sample, "_fields")


def named_values(sample: Sample) -> Mapping[str, Array]:
    """The fields of a mapping, dataclass or named tuple by name; empty for anything else."""
    if isinstance(sample, Mapping):
        return sample
    if is_named_tuple(sample):
        return sample._asdict()
    return {of.name: getattr(sample, of.name) for of in (dataclasses.fields(sample) if has_fields(sample) else ())}


def scale_weights(sample: Sample, factor: float) -> Sample:
    """The sample with its loss weights, by default 1, times a factor; a pair has those of its target.

    Fields always get the field `weights`, so that all samples have it.
    """
    is_fields = has_fields(sample)
    if is_named_tuple(sample) and describe_fields(sample) is not None:
        if len(sample) == 2 and all(map(_is_array, sample)):
            raise UserError(
                f"loss weights of a {type(sample).__name__} are those of a pair or of fields: two arrays in a named "
                "tuple could be either, so give a plain tuple or a dict"
            )
        is_fields = True
    if is_fields:
        values = named_values(sample)
        return {**values, "weights": np.asarray(values.get("weights", 1), np.float32) * np.float32(factor)}
    if factor == 1:
        return sample
    if isinstance(sample, tuple | list) and len(sample) == 2 and describe_fields(sample) is not None:
        return sample[0], scale_weights(sample[1], factor)
    if isinstance(sample, WeightedTokens):
        return WeightedTokens(sample.tokens, sample.weights * factor)
    tokens = to_tokens(sample)
    return WeightedTokens(tokens, np.full(len(tokens), factor, np.float32))


def _is_array(value: object) -> bool:
    """Whether a field can be one side of a pair."""
    return (
        hasattr(value, "__len__") and not isinstance(value, str | bytes | bytearray) and getattr(value, "ndim", 1) > 0
    )


class MarkedText(NamedTuple):
    """A text, and which of its characters are learned."""

    text: str
    learned: tuple[tuple[int, int], ...] | None = None  # ascending ranges (start, end); None for all
    has_special_tokens: bool = False  # whether a tokenizer must not add any

    def is_learned(self, start: int, end: int) -> bool:
        """Whether the token of these characters is learned: it begins in a learned part, or has a letter of one.

        A token that begins before an answer and has only white space of it belongs to what comes before.
        """
        return self.learned is None or any(
            first <= start < last or (start < first < end and not self.text[first : min(end, last)].isspace())
            for first, last in self.learned
        )


def join_marked(pieces: Sequence[tuple[str, bool]], *, learns_all: bool = False) -> MarkedText:
    """Joins pieces of text, each with whether it is learned."""
    text = "".join(piece for piece, _ in pieces)
    if learns_all:
        return MarkedText(text)
    ends = itertools.accumulate(len(piece) for piece, _ in pieces)
    ranges = [
        (end - len(piece), end) for (piece, is_learned), end in zip(pieces, ends, strict=True) if is_learned and piece
    ]
    return MarkedText(text, tuple(ranges))


class Dataset(ABC):
    """Random access by sample id, 0 to N − 1; subclasses say how many samples there are, and read one."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _read(self, index: int) -> Sample:
        """The sample of an id that exists; other datasets that have checked the id call it as well."""

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self._read(index)


def num_samples_of(dataset: AnyDataset) -> int:
    """The number of samples of a dataset; raises ValueError for what has no `len()`, or is not read by ids."""
    is_named = isinstance(dataset, Mapping) and len(dataset) > 0 and 0 not in dataset
    is_by_ids = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if is_named or isinstance(dataset, bytes | bytearray) or not is_by_ids:
        raise UserError(
            f"a dataset has len() and samples by their ids, which {type(dataset).__name__} lacks: make a list of its "
            "samples, or batch them as they come, with stream_batches"
        )
    return len(dataset)


def samples_at_once(dataset: AnyDataset, ids: list[int]) -> list[Sample]:
    """The samples of these ids in their order, by one call of the dataset's `__getitems__` if it has one."""
    return list(dataset.__getitems__(ids)) if hasattr(dataset, "__getitems__") else [dataset[i] for i in ids]


def describe_error(error: Exception) -> str:
    """The text of an error, in one line."""
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:_MOST_SHOWN]
