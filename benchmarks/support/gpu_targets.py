"""The process of the GPU benchmark that holds what `compile_for` says of a device against the device.

Run as a module, `python -m support.gpu_targets full answers.json`, as `gpu_jax.py` is. It is a process of its own since
the most bytes that were ever in use cannot be set back.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from support.gpu_jax import Trainer
from support.gpu_sizes import Sizes, bucket_options, lengths_by_kind
from support.gpu_worker import Answer, Save, run_parts, said, say

import jvarlen
from jvarlen.batches import BatchShapes
from jvarlen.targets.compile_for import compile_for
from jvarlen.targets.row_choice import choose_rows
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
    sizes: Sizes,
    answer: Answer,
    save: Save,
    peak_bytes: Callable[[jax.Device], int | None] = peak_bytes,
    *,
    max_bytes: float | None = None,
    fill: bool = False,
) -> None:
    """Bytes and seconds of a step in each bucket of the demo: predicted, and on the device.

    The buckets are those of the budget of tokens, or with `fill` those of the most rows that memory allows.
    """
    device = jax.local_devices()[0]
    target = target_of(device)
    answer |= {"device": device.device_kind, "target": target and target.name, "shapes": []}
    if target is None:
        return
    trainer = Trainer(sizes, "auto")
    lengths = lengths_by_kind(sizes)["long-tailed"]
    of_step: tuple[Any, ...] = (trainer.loss_fn, trainer.optimizer)
    how: dict[str, Any] = {"layout": "data1", "params": trainer.state.params, "target": target, "progress": False}
    if fill:
        lengths = np.tile(lengths, 20)  # enough for steps that fill the memory
        budget = jvarlen.Budget(**bucket_options(sizes, "optimal") | {"max_tokens": 2**40, "max_shapes": 3})
        make = functools.partial(jvarlen.make_plan, lengths)
        report = choose_rows(*of_step, make, budget=budget, max_bytes=max_bytes, **how).report
    else:
        buckets = jvarlen.make_buckets(lengths, **bucket_options(sizes, "optimal")).shapes
        report = compile_for(*of_step, BatchShapes(buckets, num_microbatches=1, has_many_groups=False), **how)
    # The fewest bytes first: the peak is this bucket's where it is higher than before, and otherwise a bound.
    for row in sorted(report, key=lambda row: row.total_bytes):
        shape, before = (row.bucket.rows, row.bucket.length), peak_bytes(device)
        found: dict[str, Any] = {"shape": shape, "told_bytes": row.total_bytes, "told_s": row.seconds}
        answer["shapes"].append(found)
        try:
            found["step_s"] = trainer.seconds(trainer.compile([shape]), shape, sizes.repeats)
            found["peak_bytes"] = peak_bytes(device)
            found["is_bound"] = found["peak_bytes"] == before
        except Exception as error:  # not enough memory
            found["error"] = said(error)
            trainer.begin()
        say(f"{shape[0]}×{shape[1]}: {found}")
        save()


def parts(sizes: Sizes, answers: dict[str, Answer], save: Save) -> dict[str, Callable[[Answer], None]]:
    max_bytes = 5e7 if jax.default_backend() == "cpu" else None  # which does not tell its memory
    return {
        "targets": lambda answer: compare(sizes, answer, save),
        "rows by memory": lambda answer: compare(sizes, answer, save, max_bytes=max_bytes, fill=True),
    }


if __name__ == "__main__":
    sys.exit(run_parts("JAX", parts))
