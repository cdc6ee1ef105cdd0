"""The demo transformer: a small byte-level decoder in Flax NNX.

Letters: B rows, T positions (of rows that are spread over a mesh axis, those of this device), S those of this device
under sequence parallelism, D width, F outputs of a layer, H heads, K head size, V values of a token.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jvarlen.attention.attention import attend, attend_within_segments
from jvarlen.batches.batches import Batch, PackedBatch
from jvarlen.batches.next_token import next_token_targets
from jvarlen.models.config import DecoderConfig
from jvarlen.parallel.layers import Axes
from jvarlen.parallel.tensor import (
    enter_tensor_parallel,
    leave_tensor_parallel,
    vocabulary_cross_entropy,
    vocabulary_embedding,
)
from jvarlen.training.losses import LossFn
from jvarlen.training.train_state import key_of_seed

__all__ = [
    "Decoder",
    "Rows",
    "init_params",
    "make_loss_fn",
    "rows_of",
    "run_block",
    "sum_losses",
]

_ROTARY_BASE = 10_000.0
_UNSPLIT = Axes()
# Compiled once for a shape, so that initializing takes no longer with more layers.
_LECUN_NORMAL = jax.jit(jax.nn.initializers.lecun_normal(), static_argnums=(1, 2))
_NORMAL = jax.jit(jax.nn.initializers.normal(0.02), static_argnums=(1, 2))


class Rows(NamedTuple):
    """Where samples begin and end in the rows, for attention.

    Attributes:
      lengths: int[B], tokens of a row that holds one sample; None for packed rows.
      segment_ids: int[B, T], the sample of each position of packed rows; None for rows that are not packed.
      positions: int[B, T], the place of each position in its own sample; None if that is its place in the row.

    Where rows are spread over a mesh axis, segments and positions are those of `axes.positions`.
    """

    lengths: Any = None
    segment_ids: Any = None
    positions: Any = None


class _Linear(nnx.Linear):
    """A layer without bias that multiplies in the configured type; with bfloat16 its outputs are float32."""

    def __init__(self, config: DecoderConfig, num_in: int, num_out: int, **options: Any):
        if config.compute_dtype is not None:
            from jvarlen.models.mixed_precision import dot_general_in_bfloat16

            options["dot_general"] = dot_general_in_bfloat16
        options.setdefault("kernel_init", _LECUN_NORMAL)
        super().__init__(num_in, num_out, use_bias=False, **options)

    def __call__(self, inputs: Float[Array, "*batch D"]) -> Float[Array, "*batch F"]:  # type: ignore[override]
        """The product with all positions as rows of one matrix."""
        # With more axes, XLA on a CPU computes the kernel's gradient from transposed copies of its factors.
        outputs = super().__call__(inputs.reshape(-1, self.in_features))
        return outputs.reshape(*inputs.shape[:-1], self.out_features)


class _Block(nnx.Module):
    """Attention and a two-layer perceptron, each on a normalised residual stream."""

    # With `num_parts`, the part of one device under tensor parallelism: some heads, and some of the hidden features.
    def __init__(self, config: DecoderConfig, *, num_parts: int = 1, rngs: nnx.Rngs):
        width, part = config.width, config.width // num_parts
        self.num_heads = config.num_heads // num_parts
        self.implementation = config.attention
        self.packed_implementation = config.packed_attention
        self.norm1 = nnx.RMSNorm(width, rngs=rngs)
        self.qkv = _Linear(config, width, 3 * part, rngs=rngs)
        self.out = _Linear(config, part, width, rngs=rngs)
        self.norm2 = nnx.RMSNorm(width, rngs=rngs)
        self.up = _Linear(config, width, 4 * part, rngs=rngs)
        self.down = _Linear(config, 4 * part, width, rngs=rngs)

    def __call__(
        self, x_BxTxD: Float[Array, "B T D"], rows: Rows, axes: Axes = _UNSPLIT, num_positions: int | None = None
    ) -> Float[Array, "B T D"]:
        q_BxTxHxK, k_BxTxHxK, v_BxTxHxK = self.project(x_BxTxD, rows.positions, num_positions, axes)
        if axes.context is not None:
            from jvarlen.parallel.context import attend_over_axis  # loaded where rows are spread

            attended = attend_over_axis(q_BxTxHxK, k_BxTxHxK, v_BxTxHxK, axes=axes, segment_ids=rows.segment_ids)
        elif rows.segment_ids is None:
            attended = attend(q_BxTxHxK, k_BxTxHxK, v_BxTxHxK, rows.lengths, implementation=self.implementation)
        else:
            attended = attend_within_segments(
                q_BxTxHxK, k_BxTxHxK, v_BxTxHxK, rows.segment_ids, implementation=self.packed_implementation
            )
        return self.finish(x_BxTxD, attended, axes)

    def project(
        self,
        x_BxTxD: Float[Array, "B S D"],
        positions: Int[Array, "B T"] | None,
        num_positions: int | None = None,
        axes: Axes = _UNSPLIT,
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H K"], Float[Array, "B T H K"]]:
        """Queries and keys, rotated by their positions, and values; `num_positions` as in `_rotate_positions`."""
        # Norms and layers give at least float32; only what is kept for the backward pass is rounded to x's type.
        qkv = self.qkv(enter_tensor_parallel(self.norm1(x_BxTxD), axes=axes))
        qkv = qkv.reshape(*qkv.shape[:2], 3, self.num_heads, qkv.shape[2] // (3 * self.num_heads))
        q_BxTxHxK, k_BxTxHxK = (
            _rotate_positions(qkv[:, :, i], positions, num_positions).astype(x_BxTxD.dtype) for i in (0, 1)
        )
        return q_BxTxHxK, k_BxTxHxK, qkv[:, :, 2].astype(x_BxTxD.dtype)

    def finish(
        self, x_BxTxD: Float[Array, "B S D"], attended: Float[Array, "B T H K"], axes: Axes = _UNSPLIT
    ) -> Float[Array, "B S D"]:
        """The residual stream after the block, from the one before it and the heads' outputs."""
        attended_BxTxD = attended.reshape(*attended.shape[:2], -1)
        x_BxTxD = (x_BxTxD + leave_tensor_parallel(self.out(attended_BxTxD), axes=axes)).astype(x_BxTxD.dtype)
        hidden_BxTx4D = self.up(enter_tensor_parallel(self.norm2(x_BxTxD), axes=axes)).astype(x_BxTxD.dtype)
        down_BxTxD = leave_tensor_parallel(self.down(jax.nn.gelu(hidden_BxTx4D)), axes=axes)
        return (x_BxTxD + down_BxTxD).astype(x_BxTxD.dtype)


@functools.partial(jax.jit, static_argnums=(0, 4, 5))  # all blocks are alike: one of them is traced
def run_block(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    x_BxTxD: jax.Array,
    rows: Rows,
    axes: Axes = _UNSPLIT,  # without arrays
    num_positions: int | None = None,  # of whole rows, if these are some of their positions
) -> jax.Array:
    """The residual stream after a block with these parameters."""
    return nnx.merge(graphdef, params)(x_BxTxD, rows, axes, num_positions)


class Decoder(nnx.Module):
    """A decoder that predicts every token from the tokens before it.

    With `num_parts`, the part of one device under tensor parallelism.
    """

    def __init__(self, config: DecoderConfig, *, num_parts: int = 1, rngs: nnx.Rngs):
        self.begin_of_sample = config.vocab_size  # the input at position 0; never predicted, so it has no logit
        self.embed = nnx.Embed(config.vocab_size + 1, config.width, embedding_init=_NORMAL, rngs=rngs)
        self.blocks = nnx.List([_Block(config, num_parts=num_parts, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)
        num_logits = -(-config.vocab_size // num_parts)
        self.head = _Linear(config, config.width, num_logits, kernel_init=_NORMAL, rngs=rngs)
        self.compute_dtype = config.compute_dtype

    def __call__(self, inputs_BxT: Int[Array, "B T"], rows: Rows) -> Float[Array, "B T V"]:
        """Logits of what follows every input, at least float32; values at positions without a token are meaningless."""
        x_BxTxD = self.embed_inputs(inputs_BxT)
        for block in self.blocks:
            x_BxTxD = run_block(*nnx.split(block), x_BxTxD, rows)
        return self.logits(x_BxTxD)

    def embed_inputs(self, inputs_BxT: Int[Array, "B T"], axes: Axes = _UNSPLIT) -> Float[Array, "B S D"]:
        """Embeddings of the inputs of positions, which are tokens or `begin_of_sample`, in the compute type."""
        # Calling `embed` would round parameters to the type it began with.
        x_BxTxD = vocabulary_embedding(self.embed.embedding[...], inputs_BxT, axes=axes)
        return x_BxTxD if self.compute_dtype is None else x_BxTxD.astype(self.compute_dtype)

    def logits(self, x_BxTxD: Float[Array, "B S D"], axes: Axes = _UNSPLIT) -> Float[Array, "B T V"]:
        """Logits of every token from the output of the last block."""
        return self.head(enter_tensor_parallel(self.norm(x_BxTxD), axes=axes))


def _rotate_positions(
    x_BxTxHxK: Float[Array, "B T H K"], positions: Int[Array, "B T"] | None, num_positions: int | None = None
) -> Float[Array, "B T H K"]:
    """Rotary position embedding (Su et al. 2021), first half of the head against the second."""
    _, seq_length, _, head_size = x_BxTxHxK.shape
    half = head_size // 2
    # Constants of the program, computed in float64: at late positions float32 angles are off by more than their sines.
    angles_Tx1xK = np.arange(num_positions or seq_length)[:, None, None] * _ROTARY_BASE ** (-np.arange(half) / half)
    cos, sin = (jnp.asarray(f(angles_Tx1xK), x_BxTxHxK.dtype) for f in (np.cos, np.sin))
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    x1, x2 = x_BxTxHxK[..., :half], x_BxTxHxK[..., half:]
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)


def init_params(config: DecoderConfig, seed: int) -> nnx.State:
    """The initial parameters of a model.

    Args:
      config: the sizes of the model.
      seed: equal seeds give equal parameters.

    Returns:
      A pytree of float32 arrays.
    """
    return nnx.split(Decoder(config, rngs=nnx.Rngs(key_of_seed(seed))))[1]


def make_loss_fn(config: DecoderConfig) -> LossFn:
    """A pure `loss_fn(params, microbatch) -> (loss_sum, weight_sum)` in nats.

    Args:
      config: the model that the parameters belong to.

    Returns:
      A function of the parameters and a `Batch` or a `PackedBatch` without its leading axis (tokens int32[B, T],
      weights float32[B, T] and the rest) that returns two float32 scalars: the weighted sum of the cross-entropy of
      every token given the tokens before it in its sample, and the sum of the weights. Gradients always have the type
      of the parameters.
    """
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))

    def loss_fn(params: nnx.State, microbatch: Batch | PackedBatch) -> tuple[jax.Array, jax.Array]:
        inputs_BxT, _, _ = next_token_targets(microbatch, begin_token=config.vocab_size)
        logits_BxTxV = nnx.merge(graphdef, params)(inputs_BxT, rows_of(microbatch))
        return sum_losses(logits_BxTxV, microbatch, config.vocab_size)

    return loss_fn


def rows_of(microbatch: Batch | PackedBatch, axes: Axes = _UNSPLIT) -> Rows:
    """The `Rows` of a microbatch of whole rows, at the positions of this device or slice."""
    if isinstance(microbatch, PackedBatch):
        rows = Rows(segment_ids=microbatch.segment_ids, positions=microbatch.positions)
        return rows if axes.positions is None else jax.tree.map(lambda leaf: leaf[:, axes.positions], rows)
    if axes.positions is None:
        return Rows(lengths=microbatch.lengths)
    return Rows(
        lengths=microbatch.lengths,
        positions=jnp.broadcast_to(axes.positions, (len(microbatch.tokens), len(axes.positions))),
    )


def sum_losses(
    logits_BxTxV: Float[Array, "B T V"], microbatch: Batch | PackedBatch, vocab_size: int, axes: Axes = _UNSPLIT
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The weighted sum of the cross-entropy in nats, and the sum of the weights, at the positions of `axes`."""
    _, targets, weights = next_token_targets(microbatch, begin_token=vocab_size)
    if axes.positions is not None:
        targets, weights = targets[:, axes.positions], weights[:, axes.positions]
    losses_BxT = vocabulary_cross_entropy(logits_BxTxV, targets, vocab_size=vocab_size, axes=axes)
    return jnp.sum(losses_BxT * weights), jnp.sum(weights)
