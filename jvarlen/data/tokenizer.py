"""Text to tokens and back: by bytes, or by a file of the package tokenizers, in the extra `data`.

A prompt gets the special tokens that the tokenizer adds before a text, and not those after it. The file is untrusted.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from jaxtyping import Int32, Integer, UInt8

from jvarlen._common.checks import UserError
from jvarlen._common.files import regular_file
from jvarlen.data.chat_template import named_tokens
from jvarlen.data.length_cache import combine_keys, content_key
from jvarlen.data.samples import MarkedText, WeightedTokens
from jvarlen.data.tokens import State

__all__ = ["ByteTokenizer", "FileTokenizer", "Tokenizer"]


class ByteTokenizer:
    """Tokens that are the bytes of UTF-8."""

    num_values = 256
    end_token = None

    def sample(self, text: MarkedText) -> UInt8[np.ndarray, " L"] | WeightedTokens:
        """The bytes of a text, weighted where only a part is learned; raises ValueError if none is."""
        tokens = _text_bytes(text.text)
        if text.learned is None:
            return tokens
        weights = np.zeros(len(tokens), np.float32)
        for start, end in text.learned:
            first = len(text.text[:start].encode())
            weights[first : first + len(text.text[start:end].encode())] = 1
        return _add_weights(tokens, weights)

    def prompt(self, text: MarkedText) -> Int32[np.ndarray, " L"]:
        """The bytes of a text."""
        return _text_bytes(text.text).astype(np.int32)

    def decode(self, tokens: Integer[np.ndarray, " L"]) -> str:
        """The text of bytes; invalid UTF-8 becomes U+FFFD."""
        return tokens.astype(np.uint8).tobytes().decode(errors="replace")


class FileTokenizer:
    """A tokenizer file with its post-processor, without truncation and padding; worker processes load it themselves."""

    def __init__(self, path: Path | str):
        self.path = path = regular_file(Path(path))
        if not path.is_file():
            raise FileNotFoundError(f"there is no tokenizer file {path}")
        self.key = content_key(path)
        self._tokenizer = _load(path)
        self.num_values = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if not 1 <= self.num_values <= np.iinfo(np.int32).max:
            last = self.num_values - 1
            raise UserError(f"{path}: ids of tokens must fit int32, and there must be one; they end at {last}")
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.special_tokens = tuple(token.content for token in added if token.special)

    def sample(self, text: MarkedText) -> Int32[np.ndarray, " L"] | WeightedTokens:
        """The ids of a text, weighted where only a part is learned; raises ValueError if there are none."""
        with _only_value_errors(f"{self.path} fails on the text"):
            encoded = self._tokenizer.encode(text.text, add_special_tokens=not text.has_special_tokens)
            ids = encoded.ids
        if not ids:
            raise UserError("no tokens, by this tokenizer")
        if max(ids) >= self.num_values:
            raise UserError(f"token {max(ids)}, but {self.path} has only {self.num_values} ids")
        tokens = np.array(ids, np.int32)
        if text.learned is None:
            return tokens
        weights: list[bool] = []
        before = 0  # the end of the token before
        for start, end in encoded.offsets:
            if not text.text[start:end].strip():  # post-processors may take blanks out of offsets
                start = min(start, before)
            # A token that was added is learned if the one before it is.
            weights.append(bool(weights) and weights[-1] if start == end else text.is_learned(start, end))
            before = max(before, end)
        return _add_weights(tokens, weights)

    def prompt(self, text: MarkedText) -> Int32[np.ndarray, " L"]:
        """The tokens that a sample with this beginning has at its beginning."""
        with _only_value_errors(f"{self.path} fails on the text"):
            ids = self._tokenizer.encode(text.text, add_special_tokens=False).ids
        return np.array([*([] if text.has_special_tokens else self._special_tokens[0]), *ids], np.int32)

    def decode(self, tokens: Integer[np.ndarray, " L"]) -> str:
        """The text of tokens, without special tokens."""
        with _only_value_errors(f"{self.path} fails on the tokens"):
            return self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True)

    @functools.cached_property
    def end_token(self) -> int | None:
        """The token that ends a sample; None if there is none."""
        if self._special_tokens[1]:
            return self._special_tokens[1][0]
        end = named_tokens(self.path).get("eos_token")
        return None if end is None else self._tokenizer.token_to_id(end)

    @functools.cached_property
    def _special_tokens(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after a text."""
        with _only_value_errors(f"{self.path} fails on the text of its tokens"):
            if not self._tokenizer.num_special_tokens_to_add(False):
                return [], []
            for text in itertools.chain("a", self._tokenizer.get_vocab(with_added_tokens=False)):
                encoded = self._tokenizer.encode(text)
                inside = [i for i, sequence in enumerate(encoded.sequence_ids) if sequence is not None]
                if inside:
                    return encoded.ids[: inside[0]], encoded.ids[inside[-1] + 1 :]
        return [], []

    @functools.cached_property
    def lengths_key(self) -> str:
        """What decides the lengths besides the texts: the file, and the version of its package."""
        import tokenizers

        return combine_keys(self.key, tokenizers.__version__)

    def __getstate__(self) -> State:
        return {name: value for name, value in vars(self).items() if name != "_tokenizer"}

    def __setstate__(self, state: State) -> None:
        vars(self).update(state)
        if content_key(self.path) != self.key:
            raise UserError(f"{self.path} has changed")
        self._tokenizer = _load(self.path)


Tokenizer = ByteTokenizer | FileTokenizer


def _text_bytes(text: str) -> UInt8[np.ndarray, " L"]:
    """The UTF-8 of a text; raises ValueError if it has none."""
    try:
        return np.frombuffer(text.encode(), np.uint8)
    except UnicodeEncodeError:
        raise UserError("half a surrogate pair, which has no UTF-8") from None


def _add_weights(tokens: Integer[np.ndarray, " L"], weights: npt.ArrayLike) -> WeightedTokens:
    if not np.any(weights):
        raise UserError("no token to learn from")
    return WeightedTokens(tokens, weights)


def _load(path: Path) -> Any:
    """The tokenizer of a file, without truncation and padding; raises ValueError for any other file."""
    try:
        import tokenizers  # here: an extra
    except ModuleNotFoundError:
        raise UserError(f"{path} can only be read with tokenizers: pip install 'jvarlen[data]'") from None
    wanted = (
        "a tokenizer of the package tokenizers, which Tokenizer(WordLevel(words, unk_token=…)).save(path) makes of a "
        "dictionary of words"
    )
    with _only_value_errors(f"{path} is not {wanted}"):
        tokenizer = tokenizers.Tokenizer.from_str(path.read_bytes().decode("utf-8-sig"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode("")  # tokens that are added to every text are looked up only here
    return tokenizer


@contextlib.contextmanager
def _only_value_errors(said: str) -> Iterator[None]:
    """Within, errors of the package, which are plain Exceptions or panics of its Rust, become ValueErrors."""
    try:
        yield
    except (OSError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic is not an Exception
        raise UserError(f"{said}: {error}") from None
