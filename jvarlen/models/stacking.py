"""The decoder's parameters as a whole, and by layers, as states hold them on most layouts. Letters: L layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import keystr

from jvarlen._common.types import Array, KeyPath
from jvarlen.models.config import DecoderConfig
from jvarlen.models.decoder import check_names
from jvarlen.parallel.layers import LayeredParams
from jvarlen.training.train_state import TrainState

__all__ = ["stack_layers", "unstack_layers", "whole_params"]

_DIM_OF_VALUES = {"['embed']['embedding']": 0, "['head']['kernel']": 1}


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


def whole_params(params: nnx.State | LayeredParams | TrainState, config: DecoderConfig) -> nnx.State:
    """The parameters of the model as a whole, from those of a state on any layout, or a state; traced or not."""
    params = params.params if isinstance(params, TrainState) else params
    if not isinstance(params, LayeredParams):
        check_names(params, config)
        return params

    def crop(path: KeyPath, leaf: Array) -> Array:  # "tensor" extends vocabularies by zeros
        dim = _DIM_OF_VALUES.get(keystr(path).removesuffix(".value"))
        if dim is None or leaf.shape[dim] <= config.vocab_size:
            return leaf
        return jax.lax.slice_in_dim(leaf, 0, config.vocab_size, axis=dim)

    layers = jax.tree.map(lambda leaf: leaf[: config.num_layers], params.layers)  # stages may have room for more
    return unstack_layers(LayeredParams(jax.tree.map_with_path(crop, params.ends), layers))
