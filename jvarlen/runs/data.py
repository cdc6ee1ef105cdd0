"""Opens the data to train and evaluate on, with content keys."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from jvarlen._common.checks import UserError
from jvarlen.data.mixtures import Mixture
from jvarlen.data.open import open_data
from jvarlen.data.split import HELD_OUT, Split, split_held_out
from jvarlen.data.stdlib_corpus import stdlib_functions
from jvarlen.planning.lengths import DataSource
from jvarlen.runs.config import FitConfig, evaluation_name

__all__ = ["TrainingData", "open_training_data"]

_BLOCK_LENGTH = 1024  # of files of tokens, where no length is the longest


class TrainingData(NamedTuple):
    """The data of a training.

    Attributes:
      train: the samples to train on.
      evaluation: sets to evaluate on, by name; the first is "held_out", which is split off the data.
      vocab_size: how many values a token can have.
      is_bytes: whether the tokens are known to be the bytes of text.
      content_keys: the content key of each file, by its name; empty without files.
    """

    train: DataSource
    evaluation: dict[str, DataSource]
    vocab_size: int
    is_bytes: bool
    content_keys: dict[str, str]


def open_training_data(config: FitConfig, given: Split | None = None) -> TrainingData:
    """Opens the given samples, the files of the settings, or the built-in corpus.

    Each file is split separately into training and held-out samples, so neither weights nor other files move a sample
    to the other side. A mixture is drawn once: every epoch has the same samples.

    Args:
      config: the settings.
      given: samples in place of those of the settings.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: data are given twice or cannot be read, or one side of a split is empty.
    """
    if given is not None and config.data.files:
        files = ", ".join(map(str, config.data.files))
        raise UserError(f"data are given twice, as an argument and as settings: {files}")
    vocab_size, is_bytes, content_keys = config.decoder.vocab_size, given is None, {}

    def opened(path: Path | str) -> DataSource:
        nonlocal vocab_size, is_bytes
        dataset = open_data(
            path,
            field=config.data.field,
            template=config.data.template,
            loss_on=config.data.loss_on,
            tokenizer=config.data.tokenizer,
            num_values=None if config.data.tokenizer else config.decoder.vocab_size,
            end_token=config.data.end_token,
            block_length=config.plan.max_length or _BLOCK_LENGTH,
            num_workers=config.data.num_workers,
            progress=config.progress,
        )
        content_keys[str(path)] = dataset.content_key
        if dataset.num_values is None:
            raise UserError(
                f"{path} holds tokens and no text, which the tokenizer {config.data.tokenizer} could not have made"
            )
        vocab_size = max(vocab_size, dataset.num_values)
        is_bytes = is_bytes and dataset.is_bytes
        return dataset

    if given is None and config.data.files:
        splits = [_split(path, opened(path), config.data.held_out_fraction) for path in config.data.files]
        mixed = Mixture(
            [split.train for split in splits],
            config.data.weights or None,
            num_samples=config.data.mixture_samples,
            seed=config.seed,
            loss_weights=config.data.loss_weights or None,
        )
        given = Split(mixed, Mixture([split.held_out for split in splits]))
    elif given is None:
        given = split_held_out(stdlib_functions(progress=config.progress), config.data.held_out_fraction)
    evaluation = {HELD_OUT: given.held_out} | {evaluation_name(path): opened(path) for path in config.data.eval_data}
    return TrainingData(given.train, evaluation, vocab_size, is_bytes, content_keys)


def _split(path: Path | str, dataset: DataSource, fraction: float) -> Split:
    try:
        return split_held_out(dataset, fraction)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
