"""The sums of a step: accumulated over the microbatches of a shard, then reduced over the shards, once.

They are divided after that, once, so every split of a step over shards and accumulation has the same gradient.
Letters: M microbatches of a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, PartitionSpec

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.pytree import describe, leaves_by_name
from jvarlen.batches.batches import count_tokens
from jvarlen.distributed.grad_buckets import (
    assign_grad_buckets,
    bucket_bytes_here,
    order_of_grads,
    reduce_in_buckets,
)
from jvarlen.distributed.layout import BucketBytes
from jvarlen.distributed.mesh import auto_axes, axes_in, check_shards_divide, num_shards_of
from jvarlen.training.losses import LossFn, bind_loss, takes_argument, which_are_reduced
from jvarlen.training.train_state import TrainState, divide_once

__all__ = [
    "StepSums",
    "accumulate",
    "bucket_each",
    "check_differentiable",
    "count_once",
    "field_of",
    "microbatches_of",
    "next_extra",
    "reduce_sums",
    "sharded_dims",
    "split_step",
    "step_key",
    "sum_microbatch",
    "sum_step",
]


class StepSums(NamedTuple):
    """Sums over microbatches, in float32 at least."""

    loss_sum: jax.Array  # float[]
    weight_sum: jax.Array  # float[]
    num_tokens: jax.Array | None = None  # float[]; None if the batch does not say
    sums: Mapping[str, Any] = {}  # further ones that the loss returns
    extra: tuple[jax.Array, ...] = ()  # of numeric leaves of `extra`: Σ weight · change of floats, Σ change of integers
    grads: Any = None  # a pytree like the parameters; None where none were asked for

    @property
    def loss(self) -> jax.Array:
        """The loss of the step."""
        return divide_once(self.loss_sum, self.weight_sum)


def sum_step(
    loss_fn: LossFn,
    *,
    mesh: Mesh | None = None,
    axis_name: str | tuple[str, ...] = "data",  # or several axes, over all of which sums are reduced
    rows_along: str | None = None,  # of these, the axis along which the loss computes on parts of rows
    with_grads: bool = True,
    param_specs: Any = None,  # what of each parameter lies along the axis: the loss gets its shard, and gathers it
    perturb: Callable[[Any, Any], Any] | None = None,  # perturb(shards, zeros): parameters with whole gradients
    grad_specs: Any = None,  # what of each gradient lies along the axis after the reduction
    accumulates_shards: bool = False,  # so that no more than one microbatch has whole gradients
) -> Callable[[TrainState, Any], StepSums]:
    """The sums of a whole step: accumulate over each shard's microbatches, then reduce over the shards."""
    # Gradients are reduced once, outside of any loop, unless shards are accumulated. Where the step is traced
    # `with_grad_buckets`, buckets are reduced during the backward pass of the last microbatch, or of each one then.
    mesh = None if mesh is None else auto_axes(mesh)

    def sums_of(state: TrainState, batch: Any) -> StepSums:
        microbatches, keys = split_step(state, batch, takes_key=takes_argument(loss_fn, "key"))
        if mesh is None:
            return accumulate(_microbatch_sums(loss_fn, state, with_grads), (microbatches, keys))
        over = tuple(name for name in axes_in(axis_name) if name != rows_along)
        check_shards_divide(microbatches_of(batch), mesh, over)
        bucket_bytes = bucket_bytes_here() if with_grads else None

        def on_shard(state: TrainState, microbatches: Any) -> StepSums:
            loss, at = loss_fn, state
            param_dims = sharded_dims(param_specs, state.params, axis_name)
            if perturb is not None and with_grads:  # then it is a function of zeros of the whole parameters

                @functools.wraps(loss_fn)
                def loss(zeros: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
                    return loss_fn(perturb(state.params, zeros), *args, **kwargs)

                at = state._replace(params=_whole_zeros(state.params, param_dims, num_shards_of(mesh, axis_name)))
            sums_of_one = _microbatch_sums(loss, at, with_grads)

            def one(microbatch: Any) -> StepSums:
                return count_once(sums_of_one(microbatch), rows_along)

            traced, shapes = jax.make_jaxpr(one, return_shape=True)(_first_of(microbatches))
            for name in axes_in(axis_name):
                are_reduced = jax.tree.unflatten(jax.tree.structure(shapes), which_are_reduced(traced, name))
                _check_reduced(are_reduced, getattr(loss_fn, "__name__", "loss_fn"), name)
            dims = sharded_dims(grad_specs if with_grads else None, shapes.grads, axis_name)
            buckets, unbucketed = _buckets_of(traced, shapes, dims, bucket_bytes)

            def one_in_shards(microbatch: Any) -> StepSums:
                sums = one(microbatch)
                return sums._replace(grads=reduce_in_buckets(sums.grads, buckets, axis_name, dims))

            is_gathered = perturb is None and any(dim is not None for dim in param_dims)
            if accumulates_shards or is_gathered:  # the backward pass of gathering reduces what is sharded
                sums = accumulate(one_in_shards if accumulates_shards else one, microbatches)
                return reduce_sums(sums, axis_name, dims, (), unbucketed)
            sums = accumulate(one, microbatches, last_apart=bucket_bytes is not None)
            return reduce_sums(sums, axis_name, dims, buckets, unbucketed)

        # Unchecked: a checked axis refuses every loop of the loss whose carry starts from a constant, and would put
        # the gradient's all-reduce inside the loop. Other axes of the mesh are left to the compiler.
        split, replicated = PartitionSpec(over), PartitionSpec()
        state_specs: Any = TrainState(replicated if param_specs is None else param_specs, *[replicated] * 4)
        sums_specs: Any = StepSums._make([replicated] * 6)
        if grad_specs is not None and with_grads:
            sums_specs = sums_specs._replace(grads=grad_specs)
        axes_of_params = (axis for spec in jax.tree.leaves(param_specs) for axis in axes_in(spec))
        shards = jax.shard_map(
            on_shard,
            mesh=mesh,
            in_specs=(state_specs, split),
            out_specs=sums_specs,
            axis_names={*axes_in(axis_name), *axes_of_params},
            check_vma=False,
        )
        return shards(state._replace(opt_state=None), (microbatches, keys))

    return sums_of


def count_once(sums: StepSums, rows_along: str | None) -> StepSums:
    """The sums, with tokens that all devices along an axis see counted by the first of them."""
    if rows_along is None or sums.num_tokens is None:
        return sums
    is_first = jax.lax.axis_index(rows_along) == 0
    return sums._replace(num_tokens=jnp.where(is_first, sums.num_tokens, 0))


def split_step(state: TrainState, batch: Any, *, takes_key: bool) -> tuple[Any, Any]:
    """The batch, with a leading axis M on all its arrays, and key[M]; None without keys."""
    num_microbatches = microbatches_of(batch)
    microbatches = jax.tree.map(lambda leaf: leaf if leaf.ndim else jnp.broadcast_to(leaf, (num_microbatches,)), batch)
    key = step_key(state) if takes_key else None
    if key is None:
        return microbatches, None
    return microbatches, jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(num_microbatches))


def step_key(state: TrainState) -> jax.Array | None:
    """The key of a step, which the index of a microbatch is folded into; None if the state has none."""
    if state.key is None:
        return None
    if state.step is None:
        raise UserError("the state has a key and no step: step.init(…, seed=0) gives it both")
    return jax.random.fold_in(state.key, state.step)


def sharded_dims(specs: Any, tree: Any, axis_name: str | tuple[str, ...]) -> tuple[int | None, ...]:
    """Of each array, the dimension that lies along the axis; None: it is whole."""
    if specs is None:
        return (None,) * len(jax.tree.leaves(tree))
    return tuple(spec.index(axis_name) if axis_name in spec else None for spec in jax.tree.leaves(specs))


def _whole_zeros(params: Any, dims: Sequence[int | None], num_shards: int) -> Any:
    """Zeros in the whole shapes of parameters that are in shards along these dimensions."""

    def zeros(shard: jax.Array, dim: int | None) -> jax.Array:
        return jnp.zeros([size * (num_shards if i == dim else 1) for i, size in enumerate(shard.shape)], shard.dtype)

    leaves, structure = jax.tree.flatten(params)
    return jax.tree.unflatten(structure, map(zeros, leaves, dims))


def bucket_each(dims: Sequence[int | None]) -> tuple[Sequence[Sequence[int]], Sequence[int]]:
    """`buckets` and `unbucketed` of `reduce_sums`, where each gradient that becomes a shard is a bucket."""
    sharded, whole = ([i for i, dim in enumerate(dims) if (dim is None) == is_whole] for is_whole in (False, True))
    return [(i,) for i in sharded], whole


def _buckets_of(
    traced: ClosedJaxpr, shapes: StepSums, dims: Sequence[int | None], bucket_bytes: BucketBytes | None
) -> tuple[Sequence[Sequence[int]], Sequence[int]]:
    """`buckets` and `unbucketed` of `reduce_sums`; in neither are whole gradients that are always 0."""
    if bucket_bytes is None:
        return bucket_each(dims)
    num_leaves = len(jax.tree.leaves(shapes))
    used = order_of_grads(traced, range(num_leaves - len(dims), num_leaves))
    sharded = [i for i, dim in enumerate(dims) if dim is not None]
    if not sharded:
        return assign_grad_buckets(shapes.grads, *bucket_bytes, order=used), ()
    order = [i for i in used if dims[i] is not None] + [i for i in sharded if i not in used]
    return assign_grad_buckets(shapes.grads, *bucket_bytes, order=order), [i for i in used if dims[i] is None]


def reduce_sums(
    sums: StepSums,
    axis_name: str | tuple[str, ...],
    dims: Sequence[int | None],  # of `sharded_dims`
    buckets: Sequence[Sequence[int]],  # indices of gradients that have a collective together
    unbucketed: Sequence[int],  # indices of those that are reduced with the other sums
) -> StepSums:
    """The sums over the shards: the reduction of every step."""
    leaves, structure = jax.tree.flatten(reduce_in_buckets(sums.grads, buckets, axis_name, dims))
    reduced = sums._replace(grads=[leaves[i] for i in unbucketed])
    # Where the compiler keeps buckets apart, it would reduce each of these sums by itself.
    packed = assign_grad_buckets(reduced) if bucket_bytes_here() is not None else None
    reduced = jax.lax.psum(reduced, axis_name) if packed is None else reduce_in_buckets(reduced, packed, axis_name)
    for i, leaf in zip(unbucketed, reduced.grads, strict=True):
        leaves[i] = leaf
    return reduced._replace(grads=jax.tree.unflatten(structure, leaves))


def next_extra(extra: Any, sums: StepSums) -> Any:
    """The next `extra`: floats change by the weighted mean of the microbatches' changes, integers by their sum."""
    leaves, structure = jax.tree.flatten(extra)
    changes = iter(sums.extra)

    def changed(leaf: jax.Array) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            change = next(changes)
            return (leaf.astype(change.dtype) + divide_once(change, sums.weight_sum)).astype(leaf.dtype)
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return leaf + next(changes).astype(leaf.dtype)
        return leaf

    return jax.tree.unflatten(structure, [changed(leaf) for leaf in leaves])


def microbatches_of(batch: Any) -> int:
    """M: the leading axis of a step's arrays; raises ValueError if it differs between them, or if there are none."""
    axes = {name: leaf.shape[0] for name, leaf in leaves_by_name(batch).items() if leaf.ndim}
    if len(set(axes.values())) != 1:
        raise UserError(f"arrays of a batch must begin with the same axis, the microbatches of the step: {axes}")
    return next(iter(axes.values()))


def field_of(batch: Any, name: str) -> Any:
    """A field of a batch, which is an object with attributes or a mapping; None if it has no such field."""
    return batch.get(name) if isinstance(batch, Mapping) else getattr(batch, name, None)


def sum_microbatch(
    loss_fn: LossFn, state: TrainState, microbatch: Any, key: Any = None, *, with_grads: bool = True
) -> StepSums:
    """The sums of one call of the loss."""
    loss = bind_loss(loss_fn, state)
    grads = None
    if with_grads:
        check_differentiable(state.params)
        (loss_sum, outputs), grads = jax.value_and_grad(loss, has_aux=True)(state.params, microbatch, key)
    else:
        loss_sum, outputs = loss(state.params, microbatch, key)
    # Sums of many small numbers: whatever they are computed in, they are added in float32 at least. All but gradients
    # are added in the widest type of loss and gradients, so that one all-reduce takes them along.
    grads = jax.tree.map(lambda grad: grad.astype(grad.dtype if _bits(grad) >= 32 else jnp.float32), grads)
    is_wide = any(_bits(leaf) == 64 for leaf in [loss_sum, *jax.tree.leaves(grads)])
    sum_type = jnp.float64 if is_wide else jnp.float32
    weight_sum = outputs.weight_sum.astype(sum_type)
    num_tokens = field_of(microbatch, "num_tokens")
    num_tokens = count_tokens(microbatch, sum_type) if num_tokens is None else jnp.sum(num_tokens).astype(sum_type)
    return StepSums(
        loss_sum=loss_sum.astype(sum_type),
        weight_sum=weight_sum,
        num_tokens=num_tokens,
        sums=jax.tree.map(lambda leaf: leaf.astype(sum_type), outputs.sums),
        extra=() if outputs.extra is None else _changes(state.extra, outputs.extra, weight_sum),
        grads=grads,
    )


def check_differentiable(params: Any) -> None:
    """Raises ValueError if parameters have no gradients."""
    named = leaves_by_name(params).items()
    if others := [f"{name} {describe(leaf)}" for name, leaf in named if not jnp.issubdtype(leaf.dtype, jnp.inexact)]:
        raise UserError(
            f"parameters must be floats, not {list_first(others)}: what is not trained goes into the loss itself, or "
            "into extra"
        )


def _microbatch_sums(loss_fn: LossFn, state: TrainState, with_grads: bool) -> Callable[[Any], StepSums]:
    """`sum_microbatch` of a microbatch and its key; traced once, for the shapes of its sums and for the loop."""

    @functools.partial(jax.jit, inline=True)
    def one(microbatch_and_key: Any) -> StepSums:
        return sum_microbatch(loss_fn, state, *microbatch_and_key, with_grads=with_grads)

    return one


def accumulate(one: Callable[[Any], StepSums], microbatches: Any, *, last_apart: bool = False) -> StepSums:
    """The sums over microbatches; `last_apart` runs the last one after the loop, so that reducing overlaps with it."""

    def add(sums: StepSums, microbatch: Any) -> tuple[StepSums, None]:
        return jax.tree.map(jnp.add, sums, one(microbatch)), None

    first = _first_of(microbatches)
    if all(leaf.shape[0] == 1 for leaf in jax.tree.leaves(microbatches)):
        return one(first)  # a loop of one turn, and its sums with zero, would cost time and memory
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(one, first))
    if not last_apart:
        return jax.lax.scan(add, zeros, microbatches)[0]
    before, last = (jax.tree.map(lambda leaf, part=part: leaf[part], microbatches) for part in (np.s_[:-1], -1))
    return add(jax.lax.scan(add, zeros, before)[0], last)[0]


def _first_of(microbatches: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[0], microbatches)


def _bits(leaf: jax.Array) -> int:
    return jnp.finfo(leaf.dtype).bits if jnp.issubdtype(leaf.dtype, jnp.inexact) else 32


def _changes(old: Any, new: Any, weight_sum: jax.Array) -> tuple[jax.Array, ...]:
    """The change by a microbatch of each numeric leaf of `extra`; 0 without weight, never NaN."""
    changes = []
    for before, after in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        if jnp.issubdtype(before.dtype, jnp.floating):
            change = weight_sum * (after.astype(weight_sum.dtype) - before.astype(weight_sum.dtype))
        elif jnp.issubdtype(before.dtype, jnp.integer):
            change = after - before  # which wraps around, as adding it will
            change = change if change.dtype.itemsize >= 4 else change.astype(jnp.int32)  # that collectives always have
        else:
            continue
        changes.append(jnp.where(weight_sum == 0, jnp.zeros_like(change), change))
    return tuple(changes)


def _check_reduced(reduced: StepSums, name: str, axis_name: str) -> None:
    """Raises ValueError if a loss reduces some of its sums itself, so that the step would reduce them again."""
    by_name: dict[str, Any] = {"loss_sum": reduced.loss_sum, "weight_sum": reduced.weight_sum}
    if all(by_name.values()) and not reduced.sums:
        return  # both count every shard as often, and only their ratio matters
    by_name |= {f"sums[{key!r}]": all(jax.tree.leaves(value)) for key, value in reduced.sums.items()}
    if at_fault := [what for what, is_reduced in by_name.items() if is_reduced]:
        raise UserError(
            f"{name} reduces {' and '.join(at_fault)} over mesh axis {axis_name!r} itself, and the step would sum them "
            "over the shards again: return the sums of the shard's own rows, without psum or pmean"
        )
