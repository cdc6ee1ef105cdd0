"""Cross-entropy over a vocabulary from the last layer's outputs, some tokens at a time, with its gradient.

Letters: N devices of the axis "tensor", D inputs, V values of a token, U = ⌈V / N⌉ those of this device, C tokens of a
chunk.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jvarlen._common.types import PyTree
from jvarlen.parallel.layers import Axes
from jvarlen.parallel.tensor import losses_and_gradient, vary_alike

__all__ = ["chunked_cross_entropy"]

_MOST_LOGITS = 2**27  # of a chunk; half as many where these are of as many tokens as follow
_FEWEST_TOKENS = 1024  # of fewer, products take no longer than to read and write the kernel's gradient


def chunked_cross_entropy(
    x: Float[Array, "*positions D"],
    kernel: Float[Array, "D U"],
    targets: Int[Array, "*positions"],
    weights: Float[Array, "*positions"],
    *,
    vocab_size: int,
    axes: Axes,
    compute_dtype: Any = None,
) -> Float[Array, ""]:
    """The weighted sum of the cross-entropies of `x @ kernel`, without the logits of all tokens.

    It computes 2²⁷ logits at most at a time; where it is differentiated, also the gradients that are asked for, so that
    the backward pass multiplies nothing. For 8,192 tokens and 128,256 values of a token, it takes 1.1 GB where the
    logits and their gradient take 8.4. It has no forward-mode derivative.

    Args:
      x: float[…, D], what `enter_tensor_parallel` returns.
      kernel: float[D, U], a part along `TensorSpec(P(None, "tensor"), num_values=V)`, or the transpose of the table of
        `vocabulary_embedding`.
      targets: int[…], below V, whole. Where the weight is not 0, one that is not a token makes the loss NaN.
      weights: float[…] of each target, whole.
      vocab_size: V.
      axes: what is bound.
      compute_dtype: the type that products multiply, such as bfloat16. None means the common type of x and kernel.

    Returns:
      float[] in nats, whole also under sequence parallelism. It and all sums, also of gradients over chunks, are
      float32 at least. Gradients have the types of x, kernel and weights. A chunk takes two all-reduces.

    Raises:
      ValueError: the kernel is not that of V tokens.

    Example:
      >>> targets, weights = jnp.array([0, 3]), jnp.array([1.0, 0.5])
      >>> loss = chunked_cross_entropy(jnp.ones((2, 3)), jnp.ones((3, 4)), targets, weights, vocab_size=4, axes=Axes())
      >>> f"{loss:.4f}"  # 1.5 · log 4
      '2.0794'

    References:
      Hsu et al. 2024, "Liger Kernel: Efficient Triton Kernels for LLM Training", for gradients in the forward pass.
    """
    most_logits = min(_MOST_LOGITS, max(_MOST_LOGITS // 2, _FEWEST_TOKENS * kernel.shape[1]))
    num_chunks = -(-targets.size * kernel.shape[1] // most_logits)
    dtype = jnp.dtype(jnp.result_type(x, kernel) if compute_dtype is None else compute_dtype)
    static = _Static(vocab_size, axes.tensor, dtype, max(1, num_chunks))
    return _sum_of_losses(*vary_alike(x, kernel, targets, weights), static)


class _Static(NamedTuple):
    """The static arguments; `dtype` is the type that products multiply."""

    vocab_size: int
    axis_name: str | None
    dtype: Any
    num_chunks: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _sum_of_losses(x: Array, kernel: Array, targets: Array, weights: Array, static: _Static) -> Array:
    """`chunked_cross_entropy` of arrays that vary over the same axes."""
    multiplied = kernel.astype(static.dtype)

    def run(_: None, chunk: tuple[Array, ...]) -> tuple[None, Array]:
        x_CxD, targets, weights = chunk
        logits_CxU = _product(x_CxD.astype(static.dtype), multiplied, 1, 0)
        losses = losses_and_gradient(logits_CxU, targets, static.vocab_size, static.axis_name)[0]
        return None, _weighted_sum(losses, weights)

    return jnp.sum(_over_chunks(run, None, x, targets, weights, static.num_chunks)[1])


def _forward(*given: PyTree) -> tuple[Array, Any]:
    """The sum, and its gradients: an empty array where none is needed, as JAX may keep the tree of another case."""
    *arrays, static = given
    x, kernel, targets, weights = (array.value for array in arrays)
    has_x_grad, has_kernel_grad = (array.perturbed for array in arrays[:2])
    multiplied = kernel.astype(static.dtype)

    def run(kernel_grad: Array | None, chunk: tuple[Array, ...]) -> tuple[Array | None, tuple[Array | None, ...]]:
        x_CxD, targets, weights = chunk
        rounded = x_CxD.astype(static.dtype)
        logits_CxU = _product(rounded, multiplied, 1, 0)
        losses, gradient = losses_and_gradient(logits_CxU, targets, static.vocab_size, static.axis_name)
        grad_CxU = gradient(weights).astype(static.dtype)
        x_grad = _product(grad_CxU, multiplied, 1, 1).astype(x.dtype) if has_x_grad else None
        if kernel_grad is not None:
            kernel_grad += _product(rounded, grad_CxU, 0, 0)
        return kernel_grad, (_weighted_sum(losses, weights), x_grad, losses.astype(weights.dtype))

    zeros = jnp.zeros_like(kernel, jnp.promote_types(static.dtype, jnp.float32)) if has_kernel_grad else None
    kernel_grad, (sums, *of_tokens) = _over_chunks(run, zeros, x, targets, weights, static.num_chunks)
    none = jnp.zeros(0)
    x_grad, losses = (
        none if made is None else made.reshape(-1, *made.shape[2:])[: weights.size].reshape(like.shape)
        for made, like in zip(of_tokens, (x, weights), strict=True)
    )
    return jnp.sum(sums), (x_grad, none if kernel_grad is None else kernel_grad.astype(kernel.dtype), losses)


def _backward(static: _Static, kept: tuple[Array, ...], grad: Array) -> tuple[Array | None, ...]:
    of_x, of_kernel, of_weights = ((array * grad).astype(array.dtype) if array.size else None for array in kept)
    return of_x, of_kernel, None, of_weights


_sum_of_losses.defvjp(_forward, _backward, symbolic_zeros=True)


def _over_chunks(run: Any, carry: PyTree, x: Array, targets: Array, weights: Array, num_chunks: int) -> PyTree:
    """A scan over chunks of the tokens, the last one filled with tokens without weight."""
    num_filled = -targets.size % num_chunks

    def split(flat: Array) -> Array:
        filled = jnp.pad(flat, [(0, num_filled)] + [(0, 0)] * (flat.ndim - 1))
        return filled.reshape(num_chunks, -1, *flat.shape[1:])

    flat = x.reshape(-1, x.shape[-1]), targets.reshape(-1), weights.reshape(-1)
    return lax.scan(run, carry, jax.tree.map(split, flat), unroll=num_chunks == 1)


def _weighted_sum(losses: Array, weights: Array) -> Array:
    return jnp.sum(jnp.where(weights == 0, 0, losses * weights))


def _product(x: Array, y: Array, axis_of_x: int, axis_of_y: int) -> Array:
    """The sum over these axes of two matrices, in float32 at least."""
    axes = (((axis_of_x,), (axis_of_y,)), ((), ()))
    return lax.dot_general(x, y, axes, preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))
