"""The forward and backward passes of a model by layers on one device, for one microbatch.

A derivative of a scan over the layers would leave to JAX what is held and when. Here the flow is written out:

1. `forward_embed` gives x, the input of the first layer.
2. `forward` loops over the layers. Each writes its residuals, what its backward pass needs, into a slot of one buffer.
3. `sum_loss` gives the sums of the loss, and at once the gradients of the ends that it uses and of x.
4. `backward` loops over the layers in reverse. Each reads its residuals, turns the gradient of its output into that of
   its input, and adds that of its parameters to the sums, in place. With `weights_apart`, for pipelines, it writes what
   these need into slots instead, and `weights` adds them in a later action.
5. `backward_embed` adds the gradients of the ends that `embed` uses.

So a device holds its parameters, the sums of gradients, and the residuals of a microbatch; beside these, the gradient
of one layer in steps 2 and 4, or whole ends and their gradients in steps 1, 3 and 5. Where ZeRO shards the sums, each
gradient is reduced to its shard before it is added; where it shards the parameters, each layer is gathered when it is
needed, and the next one in the same turn of the loop, while this one computes. Zeros, and gradients of the ends, wait
for the loops that they would otherwise be held through. Letters: L layers of the device, all of the model or those of
a stage.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Var

from jvarlen._common.jaxprs import with_zeros
from jvarlen._common.types import Array, Grads, Key, Microbatch, Params, PyTree, Shapes, Specs, Sums
from jvarlen.distributed.layout import ReduceDtype, Remat
from jvarlen.parallel.layers import LayeredModel, LayeredParams, axes_of, check_layer, num_layers_of
from jvarlen.parallel.passes import Passes, floats_of, split_passes, with_floats
from jvarlen.parallel.zero import along_data, gather_shards, reduce_to_shard, specs_of_layer
from jvarlen.training.losses import bind_loss
from jvarlen.training.step_sums import StepSums, sums_of_outputs
from jvarlen.training.train_state import TrainState
from jvarlen.training.trainable import merge_trained, where_trained

__all__ = [
    "DeviceLayers", "Given", "Part", "add_at", "add_trees", "buffer_of", "put_at", "read_at", "when",
    "wide_zeros", "zeros_for",
]  # fmt: skip

_EARLY_BYTES = 30 * 2**20  # XLA makes one collective of these on GPUs by default
# XLA starts a collective as late as still hides it, by costs that it takes for granted. It schedules from the end: what
# is delayed so comes before all else of a loop's turn. On its other stream, other collectives need not wait for it.
_EARLY = {"scheduler_hint": "force_delay_async", "scheduler_delay_priority": "1", "_xla_gpu_collective_stream": "p2p"}


Given: TypeAlias = tuple[Microbatch, Key]  # a microbatch and its key


class Part(NamedTuple):
    """The layers that a loop runs on a microbatch."""

    given: Given
    num_layers: int
    index: Array = 0  # of the first one in the model
    place: Array = 0  # of the first one on the device
    slot: Array = 0  # of the residuals of the first one
    num_there: Array = None  # how many of them the model has, where it may have fewer; the others are skipped


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DeviceLayers:
    """The passes of a microbatch on one device; `given` is that and its key."""

    # Where a whole layer is gathered from shards, a loop gathers the next layer while one computes: it takes `ahead`,
    # its first layer gathered, and returns the one that is next after it.

    model: LayeredModel
    params: LayeredParams  # stacked
    trained: LayeredParams  # a tree like the parameters, None in place of those that have no gradient
    num_layers: int  # of the model
    first: Given  # the first of what is given
    remat: Remat
    weights_apart: bool = False  # whether weight gradients are a separate pass
    param_specs: LayeredParams  # what the data axes shard
    grad_specs: LayeredParams  # of the sums of gradients
    reduce_dtype: ReduceDtype = "float32"

    @property
    def has_grads(self) -> bool:
        """Whether anything is trained."""
        return bool(jax.tree.leaves(self.trained))

    @functools.cached_property
    def has_backward(self) -> bool:
        """Whether layers keep residuals."""
        return bool(jax.tree.leaves((self.trained.layers, self.trained_in_embed)))

    @functools.cached_property
    def sum_shapes(self) -> LayeredParams:
        """Shapes of the sums of gradients."""
        ends = jax.eval_shape(lambda: self._reduce_ends(where_trained(self.trained.ends, self.ends())))
        of_layer = jax.eval_shape(self._reduce_layer, where_trained(self.trained.layers, self._layer_shapes))
        return LayeredParams(ends, jax.eval_shape(lambda: buffer_of(of_layer, num_layers_of(self.params))))

    @functools.cached_property
    def residual_shapes(self) -> tuple[Shapes, Shapes]:
        """Shapes of the residuals of a layer's forward pass, and of what its backward pass hands on."""
        if not self.has_backward:
            return (), ()
        layer, *others = self.layer_arguments
        trained = where_trained(self.trained.layers, layer)
        _, kept = jax.eval_shape(self.passes.forward, trained, self.x, layer, *others)
        _, handed = jax.eval_shape(self.passes.backward, trained, kept, floats_of(self.x), layer, *others)
        return kept, handed if self.weights_apart else ()

    @functools.cached_property
    def x(self) -> Shapes:
        """Shapes of the activations between layers."""
        return jax.eval_shape(lambda given: self.embed(self.ends(), *given), self.first)

    def ends(self) -> Params:
        """Whole ends; what a caller does not use of them is not gathered."""
        return gather_shards(self.params.ends, self.param_specs.ends)

    def embed(self, ends: Params, microbatch: Microbatch, key: Key) -> PyTree:
        """The input of the first layer."""
        axes = axes_of(key, self.num_layers)
        return jax.tree.map(jnp.asarray, self.model.embed(ends, microbatch, axes))

    def loss(self, ends: Params, x: PyTree, microbatch: Microbatch, key: Key) -> tuple[PyTree, ...]:
        """The result of `LayeredModel.loss`."""
        return self.model.loss(ends, x, microbatch, axes_of(key, self.num_layers + 1))

    @functools.cached_property
    def trained_in_embed(self) -> Params:
        """The ends that `embed` uses and that are trained."""
        return self._where_used(self.embed, *self.first)

    @functools.cached_property
    def trained_in_loss(self) -> Params:
        """The ends that `loss` uses and that are trained."""
        return self._where_used(self.loss, self.x, *self.first)

    def _where_used(self, call: Callable[..., PyTree], *others: PyTree) -> PyTree:
        ends = jax.eval_shape(self.ends)
        jaxpr = jax.make_jaxpr(call)(ends, *others).jaxpr
        taken = (*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars)
        used = {var for atoms in taken for var in atoms if isinstance(var, Var)}
        variables = jax.tree.unflatten(jax.tree.structure(ends), jaxpr.invars[: len(jax.tree.leaves(ends))])
        trained = self.trained.ends
        return jax.tree.map(lambda leaf, var: leaf if var in used else None, trained, where_trained(trained, variables))

    @functools.cached_property
    def _embed_passes(self) -> Passes:
        """The passes of `embed`, as a function of the trained ends."""

        def run(trained: Params, _: tuple[()], ends: Params, *given: PyTree) -> PyTree:
            return self.embed(merge_trained(trained, ends), *given)

        ends = jax.eval_shape(self.ends)
        return split_passes(run, where_trained(self.trained_in_embed, ends), (), ends, *self.first, remat=self.remat)

    def forward_embed(self, given: Given) -> tuple[PyTree, list[Array]]:
        """The input of the first layer, and what the backward pass of `embed` needs."""
        ends = self.ends()
        if not self.has_backward:
            return self.embed(ends, *given), []
        return self._embed_passes.forward(where_trained(self.trained_in_embed, ends), (), ends, *given)

    def backward_embed(self, residuals: list[Array], of_x: list[Array], given: Given, totals: Grads) -> Grads:
        """The sums for the ends with gradients of those that `embed` uses."""
        if not self.has_backward:
            return totals
        ends = self.ends()
        trained = where_trained(self.trained_in_embed, ends)
        dtypes = sorted({leaf.dtype for leaf in jax.tree.leaves(trained)}, key=str)

        # Zeros of whole gradients wait for those of x: a compiler may make constants before the loop over layers.
        of_x, zeros = jax.lax.optimization_barrier((of_x, [jnp.zeros((), dtype) for dtype in dtypes]))
        of_ends = with_zeros(
            lambda of_x: self._embed_passes.backward(trained, residuals, of_x, ends, *given)[1], zeros
        )(of_x)
        return self.add_ends(totals, of_ends)

    def sum_loss(self, x: PyTree, given: Given) -> tuple[StepSums, Grads, list[Array]]:
        """The sums of the loss, and the gradients of what is trained of the ends and of the floats of x."""
        (microbatch, key), ends = given, self.ends()

        def loss_fn(trained_and_floats: PyTree, microbatch: Microbatch) -> tuple[PyTree, ...]:
            trained, floats = trained_and_floats
            return self.loss(merge_trained(trained, ends), with_floats(x, floats), microbatch, key)

        of = where_trained(self.trained_in_loss, ends), floats_of(x)
        loss = bind_loss(loss_fn, TrainState(None, None))
        grads: Grads = jax.tree.map(lambda _: None, of[0]), []
        if self.has_grads:
            (loss_sum, outputs), grads = jax.value_and_grad(loss, has_aux=True)(of, microbatch, None)
        else:
            loss_sum, outputs = loss(of, microbatch, None)
        return sums_of_outputs(loss_sum, outputs, microbatch, self.trained), *grads

    def add_ends(self, totals: Grads, grads: Grads) -> Grads:
        """The sums for the ends, None where there are none yet, with gradients of some of them."""

        def add(total: Array, grad: Array) -> Array:
            return total if grad is None else grad if total is None else total + grad

        return jax.tree.map(add, totals, self._reduce_ends(grads), is_leaf=lambda leaf: leaf is None)

    def _reduce_ends(self, grads: Grads) -> Grads:
        return self._reduce(grads, where_trained(grads, self.grad_specs.ends))

    def _reduce_layer(self, grads: Grads) -> Grads:
        return self._reduce(grads, specs_of_layer(self.grad_specs.layers))

    def _reduce(self, grads: Grads, specs: Specs) -> Grads:
        return jax.tree.map(functools.partial(reduce_to_shard, sent=self.reduce_dtype), grads, specs)

    @functools.cached_property
    def passes(self) -> Passes:
        """The passes of a layer, as a function of its trained arrays; all passes also take the whole layer."""
        layer, *others = self.layer_arguments
        trained = where_trained(self.trained.layers, layer)

        def run(trained: Params, x: PyTree, layer: Params, *given: PyTree) -> PyTree:
            return self.run_layer(merge_trained(trained, layer), x, *given)

        return split_passes(run, trained, self.x, layer, *others, remat=self.remat, weights_apart=self.weights_apart)

    @functools.cached_property
    def layer_arguments(self) -> tuple[PyTree, ...]:
        """Shapes of what `run_layer` takes beside x."""
        return self._layer_shapes, *self.first, jax.ShapeDtypeStruct((), jnp.int32)

    @functools.cached_property
    def _layer_shapes(self) -> Params:
        return jax.eval_shape(self._layer_at, 0)

    def run_layer(self, layer: Params, x: PyTree, microbatch: Microbatch, key: Key, index: Array) -> PyTree:
        """The output of a layer."""
        following = self.model.layer(layer, x, microbatch, axes_of(key, index, index))
        check_layer(x, following)
        return following

    def _layer_at(self, place: Array) -> PyTree:
        return self._gather(read_at(self.params.layers, place))

    def _gather(self, shards: PyTree) -> PyTree:
        """The whole arrays of a layer from its shards; None where there is None."""
        return gather_shards(shards, where_trained(shards, specs_of_layer(self.param_specs.layers)))

    @functools.cached_property
    def _is_early(self) -> PyTree:
        """Whether each array of a layer is gathered first in a turn: the smallest are, at least one."""
        leaves, structure = jax.tree.flatten(self._layer_shapes)
        specs = jax.tree.leaves(self.param_specs.layers)
        num_bytes = np.array([
            np.inf if along_data(spec) is None else leaf.size * leaf.dtype.itemsize
            for leaf, spec in zip(leaves, specs, strict=True)
        ])  # fmt: skip
        order = np.argsort(num_bytes, kind="stable")  # the same on every process
        first = order[np.cumsum(num_bytes[order]) <= max(_EARLY_BYTES, num_bytes.min())]
        return jax.tree.unflatten(structure, [i in first for i in range(len(leaves))])

    def ahead(self, place: Array) -> PyTree:
        """A gathered layer; None where layers are not sharded."""
        return self._layer_at(place) if any(map(along_data, jax.tree.leaves(self.param_specs.layers))) else None

    def forward(self, part: Part, x: PyTree, kept: PyTree, ahead: PyTree = None) -> tuple[PyTree, PyTree, Params]:
        """The output, residuals in their slots, and the last layer, or the first one where nothing goes backward."""

        def turn(i: Array, carry: tuple[PyTree, PyTree], layer: Params) -> tuple[PyTree, PyTree]:
            x, kept = carry
            if not self.has_backward:
                return self.run_layer(layer, x, *part.given, part.index + i), kept
            trained = where_trained(self.trained.layers, layer)
            x, residuals = self.passes.forward(trained, x, layer, *part.given, part.index + i)
            return x, put_at(kept, residuals, part.slot + i)

        last = part.num_layers - 1

        def following(i: Array) -> Array:
            return jnp.minimum(i + 1, last) if self.has_backward else (i + 1) % part.num_layers

        (x, kept), ahead = self._loop(turn, (x, kept), part, ahead, following)
        return x, kept, ahead

    def backward(
        self, part: Part, kept: PyTree, of_y: list[Array], into: PyTree, ahead: PyTree = None
    ) -> tuple[list[Array], PyTree, Params]:
        """The gradients of x, the sums with those of layers, or what is handed on in its slots, and the first layer."""
        if not self.has_backward:
            return of_y, into, ahead

        def turn(i: Array, carry: tuple[PyTree, PyTree], layer: Params) -> tuple[PyTree, PyTree]:
            of_y, into = carry
            given = where_trained(self.trained.layers, layer), read_at(kept, part.slot + i), of_y
            of_x, found = self.passes.backward(*given, layer, *part.given, part.index + i)
            if self.weights_apart:
                return of_x, put_at(into, found, part.slot + i)
            return of_x, add_at(into, self._reduce_layer(found), part.place + i)

        (of_x, into), ahead = self._loop(turn, (of_y, into), part, ahead, lambda i: jnp.maximum(i - 1, 0), reverse=True)
        return of_x, into, ahead

    def weights(self, part: Part, kept: PyTree, handed: PyTree, totals: Grads) -> Grads:
        """The sums with the gradients of these layers."""
        if not self.has_backward:
            return totals
        weights = self.passes.weights
        assert weights is not None

        def turn(i: Array, totals: Grads, layer: Params) -> PyTree:
            given = where_trained(self.trained.layers, layer), *(read_at(x, part.slot + i) for x in (kept, handed))
            return add_at(totals, weights(*given, layer, *part.given, part.index + i), part.place + i)

        return self._loop(turn, totals, part, None, lambda i: i)[0]

    def _loop(
        self,
        turn: Callable[[Array, PyTree, Params], PyTree],
        carry: PyTree,
        part: Part,
        ahead: PyTree,
        following: Callable[[Array], Array],
        *,
        reverse: bool = False,
    ) -> tuple[PyTree, Params]:
        """Runs `turn(i, carry, layer)` over layers i; `following(i)`, the next one, is gathered meanwhile."""
        gathers = ahead is not None

        def part_of(shards: PyTree, *, early: bool) -> PyTree:
            return jax.tree.map(lambda is_early, leaf: leaf if is_early == early else None, self._is_early, shards)

        # What a turn gathers is read in the turn before: XLA may read it in one kernel with what needs a product, and
        # gather first what else fits into one collective.
        def run(given: tuple[PyTree, Params, Params], i: Array) -> tuple[tuple[PyTree, Params, Params], None]:
            carry, layer, shards = given
            if part.num_there is not None:
                own = lambda i, carry: turn(i, carry, self._layer_at(part.place + i))  # noqa: E731
                return (when(i < part.num_there, own, i, carry), None, None), None
            ahead = None
            if gathers:  # needs nothing that this turn computes
                with set_xla_metadata(**_EARLY):
                    ahead = self._gather(part_of(shards, early=True))
                ahead = merge_trained(ahead, self._gather(part_of(shards, early=False)))
                shards = read_at(self.params.layers, following(following(i)))
            layer = self._layer_at(part.place + i) if layer is None else layer
            return (turn(i, carry, layer), ahead, shards), None

        indices = jnp.arange(part.num_layers, dtype=jnp.int32)
        first = following(indices[-1 if reverse else 0])
        shards = read_at(self.params.layers, first) if gathers else None
        return jax.lax.scan(run, (carry, ahead, shards), indices, reverse=reverse)[0][:2]


def when(
    is_taken: jax.Array, run: Callable[[Array, PyTree], PyTree], t: Array, carry: PyTree, scope: str = "branch"
) -> PyTree:
    """`run(t, carry)` in a turn in which it is taken, or else the carry."""
    # A loop of one turn or none, which changes its carry in place: XLA copies what passes through the branches of a
    # conditional. All that it computes follows from t, or XLA might compute it before the loop, whether taken or not.
    # Estimates know it by its scope.
    with jax.named_scope(scope):
        return jax.lax.fori_loop(t, t + is_taken.astype(t.dtype), run, carry)


def buffer_of(value: PyTree, num_slots: int) -> PyTree:
    """Zeros in the shapes of a value, in as many slots, at least one."""
    return jax.tree.map(lambda leaf: jnp.zeros((max(1, num_slots), *leaf.shape), leaf.dtype), value)


def read_at(arrays: PyTree, place: Array) -> PyTree:
    """The arrays at a place of the leading axis; anything for place −1."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, place, keepdims=False), arrays)


def put_at(arrays: PyTree, values: PyTree, place: Array) -> PyTree:
    """The arrays with values at a place."""
    return jax.tree.map(lambda leaf, value: jax.lax.dynamic_update_index_in_dim(leaf, value, place, 0), arrays, values)


def add_at(totals: Grads, values: PyTree, place: Array) -> PyTree:
    """The sums with values added at a place."""
    return put_at(totals, add_trees(read_at(totals, place), values), place)


def add_trees(sums: Sums, more: PyTree) -> PyTree:
    """The sums and more, in the types of the sums."""
    return jax.tree.map(lambda total, value: total + value.astype(total.dtype), sums, more)


def zeros_for(shapes: Shapes, zero: Array = 0) -> PyTree:
    """Zeros of these shapes and dtypes."""
    return jax.tree.map(lambda leaf: jnp.full(leaf.shape, zero, leaf.dtype), shapes)


def wide_zeros(leaf: jax.Array) -> jax.Array:
    """Zeros in the shape of an array, in float32 at least."""
    return jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32))
