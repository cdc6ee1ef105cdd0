"""What the decoder says of the tokens of a microbatch: their loss, log probabilities and logits.

Letters: B rows, T positions (of rows that are spread over a mesh axis, those of this device), S those of this device
under sequence parallelism, D width, V values of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jvarlen._common.types import Key, Microbatch, Params, PyTree
from jvarlen.batches.batches import arrays_by_name, next_token_targets, with_arrays
from jvarlen.models.config import DecoderConfig, check_temperature
from jvarlen.models.decoder import Decoder, graphs_of, num_positions_of, rows_of
from jvarlen.models.stacking import whole_params
from jvarlen.parallel.cross_entropy import chunked_cross_entropy, chunked_log_probs
from jvarlen.parallel.layers import Axes
from jvarlen.parallel.tensor import enter_tensor_parallel
from jvarlen.training.losses import LossFn, takes_argument

__all__ = ["logits", "make_loss_fn", "sum_losses", "token_log_probs"]

_UNSPLIT = Axes()


def make_loss_fn(
    config: DecoderConfig, of_log_probs: Callable[..., PyTree] | None = None, *, temperature: float = 1.0
) -> LossFn:
    """A pure `loss_fn(params, microbatch) -> (loss_sum, weight_sum)` in nats.

    Args:
      config: the model that the parameters belong to.
      of_log_probs: a loss of your own, `of_log_probs(log_probs, microbatch)`, from the log probabilities of
        `token_log_probs`, such as a policy gradient; with a parameter `entropy`, it gets that as well. It returns what
        a loss returns, or what `StepLoss.sums` does. None: cross-entropy.
      temperature: that of these log probabilities.

    Returns:
      A function of the parameters and a microbatch, a `Batch` or a `PackedBatch` without its leading axis (tokens
      int32[B, T], weights float32[B, T] and the rest), or named fields with `tokens`. It returns two float32 scalars:
      the weighted sum of the cross-entropy of every token given the tokens before it in its sample, and the sum of the
      weights; or what `of_log_probs` does. Gradients always have the type of the parameters. With adapters
      (`config.lora`) its attribute `trainable` tells `make_train_step` that they alone are trained; with dropout of
      their inputs it takes a key, `loss_fn(params, microbatch, key)`, without which nothing is dropped.

    Example:
      >>> import numpy as np
      >>> from jvarlen.models import init_params
      >>> def likelihood(log_probs, microbatch):  # the cross-entropy, written out
      ...     return -jnp.sum(log_probs * microbatch.weights), jnp.sum(microbatch.weights)
      >>> from jvarlen.batches import Batch
      >>> tokens, lengths, ids = np.array([[5, 6, 7, 0]]), np.array([3]), np.array([0])
      >>> microbatch = Batch(tokens, lengths, np.float32([[1, 1, 1, 0]]), np.float32(1), ids, ids >= 0)
      >>> config = DecoderConfig(width=16)
      >>> losses = [make_loss_fn(config, f)(init_params(config, 0), microbatch) for f in (None, likelihood)]
      >>> bool(abs(losses[0][0] - losses[1][0]) < 1e-4)
      True
    """
    check_temperature(temperature, may_be_zero=False)

    def loss_with_key(params: Params, microbatch: Microbatch, key: Key = None) -> PyTree:
        model, x_BxTxD, microbatch = _run(params, config, microbatch, key)
        return sum_losses(model, x_BxTxD, microbatch, of_log_probs=of_log_probs, temperature=temperature)

    def loss_fn(params: Params, microbatch: Microbatch) -> PyTree:
        return loss_with_key(params, microbatch)

    made = loss_with_key if config.has_dropout else loss_fn
    vars(made).update(trainable=config.trainable, needs_key=config.has_dropout)
    return made


def token_log_probs(
    params: Params, config: DecoderConfig, microbatch: Microbatch, *, temperature: float = 1.0, entropy: bool = False
) -> PyTree:
    """The log probability of every token of a microbatch, given the tokens before it in its sample.

    Entry [b, t] belongs to the token at [b, t], whatever its loss weight. It is 0 where nothing is predicted: at
    padding, and at the first token of a sample unless the model has `begins_samples`. The logits of all tokens never
    exist, neither here nor in the gradient, which computes them again. It is the loss's: the sum of
    `-log_probs * weights` is the loss of `make_loss_fn`. It is NaN at targets that are not tokens, whatever the weight.

    Args:
      params: the result of `init_params`, trained or not; or a `TrainState` of the model, or its parameters, as they
        lie on any layout.
      config: the model that they belong to.
      microbatch: a `Batch` or a `PackedBatch` without its leading axis, or named fields with `tokens`; traced or not.
      temperature: logits are divided by it, as those that `generate` draws from.
      entropy: whether to return the entropies of the distributions of these tokens, too.

    Returns:
      float32[B, T] in nats, differentiable; with `entropy`, two of them. float64 where the parameters are.

    Raises:
      ValueError: a microbatch of samples of two lengths or without tokens; a temperature that is not above 0.

    Example:
      >>> import numpy as np
      >>> from jvarlen.batches import Batch
      >>> from jvarlen.models import init_params
      >>> tokens, lengths, ids = np.array([[5, 6, 7, 0]]), np.array([3]), np.array([0])
      >>> microbatch = Batch(tokens, lengths, np.float32([[1, 1, 1, 0]]), np.float32(1), ids, ids >= 0)
      >>> config = DecoderConfig(width=16)
      >>> log_probs = token_log_probs(init_params(config, 0), config, microbatch)
      >>> (log_probs < 0).tolist()
      [[True, True, True, False]]
    """
    check_temperature(temperature, may_be_zero=False)
    model, x_BxTxD, microbatch = _run(params, config, microbatch)
    of_tokens = _log_probs(model, x_BxTxD, microbatch, _UNSPLIT, temperature=temperature, has_entropy=entropy)
    return of_tokens if entropy else of_tokens[0]


def logits(params: Params, config: DecoderConfig, microbatch: Microbatch) -> Float[Array, "B T V"]:
    """The logits at every position of a microbatch, for the targets of `next_token_targets`.

    Without `begins_samples`, entry [b, t] is for the token after position t, as in transformers; with it, for the token
    at position t. `token_log_probs` takes less memory.

    Args:
      params: as for `token_log_probs`.
      config: the model that they belong to.
      microbatch: as for `token_log_probs`.

    Returns:
      float[B, T, V], at least float32; meaningless at padding. V is `config.vocab_size`, with the token that begins
      samples; or the size of another `head.kernel`, such as 1 in a reward model.

    Raises:
      ValueError: a microbatch of samples of two lengths or without tokens.
    """
    model, x_BxTxD, microbatch = _run(params, config, microbatch)
    return model.logits(x_BxTxD)


def _run(
    params: Params, config: DecoderConfig, microbatch: Microbatch, key: Key = None
) -> tuple[Decoder, Float[Array, "B T D"], Microbatch]:
    """The model, the output of its last layer, and the microbatch in arrays of JAX."""
    microbatch = jax.tree.map(jnp.asarray, microbatch)
    model = nnx.merge(graphs_of(config)[0], whole_params(params, config))
    inputs_BxT, _, _ = next_token_targets(microbatch, begin_token=config.begin_token)
    return model, model.run_layers(model.embed_inputs(inputs_BxT), rows_of(microbatch), key), microbatch


def sum_losses(
    model: Decoder,
    x_BxTxD: Float[Array, "B S D"],
    microbatch: Microbatch,
    axes: Axes = _UNSPLIT,
    *,
    of_log_probs: Callable[..., PyTree] | None = None,
    temperature: float = 1.0,
) -> PyTree:
    """What `make_loss_fn` returns, from the output of the last layer; of spread rows, this device's share of it."""
    if of_log_probs is not None:
        has_entropy = takes_argument(of_log_probs, "entropy")
        log_probs, *entropy = _log_probs(
            model, x_BxTxD, microbatch, axes, temperature=temperature, has_entropy=has_entropy
        )
        returned = of_log_probs(log_probs, microbatch, **({"entropy": entropy[0]} if has_entropy else {}))
        return returned if axes.context is None else _on_first(returned, axes.context)
    config = model.config
    _, targets, weights = next_token_targets(microbatch, begin_token=config.begin_token)
    if axes.positions is not None:
        targets, weights = targets[:, axes.positions], weights[:, axes.positions]
    kernel, is_table = _head_of(model)
    loss_sum = chunked_cross_entropy(
        enter_tensor_parallel(model.norm(x_BxTxD), axes=axes),
        kernel,
        targets,
        weights,
        vocab_size=config.vocab_size,
        axes=axes,
        compute_dtype=config.compute_dtype,
        is_table=is_table,
    )
    return loss_sum, jnp.sum(weights)


def _log_probs(
    model: Decoder,
    x_BxTxD: Float[Array, "B S D"],
    microbatch: Microbatch,
    axes: Axes,
    *,
    temperature: float,
    has_entropy: bool,
) -> tuple[Float[Array, "B T"], ...]:
    """The log probabilities of `token_log_probs`, and the entropies; of spread rows, whole ones on every device."""
    config, arrays = model.config, arrays_by_name(microbatch) or {}
    num_positions = num_positions_of(microbatch)
    is_token = (
        arrays["segment_ids"] > 0 if "segment_ids" in arrays else jnp.arange(num_positions) < arrays["lengths"][:, None]
    )
    of_tokens = with_arrays(microbatch, {"weights": is_token})
    _, targets, is_target = next_token_targets(of_tokens, begin_token=config.begin_token)
    if axes.positions is not None:
        targets, is_target = targets[:, axes.positions], is_target[:, axes.positions]
    kernel, is_table = _head_of(model)
    found = chunked_log_probs(
        enter_tensor_parallel(model.norm(x_BxTxD), axes=axes),
        kernel,
        targets,
        vocab_size=config.vocab_size,
        axes=axes,
        compute_dtype=config.compute_dtype,
        is_table=is_table,
        temperature=temperature,
        has_entropy=has_entropy,
    )

    def at_tokens(of_targets: Array) -> Array:
        of_targets = jnp.where(is_target, of_targets, 0)
        if axes.positions is not None:
            whole = jnp.zeros((len(of_targets), num_positions), of_targets.dtype)
            of_targets = jax.lax.psum(whole.at[:, axes.positions].set(of_targets), axes.context)
        return of_targets if config.begins_samples else jnp.roll(of_targets, 1, axis=1)

    return tuple(map(at_tokens, found if has_entropy else (found,)))


def _head_of(model: Decoder) -> tuple[Float[Array, "V D"] | Float[Array, "D V"], bool]:
    """The kernel of the head, or the table of embeddings, and whether it is that."""
    return (model.embed.embedding[...], True) if model.head is None else (model.head.kernel[...], False)


def _on_first(returned: Any, axis_name: str) -> Any:
    """What every device of an axis has, on the first one; zeros on the others, as shares are added."""
    is_first = jax.lax.axis_index(axis_name) == 0
    return jax.tree.map(lambda leaf: jnp.where(is_first, leaf, jnp.zeros_like(leaf)), returned)
