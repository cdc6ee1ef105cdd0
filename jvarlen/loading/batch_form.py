"""How a group of a plan becomes a batch: whose rows, with or without an axis of microbatches, under which names.

Letters: M microbatches, B rows, P samples of a row, T positions, n samples.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple, TypeAlias

import jax
import numpy as np

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.types import Array, Batch, PyTree
from jvarlen.batches.batches import arrays_by_name, next_token_targets
from jvarlen.batches.shapes import BatchSpec
from jvarlen.planning.buckets import AnyBucket
from jvarlen.planning.steps import PlannedSteps, StepRows

__all__ = ["BatchForm", "FieldNames", "Shard", "flat_rows", "leave_out", "map_places"]

FieldNames: TypeAlias = Mapping[str, str | Sequence[str]]
"""For arrays of a batch, the name or the names under which it has them."""

Shard: TypeAlias = tuple[int | Sequence[int], int]
"""`(i, n)`: of n equal parts of every group, the i-th, or several."""

TARGETS = ("targets", "target_weights")
"""Arrays that `rename_fields` can name besides those of a batch: the last two results of `next_token_targets`."""


class BatchForm(NamedTuple):
    """The part of every group that a process reads, and the form of its batch. `of` makes it."""

    shards: tuple[int, ...] | None = None  # of this process; None: all that the plan holds
    num_shards: int = 1
    microbatches: bool = True
    names: tuple[tuple[str, tuple[str, ...]], ...] | None = None

    @classmethod
    def of(
        cls, *, shard: Shard | None = None, microbatches: bool = True, rename_fields: FieldNames | None = None
    ) -> BatchForm:
        """The form that these arguments of `PlanSource` say; raises ValueError for others."""
        names = None if rename_fields is None else _checked_names(rename_fields)
        if shard is None:
            return cls(None, 1, bool(microbatches), names)
        try:
            of_process, num_shards = shard
            shards = tuple(map(operator.index, np.atleast_1d(of_process).tolist()))
            num_shards = operator.index(num_shards)
            is_shard = bool(shards) and all(0 <= each < num_shards for each in shards)
        except (TypeError, ValueError):
            is_shard = False
        if not is_shard:
            raise UserError(f"shard must be (i, n), the i-th of n parts with 0 ≤ i < n, not {shard!r}")
        return cls(shards, num_shards, bool(microbatches), names)

    @property
    def share(self) -> Fraction:
        """The share of a group that this process reads."""
        return Fraction(1 if self.shards is None else len(self.shards), self.num_shards)

    def rows(self, plan: PlannedSteps, group: int) -> StepRows:
        """This process's rows of a group, int64[m, B]; without microbatches int64[1, r], in their order."""
        if self.microbatches:
            microbatches = None if self.shards is None else self._parts(plan.num_microbatches, "microbatches of a step")
            return plan.local_rows(group, microbatches)
        rows = plan.local_rows(group)
        if len(rows.ids) != plan.num_microbatches:
            raise UserError("microbatches=False needs a plan that holds all rows, not those of this process alone")
        rows = map_places(rows, flat_rows)
        if self.shards is None:
            return rows
        own = self._parts(rows.ids.shape[1], f"rows of a group of {plan.buckets.shapes[plan.group_bucket[group]]}")
        num_tokens = rows.num_tokens if self.share == 1 else None
        return map_places(rows, lambda each: each[:, own])._replace(num_tokens=num_tokens)

    def _parts(self, size: int, what: str) -> np.ndarray:
        """The indices, below a size, of this process's shards."""
        per_shard, left = divmod(size, self.num_shards)
        if left:
            raise UserError(f"{self.num_shards} shards do not divide the {size} {what}")
        return (np.array(self.shards)[:, None] * per_shard + np.arange(per_shard)).ravel()

    def of_batch(self, batch: Batch) -> Batch:
        """The batch of a group, from that with an axis of microbatches and the library's names."""
        if not self.microbatches:
            batch = jax.tree.map(lambda leaf: leaf[0] if np.ndim(leaf) else leaf, batch)
        return batch if self.names is None else _renamed(batch, self.names)

    def of_spec(self, batch_spec: BatchSpec) -> BatchSpec:
        """The shapes of the batches of all processes, from those of the library."""

        def flat(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            shape = leaf.shape
            return jax.ShapeDtypeStruct((shape[0] * shape[1], *shape[2:]) if shape else (), leaf.dtype)

        def spec(bucket: AnyBucket, num_microbatches: int, *more: int | None) -> PyTree:
            made = batch_spec(bucket, num_microbatches, *more)
            if not self.microbatches:
                made = jax.tree.map(flat, made)
            return made if self.names is None else jax.eval_shape(functools.partial(_renamed, names=self.names), made)

        return batch_spec if self.microbatches and self.names is None else spec


def flat_rows(places_MxB: np.ndarray) -> np.ndarray:
    """The rows of all microbatches in the order of the plan, as one microbatch [1, M·B, …]: row j is at j."""
    return places_MxB.swapaxes(0, 1).reshape(1, -1, *places_MxB.shape[2:])


def map_places(rows: StepRows, function: Callable[[np.ndarray], np.ndarray]) -> StepRows:
    """Applies a function to the ids of rows, and to the starts and stops of their samples where they have them."""

    def apply(values: np.ndarray | None) -> np.ndarray | None:
        if values is None or values.ndim == rows.ids.ndim:
            return values if values is None else function(values)
        return np.stack([function(of_side) for of_side in np.moveaxis(values, -1, 0)], axis=-1)

    return StepRows(function(rows.ids), apply(rows.starts), rows.num_tokens, apply(rows.stops))


def leave_out(rows: StepRows, bad: Sequence[int]) -> StepRows:
    """Rows without these samples; empty places and empty rows move to the end, as in any step."""
    ids = rows.ids.copy()
    flat = ids[ids >= 0]
    flat[bad] = -1
    ids[ids >= 0] = flat
    for axis in range(ids.ndim - 1, 0, -1):  # within packed rows, then the rows of microbatches
        is_empty = ids < 0 if axis == ids.ndim - 1 else ids[:, :, :1] < 0
        order = np.argsort(is_empty, axis=axis, kind="stable")
        rows = map_places(rows._replace(ids=ids), lambda each: np.take_along_axis(each, order, axis))  # noqa: B023
        ids = rows.ids
    return map_places(rows, lambda each: np.where(ids >= 0, each, -1))._replace(num_tokens=None)


def _renamed(batch: Batch, names: Sequence[tuple[str, tuple[str, ...]]]) -> dict[str, Array]:
    """The arrays of a batch that are named, under their names; raises ValueError where it has no such array."""
    arrays = dict(arrays_by_name(batch) or {})
    if missing := [name for name, _ in names if name not in arrays and name not in TARGETS]:
        raise UserError(
            f"rename_fields= names {list_first(map(repr, missing))}, but a batch has the arrays "
            f"{', '.join(map(repr, arrays))}, and next_token_targets makes {' and '.join(map(repr, TARGETS))}"
        )
    if any(name not in arrays for name, _ in names):
        arrays = dict(zip(TARGETS, next_token_targets(batch)[1:], strict=True)) | arrays
    return {new: arrays[name] for name, of_array in names for new in of_array}


def _checked_names(rename_fields: FieldNames) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Raises ValueError that lists names that are no texts or that several arrays would have."""
    pairs = rename_fields.items() if isinstance(rename_fields, Mapping) else ()
    names = tuple(
        (name, (new,) if isinstance(new, str) or not isinstance(new, Sequence) else tuple(new)) for name, new in pairs
    )
    given = [new for _, of_array in names for new in of_array]
    if not given or not all(isinstance(name, str) for name in [*given, *(name for name, _ in names)]):
        raise UserError(
            "rename_fields= must map arrays of a batch to one name or several, such as {'tokens': 'inputs'}, not be "
            f"{rename_fields!r}"
        )
    if twice := sorted({name for name in given if given.count(name) > 1}):
        raise UserError(f"rename_fields= gives several arrays the names {list_first(map(repr, twice))}")
    return names
