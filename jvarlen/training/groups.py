"""Sums of a step of several groups: each group adds to them, and they are reduced and divided once.

Between groups the sums are in the form in which each device adds: what is summed over devices in the end has a leading
axis over them. Letters: M microbatches of a group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.pytree import describe, have_same_containers, leaves_by_name
from jvarlen._common.types import Array, Batch, PyTree
from jvarlen.batches.batches import StepBatch
from jvarlen.training.step import StepFn, StepHalves, update_state, with_extra_args
from jvarlen.training.step_sums import StepSums, SumsFn, SumsOf, field_of, microbatches_of
from jvarlen.training.train_state import Metrics, Optimizer, TrainState

__all__ = [
    "GroupSumsOf", "SumsSoFar", "add_group", "check_sums", "groups_of", "over_groups", "reduce_groups",
    "shardings_of_sums", "step_of_sums", "step_over_groups", "sum_groups", "zeros_on",
]  # fmt: skip


class SumsSoFar(NamedTuple):
    """The sums over the groups of a step so far, a pytree that the next group adds to.

    Attributes:
      sums: sums of loss, weights, tokens, gradients and others, as devices hold them between groups.
      num_microbatches: int32[], those that were added.
      num_sequences: number[], real samples; None if batches do not count them.
      num_tokens: float[], tokens as batches count them; None if they do not, in a scalar.
    """

    sums: StepSums
    num_microbatches: Array
    num_sequences: Array = None
    num_tokens: Array = None


class GroupSumsOf(NamedTuple):
    """The sums of a step of one group, `whole`, or of several, by `halves`."""

    whole: SumsFn
    halves: StepHalves  # whose `update` gives `StepSums`, and what `metrics_of` takes in place of a batch


def over_groups(sums_of: SumsOf) -> GroupSumsOf:
    """The sums of a step of several groups."""

    def zeros(state: TrainState, batch: Batch, most_rows: int) -> SumsSoFar:
        shapes = jax.eval_shape(functools.partial(add_group, sums_of), state, batch)
        return zeros_on(shapes, shardings_of_sums(sums_of, state))

    halves = StepHalves(
        zeros=zeros,
        accumulate=functools.partial(add_group, sums_of),
        update=functools.partial(reduce_groups, sums_of),
    )
    return GroupSumsOf(sums_of.whole, halves)


def add_group(
    sums_of: SumsOf, state: TrainState, batch: Batch, before: SumsSoFar | None = None, given: Batch = None
) -> SumsSoFar:
    """Adds the sums of a group; `given`: what they are of, in place of its batch."""
    given = batch if given is None else given
    first, sums = (None, None) if before is None else (before.num_microbatches, before.sums)
    sums = sums_of.accumulate(state, given, first, sums)
    num_microbatches = jnp.int32(microbatches_of(batch))
    counts = {name: field_of(batch, name) for name in ("num_sequences", "num_tokens")}
    num_sequences, num_tokens = (None if count is None else jnp.asarray(count) for count in counts.values())
    if num_sequences is not None and num_sequences.ndim:
        raise UserError(f"num_sequences of a group must be a scalar, not an array {num_sequences.shape}")
    if num_tokens is not None:
        num_tokens = None if num_tokens.ndim else num_tokens.astype(sums.loss_sum.dtype)
    added = num_microbatches, num_sequences, num_tokens
    return SumsSoFar(sums, *(added if before is None else jax.tree.map(jnp.add, tuple(before[1:]), added)))


def reduce_groups(sums_of: SumsOf, state: TrainState, sums: SumsSoFar) -> tuple[StepSums, Batch]:
    """The sums of the step, and its counts."""
    counts = {"num_sequences": sums.num_sequences, "num_tokens": sums.num_tokens}
    return sums_of.reduce(state, sums.sums), counts


def shardings_of_sums(sums_of: SumsOf, state: TrainState) -> PyTree:
    """Where sums are between groups, a prefix of them; None: on one device."""
    if (shardings := sums_of.shardings(state)) is None:
        return None
    (first, *_) = jax.tree.leaves(shardings)
    return SumsSoFar(shardings, *[NamedSharding(first.mesh, PartitionSpec())] * 3)


def zeros_on(shapes: PyTree, shardings: PyTree) -> PyTree:
    """Zeros; `shardings` are a prefix."""

    def zeros() -> PyTree:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    return jax.jit(zeros, out_shardings=shardings)()


def check_sums(sums: PyTree) -> None:
    """Raises ValueError for what is not the sums of `accumulate`."""
    if not isinstance(sums, SumsSoFar):
        raise UserError(f"sums are the result of accumulate(state, batch, sums), not a {type(sums).__name__}")


def groups_of(batch: Batch) -> Sequence[Batch]:
    """The batches of the groups of a step; raises ValueError for groups that are not alike."""
    if not isinstance(batch, StepBatch):
        return (batch,)
    if not batch.groups:
        raise UserError("a StepBatch has at least one group")
    first, *others = batch.groups
    dtypes = [{name: str(leaf.dtype) for name, leaf in leaves_by_name(group).items()} for group in batch.groups]
    for number, (group, types) in enumerate(zip(others, dtypes[1:], strict=True), 1):
        one, other = leaves_by_name(first), leaves_by_name(group)
        differing = [name for name in one | other if dtypes[0].get(name) != types.get(name)]
        if differing or not have_same_containers(first, group):
            listed = (f"{name}: {describe(one.get(name))} and {describe(other.get(name))}" for name in differing)
            raise UserError(
                f"the groups of a step must have the same arrays, and groups 0 and {number} differ: "
                f"{list_first(listed, '; ') or 'in their containers'}"
            )
    return batch.groups


def step_over_groups(function: StepFn, halves: StepHalves, state: PyTree, batch: Batch) -> tuple[PyTree, Metrics]:
    """A step of one group by a function, or of several by halves."""
    groups = groups_of(batch)
    return function(state, groups[0]) if len(groups) == 1 else halves.update(state, _add_groups(halves, state, groups))


def sum_groups(sums_of: GroupSumsOf, state: TrainState, batch: Batch) -> tuple[StepSums, Batch]:
    """The sums of a step of one group or several, and its counts."""
    groups = groups_of(batch)
    if len(groups) == 1:
        return sums_of.whole(state, groups[0]), groups[0]
    return sums_of.halves.update(state, _add_groups(sums_of.halves, state, groups))


def _add_groups(halves: StepHalves, state: PyTree, groups: Sequence[Batch]) -> PyTree:
    """The sums of all groups of a step."""

    def add_all(add: Callable[[PyTree, Batch, PyTree], PyTree], sums: PyTree) -> PyTree:
        for number, group in enumerate(groups):
            try:
                sums = add(state, group, sums)
            except UserError as error:
                error.add_note(f"in group {number} of {len(groups)} of the step")
                raise
        return sums

    sums = add_all(halves.accumulate, halves.zeros(state, groups[0], sum(map(_rows_of, groups))))
    if halves.between is None or halves.accumulate_again is None:
        return sums
    return add_all(halves.accumulate_again, halves.between(state, sums))


def _rows_of(batch: Batch) -> int:
    """The rows of a group, M · B."""
    return microbatches_of(batch) * max((leaf.shape[1] for leaf in jax.tree.leaves(batch) if leaf.ndim > 1), default=0)


def step_of_sums(
    sums_of: GroupSumsOf, optimizer: Optimizer, *, norms: bool = False, is_whole: bool = False
) -> tuple[StepFn, StepHalves]:
    """A train step of one group, and of several, from their sums; `is_whole`: every device has all of the state."""
    update_by = functools.partial(update_state, with_extra_args(optimizer), norms=norms, is_whole=is_whole)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        return update_by(state, batch, sums_of.whole(state, batch))

    def update(state: TrainState, sums: PyTree) -> tuple[TrainState, Metrics]:
        of_step, counts = sums_of.halves.update(state, sums)
        return update_by(state, counts, of_step)

    return train_step, sums_of.halves._replace(update=update)
