"""The decoder by layers.

Letters: L layers, B rows, T positions, D width, V values of a token.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jax.tree_util import keystr

from jvarlen._common.types import Array, KeyPath, Microbatch, PyTree
from jvarlen.batches.batches import next_token_targets
from jvarlen.models.config import DecoderConfig, check_temperature
from jvarlen.models.decoder import graphs_of, init_params, num_positions_of, rows_of, run_layer, window_of
from jvarlen.models.losses import sum_losses
from jvarlen.models.texts import texts_of
from jvarlen.parallel.layers import Axes, LayeredModel, LayeredParams
from jvarlen.parallel.tensor import TENSOR_AXIS, TensorSpec, check_tensor_divides

__all__ = ["layered", "stack_layers", "unstack_layers"]


def layered(
    config: DecoderConfig, of_log_probs: Callable[..., PyTree] | None = None, *, temperature: float = 1.0
) -> LayeredModel:
    """The decoder by layers.

    Args:
      config: the model that the parameters belong to.
      of_log_probs: a loss of your own, as for `make_loss_fn`, with equal numbers on all layouts. Under tensor and
        context parallelism, every device computes it from the log probabilities of whole rows.
      temperature: as for `make_loss_fn`.

    Returns:
      `LayeredModel` of the parameters that `init_params` makes, for the microbatches that `make_loss_fn` takes and with
      what it returns. Its `specs` split heads, hidden features and the vocabulary over the axis `"tensor"`.
    """
    check_temperature(temperature, may_be_zero=False)
    of_ends, of_layer = graphs_of(config.one_layer)[1:]

    def embed(ends: nnx.State, microbatch: Microbatch, axes: Axes) -> jax.Array:
        inputs_BxT, _, _ = next_token_targets(texts_of(microbatch), begin_token=config.begin_token)
        if axes.positions is not None:
            inputs_BxT = inputs_BxT[:, axes.positions]
        return nnx.merge(of_ends, ends).embed_inputs(inputs_BxT, axes)

    def layer(params: nnx.State, x_BxTxD: jax.Array, microbatch: Microbatch, axes: Axes) -> jax.Array:
        check_tensor_divides(axes, num_heads=config.num_heads, num_kv_heads=config.kv_heads)
        texts = texts_of(microbatch)
        rows = rows_of(texts, axes)._replace(window=window_of(config, axes.layer))
        num_positions = None if axes.positions is None else num_positions_of(texts)
        static = axes._replace(positions=None, key=None, layer=None)
        return run_layer(of_layer, params, x_BxTxD, rows, static, num_positions, axes.key, axes.positions)

    def loss(ends: nnx.State, x_BxTxD: jax.Array, microbatch: Microbatch, axes: Axes) -> PyTree:
        model = nnx.merge(of_ends, ends)
        return sum_losses(model, x_BxTxD, microbatch, axes, of_log_probs=of_log_probs, temperature=temperature)

    return LayeredModel(
        embed,
        layer,
        loss,
        specs=_tensor_specs(config),
        stack=stack_layers,
        by_positions=True,
        trainable=config.trainable,
        needs_key=config.has_dropout,
    )


def _tensor_specs(config: DecoderConfig) -> LayeredParams:
    """How the parameters lie along "tensor": by heads, by hidden features and by the vocabulary."""
    columns, rows = PartitionSpec(None, TENSOR_AXIS), PartitionSpec(TENSOR_AXIS)
    specs: dict[str, PartitionSpec | TensorSpec] = {
        "['embed']['embedding']": TensorSpec(rows, num_values=config.vocab_size),
        "['head']['kernel']": TensorSpec(columns, num_values=config.vocab_size),
    }
    for name, num_heads in (("q", config.num_heads), ("k", config.kv_heads), ("v", config.kv_heads)):
        specs |= dict.fromkeys(_of("attention", name, "kernel", "lora_b"), TensorSpec(columns, num_heads=num_heads))
        specs |= dict.fromkeys(_of("attention", name, "bias"), TensorSpec(rows, num_heads=num_heads))
    specs |= dict.fromkeys(_of("attention", "out", "kernel", "lora_a"), TensorSpec(rows, num_heads=config.num_heads))
    specs |= dict.fromkeys([*_of("mlp", "gate", "kernel", "lora_b"), *_of("mlp", "up", "kernel", "lora_b")], columns)
    specs |= dict.fromkeys(_of("mlp", "down", "kernel", "lora_a"), rows)

    def spec_of(path: KeyPath, _: Array) -> PartitionSpec | TensorSpec:
        return specs.get(keystr(path).removesuffix(".value"), PartitionSpec())  # as some versions of NNX name leaves

    shapes = jax.eval_shape(lambda: stack_layers(init_params(config.one_layer, 0)))
    return LayeredParams(*(jax.tree.map_with_path(spec_of, part) for part in shapes))


def _of(block: str, product: str, *names: str) -> list[str]:
    """Paths of parameters of a product."""
    return [f"['{block}']['{product}']['{name}']" for name in names]


def stack_layers(params: nnx.State | LayeredParams) -> LayeredParams:
    """The parameters by layers.

    Args:
      params: the result of `init_params`, trained or not, or gradients of the same structure; stacked ones
        stay as they are.

    Returns:
      `LayeredParams`: embedding, last norm and head are the ends; every leaf of the layers is stacked to [L, …].

    Example:
      >>> from jvarlen.models import init_params
      >>> stacked = stack_layers(init_params(DecoderConfig(num_layers=4, width=16), seed=0))
      >>> stacked.layers["mlp"]["up"]["kernel"].shape
      (4, 16, 48)
    """
    if isinstance(params, LayeredParams):
        return params
    layers = [nnx.State(params.raw_mapping["layers"][layer]) for layer in range(len(params["layers"]))]
    ends = nnx.State({name: value for name, value in params.raw_mapping.items() if name != "layers"})
    return LayeredParams(ends, _stack(*layers))


@jax.jit  # one program instead of many, kept for the next call
def _stack(*layers: nnx.State) -> nnx.State:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def unstack_layers(layered: LayeredParams) -> nnx.State:
    """The parameters of the model as a whole; the inverse of `stack_layers`.

    Args:
      layered: the result of `stack_layers`, trained or not.

    Returns:
      Parameters with the structure of `init_params`.
    """
    layers = {index: layer.raw_mapping for index, layer in enumerate(_unstack(layered.layers))}
    return nnx.State({**layered.ends.raw_mapping, "layers": layers})


@jax.jit
def _unstack(layers: nnx.State) -> list[nnx.State]:
    num_layers = jax.tree.leaves(layers)[0].shape[0]
    return [jax.tree.map(lambda leaf, layer=layer: leaf[layer], layers) for layer in range(num_layers)]
