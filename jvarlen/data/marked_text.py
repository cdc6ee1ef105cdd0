"""Texts of which parts are learned, and their bytes."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from jvarlen._common.checks import UserError
from jvarlen.planning.lengths import DataSource
from jvarlen.planning.samples import WeightedTokens

__all__ = ["MarkedBytes", "MarkedText"]


class MarkedText(NamedTuple):
    """A text of which parts are learned.

    Attributes:
      text: all of it.
      learned: the characters that are learned, as ascending ranges (start, end); None for all.
      has_special_tokens: whether special tokens are written in the text, so that a tokenizer must not add any.
    """

    text: str
    learned: tuple[tuple[int, int], ...] | None = None
    has_special_tokens: bool = False

    def is_learned(self, start: int, end: int) -> bool:
        """Whether any of these characters is learned."""
        return self.learned is None or any(first < end and start < last for first, last in self.learned)


@dataclasses.dataclass(frozen=True)
class MarkedBytes:
    """The UTF-8 of texts: a data source of uint8[L], or of `WeightedTokens` where only a part is learned.

    Attributes:
      texts: random access to `MarkedText`.
    """

    texts: DataSource

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> UInt8[np.ndarray, " L"] | WeightedTokens:
        text, learned, _ = self.texts[index]
        try:
            tokens = np.frombuffer(text.encode(), np.uint8)
        except UnicodeEncodeError:
            raise UserError("half a surrogate pair, which has no UTF-8") from None
        if learned is None:
            return tokens
        weights = np.zeros(len(tokens), np.float32)
        for start, end in learned:
            first = len(text[:start].encode())
            weights[first : first + len(text[start:end].encode())] = 1
        if not weights.any():
            raise UserError("no token to learn from")
        return WeightedTokens(tokens, weights)
