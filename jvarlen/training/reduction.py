"""Reduces the sums of the shards to those of the step.

Letters: M microbatches of a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.sharding import Mesh, PartitionSpec

from jvarlen._common.checks import UserError
from jvarlen._common.jaxprs import scan_parts
from jvarlen._common.pytree import leaves_by_name
from jvarlen._common.types import Batch, Grads, PyTree, Specs
from jvarlen.distributed.grad_buckets import FIRST_BUCKET_BYTES, assign_grad_buckets, order_of_grads, reduce_in_buckets
from jvarlen.distributed.layout import ReduceDtype
from jvarlen.distributed.mesh import auto_axes, axes_in, check_shards_divide
from jvarlen.training.step_sums import LossProgram, StepSums, SumsFn, accumulate, first_of, microbatches_of
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

    def count_once(self, sums: StepSums) -> StepSums:
        """The sums, where only the first device along an axis counts tokens that all of them see."""
        if self.rows_along is None or sums.num_tokens is None:
            return sums
        is_first = jax.lax.axis_index(self.rows_along) == 0
        return sums._replace(num_tokens=jnp.where(is_first, sums.num_tokens, 0))


def sum_over_shards(loss: LossProgram, shards: Shards) -> SumsFn:
    """The sums of a whole step: accumulate over each shard's microbatches, then reduce."""
    # Gradients are reduced once, outside of any loop, unless shards are accumulated. Gradient buckets are reduced
    # during the backward pass of the last microbatch, or of each one where shards are accumulated.
    bucket_bytes = 0 if loss.trained_of is None else shards.grad_bucket_bytes

    def sum_shard(state: TrainState, microbatches: PyTree) -> StepSums:
        one = loss.bind(state)
        traced, shapes = jax.make_jaxpr(one, return_shape=True)(first_of(microbatches))
        check_reduced(traced, shapes, loss.name, shards.axis_name)
        dims = shards.dims_of(shapes.grads)
        buckets, unbucketed = _buckets_of(traced, shapes, dims, bucket_bytes)

        def one_in_shards(microbatch: PyTree) -> StepSums:
            sums = one(microbatch)
            grads = reduce_in_buckets(sums.grads, buckets, shards.axis_name, dims, shards.reduce_dtype)
            return sums._replace(grads=grads)

        if shards.accumulates_shards:
            return reduce_sums(accumulate(one_in_shards, microbatches), shards, dims, (), unbucketed)
        sums = accumulate(one, microbatches, last_apart=bucket_bytes > 0)
        return reduce_sums(sums, shards, dims, buckets, unbucketed)

    def sums_of(state: TrainState, batch: Batch) -> StepSums:
        return sum_in_shards(sum_shard, state, loss.split_step(state, batch), shards)

    return sums_of


def sum_in_shards(
    sum_shard: Callable[[TrainState, Batch], StepSums], state: TrainState, microbatches_and_keys: PyTree, shards: Shards
) -> StepSums:
    """The sums that each shard computes and reduces of its microbatches, from the result of `split_step`."""
    check_shards_divide(microbatches_of(microbatches_and_keys), shards.mesh, shards.batch_axes)
    # Unchecked: a checked axis refuses every loop of the loss whose carry starts from a constant, and would put the
    # gradient's all-reduce inside the loop. Kernels such as cuDNN's do not compile where an axis, even of one
    # device, is left to the compiler.
    params_lie, grads_lie = (
        PartitionSpec() if specs is None else specs for specs in (shards.param_specs, shards.grad_specs)
    )
    on_shards = jax.shard_map(
        sum_shard,
        mesh=auto_axes(shards.mesh),
        in_specs=(TrainState(params_lie, *[PartitionSpec()] * 4), PartitionSpec(shards.batch_axes)),
        out_specs=StepSums._make([*[PartitionSpec()] * 5, grads_lie]),
        axis_names={*axes_in(shards.axis_name), *shards.layout_axes},
        check_vma=False,
    )
    return on_shards(state._replace(opt_state=None), microbatches_and_keys)


def bucket_each(dims: Sequence[int | None]) -> tuple[Sequence[Sequence[int]], Sequence[int]]:
    """`buckets` and `unbucketed` of `reduce_sums`, where each gradient that becomes a shard is a bucket."""
    sharded, whole = ([i for i, dim in enumerate(dims) if (dim is None) == is_whole] for is_whole in (False, True))
    return [(i,) for i in sharded], whole


def _buckets_of(
    traced: ClosedJaxpr, shapes: StepSums, dims: Sequence[int | None], bucket_bytes: int
) -> tuple[Sequence[Sequence[int]], Sequence[int]]:
    """`buckets` and `unbucketed` of `reduce_sums`; in neither are whole gradients that are always 0."""
    if not bucket_bytes:
        return bucket_each(dims)
    caps = bucket_bytes, min(bucket_bytes, FIRST_BUCKET_BYTES)
    num_leaves = len(jax.tree.leaves(shapes))
    used = order_of_grads(traced, range(num_leaves - len(dims), num_leaves))
    sharded = [i for i, dim in enumerate(dims) if dim is not None]
    if not sharded:
        return assign_grad_buckets(shapes.grads, *caps, order=used), ()
    order = [i for i in used if dims[i] is not None] + [i for i in sharded if i not in used]
    return assign_grad_buckets(shapes.grads, *caps, order=order), [i for i in used if dims[i] is None]


def reduce_sums(
    sums: StepSums,
    shards: Shards,
    dims: Sequence[int | None],  # of `Shards.dims_of`
    buckets: Sequence[Sequence[int]],  # indices of gradients that have a collective together
    unbucketed: Sequence[int],  # indices of those that are reduced with the other sums
) -> StepSums:
    """The sums over the shards; gradients in no bucket that become shards have been reduced."""
    axis_name, sent = shards.axis_name, shards.reduce_dtype
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
            return [reduced] * len(eqn.outvars)
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
