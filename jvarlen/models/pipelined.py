"""The demo transformer, cut into pipeline stages.

Letters: S stages, L layers.
"""

from __future__ import annotations

import functools

import jax
from flax import nnx

from jvarlen._common.checks import UserError
from jvarlen.batches.batches import Batch, PackedBatch
from jvarlen.models.layers import layered, stack_layers, unstack_layers
from jvarlen.models.transformer import TransformerConfig
from jvarlen.parallel.layers import Axes, LayeredParams
from jvarlen.parallel.pipeline import StagedParams, Stages

__all__ = ["make_stages", "merge_stages", "split_stages"]


def make_stages(config: TransformerConfig) -> Stages:
    """The transformer in stages, each of which runs some of its blocks one after the other.

    Args:
      config: the model that the parameters belong to.

    Returns:
      `Stages` for a `Batch` or a `PackedBatch`; the sums are those of `make_loss_fn`, in nats.
    """
    model = layered(config)

    def stage(blocks: nnx.State, x_BxTxD: jax.Array, microbatch: Batch | PackedBatch) -> jax.Array:
        for layer in range(jax.tree.leaves(blocks)[0].shape[0]):
            block = jax.tree.map(lambda leaf, layer=layer: leaf[layer], blocks)
            x_BxTxD = model.layer(block, x_BxTxD, microbatch, Axes())
        return x_BxTxD

    return Stages(functools.partial(model.embed, axes=Axes()), stage, functools.partial(model.loss, axes=Axes()))


def split_stages(params: nnx.State, num_stages: int) -> StagedParams:
    """Cuts the blocks into stages of consecutive ones.

    Args:
      params: the result of `init_params`, trained or not, or gradients of the same structure.
      num_stages: S; must divide the number of blocks, L.

    Returns:
      `StagedParams`: embedding, last norm and head are the ends; the stages hold every leaf of the blocks, stacked to
      [S, L / S, …].

    Raises:
      ValueError: S does not divide L.

    Example:
      >>> from jvarlen.models import init_params
      >>> staged = split_stages(init_params(TransformerConfig(num_layers=4, width=16), seed=0), 2)
      >>> staged.stages["up"]["kernel"].shape
      (2, 2, 16, 64)
    """
    num_layers = len(params["blocks"])
    if num_stages < 1 or num_layers % num_stages:
        raise UserError(f"num_stages must divide the {num_layers} blocks, and {num_stages} does not")

    @jax.jit  # one program instead of many
    def cut(layers: nnx.State) -> nnx.State:
        return jax.tree.map(lambda leaf: leaf.reshape(num_stages, -1, *leaf.shape[1:]), layers)

    stacked = stack_layers(params)
    return StagedParams(stacked.ends, cut(stacked.layers))


def merge_stages(staged: StagedParams) -> nnx.State:
    """The parameters of the unsplit model; the inverse of `split_stages`.

    Args:
      staged: the result of `split_stages`, trained or not.

    Returns:
      Parameters with the structure of `init_params`.
    """

    @jax.jit
    def join(stages: nnx.State) -> nnx.State:
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), stages)

    return unstack_layers(LayeredParams(staged.ends, join(staged.stages)))
