"""Loops over the layers of a model: forward, which keep residuals, and backward, which add gradients to their sums.

Letters: L layers of the loop, all of a model or those of a chunk of a stage.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jvarlen.distributed.layout import Remat
from jvarlen.parallel.layers import axes_at, check_layer
from jvarlen.parallel.passes import Passes, split_passes
from jvarlen.training.trainable import merge_trained, where_trained

__all__ = ["LayerLoop", "widened"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LayerLoop:
    """The loops of layers that are stacked, [L, …]. `given` is a microbatch and its key; `first` a layer's index.

    Where `gather` makes a whole layer of shards, a loop gathers the next layer while one computes: it takes `ahead`,
    its first layer gathered, and returns the one that is next after it.
    """

    layer: Callable[..., Any]  # of the model
    example: tuple[Any, ...]  # a whole layer, x, a microbatch and its key; arrays or shapes
    trained: Any  # a tree like a layer, None in place of what has no gradient
    remat: Remat = "none"
    weights_apart: bool = False  # whether passes have weight gradients of their own
    gather: Callable[[Any], Any] | None = None
    reduce: Callable[[Any], Any] = lambda grads: widened(grads)  # gradients of a layer to what their sums add up

    @functools.cached_property
    def passes(self) -> Passes:
        """Those of a layer, as a function of what is trained; the whole layer is with what all passes take."""
        own, x, *given = self.example
        trained, index = where_trained(self.trained, own), jax.ShapeDtypeStruct((), jnp.int32)
        options: dict[str, Any] = {"remat": self.remat, "weights_apart": self.weights_apart}
        return split_passes(self._run_trained, trained, x, own, *given, index, **options)

    def _run_trained(self, trained: Any, x: Any, own: Any, *given: Any) -> Any:
        return self._run_layer(merge_trained(trained, own), x, *given)

    def _run_layer(self, own: Any, x: Any, microbatch: Any, key: Any, index: Any) -> Any:
        following = self.layer(own, x, microbatch, axes_at(key, index))
        check_layer(x, following)
        return following

    def at(self, layers: Any, index: Any) -> Any:
        """A layer as a loop computes with it; None where it needs none ahead of its turn."""
        if self.gather is None:
            return None
        return self.gather(jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), layers))

    def run(self, layers: Any, x: Any, given: tuple[Any, Any], *, first: Any = 0, ahead: Any = None) -> tuple[Any, Any]:
        """The output, and the first layer again."""

        def turn(x: Any, index: Any, own: Any) -> tuple[Any, None]:
            return self._run_layer(own, x, *given, index), None

        num_layers = jax.tree.leaves(layers)[0].shape[0]
        x, ahead, _ = self._loop(turn, x, layers, first, ahead, lambda i: (i + 1) % num_layers)
        return x, ahead

    def forward(
        self, layers: Any, x: Any, given: tuple[Any, Any], *, first: Any = 0, ahead: Any = None
    ) -> tuple[Any, list[Any], Any]:
        """The output, the residuals of all layers, and the last layer again."""

        def turn(x: Any, index: Any, own: Any) -> tuple[Any, list[Any]]:
            return self.passes.forward(where_trained(self.trained, own), x, own, *given, index)

        last = jax.tree.leaves(layers)[0].shape[0] - 1
        x, ahead, residuals = self._loop(turn, x, layers, first, ahead, lambda i: jnp.minimum(i + 1, last))
        return x, residuals, ahead

    def backward(
        self,
        layers: Any,
        residuals: list[Any],
        of_y: list[Any],
        given: tuple[Any, Any],
        totals: Any,
        *,
        first: Any = 0,
        ahead: Any = None,
    ) -> tuple[list[Any], Any, Any]:
        """The gradients of x, the totals with those of all layers added in place, and the first layer again."""

        def turn(carry: tuple[Any, Any], index: Any, own: Any, residuals: list[Any]) -> tuple[tuple[Any, Any], Any]:
            of_y, totals = carry
            of_x, grads = self.passes.backward(where_trained(self.trained, own), residuals, of_y, own, *given, index)
            added = jax.tree.map(functools.partial(_add_at, index=index - first), totals, self.reduce(grads))
            return (of_x, added), None

        (of_x, totals), ahead, _ = self._loop(
            turn, (of_y, totals), layers, first, ahead, lambda i: jnp.maximum(i - 1, 0), residuals, reverse=True
        )
        return of_x, totals, ahead

    def no_sums(self, num_layers: int, zero: Any = 0) -> Any:
        """The totals of as many layers before anything is added."""
        shapes = jax.eval_shape(self.reduce, where_trained(self.trained, self.example[0]))
        return jax.tree.map(lambda leaf: jnp.full((num_layers, *leaf.shape), zero, leaf.dtype), shapes)

    def _loop(
        self,
        turn: Callable[..., tuple[Any, Any]],
        carry: Any,
        layers: Any,
        first: Any,
        ahead: Any,
        following: Callable[[Any], Any],
        *of_layers: Any,
        reverse: bool = False,
    ) -> tuple[Any, Any, Any]:
        """Scans `turn(carry, index, layer, *of_layers)`; `following(i)` is the layer that is gathered meanwhile."""
        num_layers = jax.tree.leaves(layers)[0].shape[0]

        def run(carry: Any, of_layer: Any) -> tuple[Any, Any]:
            (carry, gathered), (i, own, *others) = carry, of_layer
            ahead = self.at(layers, following(i))  # needs nothing that this turn computes
            carry, made = turn(carry, first + i, own if self.gather is None else gathered, *others)
            return (carry, ahead), made

        each = jnp.arange(num_layers, dtype=jnp.int32), layers if self.gather is None else None, *of_layers
        (carry, ahead), made = jax.lax.scan(run, (carry, ahead), each, reverse=reverse)
        return carry, ahead, made


def widened(grads: Any) -> Any:
    """In float32 at least."""
    return jax.tree.map(lambda grad: grad.astype(jnp.promote_types(grad.dtype, jnp.float32)), grads)


def _add_at(total: jax.Array, grad: jax.Array, index: Any) -> jax.Array:
    """The total with a layer's gradient added in its place."""
    added = jax.lax.dynamic_index_in_dim(total, index, keepdims=False) + grad.astype(total.dtype)
    return jax.lax.dynamic_update_index_in_dim(total, added, index, 0)
