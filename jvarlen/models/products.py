"""Products of the decoder, in float32 or with factors in bfloat16, and low-rank adapters beside their kernels.

Letters: B rows, S positions of this device, D inputs and F outputs of a product.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, BFloat16, Float, Float32

from jvarlen._common.checks import UserError
from jvarlen.models.config import PRODUCTS, DecoderConfig, LoraConfig
from jvarlen.parallel.layers import Axes
from jvarlen.parallel.tensor import leave_tensor_parallel, sum_backward, take_features, vary_alike

__all__ = ["Dropout", "Linear", "check_rank", "first_adapter", "multiply", "multiply_in_bfloat16", "rngs_of"]

_UNSPLIT = Axes()
# Compiled once for a shape, so that initializing takes no longer with more layers.
_LECUN_NORMAL = jax.jit(jax.nn.initializers.lecun_normal(), static_argnums=(1, 2))
_STREAM = 0x6C6F7261  # of the keys of adapters, so that other parameters are the same with and without them
# Uniform within ±1 / sqrt(inputs), as PEFT has it, so that its learning rates do.
_UNIFORM = jax.jit(jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform"), static_argnums=(1, 2))


def rngs_of(key: Array) -> nnx.Rngs:
    """The random numbers of a model's first parameters; those of adapters come from a stream of their own."""
    return nnx.Rngs(key, lora=jax.random.fold_in(key, _STREAM))


def first_adapter(shape: tuple[int, ...], rank: int, rngs: nnx.Rngs) -> tuple[Array, Array]:
    """`lora_a` and `lora_b` of a kernel of this shape before training, in float32."""
    num_in, num_out = shape
    return _UNIFORM(rngs.lora(), (num_in, rank), jnp.float32), jnp.zeros((rank, num_out), jnp.float32)


def check_rank(rank: int, lora: LoraConfig) -> None:
    """Raises ValueError for adapters of another rank, whose scale would be another."""
    if rank != lora.rank:
        raise UserError(f"the parameters have adapters of rank {rank}, and the config of rank {lora.rank}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dropout:
    """Dropout of the inputs of adapters in a layer; each product has a mask of its own, the same on any layout."""

    rate: float
    axes: Axes  # with the key of the layer
    num_rows: int  # B
    num_positions: int | None  # of whole rows; None if these are whole

    def __call__(
        self, x: Float[Array, "*positions F"], product: str, *, is_split: bool
    ) -> Float[Array, "*positions F"]:
        """Inputs, [B, S, F] or flattened, each 0 or divided by the share that stays; `is_split`: over "tensor"."""
        axes = self.axes
        num_parts = jax.lax.axis_size(axes.tensor) if is_split and axes.tensor is not None else 1
        num_here = x.size // (self.num_rows * x.shape[-1])
        shape = self.num_rows, self.num_positions or num_here, x.shape[-1] * num_parts
        key = jax.random.fold_in(axes.key, PRODUCTS.index(product))
        stays = jax.random.bernoulli(key, jnp.float32(1 - self.rate), shape)
        if axes.positions is not None:
            stays = stays[:, axes.positions]
        if is_split:
            stays = take_features(stays, axes=axes)
        return jnp.where(stays.reshape(x.shape), x / (1 - self.rate), 0)


class Linear(nnx.Module):
    """A product in the configured type, with its adapter; with a tensor axis float32, as devices add results."""

    def __init__(
        self,
        config: DecoderConfig,
        num_in: int,
        num_out: int,
        product: str = "",
        *,
        has_bias: bool = False,
        splits_inputs: bool = False,
        init: Callable[..., Array] = _LECUN_NORMAL,
        rngs: nnx.Rngs,
    ):
        self.in_bfloat16 = config.compute_dtype is not None
        self.product = product
        self.splits_inputs = splits_inputs  # over a tensor axis, and sums the product over it; else splits outputs
        self.kernel = nnx.Param(init(rngs.params(), (num_in, num_out), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(num_out, jnp.float32)) if has_bias else None
        self.lora = config.lora if product in config.adapted else None
        if self.lora is not None:
            self.lora_a, self.lora_b = map(nnx.Param, first_adapter((num_in, num_out), self.lora.rank, rngs))

    def __call__(
        self, x: Float[Array, "*batch D"], axes: Axes = _UNSPLIT, dropout: Dropout | None = None
    ) -> Float[Array, "*out F"]:
        """The product; with a tensor axis in `axes`, of what `enter_tensor_parallel` returns, or of split inputs."""
        product = multiply(x, self.kernel[...], in_bfloat16=self.in_bfloat16, rounds=axes.tensor is None)
        return self._complete(product, x, axes, dropout)

    def _complete(
        self, product: Float[Array, "*batch F"], x: Float[Array, "*batch D"], axes: Axes, dropout: Dropout | None
    ) -> Float[Array, "*out F"]:
        """The product of the kernel with what the adapter and the bias add, summed over devices."""
        if self.lora is not None:
            product = product + self._adapt(x, self.lora, axes, dropout)
        if self.splits_inputs:
            product = leave_tensor_parallel(product, axes=axes)
        return product if self.bias is None else product + self.bias[...]

    @staticmethod
    def together(
        x: Float[Array, "R D"],
        products: Sequence[Linear],
        axes: Axes = _UNSPLIT,
        dropout: Dropout | None = None,
        *,
        num_groups: int = 1,
    ) -> list[Float[Array, "R F"]]:
        """Several products of one input; in bfloat16 as one, whose kernels are joined by groups of features."""
        if not products[0].in_bfloat16:
            return [each(x, axes, dropout) for each in products]
        # Axes of a mesh that are left to the compiler may split the groups.
        kernels = [each.kernel[...].reshape(x.shape[1], num_groups, -1) for each in products]
        joined = jnp.concatenate(kernels, axis=2)
        product = multiply(x, joined.reshape(x.shape[1], -1), in_bfloat16=True, rounds=axes.tensor is None)
        ends = np.cumsum([kernel.shape[2] for kernel in kernels])[:-1]
        parts = jnp.split(product.reshape(len(x), *joined.shape[1:]), ends, axis=2)
        return [
            each._complete(part.reshape(len(x), -1), x, axes, dropout)
            for each, part in zip(products, parts, strict=True)
        ]

    def _adapt(
        self, x: Float[Array, "*batch D"], lora: LoraConfig, axes: Axes, dropout: Dropout | None
    ) -> Float[Array, "*batch F"]:
        """What the adapter adds."""
        lora_a, lora_b = self.lora_a[...], self.lora_b[...]
        check_rank(lora_a.shape[1], lora)
        if axes.tensor is not None and not axes.sequence_parallel:  # each device has the gradient of its features
            if self.splits_inputs:
                lora_b = sum_backward(lora_b, axes.tensor)
            else:
                lora_a = sum_backward(lora_a, axes.tensor)
        if dropout is not None:
            x = dropout(x, self.product, is_split=self.splits_inputs)
        inner = multiply(x, lora_a, in_bfloat16=self.in_bfloat16)
        return multiply(lora.scale * inner, lora_b, in_bfloat16=self.in_bfloat16)


def multiply(
    x: Float[Array, "*batch D"], kernel: Float[Array, "D F"], *, in_bfloat16: bool, rounds: bool = False
) -> Float[Array, "*batch F"]:
    """The product with all positions as rows of one matrix; `rounds`: that of bfloat16 factors, too."""
    # With more axes, XLA on a CPU computes the kernel's gradient from transposed copies of its factors.
    rows = x.reshape(-1, x.shape[-1])
    product = multiply_in_bfloat16(rows, kernel, rounds=rounds) if in_bfloat16 else rows @ kernel
    return product.reshape(*x.shape[:-1], kernel.shape[1])


def multiply_in_bfloat16(
    inputs: Float[Array, "*batch D"], kernel: Float[Array, "D F"], *, rounds: bool = False
) -> Float[Array, "*batch F"]:
    """The product with factors in bfloat16, also backward, and sums in float32 at least; `rounds`: it is bfloat16."""
    # Also the kernel's gradient is summed in float32 over all positions, so that it depends on the split of rows into
    # microbatches no more than a float32 gradient does. That of inputs has their type. bfloat16 has the exponents of
    # float32: losses need no scale.
    x, w = inputs if inputs.dtype == jnp.bfloat16 else inputs.astype(jnp.float32), kernel.astype(jnp.float32)
    product = _round_product(*vary_alike(x, w), jnp.dtype(jnp.bfloat16 if rounds else jnp.float32), x.dtype)
    return product if rounds else product.astype(jnp.result_type(inputs, kernel))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _round_product(
    inputs: Float[Array, "*batch D"], kernel: Float32[Array, "D F"], dtype: np.dtype, dtype_of_inputs: np.dtype
) -> Float[Array, "*batch F"]:
    return _round_product_forward(inputs, kernel, dtype, dtype_of_inputs)[0]


def _round_product_forward(
    inputs: Float[Array, "*batch D"], kernel: Float32[Array, "D F"], dtype: np.dtype, _: np.dtype
) -> tuple[Float[Array, "*batch F"], tuple[BFloat16[Array, "*batch D"], Float32[Array, "D F"]]]:
    rounded = inputs.astype(jnp.bfloat16)
    return _einsum("...D,DF->...F", rounded, kernel, dtype=dtype), (rounded, kernel)


def _round_product_backward(
    _: np.dtype,
    dtype_of_inputs: np.dtype,
    saved: tuple[BFloat16[Array, "*batch D"], Float32[Array, "D F"]],
    grad: Float[Array, "*batch F"],
) -> tuple[Float[Array, "*batch D"], Float32[Array, "D F"]]:
    inputs, kernel = saved
    of_inputs = _einsum("...F,DF->...D", grad, kernel, dtype=dtype_of_inputs)
    return of_inputs, _einsum("...D,...F->DF", inputs, grad, dtype=jnp.dtype(jnp.float32))


_round_product.defvjp(_round_product_forward, _round_product_backward)


def _einsum(subscripts: str, *factors: Array, dtype: np.dtype) -> Array:
    rounded = (factor.astype(jnp.bfloat16) for factor in factors)
    return jnp.einsum(subscripts, *rounded, preferred_element_type=dtype)
