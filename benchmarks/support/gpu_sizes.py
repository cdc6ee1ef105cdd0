"""Model sizes, lengths, and operations by formula, for the GPU benchmark.

NumPy only, for the JAX and the PyTorch process alike. Letters: N samples, D width, V values of a token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

VOCAB_SIZE = 256  # of bytes; both packages' models have a token more, which begins samples
SEED = 0


class Sizes(NamedTuple):
    """How much is measured, and what with."""

    num_layers: int
    width: int
    num_heads: int
    longest: int
    max_tokens: int
    length_multiple: int
    max_shapes: int
    num_samples: int
    attention: tuple[str, ...]  # implementations of which the fastest is taken
    packed_rows: tuple[tuple[int, int], ...]  # rows and length, of which attention is compared
    padded_rows: tuple[tuple[int, int], ...]  # likewise, of one sample each
    matrix_sizes: tuple[int, ...]
    repeats: int
    num_loop_steps: int
    buffered_shapes: tuple[tuple[int, int], ...]  # in small ones launching kernels may take longer than running them
    num_keys: int
    torch_shapes: int
    torch_backend: str
    limit_s: float  # for plans in JAX, half of it for shapes in PyTorch; those that come later are left out, and named


FULL = Sizes(
    num_layers=8,
    width=1024,
    num_heads=8,
    longest=4096,
    max_tokens=65_536,
    length_multiple=128,
    max_shapes=8,
    num_samples=100_000,
    attention=("auto", "triton", "cudnn"),
    packed_rows=((1, 8192), (4, 2048)),
    padded_rows=((128, 512), (64, 1024), (16, 4096)),
    matrix_sizes=(4096, 8192, 16_384),
    repeats=7,
    num_loop_steps=40,
    buffered_shapes=((2, 128), (16, 4096)),
    num_keys=8_000_000,
    torch_shapes=3,
    torch_backend="inductor",
    limit_s=150.0,
)
QUICK = FULL._replace(
    num_layers=1,
    width=16,
    num_heads=1,
    longest=32,
    max_tokens=256,
    length_multiple=32,
    max_shapes=2,
    num_samples=500,
    attention=("auto",),
    packed_rows=((2, 64),),
    padded_rows=((2, 32), (4, 16)),
    matrix_sizes=(64,),
    repeats=1,
    num_loop_steps=4,
    buffered_shapes=((1, 32),),
    num_keys=10_000,
    torch_shapes=1,
    torch_backend="eager",
)
OF_NAME = {"full": FULL, "quick": QUICK}


def lengths_by_kind(sizes: Sizes) -> dict[str, np.ndarray]:
    """int64[N] of each kind: most samples short and a few very long, and all lengths alike."""
    rng = np.random.default_rng(SEED)
    drawn = rng.lognormal(np.log(sizes.longest / 10), 1.0, sizes.num_samples)
    return {
        "long-tailed": np.clip(drawn, sizes.longest // 128 + 1, sizes.longest).astype(np.int64),
        "uniform": rng.integers(sizes.longest // 32, sizes.longest + 1, sizes.num_samples),
    }


STRATEGIES: dict[str, dict[str, Any]] = {
    "optimal": {},
    "pad to the longest": {"strategy": "pad_to_max"},
    "powers of two": {"strategy": "powers_of_two"},
}


def bucket_options(sizes: Sizes, strategy: str) -> dict[str, Any]:
    """Arguments of `make_buckets`, which both packages have."""
    same = {"max_tokens": sizes.max_tokens, "max_shapes": sizes.max_shapes, "length_multiple": sizes.length_multiple}
    return same | STRATEGIES[strategy]


def num_multiplied(sizes: Sizes) -> int:
    """Parameters that are multiplied with: of the layers and the head, not the table of the embedding."""
    features = 16 * -(-sizes.width // 6)  # hidden ones of the MLP
    of_layer = 4 * sizes.width**2 + 3 * sizes.width * features
    return sizes.num_layers * of_layer + sizes.width * (VOCAB_SIZE + 1)


def step_flops(sizes: Sizes, rows: Any, length: Any) -> Any:
    """Floating-point operations of a training step of rows without padding, by formula; rows and lengths broadcast.

    Six a parameter and token, forward and backward; and twelve a layer, unit of width, and pair of a position with
    itself or one before it. What is computed again in the backward pass counts once.
    """
    tokens = np.asarray(rows, np.float64) * length
    pairs = tokens * (np.asarray(length, np.float64) + 1) / 2
    return 6 * num_multiplied(sizes) * tokens + 12 * sizes.num_layers * sizes.width * pairs
