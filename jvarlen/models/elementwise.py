"""RMSNorm and SwiGLU with gradients by hand, which keep little for the backward pass and read it once.

Letters: D width, F features.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jvarlen.parallel.tensor import vary_alike

__all__ = ["rms_norm", "swiglu"]


def rms_norm(
    x: Float[Array, "*batch D"], scale: Float[Array, " D"], *, epsilon: float, dtype: np.dtype
) -> Float[Array, "*batch D"]:
    """Root mean square normalisation in float32 at least, rounded to a type."""
    return _rms_norm(*vary_alike(x, scale), epsilon, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _rms_norm(
    x: Float[Array, "*batch D"], scale: Float[Array, " D"], epsilon: float, dtype: np.dtype
) -> Float[Array, "*batch D"]:
    return _rms_norm_forward(x, scale, epsilon, dtype)[0]


def _rms_norm_forward(
    x: Float[Array, "*batch D"], scale: Float[Array, " D"], epsilon: float, dtype: np.dtype
) -> tuple[Float[Array, "*batch D"], tuple[Array, Array, Array]]:
    wide = _widen(x)
    inverse_root = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return (wide * inverse_root * scale).astype(dtype), (x, scale, inverse_root)


def _rms_norm_backward(
    _: float, __: np.dtype, saved: tuple[Array, Array, Array], grad: Float[Array, "*batch D"]
) -> tuple[Float[Array, "*batch D"], Float[Array, " D"]]:
    x, scale, inverse_root = saved
    normalised, of_normalised = x * inverse_root, grad * scale
    # Divided before the sum: a kernel for GPUs ends with the sum.
    along = jnp.sum(of_normalised * (normalised / x.shape[-1]), axis=-1, keepdims=True)
    of_scale = jnp.sum(grad * normalised, axis=tuple(range(x.ndim - 1)))
    return (inverse_root * (of_normalised - normalised * along)).astype(x.dtype), of_scale.astype(scale.dtype)


_rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


@jax.custom_vjp
def swiglu(gate: Float[Array, "*batch F"], up: Float[Array, "*batch F"]) -> Float[Array, "*batch F"]:
    """silu(gate) · up in float32 at least, rounded to their type."""
    return _swiglu_forward(gate, up)[0]


def _swiglu_forward(
    gate: Float[Array, "*batch F"], up: Float[Array, "*batch F"]
) -> tuple[Float[Array, "*batch F"], tuple[Array, Array]]:
    return (jax.nn.silu(_widen(gate)) * up).astype(gate.dtype), (gate, up)


def _swiglu_backward(
    saved: tuple[Array, Array], grad: Float[Array, "*batch F"]
) -> tuple[Float[Array, "*batch F"], Float[Array, "*batch F"]]:
    gate, up, wide = map(_widen, (*saved, grad))
    # Each use has a form of its own: XLA would keep a sigmoid that several share, in float32.
    tanh, power = jnp.tanh(gate / 2), jnp.exp(-jnp.abs(gate))
    of_gate = wide * up * (0.5 + 0.5 * tanh + 0.25 * gate * (1 - jnp.square(tanh)))
    of_up = wide * gate * (jnp.where(gate < 0, power, 1) / (1 + power))
    return of_gate.astype(grad.dtype), of_up.astype(grad.dtype)


swiglu.defvjp(_swiglu_forward, _swiglu_backward)


def _widen(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
