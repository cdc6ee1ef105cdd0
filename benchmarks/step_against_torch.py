"""How long does a training step of the demo take in each of its shapes and in 16 × 64, against PyTorch's?

Model, optimizer (clipping by the global norm, AdamW) and shapes are those of `make train`; rows are full of random
bytes. PyTorch runs `torch_ref`, eager, on as many threads as there are cores. Each has a process of its own, and they
take turns. Run `python benchmarks/step_against_torch.py [--quick]`. Prints a table and writes it, with versions and
hardware, to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import jax
import numpy as np
from jaxtyping import Int64
from support.timing import report, table, versions_and_hardware

import jvarlen
from jvarlen.batches import token_batch_spec
from jvarlen.data.split import HELD_OUT, split_held_out
from jvarlen.data.stdlib_corpus import stdlib_functions
from jvarlen.distributed.launch import keep_memory_of_steps
from jvarlen.models import DecoderConfig, init_params, make_loss_fn
from jvarlen.models.hugging_face import hugging_face_tensors
from jvarlen.runs.config import FitConfig, PlanConfig
from jvarlen.runs.model import peak_rate
from jvarlen.runs.settings import resolve
from jvarlen.runs.shapes import shapes_for
from jvarlen.runs.training_plan import TrainingPlan

TURN_S = 0.5  # of steps of one process: threads wait busily for some time after its last one
Shape: TypeAlias = tuple[int, int, int]  # microbatches, rows, length
Step: TypeAlias = Callable[[], float]  # takes a step, waits for it, and gives its loss
Lengths: TypeAlias = Int64[np.ndarray, " N"]
MakeStep: TypeAlias = Callable[[FitConfig, Lengths, Shape], tuple[Step, float]]  # with the seconds of compiling it


def jax_step(config: FitConfig, lengths: Lengths, shape: Shape) -> tuple[Step, float]:
    keep_memory_of_steps()  # as `jvarlen train` does
    optimizer = TrainingPlan(resolve(config), lengths, {HELD_OUT: lengths}).optimizer
    spec = token_batch_spec(jvarlen.Bucket(*shape[1:]), shape[0])
    batch = jax.device_put(jvarlen.batches.full_batch(spec)._replace(tokens=random_bytes(shape).astype(np.int32)))
    step = jvarlen.make_train_step(make_loss_fn(config.decoder), optimizer)
    state = step.init(init_params(config.decoder, config.seed))
    begun = time.perf_counter()
    executable = jax.jit(step, donate_argnums=0).lower(state, spec).compile()
    compile_s = time.perf_counter() - begun

    def call() -> float:
        nonlocal state
        state, metrics = jax.block_until_ready(executable(state, batch))
        return float(metrics.loss)

    return call, compile_s


def torch_step(config: FitConfig, _: Lengths, shape: Shape) -> tuple[Step, float]:
    import torch

    import torch_ref

    torch.set_num_threads(os.cpu_count() or 1)
    sizes = {name: getattr(config.decoder, name) for name in ("num_layers", "width", "num_heads", "vocab_size")}
    model = torch_ref.Decoder(torch_ref.DecoderConfig(**sizes))
    torch_ref.load_params(model, hugging_face_tensors(init_params(config.decoder, config.seed), config.decoder))
    settings = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        peak_rate(config, config.decoder),
        (settings.b1, settings.b2),
        weight_decay=settings.weight_decay,
    )

    def clip(*_: object) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_gradient_norm)

    optimizer.register_step_pre_hook(clip)
    tokens = torch.from_numpy(random_bytes(shape))
    batch = torch_ref.Batch(tokens, torch.full(shape[:2], shape[2]), torch.ones(shape), float(shape[0] * shape[1]))
    return lambda: float(torch_ref.train_step(model, optimizer, batch)["loss"]), 0.0


def random_bytes(shape: Shape) -> Int64[np.ndarray, "M B T"]:
    return np.random.default_rng(0).integers(0, 256, shape)


def serve(make_step: MakeStep, config: FitConfig, lengths: Lengths, pipe: Connection) -> None:
    """Runs one process: of each shape the first loss and the compile seconds, then seconds of steps, turn by turn."""
    while shape := pipe.recv():
        step, compile_s = make_step(config, lengths, shape)
        pipe.send((step(), compile_s))
        while turn_s := pipe.recv():
            seconds: list[float] = []
            while sum(seconds) < turn_s or len(seconds) < 2:
                begun = time.perf_counter()
                step()
                seconds.append(time.perf_counter() - begun)
            pipe.send(seconds[1:])  # the first one finds caches as the other process left them


@contextlib.contextmanager
def process(make_step: MakeStep, config: FitConfig, lengths: Lengths) -> Iterator[Connection]:
    # Nothing has used a device yet, so that a fork is as good, and need not import all of this.
    context = multiprocessing.get_context("fork" if "--quick" in sys.argv else "spawn")
    pipe, its_pipe = context.Pipe()
    worker = context.Process(target=serve, args=(make_step, config, lengths, its_pipe), daemon=True)
    worker.start()
    its_pipe.close()  # so that receiving from a process that failed raises
    yield pipe
    pipe.send(None)
    worker.join()


def measure(pipes: list[Connection], shape: Shape, num_turns: int, turn_s: float) -> list[str]:
    """The row of a shape; both processes begin with the same loss."""
    starts = [ask(pipe, shape) for pipe in pipes]
    (loss, compile_s), (loss_of_torch, _) = starts
    if not math.isclose(loss, loss_of_torch, rel_tol=1e-5):
        raise RuntimeError(f"the first losses differ: {loss} and {loss_of_torch}")
    seconds: list[list[float]] = [[], []]
    for turn in range(num_turns):
        for i in (0, 1) if turn % 2 else (1, 0):
            seconds[i] += ask(pipes[i], turn_s)
    for pipe in pipes:
        pipe.send(None)
    (best, best_of_torch), (median, median_of_torch) = map(min, seconds), map(statistics.median, seconds)
    figures = (best, best_of_torch, median, median_of_torch)
    ratios = (best / best_of_torch, median / median_of_torch)
    return [
        f"{shape[1]} × {shape[2]:,}",
        *(f"{1e3 * value:.1f}" for value in figures),
        *(f"{value:.2f}" for value in ratios),
        f"{compile_s:.2f}",
    ]


def ask(pipe: Connection, question: object) -> Any:
    pipe.send(question)
    return pipe.recv()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model and three shapes, and no report")
    quick = parser.parse_args().quick
    config = FitConfig(plan=PlanConfig(overlong="truncate", packing="padded"))
    if quick:
        tiny = DecoderConfig(num_layers=1, width=16, num_heads=1)
        config = dataclasses.replace(
            config, decoder=tiny, plan=PlanConfig(max_tokens=128, max_shapes=3, max_length=64, packing="padded")
        )
        lengths = np.array([16, 32, 64])
    else:
        train, _ = split_held_out(stdlib_functions(progress=False), config.data.held_out_fraction)
        lengths = jvarlen.measure_lengths(train, progress=False)
    num_microbatches = config.plan.num_microbatches or 1
    shapes = [(num_microbatches, *bucket) for bucket in ((16, 64), *shapes_for(config.plan.resolve(), lengths).buckets)]
    with process(jax_step, config, lengths) as ours, process(torch_step, config, lengths) as of_torch:
        rows = [measure([ours, of_torch], shape, 2 if quick else 6, 0.01 if quick else TURN_S) for shape in shapes]
    report(
        "step-against-torch",
        [
            f"# Training steps against PyTorch's, {datetime.date.today()}",
            "",
            f"{num_microbatches} microbatch a step, float32. The fastest step of each, and the median of all.",
            "",
            *table(
                "rows × length|fastest, ms|of PyTorch, ms|median, ms|of PyTorch, ms|fastest / PyTorch's|"
                "median / PyTorch's|compile s",
                rows,
            ),
            "",
            versions_and_hardware("jax", "optax", "torch"),
        ],
        write=not quick,
    )


if __name__ == "__main__":
    main()
