"""Models through whose layers rows go in slices: what a layer takes of the slices before.

Letters: B rows, S positions of a slice, P those before, H heads of queries, J of keys and values, K head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer

from jvarlen.attention.attention import attend
from jvarlen.models.config import DecoderConfig
from jvarlen.models.decoder import DecoderLayer, graphs_of, num_positions_of, rows_of, window_of
from jvarlen.models.layers import layered
from jvarlen.parallel.context import attend_over_axis
from jvarlen.parallel.layers import Axes, LayeredModel
from jvarlen.parallel.tensor import check_tensor_divides

__all__ = ["SlicedAxes", "attend_over_slices", "earlier_of", "sliced_model"]


class SlicedAxes(Axes):
    """The axes of a slice. `attend_over_axis` refuses them: it would see the slice alone."""

    earlier: Callable[[Any], Any]

    @classmethod
    def of(cls, axes: Axes, earlier: Callable[[Any], Any]) -> SlicedAxes:
        """These axes; `earlier(arrays)` is what `earlier_of` returns."""
        of_slice = cls(*axes)._replace(context="token slices")
        of_slice.earlier = earlier
        return of_slice

    def _replace(self, **changes: Any) -> SlicedAxes:
        replaced = super()._replace(**changes)
        if hasattr(self, "earlier"):
            replaced.earlier = self.earlier
        return replaced


def earlier_of(arrays: Any, *, axes: Axes) -> Any:
    """What the same call of this layer took for all positions before these. Only layers may call it.

    Args:
      arrays: pytree of arrays [B, S, …] of these positions, such as keys and values.
      axes: those that the layer got.

    Returns:
      Arrays [B, P, …]; P is 0 where rows are whole.
    """
    if isinstance(axes, SlicedAxes):
        return axes.earlier(arrays)
    return jax.tree.map(lambda leaf: leaf[:, :0], arrays)


def attend_over_slices(
    query: Float[Array, "B S H K"],
    key: Float[Array, "B S J K"],
    value: Float[Array, "B S J K"],
    *,
    axes: Axes,
    lengths: Integer[Array, " B"] | None = None,
    segment_ids: Integer[Array, "B S"] | None = None,
    window: int | Integer[Array, ""] | None = None,
) -> Float[Array, "B S H K"]:
    """Causal attention of a slice's queries to its keys and values, and to those of earlier slices.

    Args:
      query: float[B, S, H, K], at the positions of `axes.positions`.
      key: float[B, S, J, K]; J divides H.
      value: float[B, S, J, K].
      axes: those that the layer got; where rows are not in slices, this is `attend_over_axis`.
      lengths: int[B], the tokens of whole rows of one sample each.
      segment_ids: int[B, S], the sample of each position of packed rows.
      window: how many keys a query sees at most, as in `attend`.

    Returns:
      float[B, S, H, K].
    """
    if not isinstance(axes, SlicedAxes):
        of_rows: Any = {"lengths": lengths, "segment_ids": segment_ids}
        return attend_over_axis(query, key, value, axes=axes, window=window, **of_rows)
    own = key, value, segment_ids
    keys, values, ids = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), axes.earlier(own), own)
    before = keys.shape[1] - query.shape[1]
    how: Any = {"segment_ids": segment_ids, "key_segment_ids": ids}
    if segment_ids is None and lengths is not None:
        how = {"lengths": lengths.astype(jnp.int32) - before, "key_lengths": lengths}
    return attend(query, keys, values, query_offset=before, window=window, **how)


def sliced_model(config: DecoderConfig) -> LayeredModel:
    """The built-in model by layers, through which rows go whole or in slices.

    Args:
      config: the model that the parameters belong to.

    Returns:
      `LayeredModel`: `jvarlen.models.layered`, whose layers also take slices.
    """
    model = layered(config)
    of_layer = graphs_of(config.one_layer)[2]

    def layer(params: nnx.State, x_BxSxD: jax.Array, microbatch: Any, axes: Axes) -> jax.Array:
        if not isinstance(axes, SlicedAxes):
            return model.layer(params, x_BxSxD, microbatch, axes)
        check_tensor_divides(axes, num_heads=config.num_heads)
        block: DecoderLayer = nnx.merge(of_layer, params)
        rows = rows_of(microbatch, axes)
        num_positions = num_positions_of(microbatch)
        dropout = block.dropout(x_BxSxD, axes, num_positions)
        query, key, value = block.project(x_BxSxD, rows.positions, num_positions, axes, dropout)
        window = window_of(config, axes.layer, rows.window)
        of_rows: Any = {"lengths": rows.lengths, "segment_ids": rows.segment_ids}
        attended = attend_over_slices(query, key, value, axes=axes, window=window, **of_rows)
        return block.finish(x_BxSxD, attended, axes, dropout)

    return model._replace(layer=layer)
