"""Model sizes, lengths, and operations by formula, for the GPU benchmark.

NumPy only, for the processes of JAX and PyTorch alike. Letters: N samples, D width, V values of a token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

SEED = 0


class Model(NamedTuple):
    """Arguments of `DecoderConfig`, which both packages have."""

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    mlp_width: int
    vocab_size: int = 257  # bytes, and a token that begins samples
    begins_samples: bool = True
    tied: bool = False
    norm_epsilon: float = 1e-6
    rotary_base: float = 10_000.0

    @property
    def num_values(self) -> int:
        """Tokens of samples are below it."""
        return self.vocab_size - self.begins_samples

    @property
    def num_multiplied(self) -> int:
        """Parameters that are multiplied with: of the layers and the head, not the table of the embedding."""
        of_attention = 2 * self.width**2 * (1 + self.num_kv_heads / self.num_heads)
        of_layer = int(of_attention) + 3 * self.width * self.mlp_width
        return self.num_layers * of_layer + self.width * self.vocab_size


class Sizes(NamedTuple):
    """How much is measured, and what with."""

    model: Model
    llama: Model
    other_mlp_width: int  # of the profile
    longest: int
    max_tokens: int
    length_multiple: int
    max_shapes: int
    num_samples: int
    kernel_rows: tuple[int, int]  # rows and length, of which attention is compared
    sample_lengths: tuple[int, ...]  # of the samples in them
    packed_rows: tuple[tuple[int, int], ...]  # of packed microbatches, the most valuable first
    padded_shapes: tuple[tuple[int, int], ...]  # of the profile and the predictions
    matrix_sizes: tuple[int, ...]
    repeats: int
    num_steps: int  # of a plan
    sequences_per_step: int  # of steps of many shapes
    num_prompts: int  # of rollouts, each with as many answers
    num_new_tokens: int
    torch_backend: str


FULL = Sizes(
    model=Model(num_layers=8, width=1024, num_heads=8, num_kv_heads=8, mlp_width=2736),
    llama=Model(16, 2048, 32, 8, 8192, 128_256, begins_samples=False, tied=True, norm_epsilon=1e-5, rotary_base=5e5),
    other_mlp_width=2816,
    longest=4096,
    max_tokens=65_536,
    length_multiple=128,
    max_shapes=8,
    num_samples=100_000,
    kernel_rows=(4, 8192),
    sample_lengths=(8192, 64, 256, 1024, 2048),
    packed_rows=((4, 8192), (1, 8192), (4, 4096), (1, 4096)),
    padded_shapes=((255, 256), (16, 4096)),
    matrix_sizes=(4096, 8192, 16_384),
    repeats=5,
    num_steps=20,
    sequences_per_step=1024,
    num_prompts=16,
    num_new_tokens=128,
    torch_backend="inductor",
)
QUICK = FULL._replace(
    model=Model(num_layers=1, width=16, num_heads=1, num_kv_heads=1, mlp_width=48),
    llama=Model(1, 16, 2, 1, 32, 64, begins_samples=False, tied=True),
    other_mlp_width=32,
    longest=32,
    max_tokens=256,
    length_multiple=32,
    max_shapes=2,
    num_samples=300,
    kernel_rows=(2, 64),
    sample_lengths=(64, 16),
    packed_rows=((2, 64),),
    padded_shapes=((4, 32),),
    matrix_sizes=(64,),
    repeats=1,
    num_steps=2,
    sequences_per_step=20,
    num_prompts=2,
    num_new_tokens=4,
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


def bucket_options(sizes: Sizes) -> dict[str, Any]:
    """Arguments of `make_buckets`."""
    return {"max_tokens": sizes.max_tokens, "max_shapes": sizes.max_shapes, "length_multiple": sizes.length_multiple}


def pack_options(rows: tuple[int, int]) -> dict[str, Any]:
    """Arguments of `make_plan` after the lengths, which both packages have."""
    return {"buckets": [rows], "packing": "best_fit", "order": "shuffle", "seed": SEED}


def step_flops(model: Model, rows: Any, length: Any, *, per_parameter: int = 6) -> Any:
    """Floating-point operations of a training step of rows without padding, by formula; rows and lengths broadcast.

    Six a parameter and token, forward and backward, and four where it is not trained; and twelve a layer, unit of
    width, and pair of a position with itself or one before it. What is computed again in the backward pass counts once.
    """
    tokens = np.asarray(rows, np.float64) * length
    pairs = tokens * (np.asarray(length, np.float64) + 1) / 2
    return per_parameter * model.num_multiplied * tokens + 12 * model.num_layers * model.width * pairs
