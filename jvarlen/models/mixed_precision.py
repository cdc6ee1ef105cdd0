"""bfloat16 matrix products of layers with float32 parameters.

All sums are float32. bfloat16 has the exponent range of float32, so gradients need no loss scale.

Letters: D inputs, F outputs of a layer.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float32

__all__ = ["dot_general_in_bfloat16"]


def dot_general_in_bfloat16(
    inputs: Float[Array, "*batch D"], kernel: Float[Array, "D F"], dimension_numbers: Any, **options: Any
) -> Float[Array, "*batch F"]:
    """A `dot_general` for `nnx.Linear` with float32 parameters that multiplies in bfloat16, also backward.

    All sums are float32, including those of the kernel's gradient over all positions. So the gradient depends on the
    split of rows into microbatches no more than a float32 gradient does.

    Its result is float32, or float64 if an argument is.

    Example:
      >>> ones, kernel = jnp.ones((1, 256)), jnp.full((256, 1), 1 + 2**-9)
      >>> dot_general_in_bfloat16(ones, kernel, None).item(), (ones @ kernel).item()
      (256.0, 256.5)

    References:
      Micikevicius et al. 2018, "Mixed Precision Training"; Kalamkar et al. 2019, "A Study of BFLOAT16 for Deep Learning
      Training".
    """
    # Inside shard_map `_multiply` needs both to vary over the same axes, as its gradients do. XLA drops zeros added.
    x, w = inputs.astype(jnp.float32), kernel.astype(jnp.float32)
    product = _multiply(x + jnp.zeros_like(w, shape=()), w + jnp.zeros_like(x, shape=()))
    return product.astype(jnp.result_type(inputs, kernel))


@jax.custom_vjp
def _multiply(inputs: Float32[Array, "*batch D"], kernel: Float32[Array, "D F"]) -> Float32[Array, "*batch F"]:
    return _multiply_forward(inputs, kernel)[0]


def _multiply_forward(
    inputs: Float32[Array, "*batch D"], kernel: Float32[Array, "D F"]
) -> tuple[Float32[Array, "*batch F"], tuple[BFloat16[Array, "*batch D"], Float32[Array, "D F"]]]:
    rounded = inputs.astype(jnp.bfloat16)
    return _einsum("...D,DF->...F", rounded, kernel), (rounded, kernel)


def _multiply_backward(
    saved: tuple[BFloat16[Array, "*batch D"], Float32[Array, "D F"]], grad: Float32[Array, "*batch F"]
) -> tuple[Float32[Array, "*batch D"], Float32[Array, "D F"]]:
    inputs, kernel = saved
    return _einsum("...F,DF->...D", grad, kernel), _einsum("...D,...F->DF", inputs, grad)


_multiply.defvjp(_multiply_forward, _multiply_backward)


def _einsum(subscripts: str, *factors: Array) -> Array:
    rounded = (factor.astype(jnp.bfloat16) for factor in factors)
    return jnp.einsum(subscripts, *rounded, preferred_element_type=jnp.float32)
