"""Cross-entropy and log probabilities over a vocabulary, which may be split, some tokens at a time, with gradients.

Letters: N devices of the axis "tensor", D inputs, V values of a token, U = ⌈V / N⌉ those of this device, C tokens of a
chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from jvarlen._common.checks import UserError
from jvarlen._common.types import PyTree
from jvarlen.parallel.layers import Axes
from jvarlen.parallel.tensor import vary_alike

__all__ = ["chunked_cross_entropy", "chunked_log_probs", "vocabulary_cross_entropy"]

_MOST_LOGITS = 2**27  # of a chunk; half as many where these are of as many tokens as follow
_FEWEST_TOKENS = 1024  # of fewer, products take no longer than to read and write the kernel's gradient
_MOST_PARTS, _LOGITS_OF_PART = 8, 2**23  # of a chunk; each number of parts is compiled


def chunked_cross_entropy(
    x: Float[Array, "*positions D"],
    kernel: Float[Array, "D U"] | Float[Array, "U D"],
    targets: Int[Array, "*positions"],
    weights: Float[Array, "*positions"],
    *,
    vocab_size: int,
    axes: Axes,
    compute_dtype: Any = None,
    is_table: bool = False,
) -> Float[Array, ""]:
    """The weighted sum of the cross-entropies of `x @ kernel`, without the logits of all tokens.

    It computes 2²⁷ logits at most at a time; where it is differentiated, also the gradients that are asked for, so that
    the backward pass multiplies nothing. For 8,192 tokens and 128,256 values of a token, it takes 1.1 GB where the
    logits and their gradient take 8.4. It skips most tokens without weight, such as prompts, where there are 2²⁴ logits
    or more. It has no forward-mode derivative.

    Args:
      x: float[…, D], what `enter_tensor_parallel` returns.
      kernel: float[D, U], a part along `TensorSpec(P(None, "tensor"), num_values=V)`.
      targets: int[…], below V, whole. Where the weight is not 0, one that is not a token makes the loss NaN.
      weights: float[…] of each target, whole.
      vocab_size: V.
      axes: what is bound.
      compute_dtype: the type that products multiply, such as bfloat16. None means the common type of x and kernel.
      is_table: whether `kernel` is float[U, D], the table of `vocabulary_embedding`, whose transpose is not made then.

    Returns:
      float[] in nats, whole also under sequence parallelism. It and all sums, also of gradients over chunks, are
      float32 at least. Gradients have the types of x, kernel and weights. A chunk takes two all-reduces.

    Raises:
      ValueError: the kernel is not that of V tokens; products in float16, whose gradients would vanish.

    Example:
      >>> targets, weights = jnp.array([0, 3]), jnp.array([1.0, 0.5])
      >>> loss = chunked_cross_entropy(jnp.ones((2, 3)), jnp.ones((3, 4)), targets, weights, vocab_size=4, axes=Axes())
      >>> f"{loss:.4f}"  # 1.5 · log 4
      '2.0794'

    References:
      Hsu et al. 2024, "Liger Kernel: Efficient Triton Kernels for LLM Training", for gradients in the forward pass.
    """
    static = _static_of(x, kernel, targets, vocab_size, axes, compute_dtype, is_table)
    _refuse_float16(static)
    return _sum_of_losses(*vary_alike(x, kernel, targets, weights), static)


def chunked_log_probs(
    x: Float[Array, "*positions D"],
    kernel: Float[Array, "D U"] | Float[Array, "U D"],
    targets: Int[Array, "*positions"],
    *,
    vocab_size: int,
    axes: Axes,
    compute_dtype: Any = None,
    is_table: bool = False,
    temperature: float = 1.0,
    has_entropy: bool = False,
) -> PyTree:
    """The log probabilities of targets under `x @ kernel`, without the logits of all tokens.

    It computes as many logits at a time as `chunked_cross_entropy`, and once more in the backward pass, which knows
    what the log probabilities are for. It has no forward-mode derivative.

    Args:
      x: float[…, D], what `enter_tensor_parallel` returns.
      kernel: float[D, U], as for `chunked_cross_entropy`.
      targets: int[…], below V, whole. One that is not a token has the log probability NaN.
      vocab_size: V.
      axes: what is bound.
      compute_dtype: as for `chunked_cross_entropy`.
      is_table: as for `chunked_cross_entropy`.
      temperature: the logits are divided by it.
      has_entropy: whether to return the entropies of the distributions of the targets, too.

    Returns:
      float[…] in nats, float32 at least, whole also under sequence parallelism; with `has_entropy`, two of them. A
      chunk takes two all-reduces, forward and backward.

    Raises:
      ValueError: the kernel is not that of V tokens; gradients of products in float16, which would vanish.

    Example:
      >>> x, kernel, targets = jnp.ones((2, 3)), jnp.ones((3, 4)), jnp.array([0, 3])
      >>> both = chunked_log_probs(x, kernel, targets, vocab_size=4, axes=Axes(), has_entropy=True)
      >>> [f"{each[0]:.4f}" for each in both]  # log 1/4 and log 4
      ['-1.3863', '1.3863']
    """
    arrays = vary_alike(x, kernel, targets)
    static = _static_of(x, kernel, targets, vocab_size, axes, compute_dtype, is_table)
    losses = _losses(*arrays, static._replace(temperature=temperature, has_entropy=has_entropy))
    return (-losses[0], losses[1]) if has_entropy else -losses


class _Static(NamedTuple):
    """The static arguments; `dtype` is the type that products multiply."""

    vocab_size: int
    axis_name: str | None
    dtype: Any
    num_chunks: int
    num_parts: int  # of a chunk; 1: all tokens are computed
    kernel_axis: int  # of the inputs in the kernel
    temperature: float = 1.0
    has_entropy: bool = False


def _static_of(
    x: Array, kernel: Array, targets: Array, vocab_size: int, axes: Axes, compute_dtype: Any, is_table: bool
) -> _Static:
    num_values = kernel.shape[0 if is_table else 1]
    most_logits = min(_MOST_LOGITS, max(_MOST_LOGITS // 2, _FEWEST_TOKENS * num_values))
    num_chunks = max(1, -(-targets.size * num_values // most_logits))
    num_parts = max(1, min(_MOST_PARTS, targets.size * num_values // (num_chunks * _LOGITS_OF_PART)))
    # Devices that share the vocabulary would meet inside the branch that each of them takes.
    num_parts = num_parts if axes.tensor is None else 1
    dtype = jnp.dtype(jnp.result_type(x, kernel) if compute_dtype is None else compute_dtype)
    return _Static(vocab_size, axes.tensor, dtype, num_chunks, num_parts, int(is_table))


def _refuse_float16(static: _Static) -> None:
    if static.dtype == jnp.float16:
        raise UserError("products in float16 lose small gradients: give compute_dtype=jnp.bfloat16, or float32 arrays")


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _sum_of_losses(x: Array, kernel: Array, targets: Array, weights: Array, static: _Static) -> Array:
    """`chunked_cross_entropy` of arrays that vary over the same axes."""
    multiplied = kernel.astype(static.dtype)

    def run(_: None, chunk: tuple[Array, ...]) -> tuple[None, Array]:
        x_CxD, targets, weights = chunk
        return None, _weigh(_of_chunk(static, x_CxD, multiplied, targets)[0], weights)

    return jnp.sum(_over_chunks(run, None, static, x, targets, weights)[1])


def _forward(*given: PyTree) -> tuple[Array, Any]:
    """The sum, and its gradients: an empty array where none is needed, as JAX may keep the tree of another case."""
    *arrays, static = given
    x, kernel, targets, weights = (array.value for array in arrays)
    *has_grads, _, has_weights_grad = (array.perturbed for array in arrays)
    static = static._replace(num_parts=1) if has_weights_grad else static
    losses, grads = _losses_and_gradients(static, x, kernel, targets, weights, tuple(has_grads))
    none = jnp.zeros(0)
    of_x, of_kernel = (none if grad is None else grad for grad in grads)
    of_weights = losses.reshape(weights.shape).astype(weights.dtype) if has_weights_grad else none
    return jnp.sum(_weigh(losses, weights.reshape(-1))), (of_x, of_kernel, of_weights)


def _backward(static: _Static, kept: tuple[Array, ...], grad: Array) -> tuple[Array | None, ...]:
    of_x, of_kernel, of_weights = ((array * grad).astype(array.dtype) if array.size else None for array in kept)
    return of_x, of_kernel, None, of_weights


_sum_of_losses.defvjp(_forward, _backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _losses(x: Array, kernel: Array, targets: Array, static: _Static) -> PyTree:
    """The losses, and with `has_entropy` the entropies, of arrays that vary over the same axes."""
    multiplied = kernel.astype(static.dtype)

    def run(_: None, chunk: tuple[Array, ...]) -> tuple[None, PyTree]:
        x_CxD, targets = chunk
        return None, _of_chunk(static, x_CxD, multiplied, targets)[0]

    losses = _over_chunks(run, None, static, x, targets)[1]
    return jax.tree.map(lambda made: made.reshape(targets.shape), losses)


def _losses_forward(*given: PyTree) -> tuple[PyTree, Any]:
    """The losses and what they are of; an array that is not empty for each of the two gradients that are needed."""
    *arrays, static = given
    _refuse_float16(static)
    x, kernel, targets = (array.value for array in arrays)
    needed = [jnp.zeros(int(array.perturbed)) for array in arrays[:2]]
    return _losses(x, kernel, targets, static), (x, kernel, targets, needed)


def _losses_backward(static: _Static, kept: tuple[PyTree, ...], weights: PyTree) -> tuple[Array | None, ...]:
    x, kernel, targets, needed = kept
    if static.has_entropy:
        if isinstance(weights[1], SymbolicZero):  # of entropies that are told alone, as in most losses
            static, weights = static._replace(has_entropy=False), weights[0]
        elif isinstance(weights[0], SymbolicZero):
            weights = jnp.zeros_like(weights[1]), weights[1]
    has_grads = tuple(bool(each.size) for each in needed)
    return *_losses_and_gradients(static, x, kernel, targets, weights, has_grads)[1], None


_losses.defvjp(_losses_forward, _losses_backward, symbolic_zeros=True)


def _losses_and_gradients(
    static: _Static, x: Array, kernel: Array, targets: Array, weights: PyTree, has_grads: tuple[bool, ...]
) -> tuple[PyTree, tuple[Array | None, Array | None]]:
    """The losses of the flat tokens, and the gradients of their weighted sum for x and kernel, None if unneeded.

    With `has_entropy`, weights are those of losses and of entropies, and losses are both as well.
    """
    has_x_grad, has_kernel_grad = has_grads
    multiplied = kernel.astype(static.dtype)

    def run(kernel_grad: Array | None, chunk: tuple[PyTree, ...]) -> tuple[Array | None, PyTree]:
        x_CxD, targets, weights = chunk
        losses, gradient = _of_chunk(static, x_CxD, multiplied, targets)
        grad_CxU = gradient(weights).astype(static.dtype)
        x_grad = None
        if has_x_grad:
            x_grad = _product(grad_CxU, multiplied, 1, 1 - static.kernel_axis).astype(x.dtype)
        if has_kernel_grad:
            rounded = x_CxD.astype(static.dtype)
            first, second = (grad_CxU, rounded) if static.kernel_axis else (rounded, grad_CxU)
            added = _product(first, second, 0, 0)
            kernel_grad = added if kernel_grad is None else kernel_grad + added
        return kernel_grad, (losses, x_grad)

    zeros = None
    if has_kernel_grad and (static.num_chunks > 1 or static.num_parts == 1):
        zeros = jnp.zeros_like(kernel, jnp.promote_types(static.dtype, jnp.float32))
    kernel_grad, (losses, x_grad) = _over_chunks(run, zeros, static, x, targets, weights)
    x_grad = None if x_grad is None else x_grad.reshape(x.shape)
    return losses, (x_grad, None if kernel_grad is None else kernel_grad.astype(kernel.dtype))


def _of_chunk(
    static: _Static, x_CxD: Array, multiplied: Array, targets: Array
) -> tuple[PyTree, Callable[[PyTree], Array]]:
    """The losses of a chunk, and `gradient(weights)` of their weighted sum for the products."""
    logits_CxU = _product(x_CxD.astype(static.dtype), multiplied, 1, static.kernel_axis)
    scaled = logits_CxU if static.temperature == 1 else logits_CxU / static.temperature
    losses, gradient = _losses_and_gradient(scaled, targets, static.vocab_size, static.axis_name, static.has_entropy)
    if static.temperature == 1:
        return losses, gradient
    return losses, lambda weights: gradient(weights) / static.temperature


def _over_chunks(run: Any, carry: PyTree, static: _Static, x: Array, targets: Array, *weights: PyTree) -> PyTree:
    """A scan over chunks, and what it makes of flat tokens; with weights, parts without any are left out for zeros."""
    num_tokens, num_chunks, num_parts = targets.size, static.num_chunks, static.num_parts if weights else 1
    size = -(-num_tokens // (num_chunks * num_parts)) * num_parts
    flat = jax.tree.map(lambda leaf: leaf.reshape(num_tokens, *leaf.shape[targets.ndim :]), (x, targets, *weights))
    if num_parts > 1:  # those with weight first: all chunks but one are then full or empty
        order = jnp.argsort(~_has_weight(flat), stable=True)
        flat = jax.tree.map(lambda leaf: leaf[order], flat)
        run = functools.partial(_run_parts, run, num_parts)
    chunks = jax.tree.map(lambda leaf: _fill(leaf, num_chunks * size).reshape(-1, size, *leaf.shape[1:]), flat)
    if num_chunks == 1 and num_parts > 1:  # no sums to add to
        carry, made = run(carry, jax.tree.map(lambda leaf: leaf[0], chunks))
    else:
        carry, made = lax.scan(run, carry, chunks, unroll=num_chunks == 1)
        made = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), made)
    made = jax.tree.map(lambda leaf: leaf[:num_tokens], made)
    if num_parts > 1:
        made = jax.tree.map(lambda leaf: jnp.zeros_like(leaf).at[order].set(leaf, unique_indices=True), made)
    return carry, made


def _run_parts(run: Any, num_parts: int, carry: PyTree, chunk: PyTree) -> PyTree:
    """Runs the first parts of a chunk, as many as hold the tokens with weight, which come first."""
    has_weight = _has_weight(chunk)
    size = has_weight.size

    def run_first(num: int, carry: PyTree, chunk: PyTree) -> PyTree:
        if num:
            carry, made = run(carry, jax.tree.map(lambda leaf: leaf[: num * size // num_parts], chunk))
            return carry, jax.tree.map(lambda leaf: _fill(leaf, size), made)
        zero = jnp.zeros_like(chunk[0], jnp.float32, shape=())  # which varies over the same axes
        shapes = jax.eval_shape(functools.partial(run_first, 1), carry, chunk)
        made = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype) + zero.astype(shape.dtype), shapes)
        return made if carry is None else (carry, made[1])

    which = -(-jnp.sum(has_weight) * num_parts // size)
    return lax.switch(which, [functools.partial(run_first, num) for num in range(num_parts + 1)], carry, chunk)


def _has_weight(tokens: tuple[PyTree, ...]) -> Array:
    """Whether tokens have any weight."""
    return functools.reduce(jnp.logical_or, (weights != 0 for weights in jax.tree.leaves(tokens[2])))


def _fill(flat: Array, size: int) -> Array:
    """Zeros after the tokens: tokens without weight."""
    return jnp.pad(flat, [(0, size - len(flat))] + [(0, 0)] * (flat.ndim - 1))


def _weigh(losses: Array, weights: Array) -> Array:
    return jnp.where(weights == 0, 0, losses * weights)


def _product(x: Array, y: Array, axis_of_x: int, axis_of_y: int) -> Array:
    """The sum over these axes of two matrices, in float32 at least."""
    axes = (((axis_of_x,), (axis_of_y,)), ((), ()))
    return lax.dot_general(x, y, axes, preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))


def vocabulary_cross_entropy(
    logits: Float[Array, "*positions V"], targets: Int[Array, "*positions"], *, vocab_size: int, axes: Axes
) -> Float[Array, "*positions"]:
    """The cross-entropy of logits whose vocabulary is split. Neither whole logits nor whole probabilities are made.

    Args:
      logits: float[…, ⌈V / N⌉], of all positions, by a kernel along `TensorSpec(P(None, "tensor"), num_values=V)`.
        Those past V get no probability and no gradient.
      targets: int[…], below V, whole. One that is not a token makes its loss NaN.
      vocab_size: V.
      axes: what is bound.

    Returns:
      float[…] in nats, whole also under sequence parallelism, float32 at least. It takes two all-reduces.

    Raises:
      ValueError: the logits are not those of V tokens.

    Example:
      >>> losses = vocabulary_cross_entropy(jnp.zeros((2, 4)), jnp.array([0, 3]), vocab_size=4, axes=Axes())
      >>> [f"{loss:.4f}" for loss in losses]
      ['1.3863', '1.3863']

    References:
      Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism".
    """
    logits, targets = vary_alike(logits, targets)
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return _cross_entropies(logits, targets, vocab_size, axes.tensor)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _cross_entropies(logits: Array, targets: Array, vocab_size: int, axis_name: str | None) -> Array:
    return _losses_and_gradient(logits, targets, vocab_size, axis_name)[0]


def _losses_and_gradient(
    logits: Array, targets: Array, vocab_size: int, axis_name: str | None, has_entropy: bool = False
) -> tuple[PyTree, Callable[[PyTree], Array]]:
    """The losses of `vocabulary_cross_entropy`; and `gradient(weights)`, a pytree, of their weighted sum.

    With `has_entropy`, the losses and the entropies, and weights are those of both.
    """
    num_here = logits.shape[-1]
    num_devices = 1 if axis_name is None else lax.axis_size(axis_name)
    if num_here != -(-vocab_size // num_devices):
        raise UserError(
            f"{num_here} logits on each of {num_devices} devices are not those of a vocabulary of {vocab_size}"
        )
    first = 0 if axis_name is None else lax.axis_index(axis_name) * num_here
    if num_devices * num_here > vocab_size:
        logits = jnp.where(first + jnp.arange(num_here) < vocab_size, logits, -jnp.inf)
    largest = jnp.max(logits, axis=-1)
    largest = largest if axis_name is None else lax.pmax(largest, axis_name)
    local = targets - first
    is_here = (local >= 0) & (local < num_here)
    # From the logits as they are: TPUs would keep all that a gather takes.
    of_targets = jnp.take_along_axis(logits, jnp.where(is_here, local, 0)[..., None], axis=-1)[..., 0] - largest
    powers = jnp.exp(logits - largest[..., None])
    summed = [jnp.sum(powers, axis=-1), of_targets]
    if has_entropy:  # also of what has no probability, whose logit may be −∞
        summed.append(jnp.sum(jnp.where(powers > 0, powers * (logits - largest[..., None]), 0), axis=-1))
    if axis_name is not None:
        summed[1] = jnp.where(is_here, of_targets, 0)
        summed = list(lax.psum(jnp.stack(summed), axis_name))
    sums, of_targets, *products = summed
    losses = jnp.where((targets >= 0) & (targets < vocab_size), jnp.log(sums) - of_targets, jnp.nan)
    if not products:
        return losses, jax.tree_util.Partial(_gradient_of_losses, logits, largest, sums, local)
    entropies = jnp.log(sums) - products[0] / sums
    return (losses, entropies), jax.tree_util.Partial(_gradient_of_both, logits, largest, sums, local, entropies)


def _gradient_of_losses(logits: Array, largest: Array, sums: Array, local: Array, weights: Array) -> Array:
    probabilities = jnp.exp(logits - largest[..., None]) / sums[..., None]
    is_target = local[..., None] == jnp.arange(logits.shape[-1])
    return jnp.where(is_target, probabilities - 1, probabilities) * weights[..., None]


def _gradient_of_both(
    logits: Array, largest: Array, sums: Array, local: Array, entropies: Array, weights: tuple[Array, Array]
) -> Array:
    of_losses, of_entropies = weights
    log_probs = logits - largest[..., None] - jnp.log(sums)[..., None]
    products = jnp.exp(log_probs) * (jnp.where(log_probs > -jnp.inf, log_probs, 0) + entropies[..., None])
    return _gradient_of_losses(logits, largest, sums, local, of_losses) - products * of_entropies[..., None]


_cross_entropies.defvjp(
    _losses_and_gradient, lambda vocab_size, axis_name, gradient, weights: (gradient(weights), None)
)
