"""Reduces the sums of the shards to those of the step.

Letters: M microbatches of a step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jvarlen._common.checks import UserError
from jvarlen._common.jaxprs import scan_parts
from jvarlen._common.pytree import leaves_by_name
from jvarlen._common.types import Array, Batch, Grads, Params, PyTree, Specs
from jvarlen.distributed.grad_buckets import FIRST_BUCKET_BYTES, assign_grad_buckets, order_of_grads, reduce_in_buckets
from jvarlen.distributed.layout import ReduceDtype
from jvarlen.distributed.mesh import auto_axes, axes_in, check_shards_divide
from jvarlen.training.step_sums import LossProgram, StepSums, SumsOf, accumulate, first_of, microbatches_of, split_step
from jvarlen.training.train_state import TrainState

__all__ = ["Shards", "bucket_each", "check_reduced", "reduce_sums", "sum_in_shards", "sum_over_shards"]

_REDUCTIONS = {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shards:
    """How a step spreads over the axes of a mesh. Specs say what is sharded along `axis_name`; None means nothing."""

    mesh: Mesh
    axis_name: str | tuple[str, ...] = "data"  # or several axes; sums are reduced over all of them
    layout_axes: Iterable[str] = ()  # of the mesh; axes that are neither here nor in `axis_name` are the compiler's
    rows_along: str | None = None  # of the axes, the one along which the loss computes on parts of rows
    param_specs: Specs = None
    grad_specs: Specs = None  # after the reduction
    accumulates_shards: bool = False  # so that no more than one microbatch has whole gradients
    reduce_dtype: ReduceDtype = "float32"
    grad_bucket_bytes: int = 0  # of the gradients that are reduced together, while others are computed; 0: all

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that microbatches are spread over."""
        return tuple(name for name in axes_in(self.axis_name) if name != self.rows_along)

    def dims_of(self, grads: Grads) -> tuple[int | None, ...]:
        """The dimension along which each gradient is sharded; None for whole ones."""
        if self.grad_specs is None:
            return (None,) * len(jax.tree.leaves(grads))
        specs = jax.tree.leaves(self.grad_specs)
        return tuple(spec.index(self.axis_name) if self.axis_name in spec else None for spec in specs)

    def sum_once(self, sum_given: Callable[[StepSums | None], StepSums], before: StepSums | None) -> StepSums:
        """Adds to the sums before; only the first device along an axis counts tokens that all of them see."""
        if self.rows_along is None or before is None or before.num_tokens is None:
            return self._count_once(sum_given(before))
        earlier = before.num_tokens
        sums = self._count_once(sum_given(before._replace(num_tokens=jnp.zeros_like(earlier))))
        return sums._replace(num_tokens=jax.tree.map(jnp.add, earlier, sums.num_tokens))

    def _count_once(self, sums: StepSums) -> StepSums:
        if self.rows_along is None or sums.num_tokens is None:
            return sums
        is_first = jax.lax.axis_index(self.rows_along) == 0
        return sums._replace(num_tokens=jnp.where(is_first, sums.num_tokens, 0))

    @property
    def own_specs(self) -> StepSums:
        """Specs of the sums between groups, a prefix of them: a leading axis has what each device holds by itself."""
        axes = [name for name in self.mesh.axis_names if name in {*axes_in(self.axis_name), *self.layout_axes}]

        def own(spec: PartitionSpec) -> PartitionSpec:
            kept = spec if self.accumulates_shards else [None if axis == self.axis_name else axis for axis in spec]
            return PartitionSpec(tuple(name for name in axes if name not in axes_in(kept)), *kept)

        whole = own(PartitionSpec())
        grads = whole if self.grad_specs is None else jax.tree.map(own, self.grad_specs)
        return StepSums._make([*[whole] * 5, grads])


def sum_over_shards(loss: LossProgram, shards: Shards) -> SumsOf:
    """The sums of a whole step: accumulate over each shard's microbatches, then reduce."""
    # Gradients are reduced once, outside of any loop, unless shards are accumulated. Gradient buckets are reduced
    # during the backward pass of the last microbatch, or of each one where shards are accumulated.
    bucket_bytes = 0 if loss.trained_of is None else shards.grad_bucket_bytes

    def sum_shard(state: TrainState, given: PyTree, before: StepSums | None, is_whole: bool) -> StepSums:
        one = loss.bind(state)
        traced, shapes = jax.make_jaxpr(one, return_shape=True)(first_of(given))
        check_reduced(traced, shapes, getattr(loss.loss_fn, "__name__", "loss_fn"), shards.axis_name)
        dims, num_leaves = shards.dims_of(shapes.grads), len(jax.tree.leaves(shapes))
        used = order_of_grads(traced, range(num_leaves - len(dims), num_leaves)) if bucket_bytes else ()
        buckets, unbucketed = _buckets_of(shapes.grads, dims, bucket_bytes, used)

        def one_in_shards(microbatch: PyTree) -> StepSums:
            sums = one(microbatch)
            grads = reduce_in_buckets(sums.grads, buckets, shards.axis_name, dims, shards.reduce_dtype)
            return sums._replace(grads=grads)

        if shards.accumulates_shards:
            sums, buckets = accumulate(one_in_shards, given, before), ()
        else:
            sums = accumulate(one, given, before, last_apart=is_whole and bucket_bytes > 0)
        return reduce_sums(sums, shards, buckets, unbucketed) if is_whole else sums

    def reduce(params: Params, sums: StepSums) -> StepSums:
        dims = shards.dims_of(sums.grads)
        buckets, unbucketed = _buckets_of(sums.grads, dims, bucket_bytes, range(len(dims))[::-1])
        return reduce_sums(sums, shards, () if shards.accumulates_shards else buckets, unbucketed)

    return sum_in_shards(sum_shard, reduce, shards)


def sum_in_shards(
    sum_shard: Callable[[TrainState, PyTree, StepSums | None, bool], StepSums],
    reduce: Callable[[Params, StepSums], StepSums],
    shards: Shards,
) -> SumsOf:
    """The sums that each shard computes of its microbatches, and reduces, of a whole step at once."""
    # `sum_shard(state, microbatches and keys, sums before, whether it reduces them as well)`.
    # Unchecked: a checked axis refuses every loop of the loss whose carry starts from a constant, and would put the
    # gradient's all-reduce inside the loop. Kernels such as cuDNN's do not compile where an axis, even of one
    # device, is left to the compiler.
    params_lie, grads_lie = (
        PartitionSpec() if specs is None else specs for specs in (shards.param_specs, shards.grad_specs)
    )
    states_lie, given_lie = TrainState(params_lie, *[PartitionSpec()] * 4), PartitionSpec(shards.batch_axes)
    reduced_lie, own_lie = StepSums._make([*[PartitionSpec()] * 5, grads_lie]), shards.own_specs
    on_shards = functools.partial(
        jax.shard_map,
        mesh=auto_axes(shards.mesh),
        axis_names={*axes_in(shards.axis_name), *shards.layout_axes},
        check_vma=False,
    )

    def split_evenly(state: TrainState, batch: Batch, first: Array) -> PyTree:
        given = split_step(state, batch, first)
        check_shards_divide(microbatches_of(given), shards.mesh, shards.batch_axes)
        return given

    def whole(state: TrainState, batch: Batch) -> StepSums:
        def on_shard(state: TrainState, given: PyTree) -> StepSums:
            return sum_shard(state, given, None, True)

        mapped = on_shards(on_shard, in_specs=(states_lie, given_lie), out_specs=reduced_lie)
        return mapped(state._replace(opt_state=None), split_evenly(state, batch, None))

    def accumulate(state: TrainState, batch: Batch, first: Array, before: StepSums | None) -> StepSums:
        def on_shard(state: TrainState, given: PyTree, *before: StepSums) -> StepSums:
            own = jax.tree.map(lambda leaf: leaf[0], before[0]) if before else None
            return jax.tree.map(lambda leaf: leaf[np.newaxis], sum_shard(state, given, own, False))

        sums = () if before is None else (before,)
        mapped = on_shards(on_shard, in_specs=(states_lie, given_lie, *[own_lie for _ in sums]), out_specs=own_lie)
        return mapped(state._replace(opt_state=None), split_evenly(state, batch, first), *sums)

    def reduce_own(state: TrainState, sums: StepSums) -> StepSums:
        def on_shard(params: Params, own: StepSums) -> StepSums:
            return reduce(params, jax.tree.map(lambda leaf: leaf[0], own))

        return on_shards(on_shard, in_specs=(params_lie, own_lie), out_specs=reduced_lie)(state.params, sums)

    def shardings(_: TrainState) -> PyTree:
        return jax.tree.map(functools.partial(NamedSharding, auto_axes(shards.mesh)), own_lie)

    return SumsOf(whole, accumulate, reduce_own, shardings)


def bucket_each(dims: Sequence[int | None]) -> tuple[Sequence[Sequence[int]], Sequence[int]]:
    """`buckets` and `unbucketed` of `reduce_sums`, where each gradient that becomes a shard is a bucket."""
    sharded, whole = ([i for i, dim in enumerate(dims) if (dim is None) == is_whole] for is_whole in (False, True))
    return [(i,) for i in sharded], whole


def _buckets_of(
    grads: Grads, dims: Sequence[int | None], bucket_bytes: int, order: Sequence[int]
) -> tuple[Sequence[Sequence[int]], Sequence[int]]:
    """`buckets` and `unbucketed` of `reduce_sums`; in neither are whole gradients that have no place in the order."""
    if not bucket_bytes:
        return bucket_each(dims)
    caps = bucket_bytes, min(bucket_bytes, FIRST_BUCKET_BYTES)
    sharded = [i for i, dim in enumerate(dims) if dim is not None]
    if not sharded:
        return assign_grad_buckets(grads, *caps, order=order), ()
    of_shards = [i for i in order if dims[i] is not None] + [i for i in sharded if i not in order]
    return assign_grad_buckets(grads, *caps, order=of_shards), [i for i in order if dims[i] is None]


def reduce_sums(
    sums: StepSums,
    shards: Shards,
    buckets: Sequence[Sequence[int]] = (),  # indices of gradients that have a collective together
    unbucketed: Sequence[int] | None = None,  # of those that are reduced with the other sums; None: all whole ones
) -> StepSums:
    """The sums over the shards; gradients in no bucket that become shards have been reduced."""
    axis_name, sent, dims = shards.axis_name, shards.reduce_dtype, shards.dims_of(sums.grads)
    unbucketed = bucket_each(dims)[1] if unbucketed is None else unbucketed
    if sent != "float32":  # which other sums are not sent in
        buckets, unbucketed = [*buckets, *assign_grad_buckets(sums.grads, order=unbucketed)], ()
    leaves, structure = jax.tree.flatten(reduce_in_buckets(sums.grads, buckets, axis_name, dims, sent))
    reduced = sums._replace(grads=[leaves[i] for i in unbucketed])
    # Where the compiler keeps buckets apart, it would reduce each of these sums by itself.
    if not shards.grad_bucket_bytes:
        reduced = jax.lax.psum(reduced, axis_name)
    else:
        reduced = reduce_in_buckets(reduced, assign_grad_buckets(reduced), axis_name)
    for i, leaf in zip(unbucketed, reduced.grads, strict=True):
        leaves[i] = leaf
    return reduced._replace(grads=jax.tree.unflatten(structure, leaves))


def check_reduced(traced: ClosedJaxpr, shapes: StepSums, loss_name: str, axis_name: str | tuple[str, ...]) -> None:
    """Raises ValueError if a traced loss reduces some of its sums itself, so that the step would reduce them again."""
    for axis in axes_in(axis_name):
        reduced = jax.tree.unflatten(jax.tree.structure(shapes), _which_are_reduced(traced, axis))
        if reduced.loss_sum and reduced.weight_sum and not reduced.sums:
            continue  # both count every shard as often, and only their ratio matters
        by_name = {"loss_sum": reduced.loss_sum, "weight_sum": reduced.weight_sum}
        by_name |= {f"sums{name}": is_reduced for name, is_reduced in leaves_by_name(reduced.sums).items()}
        if at_fault := [what for what, is_reduced in by_name.items() if is_reduced]:
            raise UserError(
                f"{loss_name} reduces {' and '.join(at_fault)} over mesh axis {axis!r} itself, and the step would sum "
                "them over the shards again: return the sums of the shard's rows, without psum or pmean"
            )


def _which_are_reduced(closed: ClosedJaxpr, axis_name: str) -> list[bool]:
    """For each output of a traced function: is it the same on all shards because the function reduces or gathers it?"""
    same, reduced, differs = 0, 1, 2  # of several, the largest is what becomes of them

    def walk(jaxpr: Jaxpr, kinds: list[int]) -> list[int]:
        kind_of = dict(zip(jaxpr.invars, kinds, strict=True))

        def kind(atom: Any) -> int:
            return same if isinstance(atom, Literal) else kind_of.get(atom, same)

        for eqn in jaxpr.eqns:
            kind_of.update(zip(eqn.outvars, made_by(eqn, [kind(atom) for atom in eqn.invars]), strict=True))
        return [kind(atom) for atom in jaxpr.outvars]

    def made_by(eqn: JaxprEqn, given: list[int]) -> list[int]:
        axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        if eqn.primitive.name in _REDUCTIONS and axis_name in (axes if isinstance(axes, tuple) else (axes,)):
            is_of_params = "gather" in eqn.primitive.name and max(given) == same  # whole again, from shards
            return [same if is_of_params else reduced] * len(eqn.outvars)
        if eqn.primitive.name == "axis_index":
            return [differs]
        if eqn.primitive.name == "cond":  # whose shards take the same branch, if that reduces
            branches = [walk(branch.jaxpr, given[1:]) for branch in eqn.params["branches"]]
            return list(map(max, zip(*branches, strict=True)))
        if eqn.primitive.name in ("scan", "while"):
            return after_loop(eqn, given)
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            sizes = len(given), len(eqn.outvars)
            if isinstance(inner, Jaxpr) and (len(inner.invars), len(inner.outvars)) == sizes:
                return walk(inner, given)
        return [max(given, default=same)] * len(eqn.outvars)

    def after_loop(eqn: JaxprEqn, given: list[int]) -> list[int]:
        body = eqn.params.get("body_jaxpr") or eqn.params["jaxpr"]
        if eqn.primitive.name == "scan":
            num_fixed, num_carry = scan_parts(eqn)
        else:
            num_fixed, num_carry = eqn.params["body_nconsts"], len(eqn.outvars)
            given = given[eqn.params["cond_nconsts"] :]
        while True:
            made = walk(body.jaxpr, given)
            carried = list(map(max, given[num_fixed:][:num_carry], made))  # over any number of turns
            if carried == given[num_fixed:][:num_carry]:
                return made
            given = given[:num_fixed] + carried + given[num_fixed + num_carry :]

    # Arguments differ between shards, and what the function closes over does not.
    return [kind == reduced for kind in walk(closed.jaxpr, [differs] * len(closed.jaxpr.invars))]
