"""The sums of a step, accumulated over the microbatches of a shard.

They are divided once, after `reduction`, so every split of a step has the same gradient. Letters: M microbatches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.pytree import differences, is_key, leaves_by_name
from jvarlen._common.types import Array, Batch, Extra, Grads, Key, Microbatch, Params, PyTree, Shapes, Sums
from jvarlen.batches.batches import count_tokens
from jvarlen.training.losses import LossFn, LossOutputs, bind_loss
from jvarlen.training.train_state import MicrobatchKeys, TrainState, divide_once, has_keys, keys_of_microbatches
from jvarlen.training.trainable import TrainedOf, merge_trained, select_trained

__all__ = [
    "LossProgram", "NextExtra", "StepSums", "SumsFn", "SumsOf", "accumulate", "check_same_sums", "field_of", "first_of",
    "microbatches_of", "next_extra", "split_step", "step_key", "sum_on_device", "sums_of_outputs",
]  # fmt: skip


class NextExtra(NamedTuple):
    """The next `extra` itself, of a loss of the whole step."""

    value: PyTree


class StepSums(NamedTuple):
    """Sums over microbatches, in float32 at least."""

    loss_sum: jax.Array  # float[]
    weight_sum: jax.Array  # float[]
    num_tokens: jax.Array | None = None  # float[]; None if the batch does not say
    sums: Mapping[str, Sums] = {}  # further ones that the loss returns
    # How leaves of `extra` change, but keys: Σ weight · change of floats, Σ change of integers, how often bools change.
    extra: tuple[jax.Array, ...] | NextExtra = ()
    grads: Grads = None  # a pytree like the parameters, None in place of those without gradient

    @property
    def loss(self) -> jax.Array:
        """The loss of the step."""
        return divide_once(self.loss_sum, self.weight_sum)


SumsFn: TypeAlias = Callable[[TrainState, Batch], StepSums]
"""The sums of a whole step."""


class SumsOf(NamedTuple):
    """The sums of a step of one group; or those of several, which are added first and reduced once."""

    whole: SumsFn  # of a step of one group
    accumulate: Callable[[TrainState, Batch, Array, StepSums | None], StepSums]  # first microbatch, sums before it
    reduce: Callable[[TrainState, StepSums], StepSums]
    shardings: Callable[[TrainState], PyTree]  # of sums between groups, a prefix of them; None: one device


@dataclasses.dataclass(frozen=True)
class LossProgram:
    """A loss, and which parameters have gradients: what every split of a step evaluates microbatch by microbatch."""

    loss_fn: LossFn
    trained_of: TrainedOf | None = select_trained  # None: no gradients
    gather: Callable[[Params], Params] | None = None  # whole parameters from those of the state, in each microbatch

    @property
    def sums_of(self) -> SumsOf:
        """The sums of a step on one device, accumulated over its microbatches."""

        def sum_given(state: TrainState, given: PyTree, before: StepSums | None) -> StepSums:
            return accumulate(self.bind(state), given, before)

        return sum_on_device(sum_given, lambda state, sums: sums)

    def sum_microbatch(self, state: TrainState, microbatch: Microbatch, key: Key | MicrobatchKeys = None) -> StepSums:
        """The sums of one call of the loss; the key is one of those of `split_step`."""
        if isinstance(key, MicrobatchKeys):
            state, key = state._replace(extra=key.put_in(state.extra)), key.key
        elif has_keys(state.extra):
            raise UserError(
                "this step has no keys for the random state in extra: take it out, and let the loss take key"
            )
        loss = bind_loss(self.loss_fn, state)
        params, grads = state.params if self.gather is None else self.gather(state.params), None
        if self.trained_of is not None:

            def loss_of(trained: Params, *args: PyTree) -> tuple[jax.Array, LossOutputs]:
                return loss(merge_trained(trained, params), *args)

            trained = self.trained_of(params)
            (loss_sum, outputs), grads = jax.value_and_grad(loss_of, has_aux=True)(trained, microbatch, key)
        else:
            loss_sum, outputs = loss(params, microbatch, key)
        # Sums of many small numbers: whatever they are computed in, they are added in float32 at least.
        grads = jax.tree.map(lambda grad: grad.astype(grad.dtype if _bits(grad) >= 32 else jnp.float32), grads)
        sums = sums_of_outputs(loss_sum, outputs, microbatch, grads)
        if outputs.extra is not None:
            sums = sums._replace(extra=_changes_of_extra(state.extra, outputs.extra, sums.weight_sum))
        return sums._replace(grads=grads)

    def bind(self, state: TrainState) -> Callable[[tuple[Microbatch, Key]], StepSums]:
        """`sum_microbatch` of a microbatch and its key, traced once for each set of shapes."""
        # A step needs it for the shapes of its sums, for checks, and in its loop, and tracing a loss takes long.
        traced: dict[Hashable, tuple[ClosedJaxpr, Shapes]] = {}

        def whole(microbatch_and_key: tuple[Microbatch, Key]) -> StepSums:
            return self.sum_microbatch(state, *microbatch_and_key)

        def one(microbatch_and_key: tuple[Microbatch, Key]) -> StepSums:
            leaves, structure = jax.tree.flatten(microbatch_and_key)
            # Evaluated again rather than inlined by JAX, which gives all operations the line of this call.
            shapes = structure, *map(jax.typeof, leaves)
            if shapes not in traced:
                traced[shapes] = jax.make_jaxpr(whole, return_shape=True)(microbatch_and_key)
            jaxpr, returned = traced[shapes]
            return jax.tree.unflatten(jax.tree.structure(returned), jaxpr_as_fun(jaxpr)(*leaves))

        return one


def split_step(state: TrainState, batch: Batch, first: Array = None) -> tuple[Batch, Key | MicrobatchKeys]:
    """The batch, with a leading axis M on all its arrays, and the keys of all microbatches from that of the step."""
    # `first`: which microbatch of the step the first one is; None: its first.
    num_microbatches = microbatches_of(batch)
    microbatches = jax.tree.map(lambda leaf: leaf if leaf.ndim else jnp.broadcast_to(leaf, (num_microbatches,)), batch)
    indices = jnp.arange(num_microbatches) if first is None else first + jnp.arange(num_microbatches)
    if (key := step_key(state)) is not None:
        key = jax.vmap(jax.random.fold_in, (None, 0))(key, indices)
    return microbatches, keys_of_microbatches(state.extra, state.step, indices, key)


def sum_on_device(
    sum_given: Callable[[TrainState, PyTree, StepSums | None], StepSums],  # microbatches and keys, sums before them
    reduce: Callable[[TrainState, StepSums], StepSums],
) -> SumsOf:
    """The sums of a step on one device."""

    def whole(state: TrainState, batch: Batch) -> StepSums:
        return reduce(state, sum_given(state, split_step(state, batch), None))

    def accumulate(state: TrainState, batch: Batch, first: Array, before: StepSums | None) -> StepSums:
        return sum_given(state, split_step(state, batch, first), before)

    def compiled(run: Callable[..., StepSums]) -> Callable[..., StepSums]:
        """The same function, compiled where it is not traced."""

        def call(state: TrainState, *given: PyTree) -> StepSums:
            given = state._replace(opt_state=None), *given
            is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(given))
            return (run if is_traced else jax.jit(run))(*given)

        return call

    return SumsOf(compiled(whole), compiled(accumulate), compiled(reduce), lambda state: None)


def step_key(state: TrainState) -> jax.Array | None:
    """The key of a step, which the index of a microbatch is folded into; None if the state has none."""
    if state.key is None:
        return None
    if state.step is None:
        raise UserError("the state has a key and no step: step.init(…, seed=0) gives it both")
    return jax.random.fold_in(state.key, state.step)


def next_extra(extra: Extra, sums: StepSums) -> PyTree:
    """The next `extra`, by the rule of `make_train_step`."""
    if isinstance(sums.extra, NextExtra):
        return sums.extra.value
    leaves, structure = jax.tree.flatten(extra)
    changes = iter(sums.extra)

    def change_leaf(leaf: jax.Array) -> jax.Array:
        if is_key(leaf):
            return leaf
        change = next(changes)
        if leaf.dtype == np.bool_:
            return leaf ^ (change > 0)
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return leaf + change.astype(leaf.dtype)
        start, mean = leaf.astype(change.dtype), divide_once(change, sums.weight_sum)
        is_set = ~jnp.isfinite(leaf) & (sums.weight_sum != 0)  # the changes were counted from 0
        return jnp.where(is_set, mean, start + mean).astype(leaf.dtype)

    return jax.tree.unflatten(structure, [change_leaf(leaf) for leaf in leaves])


def microbatches_of(batch: Batch) -> int:
    """M: the leading axis of a step's arrays; raises ValueError if it differs between them, or if there are none."""
    axes = {name: leaf.shape[0] for name, leaf in leaves_by_name(batch).items() if leaf.ndim}
    if len(set(axes.values())) != 1:
        raise UserError(f"arrays of a batch must begin with the same axis, the microbatches of the step: {axes}")
    return next(iter(axes.values()))


def field_of(batch: Batch, name: str) -> PyTree:
    """A field of a batch, which is an object with attributes or a mapping; None if it has no such field."""
    return batch.get(name) if isinstance(batch, Mapping) else getattr(batch, name, None)


def sums_of_outputs(loss_sum: jax.Array, outputs: LossOutputs, microbatch: Microbatch, grads: Grads) -> StepSums:
    """The sums of one call of the loss without gradients, which tell by their types that sums are to be wide."""
    # All but gradients are added in the widest type of what the loss returns and of gradients: one all-reduce takes
    # them along.
    is_wide = any(_bits(leaf) == 64 for leaf in jax.tree.leaves((loss_sum, outputs, grads)))
    sum_type = jnp.float64 if is_wide else jnp.float32
    num_tokens = field_of(microbatch, "num_tokens")
    num_tokens = count_tokens(microbatch, sum_type) if num_tokens is None else jnp.sum(num_tokens).astype(sum_type)
    return StepSums(
        loss_sum=loss_sum.astype(sum_type),
        weight_sum=outputs.weight_sum.astype(sum_type),
        num_tokens=num_tokens,
        sums=jax.tree.map(lambda leaf: leaf.astype(sum_type), outputs.sums),
    )


def accumulate(
    one: Callable[[PyTree], StepSums],
    microbatches: Batch,
    before: StepSums | None = None,
    *,
    last_apart: bool = False,
) -> StepSums:
    """The sums over microbatches; `last_apart` runs the last one after the loop, so that reducing overlaps with it."""
    # `before`: what they are added to.

    def add(sums: StepSums, microbatch: Microbatch) -> tuple[StepSums, None]:
        return jax.tree.map(jnp.add, sums, one(microbatch)), None

    first = first_of(microbatches)
    is_one = all(leaf.shape[0] == 1 for leaf in jax.tree.leaves(microbatches))
    if is_one and before is None:
        return one(first)  # a loop of one turn, and its sums with zero, would cost time and memory
    shapes = jax.eval_shape(one, first)
    begin = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes) if before is None else before
    check_same_sums(begin, shapes)
    if is_one:
        return add(begin, first)[0]
    if not last_apart:
        return jax.lax.scan(add, begin, microbatches)[0]
    earlier, last = (jax.tree.map(lambda leaf, part=part: leaf[part], microbatches) for part in (np.s_[:-1], -1))
    return add(jax.lax.scan(add, begin, earlier)[0], last)[0]


def check_same_sums(before: StepSums, added: StepSums) -> None:
    """Raises ValueError if what a group adds has other shapes or dtypes than the sums before it."""
    if differing := differences(before, added):
        listed = (f"{name[1:]}: {change}" for name, change in differing.items())
        raise UserError(
            "the sums of all groups of a step are added, whatever their buckets, and must have the same shapes and "
            f"dtypes: {list_first(listed, '; ')}"
        )


def first_of(microbatches: Batch) -> PyTree:
    """The first microbatch."""
    return jax.tree.map(lambda leaf: leaf[0], microbatches)


def _bits(leaf: jax.Array) -> int:
    return jnp.finfo(leaf.dtype).bits if jnp.issubdtype(leaf.dtype, jnp.inexact) else 32


def _changes_of_extra(old: Extra, new: Extra, weight_sum: jax.Array) -> tuple[jax.Array, ...]:
    """`StepSums.extra` of a microbatch; 0 without weight, never NaN."""
    changes = []
    for before, after in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        if is_key(before):
            continue
        if before.dtype == np.bool_:
            change = (after ^ before).astype(weight_sum.dtype)  # as what is added beside it
        elif jnp.issubdtype(before.dtype, jnp.integer):
            change = after - before  # which wraps around, as adding it will
            change = change if change.dtype.itemsize >= 4 else change.astype(jnp.int32)  # that collectives always have
        else:
            wide = np.promote_types(before.dtype, weight_sum.dtype)
            start = jnp.where(jnp.isfinite(before), before, jnp.zeros_like(before))  # a minimum may begin at infinity
            change = weight_sum * (after.astype(wide) - start.astype(wide))
        changes.append(jnp.where(weight_sum != 0, change, jnp.zeros_like(change)))
    return tuple(changes)
