"""The decoder by layers.

Letters: L layers, B rows, T positions, D width, V values of a token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
from flax import nnx
from jax.sharding import PartitionSpec
from jax.tree_util import keystr

from jvarlen._common.types import Array, KeyPath, Microbatch, PyTree
from jvarlen.batches.batches import next_token_targets
from jvarlen.models.config import DecoderConfig, check_temperature
from jvarlen.models.decoder import check_names, graphs_of, num_positions_of, param_shapes, rows_of, run_layer, window_of
from jvarlen.models.losses import sum_losses
from jvarlen.models.stacking import stack_layers
from jvarlen.parallel.layers import Axes, LayeredModel, LayeredParams
from jvarlen.parallel.tensor import TENSOR_AXIS, TensorSpec, check_tensor_divides

__all__ = ["layered"]


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
        inputs_BxT, _, _ = next_token_targets(microbatch, begin_token=config.begin_token)
        if axes.positions is not None:
            inputs_BxT = inputs_BxT[:, axes.positions]
        return nnx.merge(of_ends, ends).embed_inputs(inputs_BxT, axes)

    def layer(params: nnx.State, x_BxTxD: jax.Array, microbatch: Microbatch, axes: Axes) -> jax.Array:
        check_tensor_divides(axes, num_heads=config.num_heads)
        rows = rows_of(microbatch, axes)
        rows = rows._replace(window=window_of(config, axes.layer, rows.window))
        num_positions = None if axes.positions is None else num_positions_of(microbatch)
        static = axes._replace(positions=None, key=None, layer=None)
        return run_layer(of_layer, params, x_BxTxD, rows, static, num_positions, axes.key, axes.positions)

    def loss(ends: nnx.State, x_BxTxD: jax.Array, microbatch: Microbatch, axes: Axes) -> PyTree:
        model = nnx.merge(of_ends, ends)
        return sum_losses(model, x_BxTxD, microbatch, axes, of_log_probs=of_log_probs, temperature=temperature)

    def stack(params: nnx.State | LayeredParams) -> LayeredParams:
        if not isinstance(params, LayeredParams):
            check_names(params, config)
        return stack_layers(params)

    return LayeredModel(
        embed,
        layer,
        loss,
        specs=_tensor_specs(config),
        stack=stack,
        by_positions=True,
        trainable=config.trainable,
        needs_key=config.has_dropout,
        num_layers=config.num_layers,
    )


def _tensor_specs(config: DecoderConfig) -> LayeredParams:
    """How the parameters lie along "tensor": by heads, by hidden features and by the vocabulary."""
    columns, rows = PartitionSpec(None, TENSOR_AXIS), PartitionSpec(TENSOR_AXIS)
    specs: dict[str, PartitionSpec | TensorSpec] = {
        "['embed']['embedding']": TensorSpec(rows, num_values=config.vocab_size),
        "['head']['kernel']": TensorSpec(columns, num_values=config.vocab_size),
        "['attention']['out']['kernel']": TensorSpec(rows, num_heads=config.num_heads),
        "['mlp']['gate']['kernel']": columns,
        "['mlp']['up']['kernel']": columns,
        "['mlp']['down']['kernel']": rows,
    }
    for name, num_heads in (("q", config.num_heads), ("k", config.kv_heads), ("v", config.kv_heads)):
        heads = TensorSpec(columns, num_heads=num_heads, shares_heads=name != "q")
        specs[f"['attention']['{name}']['kernel']"] = heads
        specs[f"['attention']['{name}']['bias']"] = dataclasses.replace(heads, spec=rows)
    for name, spec in [*specs.items()]:  # an adapter is split where its kernel is, and its other array is whole
        of_kernel = spec.spec if isinstance(spec, TensorSpec) else spec
        specs[name.replace("kernel", "lora_a" if of_kernel == rows else "lora_b")] = spec

    def spec_of(path: KeyPath, _: Array) -> PartitionSpec | TensorSpec:
        return specs.get(keystr(path).removesuffix(".value"), PartitionSpec())  # as some versions of NNX name leaves

    shapes = jax.eval_shape(stack_layers, param_shapes(config.one_layer))
    return LayeredParams(*(jax.tree.map_with_path(spec_of, part) for part in shapes))
