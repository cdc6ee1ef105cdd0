"""`jvarlen sample` and `jvarlen export`: what a run's trained model writes, and the model as a file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import numpy as np
import tyro
from jaxtyping import Int32

from jvarlen import __version__, models
from jvarlen._common.checks import UserError, check_at_least, list_first
from jvarlen._common.files import check_place, write_atomically
from jvarlen.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from jvarlen.distributed.launch import DeviceConfig, launch
from jvarlen.models.config import TransformerConfig
from jvarlen.runs.config import FitConfig, is_run_dir, load_config

if TYPE_CHECKING:
    from flax import nnx

__all__ = ["ExportCommand", "SampleCommand"]

_EMBEDDING = "embed.embedding"
_NUM_BYTES = 256

_WhichCheckpoint = Annotated[Literal["latest", "best"], tyro.conf.arg(name="from")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleCommand:
    """Continue prompts with the trained model of a run."""

    run_dir: tyro.conf.Positional[Path]
    """Run directory."""
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A text to continue; may be given several times. An empty one is a sample from its beginning."""
    prompts: Path | None = None
    """File with more texts to continue, a line each."""
    max_new_tokens: int = 128
    """The most tokens that a prompt is continued by; it ends earlier where the model writes the end token."""
    temperature: float = 0.0
    """Logits are divided by it; 0 always takes the likeliest token."""
    stop: str | None = None
    """Text before which a sample ends, such as the one that follows every answer in the data."""
    seed: int = 0
    """Seed of the random choice of tokens."""
    checkpoint: _WhichCheckpoint = "latest"
    """The checkpoint to take: the latest, or the one with the best evaluation."""
    tokenizer: Path | None = None
    """Tokenizer file, if it is not at the place that the run's settings name, or if they name none."""
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
        check_at_least(self, 1, "max_new_tokens", "max_tokens", "max_shapes", "devices")
        check_at_least(self, 0, "temperature", "seed")

    def run(self) -> None:
        """Samples, writes the file, and prints prompts with their continuations."""
        layout = None if self.devices is None else launch(DeviceConfig(devices=self.devices))
        if self.out is not None:
            check_place(self.out)
        prompts = self._named_prompts()
        trained = _read_trained(self.run_dir, self.checkpoint)
        codec = _codec_of(trained, self.tokenizer)
        tokens = _encode(codec, prompts, trained.model.vocab_size, self.max_tokens - self.max_new_tokens)
        new = models.generate(
            trained.params,
            trained.model,
            tokens,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            seed=self.seed,
            end_token=_end_token(trained, codec),
            max_tokens=self.max_tokens,
            max_shapes=self.max_shapes,
            layout=layout,
            progress=self.progress,
        )
        texts = [_text_of(codec, *parts, self.stop) for parts in zip(tokens, new, strict=True)]
        if self.out is not None:
            _write_samples(self.out, list(prompts.values()), texts, new)
        for name, text in zip(prompts, texts, strict=True):
            print(text if len(texts) == 1 else f"── {name}\n{text}")
        if self.out is not None:
            print(self.out)

    def _named_prompts(self) -> dict[str, str]:
        """All prompts, by where they come from."""
        named = {f"prompt {i}": text for i, text in enumerate(self.prompt, 1)}
        if self.prompts is not None:
            try:
                lines = self.prompts.read_bytes().decode().split("\n")
            except UnicodeDecodeError as error:
                line = error.object[: error.start].count(b"\n") + 1
                raise UserError(f"{self.prompts}: line {line} is not UTF-8") from None
            lines = lines[:-1] if lines[-1] == "" else lines
            named |= {f"{self.prompts} line {i}": line.removesuffix("\r") for i, line in enumerate(lines, 1)}
        if not named:
            raise UserError("there is nothing to continue: give --prompt TEXT, or --prompts FILE with lines")
        return named


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportCommand:
    """Write the trained model of a run as one safetensors file, with its settings and tokenizer."""

    run_dir: tyro.conf.Positional[Path]
    """Run directory."""
    out: tyro.conf.Positional[Path]
    """Where to write the model (.safetensors)."""
    checkpoint: _WhichCheckpoint = "latest"
    """The checkpoint to take: the latest, or the one with the best evaluation."""
    tokenizer: Path | None = None
    """Tokenizer file, if it is not at the place that the run's settings name, or if they name none."""

    def run(self) -> None:
        """Writes the file, and prints what it holds."""
        check_place(self.out)
        trained = _read_trained(self.run_dir, self.checkpoint)
        metadata = {"jvarlen": __version__, "num_steps": str(trained.num_steps)}
        tokenizer = self.tokenizer or trained.settings.data.tokenizer
        if tokenizer is not None:
            codec = FileTokenizer(tokenizer)
            metadata["tokenizer"] = tokenizer.read_text(encoding="utf-8")
            if (end_token := _end_token(trained, codec)) is not None:
                metadata["end_token"] = str(end_token)
        models.save_params(self.out, trained.params, trained.model, metadata=metadata)
        size = sum(np.size(leaf) for leaf in trained.arrays.values())
        print(f"{self.out}: {size:,} parameters after {trained.num_steps:,} steps")


class _Trained(NamedTuple):
    """A checkpoint of a run of the built-in model.

    Attributes:
      settings: of the run.
      model: its settings, with the size of the vocabulary that it was trained with.
      params: as `init_params` returns them.
      arrays: the same by dotted names.
      num_steps: steps done.
    """

    settings: FitConfig
    model: TransformerConfig
    params: nnx.State
    arrays: dict[str, np.ndarray]
    num_steps: int


def _read_trained(run_dir: Path, which: Literal["latest", "best"]) -> _Trained:
    if not is_run_dir(run_dir):
        raise FileNotFoundError(f"{run_dir} is not the directory of a run: there is no {run_dir / 'config.json'}")
    settings = load_config(run_dir / "config.json")
    from jvarlen.training.checkpoint import read_params  # here: settings are read without JAX

    arrays, place = read_params(run_dir / "checkpoints", which)
    # The run's vocabulary may be larger than its settings say: that of the data counts.
    num_embeddings = len(np.atleast_1d(arrays.get(_EMBEDDING, np.zeros(2))))
    try:
        model = dataclasses.replace(settings.decoder, vocab_size=num_embeddings - 1)
        params = models.params_from_flat(model, arrays)
    except UserError as error:
        raise UserError(f"{run_dir} is a run of a model of your own, not of the built-in one: {error}") from None
    return _Trained(settings, model, params, arrays, place.num_steps_done)


def _codec_of(trained: _Trained, given: Path | None) -> Tokenizer:
    """Between text and the run's tokens, by the given tokenizer or the run's own."""
    tokenizer = given or trained.settings.data.tokenizer
    if tokenizer is not None:
        return FileTokenizer(tokenizer)
    if trained.model.vocab_size != _NUM_BYTES:
        raise UserError(
            f"the run's {trained.model.vocab_size:,} tokens are no bytes, and its settings name no tokenizer: give one"
        )
    return ByteTokenizer()


def _end_token(trained: _Trained, codec: Tokenizer) -> int | None:
    """The token that ends a sample, if the model can write it."""
    end = trained.settings.data.end_token if trained.settings.data.end_token is not None else codec.end_token
    return end if end is not None and end < trained.model.vocab_size else None


def _encode(codec: Tokenizer, prompts: dict[str, str], vocab_size: int, longest: int) -> list[Int32[np.ndarray, " L"]]:
    """The tokens of the prompts; raises ValueError that lists prompts without, too long, or of unknown tokens."""
    encoded, wrong = [], []
    for name, text in prompts.items():
        try:
            tokens = codec.prompt(text)
        except UserError as error:
            wrong.append(f"{name}: {error}")
            continue
        if (outside := tokens[tokens >= vocab_size]).size:
            wrong.append(f"{name}: tokens {list_first(outside.tolist())}, but the model's are below {vocab_size}")
        if len(tokens) > longest:
            wrong.append(f"{name}: {len(tokens):,} tokens, but max_tokens leaves room for {max(longest, 0):,}")
        encoded.append(tokens)
    if wrong:
        raise UserError(f"prompts that cannot be continued: {list_first(wrong, '; ')}")
    return encoded


def _text_of(codec: Tokenizer, prompt: Int32[np.ndarray, " L"], new: Int32[np.ndarray, " n"], stop: str | None) -> str:
    """The prompt and what continues it, up to the stop."""
    text = codec.decode(np.concatenate([prompt, new]))
    end = text.find(stop, len(codec.decode(prompt))) if stop else -1
    return text if end < 0 else text[:end]


def _write_samples(path: Path, prompts: list[str], texts: list[str], new: list[Int32[np.ndarray, " n"]]) -> None:
    with write_atomically(path) as file:
        for prompt, text, tokens in zip(prompts, texts, new, strict=True):
            line = {"prompt": prompt, "text": text, "tokens": tokens.tolist()}
            file.write((json.dumps(line, ensure_ascii=False) + "\n").encode())
