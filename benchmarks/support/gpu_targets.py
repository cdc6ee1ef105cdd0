"""Section of the GPU benchmark: bytes and seconds that `compile_for` predicts of a device, against the device."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import jax
from support.gpu_jax import Trainer, attempt, full_batch, shapes_of
from support.gpu_sizes import Sizes, lengths_by_kind, pack_options
from support.gpu_worker import Answer, Save, run_section, say

import jvarlen
from jvarlen.targets.compile_for import compile_for
from jvarlen.targets.target import Target

KINDS = ("a100", "h100", "h200")


def target_of(device: jax.Device) -> Target | None:
    """What to compile for instead of the device: one that is elsewhere, if its kind is known; a CPU itself."""
    if device.platform != "gpu":
        return Target(device.platform, (device,), None, is_here=True)
    return next((Target.parse(f"1x{kind}") for kind in KINDS if kind in device.device_kind.lower()), None)


def peak_bytes(device: jax.Device) -> int | None:
    """The most bytes that were in use since the process began; None where the device does not tell."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


def compare(
    sizes: Sizes, answer: Answer, save: Save, peak_bytes: Callable[[jax.Device], int | None] = peak_bytes
) -> None:
    """Bytes and seconds of a step in padded shapes and in packed rows: predicted, and on the device."""
    device = jax.local_devices()[0]
    target = target_of(device)
    answer |= {"device": device.device_kind, "target": target and target.name, "shapes": []}
    if target is None:
        return
    trainer, packed = Trainer(sizes.model), sizes.packed_rows[0]
    plan = jvarlen.make_plan(lengths_by_kind(sizes)["long-tailed"], **pack_options(packed))
    shapes = shapes_of([*sizes.padded_shapes, packed], {packed: plan.samples_per_row[0]})
    report = compile_for(
        trainer.loss_fn,
        trainer.optimizer,
        shapes,
        layout="data1",
        params=trainer.state.params,
        target=target,
        progress=False,
    )
    # The fewest bytes first: the peak is this bucket's where it is higher than before, and otherwise a bound.
    for row in sorted(report, key=lambda row: row.total_bytes):
        shape, before = (row.bucket.rows, row.bucket.length), peak_bytes(device)
        found: dict[str, Any] = {"shape": shape, "told_bytes": row.total_bytes, "told_s": row.seconds}
        answer["shapes"].append(found)
        found |= attempt(trainer, lambda s=shape: measure(trainer, shapes, s, sizes.repeats))
        found["peak_bytes"] = peak_bytes(device)
        found["is_bound"] = found["peak_bytes"] == before
        say(f"{shape[0]}×{shape[1]}: {found}")
        save()


def measure(trainer: Trainer, shapes: Any, shape: tuple[int, int], repeats: int) -> Answer:
    """Seconds of a step in one of the shapes, of rows without padding."""
    compiled = trainer.compile(dataclasses.replace(shapes, buckets=[shape]))
    return {"step_s": trainer.seconds(compiled, full_batch(trainer, shapes, shape), repeats)}


SECTIONS = {"targets": compare}

if __name__ == "__main__":
    sys.exit(run_section(SECTIONS))
