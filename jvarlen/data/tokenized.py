"""Datasets of text, tokenized by a tokenizer file when a sample is read.

Needs the package tokenizers, in the extra `data`. The tokenizer file is untrusted: a bad one is a ValueError with its
path.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from jvarlen._common.checks import UserError
from jvarlen.data.content_key import combine_keys, content_key
from jvarlen.data.marked_text import MarkedText
from jvarlen.planning.lengths import DataSource
from jvarlen.planning.samples import WeightedTokens, to_tokens

__all__ = ["TokenizedDataset", "count_values", "load_tokenizer", "only_value_errors"]


class TokenizedDataset:
    """Texts as token ids: a data source that tokenizes a sample when it is read.

    Special tokens, such as those for the beginning and end of a sentence, are added by the post-processor in the
    tokenizer file, if it has one. Truncation and padding in the file are ignored: a sample keeps all its tokens and
    gets no others. Worker processes load the tokenizer themselves.

    Args:
      texts: random access to strings, to their UTF-8 as bytes or uint8[length], or to `MarkedText`.
      tokenizer_path: a file of the package `tokenizers`, `tokenizer.json` by custom; it must not change while in use.

    Attributes:
      path: the tokenizer file.
      num_values: the number of ids: the greatest plus 1.
      key: hex key of the tokenizer file.
      special_tokens: the texts of its special tokens.

    Raises:
      ValueError: tokenizers is missing; the file is not a tokenizer; and, when a sample is read, it is not UTF-8 or has
        no tokens.
      OSError: the file cannot be read.

    Example:
      >>> import tempfile
      >>> from tokenizers import Tokenizer, models, pre_tokenizers
      >>> tokenizer = Tokenizer(models.WordLevel({"a": 0, "plan": 1, "?": 2}, unk_token="?"))
      >>> tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     tokenizer.save(f"{folder}/tokenizer.json")
      ...     dataset = TokenizedDataset(["a plan", b"another plan"], Path(folder, "tokenizer.json"))
      >>> dataset[1], dataset.num_values
      (array([2, 1], dtype=int32), 3)

    References:
      Hugging Face tokenizers, https://huggingface.co/docs/tokenizers
    """

    def __init__(self, texts: DataSource, tokenizer_path: Path):
        self._texts = texts
        self.path = tokenizer_path
        if not tokenizer_path.is_file():  # nor what can be read without end
            raise FileNotFoundError(f"there is no tokenizer file {tokenizer_path}")
        self.key = content_key(tokenizer_path)
        self._tokenizer = load_tokenizer(tokenizer_path)
        self.num_values = count_values(self._tokenizer, tokenizer_path)
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.special_tokens = tuple(token.content for token in added if token.special)

    def with_texts(self, texts: DataSource) -> TokenizedDataset:
        """The same tokenizer on other texts."""
        other = object.__new__(TokenizedDataset)  # a copy would load the tokenizer again, as a worker does
        vars(other).update(vars(self), _texts=texts)
        return other

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> Int32[np.ndarray, " length"] | WeightedTokens:
        sample = self._texts[index]
        marked = sample if isinstance(sample, MarkedText) else MarkedText(_to_text(sample))
        with only_value_errors(f"{self.path} fails on the text"):
            encoded = self._tokenizer.encode(marked.text, add_special_tokens=not marked.has_special_tokens)
            ids = encoded.ids
        if not ids:
            raise UserError("no tokens, by this tokenizer")
        if max(ids) >= self.num_values:
            raise UserError(f"token {max(ids)}, but {self.path} has only {self.num_values} ids")
        tokens = np.array(ids, np.int32)
        if marked.learned is None:
            return tokens
        weights = _weights_of(marked, encoded.offsets)
        if not any(weights):
            raise UserError("no token to learn from")
        return WeightedTokens(tokens, weights)

    @functools.cached_property
    def lengths_key(self) -> str:
        """What decides the lengths besides the texts: the tokenizer file, and the version of its package."""
        import tokenizers

        return combine_keys(self.key, tokenizers.__version__)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_tokenizer"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if content_key(self.path) != self.key:
            raise UserError(f"{self.path} has changed")
        self._tokenizer = load_tokenizer(self.path)


def _weights_of(marked: MarkedText, offsets: list[tuple[int, int]]) -> list[bool]:
    """Whether each token is learned: it has a learned character, or was added after such a token."""
    weights: list[bool] = []
    for start, end in offsets:
        is_added = start == end
        weights.append(bool(weights) and weights[-1] if is_added else marked.is_learned(start, end))
    return weights


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a file, without truncation and padding; raises ValueError if it is none."""
    try:
        import tokenizers  # here: an extra
    except ModuleNotFoundError:
        raise UserError(f"{path} can only be read with tokenizers: pip install 'jvarlen[data]'") from None
    with only_value_errors(f"{path} is no tokenizer of the package tokenizers"):
        tokenizer = tokenizers.Tokenizer.from_str(path.read_bytes().decode())
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode("")  # what is added to every text is looked up only here
    return tokenizer


def count_values(tokenizer: Any, path: Path) -> int:
    """The number of ids of a tokenizer: the greatest plus 1; raises ValueError if there is none."""
    num_values = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if not 1 <= num_values <= np.iinfo(np.int32).max:
        raise UserError(f"{path}: ids of tokens must fit int32, and there must be one; they end at {num_values - 1}")
    return num_values


def _to_text(sample: Any) -> str:
    if isinstance(sample, str):
        return sample
    tokens = to_tokens(sample)
    if tokens.dtype != np.uint8:
        raise UserError(f"no text, but tokens of {tokens.dtype}")
    try:
        return tokens.tobytes().decode()
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 at byte {error.start}") from None


@contextlib.contextmanager
def only_value_errors(said: str) -> Iterator[None]:
    """Within, errors of the package, which are plain Exceptions or panics of its Rust, become ValueErrors."""
    try:
        yield
    except (OSError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic is no Exception
        raise UserError(f"{said}: {error}") from None
