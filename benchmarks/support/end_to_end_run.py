"""What all ways of training share: a curve of bits per byte over seconds.

Nothing here needs JAX or PyTorch, so a run of one does not import the other. Letters: B rows, T positions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from support.reports import commit

PARTS = ("planning", "compile", "data", "steps")
OPTIMIZER = {"b1": 0.9, "b2": 0.95, "weight_decay": 0.1}
MAX_GRADIENT_NORM = 1.0
PADDED_SHAPES = 4
WARMUP_FRACTION, FINAL_FRACTION = 0.1, 0.05

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What one run does.

    Attributes:
      way: a key of the worker's `WAYS`.
      seed: decides the order of the samples; the weights are those of a file.
      data: file of `save_data`.
      weights: file of the initial parameters by their names at Hugging Face.
      model: `num_layers`, `width` and `num_heads`.
      longest: positions of the longest row; no sample is longer.
      max_tokens: positions of a batch at most, padding included.
      length_multiple: of a plan.
      learning_rate: the highest rate; for `jvarlen`, of steps of `max_tokens` real tokens.
      horizon: real tokens that the schedule covers; the run ends there at the latest.
      eval_every: real tokens between evaluations.
      target: bits per byte at which the run ends.
      limit_s: seconds after which the run ends.
      programs: folder of compiled programs; None: none are kept.
      num_devices: of `jvarlen`: devices of JAX that the CPU is split into, each with a microbatch of its own.
    """

    way: str
    seed: int
    data: str
    weights: str
    model: dict[str, int]
    longest: int
    max_tokens: int
    length_multiple: int
    learning_rate: float
    horizon: int
    eval_every: int
    target: float
    limit_s: float
    programs: str | None = None
    num_devices: int = 1

    @property
    def fixed_rows(self) -> int:
        """Samples of a batch whose size does not follow the lengths."""
        return self.max_tokens // self.longest

    def schedule(self, num_tokens: Any) -> np.ndarray:
        """The rate after this many real tokens: up along a line, down along a cosine; float64 of the shape given."""
        share = np.minimum(np.asarray(num_tokens, np.float64) / self.horizon, 1.0)
        decayed = 0.5 * (1 + np.cos(np.pi * np.maximum(share - WARMUP_FRACTION, 0.0) / (1 - WARMUP_FRACTION)))
        risen = np.minimum(share / WARMUP_FRACTION, 1.0)
        return self.learning_rate * (FINAL_FRACTION + (1 - FINAL_FRACTION) * risen * decayed)


class Data(NamedTuple):
    """Samples, integers[length] each, none longer than a row."""

    train: list[np.ndarray]
    held_out: list[np.ndarray]


def save_data(path: Path, data: Data) -> None:
    arrays = {name: np.concatenate(samples) for name, samples in data._asdict().items()}
    lengths = {
        f"{name}_lengths": np.array([len(sample) for sample in samples]) for name, samples in data._asdict().items()
    }
    np.savez(path, **arrays, **lengths)


def read_data(path: str) -> Data:
    with np.load(path) as stored:
        return Data(*(np.split(stored[name], np.cumsum(stored[f"{name}_lengths"])[:-1]) for name in Data._fields))


def pad(samples: Iterable[np.ndarray], rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int32[B, T], padded with 0, and lengths int32[B], 0 for rows without a sample."""
    tokens_BxT, lengths_B = np.zeros((rows, length), np.int32), np.zeros(rows, np.int32)
    for row, sample in enumerate(samples):
        tokens_BxT[row, : len(sample)] = sample
        lengths_B[row] = len(sample)
    return tokens_BxT, lengths_B


def eval_batches(samples: list[np.ndarray], longest: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """All samples in two shapes of four times `longest` positions, the same for all ways, as `pad` gives them."""
    batches = []
    lower = 0
    for length in (longest // 4, longest):
        fitting, rows = [sample for sample in samples if lower < len(sample) <= length], 4 * longest // length
        batches += [pad(fitting[start : start + rows], rows, length) for start in range(0, len(fitting), rows)]
        lower = length
    return batches


def bits_per_byte(eval_step: Callable[[T], float], batches: Iterable[T], num_bytes: int) -> float:
    """From a function that gives the sum of the losses of a batch in nats."""
    return sum(map(eval_step, batches)) / num_bytes / float(np.log(2))


class Stopwatch:
    """Seconds of what is run in `with` blocks, by the part of the work that each belongs to."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)

    @contextlib.contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Counts what runs inside, for one of `PARTS`."""
        begun = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - begun

    @property
    def total(self) -> float:
        """The seconds of all parts."""
        return sum(self.seconds.values())


class Batch(NamedTuple, Generic[T]):
    """What a step takes, in whatever form its way has, and what it counts."""

    arrays: T
    shape: tuple[int, int]
    num_tokens: int


class Trainer(Protocol):
    """A way of training, made ready under a `Stopwatch`.

    Attributes:
      batches: of one epoch.
      num_params: of the model.
      num_compiled: train steps compiled so far.
      about: further facts of the run.
    """

    batches: Iterator[Batch]
    num_params: int
    num_compiled: int
    about: dict[str, Any]

    def step(self, batch: Batch, num_tokens_before: int) -> Any:
        """Takes a step, and returns what `wait` takes; the work may continue in the background."""

    def compiles(self, batch: Batch) -> bool:
        """Whether a step with this batch compiles first."""

    def wait(self, pending: Any) -> None:
        """Returns when a step is done."""

    def evaluate(self) -> float:
        """Bits per byte of all held-out samples."""

    def close(self) -> None:
        """Notes what is known of the run at its end."""


def train(trainer: Trainer, watch: Stopwatch, settings: Settings) -> dict[str, Any]:
    """Trains until the target, the end of the schedule or the limit; evaluations stop the watch.

    Returns:
      The figures of a run: `points`, one an evaluation, each with what there was until then; `end`, the reason why it
      ended.
    """
    points: list[dict[str, Any]] = []
    shapes: set[tuple[int, int]] = set()
    pending, num_tokens, num_positions = None, 0, 0
    for num_steps in itertools.count():
        if num_tokens >= len(points) * settings.eval_every:
            with watch("steps"):
                trainer.wait(pending)
            pending = None
            reached = trainer.evaluate()
            counts = {"num_tokens": num_tokens, "num_positions": num_positions, "num_steps": num_steps}
            of_shapes = {"num_shapes": len(shapes), "num_compiled": trainer.num_compiled}
            points.append({"bits_per_byte": reached, "seconds": dict(watch.seconds)} | counts | of_shapes)
            print(f"  {num_tokens:>9,} tokens, {watch.total:5.1f} s, {reached:.3f} bits per byte", file=sys.stderr)
            if reached <= settings.target:
                end = "target"
                break
            if num_tokens >= settings.horizon:
                end = "horizon"
                break
            if watch.total >= settings.limit_s:
                end = "limit"
                break
        with watch("data"):
            batch = next(trainer.batches)
        before, is_new = pending, trainer.compiles(batch)
        with watch("compile" if is_new else "steps"):
            pending = trainer.step(batch, num_tokens)
        with watch("steps"):
            trainer.wait(before)  # a step late: the host prepares the next one while the device computes
        shapes.add(batch.shape)
        num_tokens += batch.num_tokens
        num_positions += batch.shape[0] * batch.shape[1]
    trainer.close()
    return {"points": points, "end": end, "num_params": trainer.num_params, "about": trainer.about}


class Turns(NamedTuple):
    """Microseconds a real token of each turn of each way at one budget; names of PyTorch's ways begin with "torch"."""

    max_tokens: int
    of_ways: dict[str, list[float]]

    def median(self, name: str) -> float:
        """The median of one way."""
        return statistics.median(self.of_ways[name])

    @property
    def best_of_torch(self) -> str | None:
        """The way of PyTorch that takes least; None where it is not installed."""
        return min((name for name in self.of_ways if name.startswith("torch ")), key=self.median, default=None)

    def ratios(self, name: str) -> list[float]:
        """The ratio of each turn to the best way of PyTorch."""
        best = self.best_of_torch
        return [] if best is None else [a / b for a, b in zip(self.of_ways[name], self.of_ways[best], strict=True)]


def answer_all(
    ways: dict[str, Callable[[Settings, Data, Stopwatch], Trainer]], runs: Iterable[tuple[dict[str, Any], str]]
) -> None:
    """What a worker does: runs are pairs of settings and the file for the figures."""
    for given, path in runs:
        settings, watch = Settings(**given), Stopwatch()
        trainer = ways[settings.way](settings, read_data(settings.data), watch)
        figures = train(trainer, watch, settings) | {"settings": given, "code": commit()}
        # A file is there whole or not at all: an interrupted benchmark goes on from those that are.
        unfinished = Path(path).with_suffix(".part")
        unfinished.write_text(json.dumps(figures))
        unfinished.rename(path)
