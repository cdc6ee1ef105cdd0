"""A small byte-level decoder in Flax NNX: in go tokens and lengths, out come logits, or the sums of a loss.

Letters: B rows, T positions, D width, H heads, K head size, V = 256 byte values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from jvarlen.collate import Batch

__all__ = ["Transformer", "TransformerConfig", "flat_params", "init_params", "make_loss_fn"]

LossFn = Callable[[nnx.State, Batch], tuple[jax.Array, jax.Array]]

NUM_BYTES = 256
BEGIN_OF_SAMPLE = 256  # the input at position 0; never predicted, so the logits cover the 256 bytes only


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The shape of the decoder."""

    num_layers: int = 2
    """Number of blocks."""
    width: int = 128
    """Size of the residual stream."""
    num_heads: int = 2
    """Attention heads; must divide the width into even head sizes (rotary positions need pairs)."""

    def __post_init__(self):
        if min(self.num_layers, self.width, self.num_heads) < 1 or self.width % (2 * self.num_heads):
            raise ValueError(
                f"num_layers ({self.num_layers}) must be at least 1 and width ({self.width}) a multiple of "
                f"2 * num_heads ({2 * self.num_heads})"
            )


class Block(nnx.Module):
    """Attention and a two-layer perceptron, each on a normalised residual stream."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        width = config.width
        self.num_heads = config.num_heads
        self.norm1 = nnx.RMSNorm(width, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.norm2 = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, use_bias=False, rngs=rngs)

    def __call__(self, x_BxTxD: Float[Array, "B T D"], lengths_B: Int[Array, " B"]) -> Float[Array, "B T D"]:
        batch, seq_length, width = x_BxTxD.shape
        qkv = self.qkv(self.norm1(x_BxTxD)).reshape(batch, seq_length, 3, self.num_heads, width // self.num_heads)
        q_BxTxHxK, k_BxTxHxK, v_BxTxHxK = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        attended = jax.nn.dot_product_attention(
            rotate_positions(q_BxTxHxK),
            rotate_positions(k_BxTxHxK),
            v_BxTxHxK,
            is_causal=True,
            key_value_seq_lengths=lengths_B,
        )
        x_BxTxD = x_BxTxD + self.out(attended.reshape(batch, seq_length, width))
        return x_BxTxD + self.down(jax.nn.gelu(self.up(self.norm2(x_BxTxD))))


class Transformer(nnx.Module):
    """A decoder that gives the logits of every byte from the bytes before it."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(NUM_BYTES + 1, config.width, embedding_init=jax.nn.initializers.normal(0.02), rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.head = nnx.Linear(
            config.width, NUM_BYTES, use_bias=False, kernel_init=jax.nn.initializers.normal(0.02), rngs=rngs
        )

    def __call__(self, tokens_BxT: Int[Array, "B T"], lengths_B: Int[Array, " B"]) -> Float[Array, "B T V"]:
        """Logits of every byte; positions past a row's length give numbers without meaning."""
        inputs_BxT = jnp.pad(tokens_BxT[:, :-1], ((0, 0), (1, 0)), constant_values=BEGIN_OF_SAMPLE)
        x_BxTxD = self.embed(inputs_BxT)
        for block in self.blocks:
            x_BxTxD = block(x_BxTxD, lengths_B)
        return self.head(self.norm(x_BxTxD))


def rotate_positions(x_BxTxHxK: Float[Array, "B T H K"], theta: float = 10_000.0) -> Float[Array, "B T H K"]:
    """Rotary position embedding, first half of the head against the second (Su et al. 2021, arXiv:2104.09864)."""
    _, seq_length, _, head_size = x_BxTxHxK.shape
    half = head_size // 2
    # Constants of the program, computed in float64: at late positions float32 angles are off by more than their sines.
    angles_Tx1xK = np.arange(seq_length)[:, None, None] * theta ** (-np.arange(half) / half)
    cos, sin = (jnp.asarray(f(angles_Tx1xK), x_BxTxHxK.dtype) for f in (np.cos, np.sin))
    x1, x2 = x_BxTxHxK[..., :half], x_BxTxHxK[..., half:]
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)


def init_params(config: TransformerConfig, seed: int) -> nnx.State:
    """The parameters of a fresh model: a pytree of float32 arrays, the same for the same seed."""
    return nnx.split(Transformer(config, rngs=nnx.Rngs(seed)))[1]


def make_loss_fn(config: TransformerConfig) -> LossFn:
    """A pure `loss_fn(params, microbatch) -> (loss_sum, weight_sum)` in nats.

    Args:
      config: the model that the parameters belong to.

    Returns:
      A function of the parameters and a `Batch` without its leading axis (tokens int32[B, T], lengths int32[B],
      weights float32[B, T]) that gives two float32 scalars: the weighted sum of the cross-entropy of every byte given
      the bytes before it, and the sum of the weights.
    """
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))

    def loss_fn(params: nnx.State, microbatch: Batch) -> tuple[jax.Array, jax.Array]:
        logits_BxTxV = nnx.merge(graphdef, params)(microbatch.tokens, microbatch.lengths)
        losses_BxT = optax.softmax_cross_entropy_with_integer_labels(logits_BxTxV, microbatch.tokens)
        return jnp.sum(losses_BxT * microbatch.weights), jnp.sum(microbatch.weights)

    return loss_fn


def flat_params(params: nnx.State) -> dict[str, np.ndarray]:
    """The parameters as host arrays under dotted names, to carry them into another framework.

    Args:
      params: what `init_params` gave, or what training made of it.

    Returns:
      A dict from names such as `blocks.0.qkv.kernel` to float32 arrays; kernels are [inputs, outputs].
    """
    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(params)}
