"""What a step holds on a device, before anything is compiled. Letters: N shards, P parameters."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.extend.core import Var
from jax.sharding import PartitionSpec

from jvarlen._common.checks import UserError
from jvarlen._common.text_table import text_table
from jvarlen.batches.batches import token_batch_spec
from jvarlen.distributed.mesh import DATA_AXIS
from jvarlen.parallel.layers import LayeredModel, layered_loss_fn
from jvarlen.parallel.layout import Layout
from jvarlen.parallel.train import Accumulate, check_layout
from jvarlen.parallel.zero import padded_shape, shard_specs, state_specs
from jvarlen.planning.buckets import check_buckets
from jvarlen.training.losses import LossFn, bind_loss, takes_argument
from jvarlen.training.train_state import TrainState, init_train_state

__all__ = ["MemoryBill", "memory_bill"]


class MemoryBill(NamedTuple):
    """What a step holds on the fullest device, in bytes; `str` is a table.

    Attributes:
      params: parameters.
      grads: gradients, in the type of their parameters, as the papers count them.
      accumulation: what sums of gradients in float32 take beyond `grads`; 0 for parameters in float32.
      opt_state: the state of the optimizer, and `extra`.
      gathered: parameters and gradients that are whole for a time only: at ZeRO-3 those of the ends and of one layer;
        below, the gradients of a microbatch, before they are added to `grads`.
      activations: what the forward pass of one microbatch leaves to the backward pass, before the compiler shares
        memory; None if no model was given.
    """

    params: int
    grads: int
    accumulation: int
    opt_state: int
    gathered: int
    activations: int | None

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer state: what the papers on ZeRO count."""
        return self.params + self.grads + self.opt_state

    @property
    def total(self) -> int:
        """The sum of all."""
        return sum(number or 0 for number in self)

    def __str__(self) -> str:
        rows = [[name, f"{number:,}"] for name, number in self._asdict().items() if number is not None]
        return text_table([["held by a device", "bytes"], *rows, ["total", f"{self.total:,}"]])


def memory_bill(
    layout: Layout,
    params: Any,
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    bucket: tuple[int, ...] | None = None,
    *,
    model: LayeredModel | LossFn | None = None,
    extra: Any = None,
    batch_spec: Any = token_batch_spec,
    accumulate: Accumulate = "shards",
) -> MemoryBill:
    """What a step of a bucket holds on a device, for a layout that need not fit this machine.

    Nothing is computed or compiled: shapes are enough. The state is counted exactly, what the backward pass needs as
    the model is written; a compiled program may hold less, and holds its own temporaries beside.

    Args:
      layout: what is sharded, over any number of devices.
      params: pytree of arrays or `jax.ShapeDtypeStruct`, as for `init_state`.
      optimizer: any Optax optimizer.
      bucket: the shape of a microbatch; None counts no activations.
      model: as for `make_train_step`; None counts no activations.
      extra: as for `init_state`.
      batch_spec: `batch_spec(bucket, 1)` gives the batch's pytree of `jax.ShapeDtypeStruct`.
      accumulate: as for `make_train_step`.

    Returns:
      The bill.

    Raises:
      ValueError: a layout that is not supported, or has stages; ZeRO-3 of a loss function, or of parameters that are
        not by layers.

    Example:
      >>> params = {"w": jax.ShapeDtypeStruct((1024, 4096), np.float32)}
      >>> print(memory_bill(Layout(data=4, zero=2), params, optax.adam(1e-3)))
      held by a device       bytes
      params            16,777,216
      grads              4,194,304
      accumulation               0
      opt_state          8,388,612
      gathered          16,777,216
      total             46,137,348

    References:
      Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", figure 1.
    """
    if layout.stage > 1:
        raise UserError(f"memory_bill does not count stages, and the layout {layout} has {layout.stage}")
    check_layout(layout, params, model)
    if layout.tensor > 1:
        raise UserError(f"memory_bill does not count what lies along 'tensor', which {layout} has {layout.tensor} of")
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.result_type(leaf)), params)
    state = jax.eval_shape(lambda params: init_train_state(params, optimizer, extra=extra), params)
    specs_of_state = state_specs(state, layout)
    specs = jax.tree.map(lambda _: PartitionSpec(), params)
    if layout.zero >= 2 and accumulate == "shards":
        specs = shard_specs(params, layout, padded=layout.zero == 2)
    wide = jax.tree.map(_accumulated, params)
    grads = _bytes_of(params, specs, layout.data)
    return MemoryBill(
        params=_bytes_of(params, specs_of_state.params, layout.data),
        grads=grads,
        accumulation=_bytes_of(wide, specs, layout.data) - grads,
        opt_state=_bytes_of(
            (state.opt_state, state.extra), (specs_of_state.opt_state, specs_of_state.extra), layout.data
        ),
        gathered=_gathered_bytes(params, layout, model),
        activations=None if model is None or bucket is None else _activation_bytes(model, state, bucket, batch_spec),
    )


def _accumulated(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The sum of gradients of a parameter: in float32 at least."""
    return jax.ShapeDtypeStruct(leaf.shape, np.promote_types(leaf.dtype, np.float32))


def _bytes_of(tree: Any, specs: Any = None, num_shards: int = 1) -> int:
    """Bytes of arrays, of which the specs tell which are in shards."""
    leaves = jax.tree.leaves(tree)
    if specs is None:
        in_specs = [PartitionSpec()] * len(leaves)
    else:
        in_specs = jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
    axis_sizes = {DATA_AXIS: num_shards}
    return sum(
        math.prod(padded_shape(leaf.shape, spec, axis_sizes)) * leaf.dtype.itemsize // (num_shards if any(spec) else 1)
        for leaf, spec in zip(leaves, in_specs, strict=True)
    )


def _gathered_bytes(params: Any, layout: Layout, model: LayeredModel | LossFn | None) -> int:
    """Bytes of whole parameters and gradients that exist for a time only."""
    if layout.zero < 3:
        return _bytes_of(params)
    if isinstance(model, LayeredModel) and model.stack is not None:
        params = jax.eval_shape(model.stack, params)
    specs = shard_specs(params, layout, padded=False)

    def of_shards(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec, num_layers: int = 1) -> int:
        return _bytes_of((leaf, _accumulated(leaf))) // num_layers if any(spec) else 0

    ends = jax.tree.map(of_shards, params.ends, specs.ends)
    layer = jax.tree.map(lambda leaf, spec: of_shards(leaf, spec, leaf.shape[0]), params.layers, specs.layers)
    return sum(jax.tree.leaves((ends, layer)))


def _activation_bytes(model: LayeredModel | LossFn, state: TrainState, bucket: tuple[int, ...], batch_spec: Any) -> int:
    """Bytes of what the backward pass of a microbatch needs and is not an argument: parameters, or the microbatch."""
    loss_fn = layered_loss_fn(model) if isinstance(model, LayeredModel) else model
    batch = batch_spec(check_buckets([bucket])[0], 1)
    microbatch = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) if leaf.shape else leaf, batch
    )
    key = jax.eval_shape(lambda: jax.random.key(0)) if takes_argument(loss_fn, "key") else None
    state = state._replace(key=key, opt_state=None)

    def residuals(state: TrainState, microbatch: Any) -> Any:
        loss = bind_loss(loss_fn, state)
        return jax.vjp(lambda params: loss(params, microbatch, state.key), state.params, has_aux=True)[1]

    closed, shapes = jax.make_jaxpr(residuals, return_shape=True)(state, microbatch)
    given = {*closed.jaxpr.invars, *closed.jaxpr.constvars}
    saved = zip(closed.jaxpr.outvars, jax.tree.leaves(shapes), strict=True)
    return _bytes_of({id(var): shape for var, shape in saved if isinstance(var, Var) and var not in given})
