"""Products in bfloat16 that are summed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float32

__all__ = ["multiply_in_bfloat16"]


def multiply_in_bfloat16(inputs: Float[Array, "*batch D"], kernel: Float[Array, "D F"]) -> Float[Array, "*batch F"]:
    """The product with factors in bfloat16, also backward, and sums in float32 at least."""
    # Also the kernel's gradient is summed in float32 over all positions, so that it depends on the split of rows into
    # microbatches no more than a float32 gradient does. bfloat16 has the exponents of float32: losses need no scale.
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
