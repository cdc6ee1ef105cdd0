"""The demo transformer, cut into pipeline stages.

Letters: S stages, L layers, B rows, T positions, D width.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
from flax import nnx

from jvarlen._common.checks import UserError
from jvarlen.batches.batches import Batch, PackedBatch
from jvarlen.models.transformer import Transformer, TransformerConfig, rows_of, run_block, sum_losses
from jvarlen.parallel.pipeline import StagedParams, Stages

__all__ = ["make_stages", "merge_stages", "split_stages"]


def make_stages(config: TransformerConfig) -> Stages:
    """The transformer in stages, each of which runs some of its blocks one after the other.

    Args:
      config: the model that the parameters belong to.

    Returns:
      `Stages` for a `Batch` or a `PackedBatch`; the sums are those of `make_loss_fn`, in nats.
    """

    def graphs() -> tuple[nnx.GraphDef, nnx.GraphDef]:
        model = Transformer(config, rngs=nnx.Rngs(0))
        block, _ = nnx.split(model.blocks[0])
        model.blocks = nnx.List([])
        return nnx.split(model)[0], block

    ends_graph, block_graph = nnx.eval_shape(graphs)

    def embed(ends: nnx.State, microbatch: Batch | PackedBatch) -> jax.Array:
        return nnx.merge(ends_graph, ends).embed_tokens(microbatch.tokens, rows_of(microbatch))

    def stage(blocks: nnx.State, x_BxTxD: jax.Array, microbatch: Batch | PackedBatch) -> jax.Array:
        for layer in range(jax.tree.leaves(blocks)[0].shape[0]):
            block = jax.tree.map(lambda leaf, layer=layer: leaf[layer], blocks)
            x_BxTxD = run_block(block_graph, block, x_BxTxD, rows_of(microbatch))
        return x_BxTxD

    def loss(ends: nnx.State, x_BxTxD: jax.Array, microbatch: Batch | PackedBatch) -> tuple[jax.Array, jax.Array]:
        logits_BxTxV = nnx.merge(ends_graph, ends).logits(x_BxTxD)
        return sum_losses(logits_BxTxV, microbatch)

    return Stages(embed, stage, loss)


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
    blocks = [nnx.State(params.raw_mapping["blocks"][layer]) for layer in range(len(params["blocks"]))]
    if num_stages < 1 or len(blocks) % num_stages:
        raise UserError(f"num_stages must divide the {len(blocks)} blocks, and {num_stages} does not")

    @jax.jit  # one program instead of many
    def stack_all(*blocks: nnx.State) -> nnx.State:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves).reshape(num_stages, -1, *leaves[0].shape), *blocks)

    ends = nnx.State({name: value for name, value in params.raw_mapping.items() if name != "blocks"})
    return StagedParams(ends, stack_all(*blocks))


def merge_stages(staged: StagedParams) -> nnx.State:
    """The parameters of the unsplit model; the inverse of `split_stages`.

    Args:
      staged: the result of `split_stages`, trained or not.

    Returns:
      Parameters with the structure of `init_params`.
    """
    num_stages, per_stage = jax.tree.leaves(staged.stages)[0].shape[:2]

    @jax.jit
    def unstack_all(stages: nnx.State) -> list[nnx.State]:
        places = itertools.product(range(num_stages), range(per_stage))
        return [jax.tree.map(lambda leaf, place=place: leaf[place], stages) for place in places]

    blocks = {layer: block.raw_mapping for layer, block in enumerate(unstack_all(staged.stages))}
    return nnx.State({**staged.ends.raw_mapping, "blocks": blocks})
