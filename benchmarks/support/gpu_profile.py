"""Section of the GPU benchmark: what the kernels of a step take, in variants of the program and of the model."""

from __future__ import annotations

import collections
import gc
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from support.gpu_jax import Trainer, full_batch, shapes_of
from support.gpu_sizes import Sizes
from support.gpu_worker import Answer, Save, run_section, said, say

NUM_STEPS, NUM_NAMED = 3, 8
# Kernels one by one, so that the profiler has a name for each.
ONE_BY_ONE = "xla_gpu_enable_command_buffer="
# By the names of kernels, the first that fits.
KINDS = {
    "attention": r"cudnn_generated|flash|fmha|sdpa|_(forward|dq|dkv)_kernel",
    "products by Triton": r"gemm_fusion|triton_gemm",
    "products by libraries": r"gemm|nvjet|cutlass|cublas|xmma|dot",
    "copies": r"memcpy|memset|copy",
}
OTHERS = "others: norms, SwiGLU, rotary, loss, optimizer"


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name.lower())), OTHERS)


def events_of(folder: Path) -> Iterator[tuple[str, float]]:
    """Name and seconds of each kernel of the profiles in a folder; on a CPU, of each operation of a program."""
    for path in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            is_device = plane.name.startswith("/device:")
            for line in plane.lines:
                for event in line.events:
                    if line.name.startswith("Stream") if is_device else any(n == "hlo_op" for n, _ in event.stats):
                        yield event.name, event.duration_ns / 1e9


def profile(sizes: Sizes, answer: Answer, save: Save) -> None:
    """Milliseconds and kernels of a step by kind, and the longest kernels."""
    shape = sizes.padded_shapes[0]
    on_gpu = jax.default_backend() == "gpu"
    options = (ONE_BY_ONE,) if on_gpu else ()
    variants: dict[str, tuple[Any, tuple[str, ...]]] = {
        "the program": (sizes.model, options),
        "without Triton's products": (sizes.model, (*options, *["xla_gpu_enable_triton_gemm=false"] * on_gpu)),
        f"an MLP of {sizes.other_mlp_width:,}": (sizes.model._replace(mlp_width=sizes.other_mlp_width), options),
    }
    for name, (model, xla_options) in variants.items():
        try:
            trainer = Trainer(model)
            shapes = shapes_of([shape])
            compiled = trainer.compile(shapes, xla_options=xla_options)
            batch = full_batch(trainer, shapes, shape)
            answer[name] = {"step_s": trainer.seconds(compiled, batch, sizes.repeats), "num_steps": NUM_STEPS}
            save()
            with tempfile.TemporaryDirectory() as folder:
                with jax.profiler.trace(folder):
                    trainer.run(compiled, [batch] * NUM_STEPS)
                answer[name] |= sum_up(events_of(Path(folder)))
        except Exception as error:
            answer[name] = answer.get(name, {}) | {"error": said(error)}
        say(f"profile, {name}: {answer[name]}")
        save()
        trainer = compiled = batch = None
        gc.collect()


def sum_up(events: Iterator[tuple[str, float]]) -> Answer:
    """Seconds and numbers by kind, and those of the names that take longest."""
    kinds, names = collections.defaultdict(lambda: [0.0, 0]), collections.defaultdict(lambda: [0.0, 0])
    for name, seconds in events:
        for sums, key in ((kinds, kind_of(name)), (names, name)):
            sums[key][0] += seconds
            sums[key][1] += 1
    longest = sorted(names.items(), key=lambda of: -of[1][0])[:NUM_NAMED]
    return {"kinds": dict(kinds), "longest": dict(longest)}


SECTIONS = {"profile": profile}

if __name__ == "__main__":
    sys.exit(run_section(SECTIONS))
