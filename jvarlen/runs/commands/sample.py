"""`jvarlen sample`: prompts, continued by a trained model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np

from jvarlen import inference
from jvarlen._common.checks import UserError, check_at_least_zero, check_counts
from jvarlen._common.files import check_outputs, regular_file, write_atomically
from jvarlen._common.options import POSITIONAL
from jvarlen._common.settings import Settings
from jvarlen._common.terminal import say
from jvarlen.data.samples import MarkedText
from jvarlen.distributed.launch import DeviceConfig, launch
from jvarlen.models.config import check_sampling
from jvarlen.runs.commands.trained_model import WhichCheckpoint, read_trained

__all__ = ["SampleCommand"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleCommand(Settings):
    """Continue prompts with the model of a run or of a Hugging Face directory."""

    directory: Path = dataclasses.field(metadata=POSITIONAL)
    """Run directory, or Hugging Face directory."""
    prompt: tuple[str, ...] = ()
    """A text to continue; may be given several times. An empty one is a sample from its beginning."""
    prompts: Path | None = None
    """File with more texts to continue, a line each."""
    chat: bool = False
    """Take each prompt as the message of a user, written by the chat template; the sample is the answer."""
    max_new_tokens: int = 128
    """The most tokens that a prompt is continued by; it ends earlier where the model writes the end token."""
    temperature: float = 0.0
    """Logits are divided by it; 0 always takes the likeliest token."""
    top_k: int | None = None
    """Draw only from this many of the likeliest tokens. None: from all."""
    top_p: float | None = None
    """Draw only from the likeliest tokens that have this probability together. None: from all."""
    samples_per_prompt: int = 1
    """How often to continue each prompt."""
    stop: str | None = None
    """Text before which a sample ends, such as the one that follows every answer in the data."""
    seed: int = 0
    """Seed of the random choice of tokens."""
    checkpoint: WhichCheckpoint = dataclasses.field(default="latest", metadata={"name": "from"})
    """The checkpoint of a run to take: the latest, or the one with the best evaluation."""
    tokenizer: Path | None = None
    """Tokenizer file, for a model that has none."""
    out: Path | None = None
    """Where to write the samples as well: a JSON object a line, with prompt, text and the new tokens."""
    max_tokens: int = 16_384
    """Budget of prompts and new tokens that are held at once on a device, padding included."""
    max_shapes: int = 4
    """The most buckets, that is, compiled shapes."""
    devices: int | None = None
    """Number of devices. Without accelerators the CPU is split into this many. None for one."""
    progress: bool = True
    """Show progress bars."""

    def __post_init__(self):
        super().__post_init__()
        check_counts(self, 1, "max_new_tokens", "max_tokens", "max_shapes", "devices")
        check_at_least_zero(seed=self.seed)
        check_sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            samples_per_prompt=self.samples_per_prompt,
        )

    def run(self) -> None:
        """Samples, writes the file, and prints prompts with their continuations, or the answers to them."""
        layout = None if self.devices is None else launch(DeviceConfig(devices=self.devices))
        check_outputs({"out": self.out}, self.directory, self.prompts, self.tokenizer)
        prompts = [*self.prompt]
        if self.prompts is not None:
            of_file = regular_file(self.prompts).read_bytes().splitlines()  # text has more ends of lines than bytes
            prompts += [line.decode("utf-8-sig", "surrogateescape") for line in of_file]
        if not prompts:
            raise UserError("there is nothing to continue: give --prompt TEXT, or --prompts FILE with lines")
        trained = read_trained(self.directory, self.checkpoint, self.tokenizer)
        codec = trained.codec
        if codec is None:
            raise UserError(
                f"the {trained.decoder.num_values:,} tokens of {self.directory} are not bytes, and it has no tokenizer"
                ": give one with --tokenizer"
            )
        if self.chat and trained.chats is None:
            raise UserError(f"{self.directory} has no template of chats: its prompts are texts, without --chat")
        write = trained.chats.render_prompt if self.chat and trained.chats is not None else MarkedText
        tokens = [codec.prompt(write(prompt)) for prompt in prompts]
        continued = inference.generate(
            trained.params,
            trained.decoder,
            tokens,
            max_new_tokens=self.max_new_tokens,
            samples_per_prompt=self.samples_per_prompt,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            end_token=trained.end_tokens,
            max_tokens=self.max_tokens,
            max_shapes=self.max_shapes,
            layout=layout,
            progress=self.progress,
        )
        samples, num_samples = [], self.samples_per_prompt
        of_samples = [
            (prompt, given) for prompt, given in zip(prompts, tokens, strict=True) for _ in range(num_samples)
        ]
        for (_, given), new in zip(of_samples, continued, strict=True):
            shown = given[:0] if self.chat else given
            text = codec.decode(np.concatenate([shown, new]))
            end = text.find(self.stop, len(codec.decode(shown))) if self.stop else -1
            samples.append(text if end < 0 else text[:end])
        if self.out is not None:
            rows = zip(of_samples, samples, continued, strict=True)
            lines = ({"prompt": prompt, "text": text, "tokens": new.tolist()} for (prompt, _), text, new in rows)
            with write_atomically(self.out) as file:
                file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode())
        for i, text in enumerate(samples):
            number = f", sample {i % num_samples + 1}" * (num_samples > 1)
            say(text if len(samples) == 1 else f"── prompt {i // num_samples + 1}{number}\n{text}")
        if self.out is not None:
            say(self.out)
