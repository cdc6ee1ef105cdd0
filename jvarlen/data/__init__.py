"""Datasets with known lengths, from files or from any sequence. No JAX.

- `samples`: tokens, with loss weights or without. `tokens`: datasets of tokens. `split`: held-out samples.
  `stdlib_corpus`: the built-in corpus.
- `open`, `find_files`: files by path, glob or URL. `line_files`, `arrow_files`, `token_files`: their formats.
- `records`: text from several fields or chats, and which parts of it are learned. `chat_template`: chats by the
  template of a tokenizer. `tokenizer`: text to tokens and back.
- `measure`: sample lengths, measured here or in worker processes. `shard_files`: files from which measuring resumes.
- `length_cache`: keys of file contents, and lengths cached under them.
- `shared_prompts`: samples that hold a prompt once, with several answers.
- `mixtures`: several datasets as one, with exact counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jvarlen._common.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from jvarlen.data.mixtures import mixture_counts
    from jvarlen.data.samples import WeightedTokens
    from jvarlen.data.shared_prompts import share_prompts

__all__ = ["WeightedTokens", "mixture_counts", "share_prompts"]

__getattr__, __dir__ = lazy_imports(__name__)
