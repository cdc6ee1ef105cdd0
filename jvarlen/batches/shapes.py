"""The shapes and placement of the batches of every bucket, for which a step is compiled."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import jax

from jvarlen._common.checks import UserError, check_at_least_one, if_given
from jvarlen._common.types import Array, PyTree
from jvarlen.batches.batches import token_batch_spec
from jvarlen.batches.fields import Fields, arrays_spec
from jvarlen.distributed.placement import LayoutLike, Placement, placement_of
from jvarlen.planning.buckets import AnyBucket, check_buckets
from jvarlen.planning.steps import PlannedSteps

if TYPE_CHECKING:
    from jvarlen.planning.streams import StreamBatches

__all__ = ["BatchShapes", "BatchSpec", "HasShapes", "plan_specs"]

BatchSpec: TypeAlias = Callable[..., PyTree]
"""`batch_spec(bucket, M)` gives the batch's pytree of `jax.ShapeDtypeStruct`."""


@dataclasses.dataclass(frozen=True)
class BatchShapes:
    """The shapes of the batches of every bucket, for `compile_buckets` without a plan or a `Loader`.

    Raises:
      ValueError: buckets or numbers that are not as described.

    Example:
      >>> [spec.tokens.shape for spec in BatchShapes([(2, 4), (1, 8)]).specs.values()]
      [(1, 2, 4), (1, 1, 8)]
    """

    buckets: Sequence[Any]
    """Different (rows, length) pairs, or (rows, source length, target length)."""
    _: dataclasses.KW_ONLY
    num_microbatches: int = 1
    """M."""
    layout: LayoutLike = None
    """Layout of the batches, whose microbatches are spread over data shards. None takes the step's, or one device."""
    batch_spec: BatchSpec | None = None
    """`batch_spec(bucket, M)` gives the batch's pytree of `jax.ShapeDtypeStruct`. None: samples or pairs, one a row."""
    plan: PlannedSteps | None = None
    """The plan that has these buckets."""
    start_step: int = 0
    """The plan's step that runs first."""
    has_many_groups: bool | None = None
    """Whether steps have several groups, so that a train step is compiled as its halves. None: as the plan has them, or
    as if some steps had without a plan or with one of `plan_step`, which others follow."""
    rows_per_step: int | Callable[[], int] | None = None
    """The most rows of a step, padding rows included, which a `StepLoss` that returns rows needs, or a function. None:
    those of the plan. There is room for the largest step of one group in any case."""

    def __post_init__(self):
        rows_per_step = None if callable(self.rows_per_step) else self.rows_per_step
        check_at_least_one(num_microbatches=self.num_microbatches, **if_given(rows_per_step=rows_per_step))
        ascending = sorted(self.buckets, key=lambda each: (*each[1:], each[0]))
        checked = check_buckets(ascending).shapes
        by_shape = {tuple(bucket): bucket for bucket in checked}
        object.__setattr__(self, "buckets", tuple(by_shape[tuple(shape)] for shape in self.buckets))
        num_steps = 0 if self.plan is None else self.plan.num_steps
        if not 0 <= self.start_step <= num_steps:
            raise UserError(f"start_step ({self.start_step}) must be in 0 … {num_steps}, the steps of the plan")
        if self.has_many_groups is False and self.plan is not None and self.plan.has_many_groups:
            raise UserError("has_many_groups=False, but steps of the plan have several groups")

    @classmethod
    def of_plan(
        cls, plan: PlannedSteps, *, layout: LayoutLike = None, batch_spec: BatchSpec | None = None, start_step: int = 0
    ) -> BatchShapes:
        """The shapes of a plan's batches.

        Args:
          plan: decides which arrays a batch has: those of packed or padded rows, of samples or pairs.
          layout: as the field.
          batch_spec: for other arrays than those that `load` makes from samples of tokens.
          start_step: as the field.

        Returns:
          `BatchShapes`.
        """
        return cls(
            plan.buckets.shapes,
            num_microbatches=plan.num_microbatches,
            layout=layout,
            batch_spec=batch_spec or plan_specs(plan),
            plan=plan,
            start_step=start_step,
        )

    @functools.cached_property
    def placement(self) -> Placement | None:
        """Devices and shards of the batches; None for one device."""
        return placement_of(self.layout)

    @property
    def may_have_many_groups(self) -> bool:
        """Whether a step may have several groups."""
        if self.has_many_groups is not None:
            return self.has_many_groups
        return self.plan is None or self.plan.has_many_groups or self.plan.sized_by == "plan_step"

    @property
    def most_rows(self) -> int:
        """The most rows of a step, padding rows included."""
        rows = self.rows_per_step() if callable(self.rows_per_step) else self.rows_per_step
        if rows is None and self.plan is not None:
            rows = self.plan.rows_per_step
        return max(rows or 0, self.num_microbatches * max(bucket.rows for bucket in self.buckets))

    def without_dataset(self) -> BatchShapes:
        """The same shapes, which read no sample and hold no dataset.

        Returns:
          `BatchShapes` without a plan.
        """
        specs = self.specs
        return dataclasses.replace(
            self,
            batch_spec=lambda bucket, _: specs[bucket],
            plan=None,
            start_step=0,
            has_many_groups=self.may_have_many_groups,
            rows_per_step=self.most_rows,
        )

    @property
    def specs(self) -> dict[AnyBucket, PyTree]:
        """The batch of each bucket, as `spec` gives it."""
        return {bucket: self.spec(bucket) for bucket in self.buckets}

    def spec(self, bucket: AnyBucket) -> PyTree:
        """The batch of a bucket.

        Args:
          bucket: one of `buckets`, or another.

        Returns:
          A pytree of `jax.ShapeDtypeStruct`, with the dtypes of arrays on devices, and shardings if there are several.
        """
        batch_spec = self.batch_spec or token_batch_spec
        spec = jax.tree.map(_canonical, batch_spec(bucket, self.num_microbatches))
        if self.placement is None:
            return spec
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            spec,
            self.placement.batch_shardings(spec),
        )


def plan_specs(plan: PlannedSteps | StreamBatches, fields: Fields | None = None) -> BatchSpec:
    """The batches of a plan or a stream whose samples have these fields; None for tokens, or pairs of them."""
    most = dict(zip(plan.buckets.shapes, plan.samples_per_row, strict=True)) if plan.is_packed else {}

    def batch_spec(bucket: AnyBucket, num_microbatches: int, samples_per_row: int | None = None) -> PyTree:
        if samples_per_row is None and plan.is_packed:
            # Estimates are also made from other buckets than the plan's.
            samples_per_row = most.get(bucket, min(bucket.lengths[0], max(plan.samples_per_row)))
        if fields is None:
            return token_batch_spec(bucket, num_microbatches, samples_per_row)
        return arrays_spec(fields, bucket, num_microbatches, samples_per_row)

    return batch_spec


@runtime_checkable
class HasShapes(Protocol):
    """Batches that know their shapes, such as the result of `load`."""

    @property
    def shapes(self) -> BatchShapes:
        """The shapes of all buckets."""


def _canonical(leaf: Array) -> jax.ShapeDtypeStruct:
    """With the dtype that such an array has on a device: float64 is float32 there, unless 64-bit types are enabled."""
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=getattr(leaf, "sharding", None))
