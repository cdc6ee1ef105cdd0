"""The demo transformer by layers.

Letters: L layers, B rows, T positions, D width, V values of a token.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jax.tree_util import keystr

from jvarlen.batches.batches import Batch, PackedBatch
from jvarlen.batches.next_token import next_token_targets
from jvarlen.models.config import DecoderConfig
from jvarlen.models.decoder import Decoder, init_params, rows_of, run_block, sum_losses
from jvarlen.parallel.layers import Axes, LayeredModel, LayeredParams
from jvarlen.parallel.tensor import check_tensor_divides
from jvarlen.parallel.tensor_params import TENSOR_AXIS, TensorSpec

__all__ = ["layered", "stack_layers", "unstack_layers"]


def layered(config: DecoderConfig) -> LayeredModel:
    """The transformer by layers, each of which is one of its blocks.

    Args:
      config: the model that the parameters belong to.

    Returns:
      `LayeredModel` for a `Batch` or a `PackedBatch`; the sums are those of `make_loss_fn`, in nats. Its `specs` split
      heads, hidden features and the vocabulary over the axis `"tensor"`.
    """
    of_one_layer = dataclasses.replace(config, num_layers=1)  # all are alike

    @functools.cache
    def graphs(num_parts: int) -> tuple[nnx.GraphDef, nnx.GraphDef]:
        def split() -> tuple[nnx.GraphDef, nnx.GraphDef]:
            model = Decoder(of_one_layer, num_parts=num_parts, rngs=nnx.Rngs(0))
            block, _ = nnx.split(model.blocks[0])
            model.blocks = nnx.List([])
            return nnx.split(model)[0], block

        return nnx.eval_shape(split)

    def graphs_on(axes: Axes) -> tuple[nnx.GraphDef, nnx.GraphDef]:
        return graphs(check_tensor_divides(axes, num_heads=config.num_heads))

    def embed(ends: nnx.State, microbatch: Batch | PackedBatch, axes: Axes) -> jax.Array:
        inputs_BxT, _, _ = next_token_targets(microbatch, begin_token=config.vocab_size)
        if axes.positions is not None:
            inputs_BxT = inputs_BxT[:, axes.positions]
        return nnx.merge(graphs_on(axes)[0], ends).embed_inputs(inputs_BxT, axes)

    def layer(block: nnx.State, x_BxTxD: jax.Array, microbatch: Batch | PackedBatch, axes: Axes) -> jax.Array:
        graphdef, rows = graphs_on(axes)[1], rows_of(microbatch, axes)
        num_positions = None if axes.positions is None else microbatch.tokens.shape[1]
        axes = axes._replace(positions=None, key=None, layer=None)
        return run_block(graphdef, block, x_BxTxD, rows, axes, num_positions)

    def loss(
        ends: nnx.State, x_BxTxD: jax.Array, microbatch: Batch | PackedBatch, axes: Axes
    ) -> tuple[jax.Array, jax.Array]:
        logits_BxTxV = nnx.merge(graphs_on(axes)[0], ends).logits(x_BxTxD, axes)
        return sum_losses(logits_BxTxV, microbatch, config.vocab_size, axes)

    return LayeredModel(embed, layer, loss, specs=_tensor_specs(of_one_layer), by_positions=True)


def _tensor_specs(config: DecoderConfig) -> LayeredParams:
    """How the parameters lie along "tensor": by heads, by hidden features and by the vocabulary."""
    columns, rows = PartitionSpec(None, TENSOR_AXIS), PartitionSpec(TENSOR_AXIS)
    specs: dict[str, PartitionSpec | TensorSpec] = {
        "['embed']['embedding']": TensorSpec(rows, num_values=config.vocab_size + 1),
        "['head']['kernel']": TensorSpec(columns, num_values=config.vocab_size),
        "['qkv']['kernel']": TensorSpec(columns, num_blocks=3, num_heads=config.num_heads),
        "['out']['kernel']": TensorSpec(rows, num_heads=config.num_heads),
        "['up']['kernel']": columns,
        "['down']['kernel']": rows,
    }

    def spec_of(path: tuple[Any, ...], _: Any) -> PartitionSpec | TensorSpec:
        return specs.get(keystr(path).removesuffix(".value"), PartitionSpec())  # as some versions of NNX name leaves

    shapes = jax.eval_shape(lambda: stack_layers(init_params(config, 0)))
    return LayeredParams(*(jax.tree.map_with_path(spec_of, part) for part in shapes))


def stack_layers(params: nnx.State) -> LayeredParams:
    """The parameters by layers.

    Args:
      params: the result of `init_params`, trained or not, or gradients of the same structure.

    Returns:
      `LayeredParams`: embedding, last norm and head are the ends; the layers hold every leaf of the blocks, stacked to
      [L, …].

    Example:
      >>> from jvarlen.models import init_params
      >>> stacked = stack_layers(init_params(DecoderConfig(num_layers=4, width=16), seed=0))
      >>> stacked.layers["up"]["kernel"].shape
      (4, 16, 64)
    """
    blocks = [nnx.State(params.raw_mapping["blocks"][layer]) for layer in range(len(params["blocks"]))]

    ends = nnx.State({name: value for name, value in params.raw_mapping.items() if name != "blocks"})
    return LayeredParams(ends, _stack(*blocks))


@jax.jit  # one program instead of many, kept for the next call
def _stack(*blocks: nnx.State) -> nnx.State:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)


def unstack_layers(layered: LayeredParams) -> nnx.State:
    """The parameters of the model as a whole; the inverse of `stack_layers`.

    Args:
      layered: the result of `stack_layers`, trained or not.

    Returns:
      Parameters with the structure of `init_params`.
    """
    blocks = {layer: block.raw_mapping for layer, block in enumerate(_unstack(layered.layers))}
    return nnx.State({**layered.ends.raw_mapping, "blocks": blocks})


@jax.jit
def _unstack(layers: nnx.State) -> list[nnx.State]:
    num_layers = jax.tree.leaves(layers)[0].shape[0]
    return [jax.tree.map(lambda leaf, layer=layer: leaf[layer], layers) for layer in range(num_layers)]
