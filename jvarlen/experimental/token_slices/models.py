"""Models through whose layers rows go in slices: what a layer takes of the slices before.

Letters: B rows, S positions of a slice, P those before, H heads of queries, J of keys and values, K head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer

from jvarlen.attention import AttentionImplementation
from jvarlen.attention.attention import attend
from jvarlen.models.config import DecoderConfig
from jvarlen.models.decoder import DecoderLayer, graphs_of, rows_of, window_of
from jvarlen.models.layers import layered
from jvarlen.parallel.context import attend_over_axis
from jvarlen.parallel.layers import Axes, LayeredModel
from jvarlen.parallel.tensor import check_tensor_divides

__all__ = ["SlicedAxes", "attend_last", "attend_over_slices", "earlier_of", "sliced_model"]


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
    segment_ids: Integer[Array, "B S"] | None = None,
    window: int | Integer[Array, ""] | None = None,
) -> Float[Array, "B S H K"]:
    """Causal attention of a slice's queries to its keys and values, and to those of earlier slices.

    Args:
      query: float[B, S, H, K], at the positions of `axes.positions`.
      key: float[B, S, J, K]; J divides H.
      value: float[B, S, J, K].
      axes: those that the layer got; where rows are not in slices, this is `attend_over_axis`.
      segment_ids: int[B, S], the sample of each position of packed rows; None: a row is one sample.
      window: how many keys a query sees at most, as in `attend`.

    Returns:
      float[B, S, H, K].
    """
    if not isinstance(axes, SlicedAxes):
        return attend_over_axis(query, key, value, axes=axes, segment_ids=segment_ids, window=window)
    own = key, value, segment_ids
    whole = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), axes.earlier(own), own)
    return attend_last(query, *whole, window=window)


def attend_last(
    query: Float[Array, "B S H K"],
    key: Float[Array, "B T J K"],
    value: Float[Array, "B T J K"],
    segment_ids: Integer[Array, "B T"] | None = None,
    *,
    window: int | Integer[Array, ""] | None = None,
    implementation: AttentionImplementation = "auto",
) -> Float[Array, "B S H K"]:
    """What causal attention of all positions gives for the last S of them; without segments a row is one sample."""
    before = key.shape[1] - query.shape[1]
    how: Any = {"query_offset": before, "window": window, "implementation": implementation}
    if segment_ids is not None:
        how |= {"segment_ids": segment_ids[:, before:], "key_segment_ids": segment_ids}
    return attend(query, key, value, **how)


def sliced_model(config: DecoderConfig) -> LayeredModel:
    """The built-in model by layers, through which rows go whole or in slices.

    Args:
      config: the model that the parameters belong to.

    Returns:
      `LayeredModel`: `jvarlen.models.layered`, whose layers also take slices.
    """
    model = layered(config)
    of_layer = graphs_of(dataclasses.replace(config, num_layers=1, windows=()))[2]

    def layer(params: nnx.State, x_BxSxD: jax.Array, microbatch: Any, axes: Axes) -> jax.Array:
        if not isinstance(axes, SlicedAxes):
            return model.layer(params, x_BxSxD, microbatch, axes)
        check_tensor_divides(axes, num_heads=config.num_heads, num_kv_heads=config.kv_heads)
        block: DecoderLayer = nnx.merge(of_layer, params)
        rows = rows_of(microbatch, axes)
        query, key, value = block.project(x_BxSxD, rows.positions, microbatch.tokens.shape[1], axes)
        window = window_of(config, axes.layer)
        attended = attend_over_slices(query, key, value, axes=axes, segment_ids=rows.segment_ids, window=window)
        return block.finish(x_BxSxD, attended, axes)

    return model._replace(layer=layer)
