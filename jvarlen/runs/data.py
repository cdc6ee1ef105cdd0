"""The data of a training: files, given samples or the built-in corpus, and whether all processes have the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int64

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.files import regular_file
from jvarlen._common.terminal import say
from jvarlen._common.types import JsonObject
from jvarlen.data.find_files import distinct_names, without_credentials
from jvarlen.data.length_cache import content_key
from jvarlen.data.mixtures import Mixture
from jvarlen.data.open import NUM_BYTES, StoredDataset, open_stored, roles_error
from jvarlen.data.split import HELD_OUT, Split, split_held_out
from jvarlen.data.stdlib_corpus import stdlib_functions
from jvarlen.distributed.processes import agree, gather_arrays, is_main_process
from jvarlen.planning.compare import length_histogram
from jvarlen.planning.lengths import DataSource
from jvarlen.runs.config import FitConfig, evaluation_name
from jvarlen.runs.model import MODEL_DIR, TOKENIZER, RunModel, has_checkpoint, has_weights, model_key
from jvarlen.runs.saved_config import changed_contents, load_config

__all__ = ["SamplesOfLengths", "TrainingData", "agree_on_contents", "open_training_data", "refuse_changed"]


class TrainingData(NamedTuple):
    """The data of a training."""

    train: DataSource
    evaluation: dict[str, DataSource]  # by name; the first is "held_out", which is split off the data
    num_values: int  # how many values a token can have
    content_keys: dict[str, str]  # of each file, of the tokenizer and of the model, by its name
    skipped: list[JsonObject]  # records of files that are not samples, as a run lists them

    def describe(self, lengths: Int64[np.ndarray, " N *2"]) -> list[str]:
        """The lengths of the samples to train on, how many others there are, and records that are not samples."""
        others = ", ".join(f"{len(dataset):,} of {name}" for name, dataset in self.evaluation.items())
        bad = [f"{each['file']}, {each['record']}: {each['reason']}" for each in self.skipped]
        left_out = [f"{len(bad):,} records that are not samples are left out: {list_first(bad, '; ')}"] if bad else []
        # A second length may be 0, but not both.
        histogram = length_histogram(lengths if lengths.ndim == 1 else lengths.sum(axis=1))
        both = ["of both lengths together:"] if lengths.ndim == 2 else []
        evaluated = [f"evaluated on other samples: {others}"] if others else []
        return [*both, histogram, *evaluated, *left_out]


class SamplesOfLengths:
    """Stands for samples to train on with known lengths, int64[N], and no content; nothing is held out."""

    def __init__(self, lengths: Int64[np.ndarray, " N"]):
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> np.ndarray:
        return np.zeros(self.lengths[i], np.int32)


def open_training_data(
    config: FitConfig, given: Split | SamplesOfLengths | None = None, model: RunModel | None = None
) -> TrainingData:
    """Opens the given samples, the files of the settings, each split by itself, or the built-in corpus."""
    model = model or RunModel.of(config)
    settings, num_values = config.data, model.decoder.num_values
    if given is not None and settings.files:
        shown = ", ".join(map(without_credentials, settings.files))
        raise UserError(f"data are given twice, as an argument and as settings: {shown}")
    if given is None and not settings.files and has_weights(config.model) and num_values != NUM_BYTES:
        raise UserError(f"model ({config.model}) has other tokens than the bytes of the built-in corpus: give files=")
    split: Split | SamplesOfLengths
    opened = {path: _open(path, config, model) for path in dict.fromkeys([*settings.files, *settings.eval_data])}
    if (error := roles_error([*opened.values()])) is not None:
        raise error
    if settings.files:
        splits = [
            _split(without_credentials(path), opened[path], settings.held_out_fraction) for path in settings.files
        ]
        mixed = Mixture(
            [split.train for split in splits],
            settings.weights or None,
            num_samples=settings.mixture_samples,
            seed=config.seed,
            loss_weights=settings.loss_weights or None,
        )
        split = Split(mixed, Mixture([split.held_out for split in splits]))
    elif given is None:
        split = split_held_out(
            stdlib_functions(progress=config.progress and is_main_process()), settings.held_out_fraction
        )
    else:
        split = given
    names = distinct_names(opened)
    keys = {name: dataset.content_key for name, dataset in zip(names, opened.values(), strict=True)}
    if (tokenizer := _tokenizer_file(config, model)) is not None:
        keys[str(model.tokenizer)] = content_key(regular_file(tokenizer))
    if config.model is not None and not has_checkpoint(config.directory.resumed):  # of a run with one it is not read
        keys[str(config.model)] = model_key(config.model)
    sets: dict[str, DataSource] = {evaluation_name(path): opened[path] for path in settings.eval_data}
    return TrainingData(
        train=split if isinstance(split, SamplesOfLengths) else split.train,
        evaluation=sets if isinstance(split, SamplesOfLengths) else {HELD_OUT: split.held_out} | sets,
        num_values=max([num_values, *(dataset.num_values or 0 for dataset in opened.values())]),
        content_keys=keys,
        skipped=[
            {"step": None, "file": name, "record": record, "reason": reason}
            for name, dataset in zip(names, opened.values(), strict=True)
            for record, reason in dataset.skipped
        ],
    )


def _open(path: Path | str, config: FitConfig, run_model: RunModel) -> StoredDataset:
    """Opens a file or directory by the settings."""
    tokenizer, model, num_values = _tokenizer_file(config, run_model), config.model, run_model.decoder.num_values
    dataset = open_stored(
        path,
        field=config.data.field,
        template=config.data.template,
        loss_on=config.data.loss_on,
        tokenizer=tokenizer,
        num_values=None if tokenizer is not None and model is None else num_values,
        end_token=config.data.end_token,
        block_length=config.plan.longest_bucket(),
        num_workers=config.data.num_workers,
        progress=config.progress and is_main_process(),
        on_bad_sample=config.data.on_bad_sample,
        max_bad_fraction=config.data.max_bad_fraction,
    )
    path = without_credentials(path)
    if dataset.num_values is None:
        raise UserError(f"{path} holds tokens and no text, and the tokenizer {tokenizer} cannot have made them")
    if model is not None and dataset.num_values > num_values:
        raise UserError(
            f"{path} has tokens up to {dataset.num_values - 1:,}, and those of {model} are below {num_values:,}"
        )
    if has_weights(model) and tokenizer is None and dataset.num_values == NUM_BYTES != num_values:
        raise UserError(
            f"{path} holds text, and there is no {TOKENIZER} in {model}: give tokenizer=, the one of this model"
        )
    is_bytes = tokenizer is None and dataset.num_values == NUM_BYTES
    beside = None if model is None or has_weights(model) else model.with_name(TOKENIZER)
    if is_bytes and beside is not None and beside.exists() and is_main_process():
        say(f"{path} is read as bytes: {beside} is used if --tokenizer names it")
    return dataset


def _tokenizer_file(config: FitConfig, model: RunModel) -> Path | None:
    """The tokenizer of the settings, or the copy that the resumed run has of it, if that is gone."""
    tokenizer, resumed = model.tokenizer, config.directory.resumed
    copy = None if resumed is None else resumed / MODEL_DIR / TOKENIZER
    is_gone = tokenizer is not None and not tokenizer.exists()
    return copy if is_gone and copy is not None and copy.exists() else tokenizer


def _split(path: Path | str, dataset: DataSource, fraction: float) -> Split:
    try:
        return split_held_out(dataset, fraction)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def agree_on_contents(data: TrainingData) -> None:
    """Raises ValueError that lists the files, tokenizer, model and datasets whose contents differ between processes."""
    if jax.process_count() == 1:
        return
    agree("the files of data and model", json.dumps([*data.content_keys]))
    given = {"the training data": data.train, **{f"the data of {name}": each for name, each in data.evaluation.items()}}
    known = data.content_keys | {name: getattr(each, "content_key", None) for name, each in given.items()}
    of_processes = gather_arrays(np.array([bytes.fromhex(key or "") for key in known.values()], "S32"))
    keys = {name: {*column.tolist()} - {b""} for name, column in zip(known, of_processes.T, strict=True)}
    if different := [name for name, found in keys.items() if len(found) > 1]:
        raise UserError(f"processes have different contents of {list_first(different)}: give all the same")


def refuse_changed(run_dir: Path, data: TrainingData, tokenizer: Path | None) -> None:
    """Raises ValueError for files whose content has changed since the run began."""
    saved = load_config(run_dir / "config.json")  # settings that name other files are refused as such, later
    names = {*distinct_names((*saved.data.files, *saved.data.eval_data)), str(saved.data.tokenizer), str(saved.model)}
    changed = changed_contents(run_dir, {name: key for name, key in data.content_keys.items() if name in names})
    if str(tokenizer) in changed:  # the tokenizer is a part of all other keys
        changed = [str(tokenizer)]
    if changed:
        raise UserError(f"{run_dir} began with another content of {list_first(changed)}: put it back, or begin another")
