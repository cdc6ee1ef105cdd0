"""Shape, size and padding of every step of an epoch.

`Plan` adds which samples are in each step. A step is one group or several, of M microbatches of one bucket each.
Letters: n samples in the plan, S steps, G groups, K buckets, M microbatches of a group, m of them on this process, B
rows of a microbatch, P samples of a row.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from jaxtyping import Bool, Float, Float64, Int32, Int64

from jvarlen._common.checks import UserError, check_at_least_zero, check_choices
from jvarlen._common.terminal import text_table
from jvarlen.planning.buckets import MOST_TOKENS, AnyBucket, Bucket, Buckets, check_buckets, rows_of_steps
from jvarlen.planning.budget import Budget, CostFn, evaluate_cost, limits_of_rows
from jvarlen.planning.cost_model import CostModel, warn_beyond_measured
from jvarlen.planning.lengths import PackedOverlong, SampleSize

__all__ = [
    "BucketFigures", "PlannedSteps", "StepPlan", "StepRows", "bucket_figures", "check_offsets", "check_steps",
    "cost_of_plan",
]  # fmt: skip


@runtime_checkable
class StepPlan(Protocol):
    """The part of any plan that learning rates need: S steps, and the samples and tokens of each."""

    @property
    def num_steps(self) -> int:
        """S, the number of steps."""

    @property
    def num_sequences(self) -> Int64[np.ndarray, " S"]:
        """int64[S], real samples of each step."""

    @property
    def num_tokens(self) -> Int64[np.ndarray, " S"]:
        """int64[S], real tokens of each step."""


class StepRows(NamedTuple):
    """The rows of a group in some of its microbatches."""

    ids: Int64[np.ndarray, "m B *P"]  # as `Plan.rows` has them
    starts: Int64[np.ndarray, "m B *P_D"] | None  # as `Plan.chunks` has them
    num_tokens: int | None  # None where that is not known
    stops: Int64[np.ndarray, "m B *P_D"] | None = None  # where each chunk ends, as `Plan.chunk_ends` says


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PlannedSteps:
    """The steps of an epoch: how many samples, in which shape, in which order.

    Attributes:
      buckets: the static shapes, lengths ascending: `buckets.shapes` is a tuple of them.
      num_microbatches: M.
      group_bucket: int32[G], the bucket of each group.
      group_offsets: int64[G+1], the samples before each group; the last is n.
      group_tokens: int64[G], real tokens of each group; a truncated sample counts with its cut length, a pair with its
        `size`.
      step_groups: int64[S+1], the groups before each step; the last is G. None: every step is one group.
      overlong: the rule for samples above the longest bucket: "error", "drop", "truncate", "truncate_start",
        "truncate_random", or for packed rows "split".
      num_dropped: samples dropped by that rule.
      num_truncated: samples truncated by that rule.
      new_shape_every: as in `make_plan`. Neither in the digest nor in a plan's file: the order of the steps shows it.
      reason: why its rows are packed or not, where `packing="auto"` chose. Neither in the digest nor in a plan's file.
      repacking: as text, how much the rows of other epochs differ, where packed rows are shuffled, and else that steps
        do not follow the order. Neither in the digest nor in a plan's file.
      sized_by: what made steps of given sizes of its samples, in as many groups as those take: "make_plan", whose other
        epochs may have steps of several groups where this one has none, or "plan_step", whose other steps may; "" where
        buckets decide the sizes. Neither in the digest nor in a plan's file.
      samples_per_row: for each bucket, the most samples that a row of it could hold in any epoch, whatever the order: 1
        where nothing is packed. Not in the digest.
    """

    buckets: Buckets[AnyBucket]
    num_microbatches: int
    group_bucket: Int32[np.ndarray, " G"]
    group_offsets: Int64[np.ndarray, " G_plus_1"]
    group_tokens: Int64[np.ndarray, " G"]
    step_groups: Int64[np.ndarray, " S_plus_1"] = None  # type: ignore[assignment]  # which `__post_init__` replaces
    overlong: PackedOverlong = "error"
    num_dropped: int = 0
    num_truncated: int = 0
    new_shape_every: int = 0
    reason: str = ""
    repacking: object | None = None
    sized_by: Literal["", "make_plan", "plan_step"] = ""
    samples_per_row: tuple[int, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "buckets", check_buckets(self.buckets, self.num_microbatches))
        if self.step_groups is None:
            object.__setattr__(self, "step_groups", np.arange(self.num_groups + 1))
        if not self.is_packed:
            object.__setattr__(self, "samples_per_row", (1,) * len(self.buckets.shapes))
        for field in dataclasses.fields(self):
            if isinstance(value := getattr(self, field.name), np.ndarray):
                value.setflags(write=False)  # the digest is computed once

    @property
    def num_steps(self) -> int:
        """S, the number of steps."""
        return len(self.step_groups) - 1

    @property
    def num_groups(self) -> int:
        """G, the number of groups; S where every step is one."""
        return len(self.group_bucket)

    @property
    def has_many_groups(self) -> bool:
        """Whether a step has several groups."""
        return self.num_groups > self.num_steps

    @property
    def step_bucket(self) -> Int32[np.ndarray, " S"]:
        """int32[S], the bucket of each step; ValueError where steps have several groups, each of its own bucket."""
        if self.has_many_groups:
            raise UserError("steps of this plan have several groups, each of its own bucket: read group_bucket")
        return self.group_bucket

    @functools.cached_property
    def step_offsets(self) -> Int64[np.ndarray, " S_plus_1"]:
        """int64[S+1], the samples before each step; the last is n."""
        return _freeze(self.group_offsets[self.step_groups]) if self.has_many_groups else self.group_offsets

    @functools.cached_property
    def num_tokens(self) -> Int64[np.ndarray, " S"]:
        """int64[S], real tokens of each step."""
        return _freeze(self.sum_groups(self.group_tokens))

    def groups(self, step: int) -> range:
        """The groups of a step, which `rows` takes.

        Args:
          step: 0 ≤ step < S.

        Returns:
          Their numbers.

        Raises:
          IndexError: no such step.
        """
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} of a plan of {self.num_steps} steps")
        return range(*self.step_groups[step : step + 2].tolist())

    def sum_groups(self, values: Int64[np.ndarray, " G"]) -> Int64[np.ndarray, " S"]:
        """Sums over the groups of each step.

        Args:
          values: int64[G].

        Returns:
          int64[S]; the values themselves where every step is one group.
        """
        return np.add.reduceat(values, self.step_groups[:-1]) if self.has_many_groups else values

    @property
    def size(self) -> SampleSize:
        """How a sample of two lengths counts in `num_tokens`, in padding and in reports, as in `Budget`."""
        return self.buckets.size

    @property
    def num_samples(self) -> int:
        """n, the number of real samples; each comes exactly once."""
        return int(self.group_offsets[-1])

    @property
    def num_rows(self) -> int:
        """R, the number of rows that hold samples; n where nothing is packed."""
        return self.num_samples

    @property
    def is_packed(self) -> bool:
        """Whether a row can hold several samples."""
        return False

    if TYPE_CHECKING:  # each kind of plan defines these

        @property
        def digest(self) -> str:
            """Equal for equal batches, on all processes."""

        @property
        def largest_id(self) -> int:
            """The largest id of a sample that this process may read."""

        def local_rows(self, group: int, microbatches: Int64[np.ndarray, " m"] | None = None) -> StepRows:
            """The rows of a group in these microbatches; None means all that this process has."""

        def pairs_of_samples(self, lengths: npt.ArrayLike | None) -> Int64[np.ndarray, " n"]:
            """The pairs of tokens of each sample of packed rows."""

    @functools.cached_property
    def num_sequences(self) -> Int64[np.ndarray, " S"]:
        """int64[S], real samples of each step."""
        return _freeze(np.diff(self.step_offsets))

    @functools.cached_property
    def padded_tokens_per_step(self) -> Int64[np.ndarray, " S"]:
        """int64[S], tokens with padding of each step: M × rows × length, or of pairs M × rows × `size`."""
        return _freeze(self.sum_groups((self.num_microbatches * self.buckets.padded_tokens)[self.group_bucket]))

    @property
    def most_groups(self) -> int:
        """The most groups of a step."""
        return int(np.diff(self.step_groups).max())

    @functools.cached_property
    def rows_per_step(self) -> int:
        """The most rows of a step, padding rows included: M × the rows of its groups' buckets."""
        rows = np.array([bucket.rows for bucket in self.buckets.shapes])
        return int(self.sum_groups((self.num_microbatches * rows)[self.group_bucket]).max())

    def groups_of_buckets(self, start_step: int = 0, end_step: int | None = None) -> dict[AnyBucket, int]:
        """How many groups each bucket has; where every step is one group, its steps.

        Args:
          start_step: the first step that counts.
          end_step: the first step that no longer counts; None counts all.

        Returns:
          The number of groups by bucket, possibly 0.
        """
        first, *_, last = self.step_groups[start_step : None if end_step is None else end_step + 1][[0, -1]].tolist()
        counts = np.bincount(self.group_bucket[first:last], minlength=len(self.buckets.shapes))
        return dict(zip(self.buckets.shapes, counts.tolist(), strict=True))

    @property
    def padding(self) -> float:
        """The share of positions that hold no token, padding rows included, in [0, 1)."""
        return 1.0 - int(self.num_tokens.sum()) / int(self.padded_tokens_per_step.sum())

    def limits(self, budget: Budget) -> list[str]:
        """The limit that set the rows of each bucket that a budget chose.

        Args:
          budget: it.

        Returns:
          For each bucket "tokens", "cost", "memory" or "sequences"; "samples" where these are one step of fewer rows.
        """
        rows, sizes = np.array([bucket.rows for bucket in self.buckets.shapes]), self.buckets.row_sizes
        is_one = (np.array(list(self.groups_of_buckets().values())) <= 1) & (rows < budget.row_caps(sizes))
        return ["samples" if one else limit for one, limit in zip(is_one, limits_of_rows(budget, sizes), strict=True)]

    def report(
        self,
        learning_rates: Float[np.ndarray, " S"] | None = None,
        *,
        cost: CostFn | None = None,
        lengths: npt.ArrayLike | None = None,
        compile_seconds: float | None = None,
        budget: Budget | None = None,
    ) -> str:
        """A table: per bucket its shape, samples, steps and padding; in total steps, tokens, padding.

        With `new_shape_every` it also has the first step of each bucket; for packed rows that are shuffled, how many
        rows more their blocks need, and which share of the rows of epoch 0 recurs in epoch 1.

        Args:
          learning_rates: float64[S], as from `lr_sequence`; their range is shown.
          cost: cost(rows, length) of one microbatch in seconds; its prediction is shown.
          lengths: integers[N], tokens per sample, as it was planned; only a `CostModel` of packed rows needs them.
          compile_seconds: seconds of compiling one bucket, shown with the prediction.
          budget: that chose the buckets: which of its limits set the rows of each is shown, or "samples" where
            those of the bucket fit into one step of fewer rows.

        Returns:
          Lines of text.
        """
        figures = bucket_figures(self, cost, lengths)
        seconds = figures.seconds
        padding = [f"{part:.2%}" if n else "–" for part, n in zip(figures.padding, figures.num_groups, strict=True)]
        columns = [
            [
                "rows × length",
                *(f"{b.rows:>6,} × {self.buckets.lengths_of(b):>6}" for b in self.buckets.shapes),
                "total",
            ],
            ["samples", *(f"{number:,}" for number in (*figures.num_samples, self.num_samples))],
            [
                "groups" if self.has_many_groups else "steps",
                *(f"{number:,}" for number in (*figures.num_groups, self.num_groups)),
            ],
            ["padding", *padding, f"{self.padding:.2%}"],
        ]
        if self.new_shape_every:
            first = {k: int((self.group_bucket == k).argmax()) for k in np.flatnonzero(figures.num_groups).tolist()}
            columns.append(["first step", *(f"{first[k]:,}" if k in first else "–" for k in range(len(padding))), ""])
        if seconds is not None:
            columns.append(["predicted s", *(f"{each:,.1f}" for each in (*seconds, seconds.sum()))])
        if budget is not None:
            columns.append(["limit", *self.limits(budget), ""])
        rows = list(zip(*columns, strict=True))
        lines = [text_table(rows, align=">", least_widths=(15, 12, 8, 9, 12, 12, 9)[: len(columns)], gap=" ")]
        num_tokens, padded_tokens = int(self.num_tokens.sum()), int(self.padded_tokens_per_step.sum())
        lines.append(
            f"{num_tokens:,} {self.buckets.unit}, {padded_tokens:,} with padding; {self._describe_microbatches()}"
        )
        if self.is_packed:
            lines.append(f"packed: {self.num_rows:,} rows, {self.num_samples / self.num_rows:.2f} samples a row")
        if self.repacking is not None:
            lines.append(str(self.repacking))
        longest = self.buckets.lengths_of(self.buckets.shapes[-1])
        cut = f"overlong={self.overlong!r}: {self.num_truncated:,} samples cut, {self.num_dropped:,} dropped"
        if self.overlong == "split":  # wrapped, too, where nobody said it
            cut = "packing splits samples, and chunks count as samples"
        lines.append(f"longest bucket {longest} tokens; {cut}")
        if seconds is not None and compile_seconds is not None:
            compiling = compile_seconds * len(self.buckets.shapes)
            lines.append(
                f"predicted: {seconds.sum():,.1f} s of steps, {compiling:,.1f} s of compiling "
                f"{len(self.buckets.shapes)} buckets"
            )
        if self.reason:
            lines.append(self.reason)
        if learning_rates is not None:
            lines.append(f"learning rate {learning_rates.min():.3g} to {learning_rates.max():.3g} in this epoch")
        return "\n".join(lines)

    def _describe_microbatches(self) -> str:
        """How many microbatches and groups a step has."""
        if not self.has_many_groups:
            return f"microbatches a step: {self.num_microbatches}"
        mean = self.num_groups / self.num_steps
        return (
            f"microbatches a group: {self.num_microbatches}, groups a step: {mean:.1f}, at most {self.most_groups}, "
            f"steps: {self.num_steps:,}"
        )


def _freeze(array: np.ndarray) -> np.ndarray:
    """The array, read-only: it is made once and shared by all callers."""
    array.setflags(write=False)
    return array


class BucketFigures(NamedTuple):
    """Figures of each bucket of a plan, in the order of the buckets."""

    num_samples: Int64[np.ndarray, " K"]
    num_groups: Int64[np.ndarray, " K"]
    num_tokens: Int64[np.ndarray, " K"]
    padded_tokens: Int64[np.ndarray, " K"]
    seconds: Float64[np.ndarray, " K"] | None  # predicted by the cost for all groups of the bucket; None without one

    @property
    def padding(self) -> Float64[np.ndarray, " K"]:
        """float64[K], NaN where a bucket has no group."""
        with np.errstate(invalid="ignore"):
            return 1.0 - self.num_tokens / self.padded_tokens


def bucket_figures(
    plan: PlannedSteps, cost: CostFn | None = None, lengths: npt.ArrayLike | None = None
) -> BucketFigures:
    """Counts samples, groups and tokens of each bucket, also with padding; with a cost, predicts seconds as well."""
    num_buckets = len(plan.buckets.shapes)
    num_groups = np.bincount(plan.group_bucket, minlength=num_buckets)
    microbatches = plan.num_microbatches * num_groups

    def sums(per_group: Int64[np.ndarray, " G"]) -> Int64[np.ndarray, " K"]:
        totals = np.zeros(num_buckets, np.int64)
        np.add.at(totals, plan.group_bucket, per_group)
        return totals

    seconds = None
    if cost is not None:
        warn_beyond_measured(cost, plan.buckets.shapes)
        rows, *bucket_lengths = np.array(plan.buckets.shapes, np.int64).T
        seconds = microbatches * evaluate_cost(cost_of_plan(plan, cost, lengths), rows, *bucket_lengths)
    padded_tokens = microbatches * plan.buckets.padded_tokens
    num_samples = sums(np.diff(plan.group_offsets))
    return BucketFigures(num_samples, num_groups, sums(plan.group_tokens), padded_tokens, seconds)


def cost_of_plan(plan: PlannedSteps, cost: CostFn, lengths: npt.ArrayLike | None) -> CostFn:
    """The cost of the plan's buckets; a `CostModel` of packed rows counts the pairs of their samples, on average."""
    if not plan.is_packed or not isinstance(cost, CostModel) or not cost.quadratic:
        return cost
    of_groups = np.add.reduceat(plan.pairs_of_samples(lengths), plan.group_offsets[:-1])
    num_groups = np.bincount(plan.group_bucket, minlength=len(plan.buckets.shapes))
    pairs = np.bincount(plan.group_bucket, of_groups, len(plan.buckets.shapes))
    return functools.partial(cost, pairs=pairs / (np.maximum(num_groups, 1) * plan.num_microbatches))


def check_steps(plan: PlannedSteps, num_samples: int, row_offsets: Int64[np.ndarray, " G_plus_1"]) -> None:
    """Raises ValueError for groups that are not as `make_plan` makes them; `row_offsets` are the rows before each."""
    num_groups, num_buckets = len(plan.group_bucket), len(plan.buckets.shapes)
    capacities, sizes = rows_of_steps(plan.buckets), plan.buckets.row_sizes
    check_choices(overlong=(plan.overlong, PackedOverlong))
    check_at_least_zero(num_dropped=plan.num_dropped, num_truncated=plan.num_truncated)
    if plan.group_offsets.shape != (num_groups + 1,) or plan.group_tokens.shape != (num_groups,):
        raise UserError("group_bucket, group_offsets and group_tokens are not of the same groups")
    check_offsets("group_offsets", plan.group_offsets, num_samples)
    check_offsets("step_groups", plan.step_groups, num_groups)
    if plan.group_bucket.min() < 0 or plan.group_bucket.max() >= num_buckets:
        raise UserError(f"group_bucket must be from 0 to {num_buckets - 1}")
    num_rows = np.diff(row_offsets)
    if (num_rows > capacities[plan.group_bucket]).any():
        raise UserError("groups have more rows than M × rows of their buckets")
    of_group, groups = (capacities * sizes).tolist(), np.bincount(plan.group_bucket, minlength=num_buckets).tolist()
    if (total := sum(n * padded for n, padded in zip(groups, of_group, strict=True))) > MOST_TOKENS:
        raise UserError(f"all steps have {total:,} tokens with padding, more than 2**63 − 1")
    too_few, too_many = (
        plan.group_tokens < np.diff(plan.group_offsets),
        plan.group_tokens > num_rows * sizes[plan.group_bucket],
    )
    if (too_few | too_many).any():
        raise UserError("group_tokens must be at least the samples of each group, and fit into its rows")
    if plan.has_many_groups:
        _check_groups(plan, num_rows == capacities[plan.group_bucket])


def _check_groups(plan: PlannedSteps, is_full: Bool[np.ndarray, " G"]) -> None:
    """Raises ValueError for groups of a step that are not as the samples of one step open them."""
    step = np.repeat(np.arange(plan.num_steps), np.diff(plan.step_groups))
    bucket = plan.group_bucket
    has_next = step[:-1] == step[1:]
    if (has_next & (bucket[:-1] > bucket[1:])).any():
        raise UserError("the groups of a step must come by bucket, ascending")
    if (has_next & (bucket[:-1] == bucket[1:]) & ~is_full[:-1]).any():
        raise UserError("only the last group that a step has of a bucket can have padding rows")
    shapes = plan.buckets.shapes
    if isinstance(shapes[0], Bucket) and (~is_full & (bucket != bucket[plan.step_groups[step]])).any():
        raise UserError("only a group of the shortest bucket of a step can have padding rows")
    is_last_of_length = [k + 1 == len(shapes) or shapes[k].lengths != shapes[k + 1].lengths for k in range(len(shapes))]
    length = np.cumsum([0, *is_last_of_length[:-1]])[bucket]
    has_fewer_rows = ~np.array(is_last_of_length)[bucket]
    again = step[has_fewer_rows] * len(shapes) + length[has_fewer_rows]
    if (np.diff(again) == 0).any():
        raise UserError("only one group that a step has of a length can have fewer than the most rows")


def check_offsets(name: str, offsets: Int64[np.ndarray, " m"], last: int) -> None:
    """Raises ValueError unless offsets ascend strictly from 0 to the last."""
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != last or (offsets[1:] <= offsets[:-1]).any():
        raise UserError(f"{name} must ascend strictly from 0 to the {last:,} samples of the plan")
