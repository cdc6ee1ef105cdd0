"""Steps of the end-to-end benchmark without planning and compiling: microseconds a real token, way against way."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

from support import end_to_end_jax
from support.end_to_end_run import Settings, Stopwatch, Trainer, Turns, read_data

from jvarlen.distributed.launch import keep_memory_of_steps

OURS = {
    "packed": {"packing": "best_fit"},
    "packed, one of these devices": {"packing": "best_fit"},
    "padded": {"packing": "padded"},
    # What is left is what attention does not take.
    "without attention": {"packing": "best_fit", "attend": lambda query, key, value, **_: query + key + value},
}
OF_TORCH = ("token_batches", "packed")  # those whose batches have about as many real tokens as positions


def measure(settings: Settings, *, num_shapes: int, num_turns: int, turn_s: float, has_torch: bool) -> dict[str, Any]:
    """Ways take turns in one process; each is at its full speed after the first step of a turn."""
    keep_memory_of_steps()
    trainers = dict(make_trainers(settings, num_shapes, has_torch=has_torch))
    of_ways: dict[str, list[float]] = {name: [] for name in trainers}
    for number in range(num_turns):
        for name in list(trainers) if number % 2 else reversed(trainers):
            of_ways[name].append(turn(trainers[name], turn_s))
    return Turns(settings.max_tokens, of_ways)._asdict()


def make_trainers(settings: Settings, num_shapes: int, *, has_torch: bool) -> Iterator[tuple[str, Trainer]]:
    data = read_data(settings.data)
    for name, options in OURS.items():
        given = dataclasses.replace(settings, num_devices=1) if "one of these devices" in name else settings
        trainer = end_to_end_jax.PlannedRun(given, data, Stopwatch(), num_shapes=num_shapes, **options)
        trainer.compile("ahead")
        yield name, trainer
    if has_torch:
        from support import end_to_end_torch

        for way in OF_TORCH:
            given = dataclasses.replace(settings, way=way)
            yield f"torch {way}", end_to_end_torch.WAYS[way](given, data, Stopwatch())


def turn(trainer: Any, turn_s: float) -> float:
    """Microseconds a real token, data included; nothing is read ahead in the turns of others."""
    gate = getattr(trainer, "samples", None)
    if gate is not None:
        gate.gate.set()
    trainer.wait(trainer.step(next(trainer.batches), 0))
    begun, num_tokens, pending = time.perf_counter(), 0, None
    while not num_tokens or time.perf_counter() - begun < turn_s:
        batch = next(trainer.batches)
        before, pending = pending, trainer.step(batch, 0)
        trainer.wait(before)
        num_tokens += batch.num_tokens
    trainer.wait(pending)
    seconds = time.perf_counter() - begun
    if gate is not None:
        gate.gate.clear()
    return 1e6 * seconds / num_tokens
