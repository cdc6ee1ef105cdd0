"""`jvarlen export`: the trained model of a run, as a Hugging Face directory, or its adapters as one of PEFT."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from jvarlen import models
from jvarlen._common.checks import UserError, list_first
from jvarlen._common.files import check_new_directory
from jvarlen._common.options import POSITIONAL
from jvarlen._common.settings import Settings
from jvarlen._common.terminal import say
from jvarlen.models.adapter_config import base_of, is_adapter
from jvarlen.runs.commands.trained_model import TrainedModel, WhichCheckpoint, read_trained
from jvarlen.runs.model import has_weights, is_run
from jvarlen.runs.saved_config import load_config

__all__ = ["ExportCommand"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportCommand(Settings):
    """Write the trained model of a run as a Hugging Face directory, with its tokenizer. Adapters are merged into it."""

    run_dir: Path = dataclasses.field(metadata=POSITIONAL)
    """Run directory, or directory of adapters of PEFT."""
    out: Path = dataclasses.field(metadata=POSITIONAL)
    """The directory to write, which `transformers` opens; it must be empty or new."""
    checkpoint: WhichCheckpoint = dataclasses.field(default="latest", metadata={"name": "from"})
    """The checkpoint to take: the latest, or the one with the best evaluation."""
    tokenizer: Path | None = None
    """Tokenizer file, for a run that has none."""
    adapters: bool = False
    """Write adapters alone, as a directory that PEFT opens on top of their model."""

    def run(self) -> None:
        """Writes the directory, and prints its files."""
        import jax  # here: settings are read without it

        from jvarlen.training.trainable import select_trained

        check_new_directory(self.out)
        trained, base = read_trained(self.run_dir, self.checkpoint, self.tokenizer), None
        params, decoder = trained.params, trained.decoder
        if self.adapters:
            base = _base_of(self.run_dir, trained)
        elif decoder.lora is not None:
            params, decoder = models.merge_lora(params, decoder), dataclasses.replace(decoder, lora=None)
        models.to_hugging_face(
            self.out,
            params,
            decoder,
            base_model=base,
            tokenizer=self.tokenizer or trained.folder,
            end_token=trained.end_tokens[0] if len(trained.end_tokens) == 1 else trained.end_tokens or None,
        )
        size = sum(leaf.size for leaf in jax.tree.leaves(select_trained(params, decoder.trainable)))
        what = "parameters" if base is None else f"parameters of adapters of {base}"
        say(f"{self.out}: {size:,} {what} after {trained.num_steps:,} steps")


def _base_of(directory: Path, trained: TrainedModel) -> Path:
    """The directory of the model of adapters; ValueError unless its parameters are those beside the adapters."""
    import jax  # here: settings are read without it

    from jvarlen.training.trainable import names_of

    if trained.decoder.lora is None:
        raise UserError(f"{directory} has no adapters: without adapters=True, the whole model is written")
    model: Path | None = directory
    while model is not None and is_run(model):  # which may have begun with another
        model = load_config(model / "config.json").model
    if model is None or not has_weights(model):
        raise UserError(f"the adapters of {directory} are of no Hugging Face directory: leave out adapters=True")
    base = base_of(model) if is_adapter(model) else model
    frozen = models.from_hugging_face(base)[1]
    own = dict(zip(names_of(trained.params), jax.tree.leaves(trained.params), strict=True))
    of_base = zip(names_of(frozen), jax.tree.leaves(frozen), strict=True)
    if differing := [name for name, leaf in of_base if name not in own or not np.array_equal(leaf, own[name])]:
        raise UserError(
            f"{base} is not the model that {directory} has adapters of, these parameters differ: "
            f"{list_first(differing)}. Without adapters=True, adapters are merged into those of {directory}"
        )
    return base
