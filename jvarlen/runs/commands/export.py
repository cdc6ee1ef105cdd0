"""`jvarlen export`: the trained model of a run, as a Hugging Face directory."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import tyro

from jvarlen import models
from jvarlen._common.files import check_new_directory
from jvarlen._common.settings import Settings
from jvarlen._common.terminal import say
from jvarlen.runs.commands.trained_model import WhichCheckpoint, read_trained

__all__ = ["ExportCommand"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportCommand(Settings):
    """Write the trained model of a run as a Hugging Face directory, with its tokenizer."""

    run_dir: tyro.conf.Positional[Path]
    """Run directory."""
    out: tyro.conf.Positional[Path]
    """The directory to write, which `transformers` opens; it must be empty or new."""
    checkpoint: WhichCheckpoint = dataclasses.field(default="latest", metadata={"name": "from"})
    """The checkpoint to take: the latest, or the one with the best evaluation."""
    tokenizer: Path | None = None
    """Tokenizer file, for a run that has none."""

    def run(self) -> None:
        """Writes the directory, and prints its files."""
        import jax  # here: settings are read without it

        check_new_directory(self.out)
        trained = read_trained(self.run_dir, self.checkpoint, self.tokenizer)
        models.to_hugging_face(
            self.out,
            trained.params,
            trained.decoder,
            tokenizer=self.tokenizer or trained.folder,
            end_token=trained.end_tokens[0] if len(trained.end_tokens) == 1 else trained.end_tokens or None,
        )
        size = sum(leaf.size for leaf in jax.tree.leaves(trained.params))
        say(f"{self.out}: {size:,} parameters after {trained.num_steps:,} steps")
