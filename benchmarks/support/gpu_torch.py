"""The PyTorch process of the GPU benchmark: writes its figures to a JSON file.

Run as a module, `python -m support.gpu_torch full answers.json`; otherwise like `gpu_jax`. The model has float32
parameters and multiplies in bfloat16 under autocast, as the JAX model does.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.gpu_sizes import SEED, VOCAB_SIZE, Sizes, bucket_options, lengths_by_kind
from support.gpu_worker import Answer, Save, run_parts, say

# Last on the path, so that they stand in only for what is missing.
sys.path.append(str(Path(__file__).parents[2] / "tests" / "gpu" / "stand_ins"))

import torch_ref

WARM_UPS = 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Shape = tuple[int, int]


def tell_machine(sizes: Sizes, answer: Answer) -> None:
    answer["device"] = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    answer["versions"] = {"torch": torch.__version__}


def measure_matrices(sizes: Sizes, answer: Answer) -> None:
    """Operations a second of the product of two square matrices in bfloat16, the best of some turns."""
    for size in sizes.matrix_sizes:
        a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        seconds = fastest(lambda a=a, b=b: torch.mm(a, b), num_in_turn=10, repeats=sizes.repeats)
        answer[str(size)] = 2 * size**3 / seconds


def measure_sort(sizes: Sizes, answer: Answer) -> None:
    """Seconds of sorting keys; torch's sort gives indices as well."""
    keys = np.random.default_rng(SEED).integers(-(2**31), 2**31, sizes.num_keys).astype(np.int32)
    placed = torch.from_numpy(keys).to(DEVICE)
    calls: dict[str, Callable[[], Any]] = {
        "`torch.sort`, stable": lambda: torch.sort(placed, stable=True),
        "`torch_ref.sample_sort`": lambda: torch_ref.sample_sort(placed),
    }
    answer |= {name: fastest(call, repeats=sizes.repeats) for name, call in calls.items()}


def measure_steps(sizes: Sizes, answer: Answer) -> None:
    """Steps in the longest, the shortest and the middle shape of the optimal plan of long-tailed lengths."""
    lengths = lengths_by_kind(sizes)["long-tailed"]
    buckets = torch_ref.make_buckets(lengths, **bucket_options(sizes, "optimal")).shapes
    by_interest = (buckets[-1], buckets[0], buckets[len(buckets) // 2])
    shapes = list(dict.fromkeys((int(rows), int(length)) for rows, length in by_interest))[: sizes.torch_shapes]
    torch.manual_seed(SEED)
    config = torch_ref.DecoderConfig(width=sizes.width, num_layers=sizes.num_layers, num_heads=sizes.num_heads)
    model = torch_ref.Decoder(config).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    answer |= {"num_parameters": sum(weight.numel() for weight in model.parameters()), "shapes": [], "left_out": []}
    begun = time.perf_counter()
    for shape in shapes:
        if time.perf_counter() - begun > sizes.limit_s / 2:
            answer["left_out"].append(shape)
            continue
        say(f"compiling {shape[0]}×{shape[1]}")
        compiled = torch_ref.compile_buckets(
            model, [shape], loss_fn=loss_in_bfloat16, backend=sizes.torch_backend, progress=False
        )
        batch = full_batch(shape)
        found = []
        for _ in range(WARM_UPS + sizes.repeats):
            start = time.perf_counter()
            compiled(optimizer, batch)
            wait()
            found.append(time.perf_counter() - start)
        (row,) = compiled.rows
        step_s = float(np.median(found[WARM_UPS:]))
        answer["shapes"].append({"shape": shape, "compile_s": row.compile_s, "step_s": step_s, "mode": compiled.mode})
        say(f"{shape[0]}×{shape[1]}: {step_s * 1e3:.4g} ms a step")
        # What one shape's graphs hold, the next has no use for.
        del compiled
        torch.compiler.reset()
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


def loss_in_bfloat16(model: torch.nn.Module, microbatch: torch_ref.Batch) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.autocast(DEVICE, torch.bfloat16):
        return torch_ref.loss_sums(model, microbatch)


def full_batch(shape: Shape) -> torch_ref.Batch:
    """One microbatch of full rows of random bytes."""
    batch_shape = (1, *shape)
    tokens = torch.from_numpy(np.random.default_rng(SEED).integers(VOCAB_SIZE, size=batch_shape))
    return torch_ref.to_device(
        torch_ref.Batch(
            tokens=tokens,
            lengths=torch.full(batch_shape[:2], shape[1]),
            weights=torch.ones(batch_shape),
            num_sequences=float(shape[0]),
            ids=torch.zeros(batch_shape[:2], dtype=torch.int64),
            is_real=torch.ones(batch_shape[:2], dtype=torch.bool),
        ),
        DEVICE,
    )


def fastest(call: Callable[[], Any], *, num_in_turn: int = 1, repeats: int) -> float:
    """Seconds of a call in the fastest of some turns, several calls of which are dispatched one after the other."""
    call()
    found = []
    for _ in range(repeats):
        wait()
        begun = time.perf_counter()
        for _ in range(num_in_turn):
            call()
        wait()
        found.append((time.perf_counter() - begun) / num_in_turn)
    return min(found)


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def parts(sizes: Sizes, answers: dict[str, Answer], save: Save) -> dict[str, Callable[[Answer], None]]:
    return {
        "machine": lambda answer: tell_machine(sizes, answer),
        "matrices": lambda answer: measure_matrices(sizes, answer),
        "sort": lambda answer: measure_sort(sizes, answer),
        "steps": lambda answer: measure_steps(sizes, answer),
    }


if __name__ == "__main__":
    sys.exit(run_parts("PyTorch", parts))
