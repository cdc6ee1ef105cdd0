"""Text as tokens of a prompt, and tokens as text: by bytes, or by a tokenizer file.

A prompt begins as a sample begins and does not end: of the special tokens that the tokenizer adds to a sample, it gets
those before the text and not those after it.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int32, Integer

from jvarlen._common.checks import UserError
from jvarlen.data.tokenized import count_values, load_tokenizer, only_value_errors

__all__ = ["ByteCodec", "TextCodec", "TokenizerCodec"]


class TextCodec(Protocol):
    """Between text and tokens.

    Attributes:
      num_values: all tokens are below it.
      end_token: the token that ends a sample; None if there is none.
    """

    num_values: int
    end_token: int | None

    def encode(self, text: str) -> Int32[np.ndarray, " L"]:
        """The tokens of a prompt; raises ValueError if the text has none."""

    def decode(self, tokens: Integer[np.ndarray, " L"]) -> str:
        """The text of tokens, without special tokens."""


class ByteCodec:
    """Tokens that are the bytes of UTF-8; a `TextCodec`.

    Example:
      >>> codec = ByteCodec()
      >>> codec.encode("ö").tolist(), codec.decode(np.array([195, 182, 195]))
      ([195, 182], 'ö�')
    """

    num_values = 256
    end_token: int | None = None

    def encode(self, text: str) -> Int32[np.ndarray, " L"]:
        """The bytes of a text."""
        try:
            return np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        except UnicodeEncodeError:
            raise UserError("half a surrogate pair, which has no UTF-8") from None

    def decode(self, tokens: Integer[np.ndarray, " L"]) -> str:
        """The text of bytes; what is no UTF-8 becomes U+FFFD."""
        return tokens.astype(np.uint8).tobytes().decode(errors="replace")


class TokenizerCodec:
    """Tokens of a tokenizer file; a `TextCodec`.

    The token that ends a sample is the first that the tokenizer adds after a text. If it adds none, it is the
    `eos_token` of a `tokenizer_config.json` beside the file.

    Args:
      path: a file of the package `tokenizers`.

    Raises:
      ValueError: tokenizers is missing; a file is damaged.
      FileNotFoundError: there is no tokenizer file.
    """

    def __init__(self, path: Path):
        if not path.is_file():
            raise FileNotFoundError(f"there is no tokenizer file {path}")
        self.path = path
        self._tokenizer = load_tokenizer(path)
        self.num_values = count_values(self._tokenizer, path)
        self._prefix, suffix = self._added_tokens()
        self.end_token = suffix[0] if suffix else self._configured_end()

    def encode(self, text: str) -> Int32[np.ndarray, " L"]:
        """The tokens that a sample with this beginning has at its beginning."""
        with only_value_errors(f"{self.path} fails on the text"):
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.array([*self._prefix, *ids], np.int32)

    def decode(self, tokens: Integer[np.ndarray, " L"]) -> str:
        """The text of tokens, without special tokens."""
        with only_value_errors(f"{self.path} fails on the tokens"):
            return self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True)

    def _added_tokens(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after a text."""
        with only_value_errors(f"{self.path} fails on a text of its own tokens"):
            if not self._tokenizer.num_special_tokens_to_add(False):
                return [], []
            for text in itertools.chain("a", self._tokenizer.get_vocab(with_added_tokens=False)):
                encoded = self._tokenizer.encode(text)
                own = [i for i, sequence in enumerate(encoded.sequence_ids) if sequence is not None]
                if own:
                    return encoded.ids[: own[0]], encoded.ids[own[-1] + 1 :]
        return [], []

    def _configured_end(self) -> int | None:
        config = self.path.with_name("tokenizer_config.json")
        if not config.is_file():
            return None
        try:
            settings: dict[str, Any] = json.loads(config.read_bytes())
            end = settings.get("eos_token")
        except (ValueError, AttributeError, RecursionError) as error:
            raise UserError(f"{config} is damaged: {error}") from None
        text = end.get("content") if isinstance(end, dict) else end
        return self._tokenizer.token_to_id(text) if isinstance(text, str) else None
