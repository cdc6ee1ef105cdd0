"""Samples whose tokens count differently in the loss."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torch_ref.checks import MAX_LISTED, known_keywords

__all__ = ["WeightedTokens", "is_record", "reweight", "values_of_record"]


@known_keywords
class WeightedTokens:
    """Tokens, and by how much the prediction of each counts in the loss.

    Args:
        tokens: [L] integers.
        weights: [L] finite numbers >= 0.

    Attributes:
        tokens: integers [L].
        weights: float32 [L].

    Raises:
        ValueError: if there are not as many weights as tokens, or a weight is out of its range.

    Example:
        >>> WeightedTokens([5, 6, 7], np.array([-100, 6, 7]) != -100).weights
        array([0., 1., 1.], dtype=float32)
    """

    def __init__(self, tokens: ArrayLike, weights: ArrayLike) -> None:
        """Check the weights."""
        self.tokens: NDArray[Any] = np.asarray(tokens)
        self.weights: NDArray[np.float32] = np.asarray(weights, dtype=np.float32)
        if self.weights.shape != self.tokens.shape:
            raise ValueError(f"weights of shape {self.weights.shape} do not go with tokens of {self.tokens.shape}")
        bad = np.flatnonzero(~(np.isfinite(self.weights) & (self.weights >= 0)))
        if len(bad):
            listed = ", ".join(f"token {i}: {self.weights[i]}" for i in bad[:MAX_LISTED])
            raise ValueError(f"weights must be finite and at least 0: {listed}")

    def __len__(self) -> int:
        """Return the number of tokens, which is the length that a plan needs."""
        return len(self.tokens)


def is_record(sample: object) -> bool:
    """Return whether a sample has named fields: a mapping or a dataclass."""
    return isinstance(sample, Mapping) or (dataclasses.is_dataclass(sample) and not isinstance(sample, type))


def values_of_record(record: Any) -> Mapping[str, Any]:
    """Return its fields."""
    if isinstance(record, Mapping):
        return record
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def reweight(sample: Any, factor: float) -> Any:
    """Return a sample, its fields, or a pair, with the weights, or 1 where it has none, times a factor."""
    if is_record(sample):
        fields = values_of_record(sample)
        return {**fields, "weights": np.asarray(fields.get("weights", 1), dtype=np.float32) * np.float32(factor)}
    if factor == 1:
        return sample
    if isinstance(sample, WeightedTokens):
        return WeightedTokens(sample.tokens, sample.weights * factor)
    if isinstance(sample, tuple | list) and any(map(_has_length, sample)):
        if hasattr(sample, "_fields") or len(sample) != 2 or not all(map(_has_length, sample)):
            kind = f"{type(sample).__name__} of {', '.join(type(each).__name__ for each in sample)}"
            raise ValueError(f"loss weights need tokens, a dict, or a plain tuple of source and target, not a {kind}")
        return sample[0], reweight(sample[1], factor)
    return WeightedTokens(sample, np.full(len(sample), factor, dtype=np.float32))


def _has_length(value: object) -> bool:
    return hasattr(value, "__len__") and getattr(value, "ndim", 1) > 0
