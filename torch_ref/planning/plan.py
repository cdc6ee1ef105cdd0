"""The plan: which samples form which step of an epoch, in which static shape."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torch_ref.checks import INT64_MAX, check_integer
from torch_ref.planning.buckets import Bucket, Buckets, check_steps
from torch_ref.planning.group_ids import check_one_step_each
from torch_ref.planning.lengths import PACKED_OVERLONG
from torch_ref.planning.packing import ShuffledSamples
from torch_ref.planning.plan_file import plan_digest, read_plan_file, write_plan_file
from torch_ref.planning.steps import PlannedSteps
from torch_ref.planning.windows import WINDOWS, end_windows

__all__ = ["Plan", "check_plan"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan(PlannedSteps):
    """The steps of an epoch, fixed before training and the same on every process.

    It has the attributes of `PlannedSteps`, and these:

    Attributes:
        sample_ids: int64[n], real samples only, in the order of groups and rows.
        row_offsets: int64[R + 1] for packed rows; row r, in the order of the groups, holds
            `sample_ids[row_offsets[r]:row_offsets[r + 1]]`. None where each sample is a row.
        chunk_starts: int64[n], how many tokens of its sample come before each chunk of packed rows, or before what
            "truncate_start" and "truncate_random" keep of it, of packed pairs int64[n, 2]. None where rows have samples
            from their first token on.
        group_ids: int64[N], of each sample of the dataset, equal for those that share a step. None if none have to.
        overlong: the rule the plan was made with: "error" | "drop" | "truncate" | "truncate_start" |
            "truncate_random", or of packed rows "split".
        num_dropped: samples left out because they were too long.
        num_truncated: samples cut to the longest bucket.
        new_shape_every: what the plan was made with, for its report; a plan that was loaded has 0.
        reason: why rows are packed or not, where packing="auto" chose; a plan that was loaded has none.
        shuffled: what packed rows that are shuffled were made from, for the report; a plan that was loaded has none.
        samples_per_row: K numbers, the most samples that a row of each bucket could hold in any epoch, whatever the
            order: 1 where each sample is a row. Not in the digest.
        plan_epoch: makes the plan of another epoch, as `of_epoch` does; None where the lengths are not known. It is not
            in the digest, in the file or in a pickle.
    """

    sample_ids: NDArray[np.int64]
    row_offsets: NDArray[np.int64] | None = None
    chunk_starts: NDArray[np.int64] | None = None
    group_ids: NDArray[np.int64] | None = None
    overlong: str = "error"
    num_dropped: int = 0
    num_truncated: int = 0
    new_shape_every: int = 0
    reason: str = ""
    shuffled: ShuffledSamples | None = None
    samples_per_row: tuple[int, ...] = ()
    plan_epoch: Callable[[int], "Plan"] | None = None

    def __post_init__(self) -> None:
        """Lock the arrays: the digest is computed once."""
        super().__post_init__()
        if not self.samples_per_row:
            object.__setattr__(self, "samples_per_row", (1,) * len(self.buckets.shapes))
        for array in vars(self).values():
            if isinstance(array, np.ndarray):
                array.setflags(write=False)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what makes other epochs: it holds the lengths, and functions that need not be picklable."""
        return vars(self) | {"plan_epoch": None}

    def of_epoch(self, epoch: int) -> "Plan":
        """Return the plan of another epoch: `make_plan` with the other arguments as they were, in these buckets.

        Args:
            epoch: 0 <= epoch < 2**63.

        Returns:
            A plan of the same shapes.

        Raises:
            ValueError: if the epoch is out of its range, or the plan does not know the lengths of its samples.
        """
        epoch = check_integer("epoch", epoch, minimum=0)
        if self.plan_epoch is None:
            raise ValueError(
                "the plan does not know the lengths of its samples (it was read from a file or another process, is of "
                "a single step, or balanced by the costs of packed rows), which other epochs need: use make_plan"
            )
        return replace(self.plan_epoch(epoch), samples_per_row=self.samples_per_row)

    @property
    def num_samples(self) -> int:
        """The number of real samples, n."""
        return len(self.sample_ids)

    @property
    def num_rows(self) -> int:
        """The number of rows that hold samples; as many as samples where these are not packed."""
        return self.num_samples if self.row_offsets is None else len(self.row_offsets) - 1

    @property
    def is_split(self) -> bool:
        """Whether samples are in chunks, of which one sample can have several."""
        return self.overlong == "split" and self.chunk_starts is not None

    @property
    def longest(self) -> tuple[int, ...]:
        """The length of the longest bucket, of pairs that of both sides: what samples are cut to."""
        return tuple(np.max(self.buckets.shapes, axis=0)[1:].tolist())

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the plan as 64 hex digits; equal digests mean the same steps."""
        return plan_digest(
            self.num_microbatches,
            np.array(self.buckets.shapes),
            self.group_bucket,
            self.group_offsets,
            self.sample_ids,
            self.row_offsets,
            self.chunk_starts,
            self.step_groups if self.has_many_groups else None,
            self.group_ids,
            is_split=self.is_split,
        )

    def rows(self, group: int) -> NDArray[np.int64]:
        """Return the samples of a group in the order of its microbatches and their rows.

        Args:
            group: 0 <= group < num_groups, as `groups(step)` has them.

        Returns:
            int64[M, B] sample ids, -1 for a padding row. Row j of the group is in microbatch j mod M at slot j // M.
            For packed rows int64[M, B, P], P the most samples of a row in this group, -1 where there is none.

        Raises:
            IndexError: if there is no such group.
        """
        return self._lay_out(self.sample_ids, group)

    def chunks(self, group: int) -> NDArray[np.int64] | None:
        """Return where in their samples the chunks of a group begin, or what stays of them; None for all at 0.

        Args:
            group: 0 <= group < num_groups, as `groups(step)` has them.

        Returns:
            int64, shaped as `rows`, of pairs [M, B, P, 2]: the tokens of the sample before, -1 where there is none.

        Raises:
            IndexError: if there is no such group.
        """
        return None if self.chunk_starts is None else self._lay_out(self.chunk_starts, group)

    def ends(self, group: int) -> NDArray[np.int64] | None:
        """Return where in their samples the chunks of a group end, or what stays of them; None as for `chunks`.

        Args:
            group: 0 <= group < num_groups, as `groups(step)` has them.

        Returns:
            int64, shaped as `chunks`; for the last chunks of samples, their end or more.

        Raises:
            IndexError: if there is no such group.
        """
        return None if self.chunk_ends is None else self._lay_out(self.chunk_ends, group)

    @cached_property
    def chunk_ends(self) -> NDArray[np.int64] | None:
        """Shaped as `chunk_starts`, where each chunk ends: where the next of its sample starts, or a row later."""
        if self.chunk_starts is None:
            return None
        ends = end_windows(self.overlong, self.chunk_starts, self.longest)
        if not self.is_split:
            return ends
        split = np.flatnonzero(np.isin(self.sample_ids, self.sample_ids[self.chunk_starts > 0]))
        ordered = split[np.lexsort((self.chunk_starts[split], self.sample_ids[split]))]
        has_next = self.sample_ids[ordered[1:]] == self.sample_ids[ordered[:-1]]
        one, next_one = ordered[:-1][has_next], ordered[1:][has_next]
        ends[one] = np.minimum(ends[one], self.chunk_starts[next_one])
        return ends

    def _lay_out(self, values: NDArray[np.int64], group: int) -> NDArray[np.int64]:
        if not 0 <= group < self.num_groups:
            raise IndexError(f"group {group} is outside the plan's {self.num_groups} groups")
        begin, end = self.group_offsets[group : group + 2]
        offsets = np.arange(begin, end + 1)
        if self.row_offsets is not None:
            first, last = np.searchsorted(self.row_offsets, (begin, end))
            offsets = self.row_offsets[first : last + 1]
        sizes = np.diff(offsets)
        rows_per_microbatch = self.buckets.shapes[self.group_bucket[group]].rows
        rows = np.full((rows_per_microbatch * self.num_microbatches, sizes.max(), *values.shape[1:]), -1)
        rows[: len(sizes)][np.arange(sizes.max()) < sizes[:, None]] = values[begin:end]
        split = rows.reshape(rows_per_microbatch, self.num_microbatches, *rows.shape[1:]).swapaxes(0, 1)
        return np.ascontiguousarray(split if self.row_offsets is not None else split[:, :, 0])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, whole or not at all.

        Args:
            path: where to; an existing file is replaced.

        Raises:
            OSError: if the file cannot be written.
        """
        optional: dict[str, ArrayLike] = {}
        if self.row_offsets is not None:
            optional = {"row_offsets": self.row_offsets, "samples_per_row": self.samples_per_row}
        if self.chunk_starts is not None:
            optional["piece_starts"] = self.chunk_starts
        if self.group_ids is not None:
            optional["group_ids"] = self.group_ids
        of_steps: dict[str, ArrayLike] = {"step_bucket": self.group_bucket, "step_offsets": self.group_offsets}
        if self.has_many_groups:
            of_steps = {
                "group_bucket": self.group_bucket,
                "step_groups": self.step_groups,
                "group_offsets": self.group_offsets,
            }
        write_plan_file(
            path,
            **optional,
            **of_steps,
            microbatches_per_step=self.num_microbatches,
            buckets=np.array(self.buckets.shapes),
            sample_ids=self.sample_ids,
            num_tokens=self.group_tokens,
            num_dropped=self.num_dropped,
            num_truncated=self.num_truncated,
            overlong=self.overlong,
            size=self.size,
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a plan that `save` wrote.

        Args:
            path: the file.

        Returns:
            An equal plan.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if it is not a plan file, of another version, cut short or changed, or `make_plan` makes no such
                steps; the message names the file. Whether every id comes once is not checked.
        """
        fields, counted = read_plan_file(path)
        num_microbatches = int(fields["microbatches_per_step"])
        try:
            plan = cls(
                buckets=Buckets(tuple(fields["buckets"].tolist()), num_microbatches, counted),
                num_microbatches=num_microbatches,
                group_bucket=fields["step_bucket"] if "step_bucket" in fields else fields["group_bucket"],
                group_offsets=fields["step_offsets"] if "step_offsets" in fields else fields["group_offsets"],
                sample_ids=fields["sample_ids"],
                group_tokens=fields["num_tokens"],
                step_groups=fields.get("step_groups"),  # type: ignore[arg-type]
                row_offsets=fields.get("row_offsets"),
                chunk_starts=fields.get("piece_starts"),
                group_ids=fields.get("group_ids"),
                overlong=str(fields["overlong"]),
                num_dropped=int(fields["num_dropped"]),
                num_truncated=int(fields["num_truncated"]),
                samples_per_row=tuple(fields["samples_per_row"].tolist()) if "samples_per_row" in fields else (),
            )
            check_plan(plan, with_ids=not isinstance(fields["sample_ids"], np.memmap))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        return plan

    def report(self) -> str:
        """Return a table: shape, samples, steps (or groups) and padding of each bucket, then the totals.

        With `new_shape_every` it also names the first step of each bucket. If packed rows are shuffled, it says how
        many rows more their blocks need, and what share of the rows of epoch 0 recurs in epoch 1.
        """
        packed = "" if self.row_offsets is None else f"{self.num_rows:,} packed rows; "
        microbatches = f"{self.num_microbatches} microbatch{'es' * (self.num_microbatches > 1)}"
        of = f"group; {self.num_steps:,} steps" if self.has_many_groups else "step"
        cut = f"{self.num_dropped:,} samples dropped, {self.num_truncated:,} truncated"
        if self.overlong == "split":
            cut = "packing splits samples, and chunks count as samples"
        return (
            f"{self._table()}\n{microbatches} a {of}; {packed}{cut}; digest {self.digest[:16]}"
            + ("" if self.shuffled is None else f"\n{self.shuffled.describe()}")
            + ("" if self.size == "sum" else f"\na sample counts size={self.size!r}")
            + (f"\n{self.reason}" if self.reason else "")
        )

    def _table(self) -> str:
        positions, num_sequences = self.positions, np.diff(self.group_offsets)
        sizes = [f"{rows} x {' + '.join(map(str, sides))}" for rows, *sides in self.buckets.shapes]
        counted = "groups" if self.has_many_groups else "steps"
        lines = [f"{'rows x length':>20} {'samples':>12} {counted:>9} {'padding':>9}"]
        if self.new_shape_every:
            lines[0] += f" {'first step':>11}"
        for bucket, name in enumerate([*sizes, "total"]):
            groups = np.flatnonzero((self.group_bucket == bucket) | (name == "total"))
            padding = f"{1 - self.group_tokens[groups].sum() / positions[groups].sum():.2%}" if len(groups) else "-"
            line = f"{name:>20} {num_sequences[groups].sum():>12,} {len(groups):>9,} {padding:>9}"
            if self.new_shape_every and name != "total":
                line += f" {f'{groups[0]:,}' if len(groups) else '-':>11}"
            lines.append(line)
        return "\n".join(lines)


def check_plan(plan: Plan, *, with_ids: bool = True) -> None:
    """Raise ValueError, which names what is wrong, for a plan that `make_plan` would not make.

    Each sample comes once, or each chunk of it; one that never comes may have been left out of the order. `with_ids`
    says whether to look at the ids as well, which takes time and memory for very many.
    """
    shapes, ids = plan.buckets.shapes, plan.sample_ids
    check_steps(plan.buckets)
    if plan.overlong not in PACKED_OVERLONG:
        raise ValueError(f"overlong is {plan.overlong!r}, not one of {', '.join(PACKED_OVERLONG)}")
    check_integer("num_dropped", plan.num_dropped, minimum=0)
    check_integer("num_truncated", plan.num_truncated, minimum=0)
    if not len(plan.group_bucket) == len(plan.group_offsets) - 1 == len(plan.group_tokens):
        raise ValueError("group_bucket, group_offsets and group_tokens count different numbers of groups")
    _check_offsets("group_offsets", plan.group_offsets, len(ids), "samples")
    _check_offsets("step_groups", plan.step_groups, plan.num_groups, "groups")
    if not ((plan.group_bucket >= 0) & (plan.group_bucket < len(shapes))).all():
        raise ValueError(f"group_bucket has numbers that are none of the {len(shapes)} buckets")
    rows_before = plan.group_offsets
    if plan.row_offsets is not None:
        _check_offsets("row_offsets", plan.row_offsets, len(ids), "samples")
        if not np.isin(plan.group_offsets, plan.row_offsets).all():
            raise ValueError("a group begins within a packed row")
        rows_before = np.searchsorted(plan.row_offsets, plan.group_offsets)
    rows = np.diff(rows_before)
    per_group = plan.num_microbatches * np.array([bucket[0] for bucket in shapes])
    if (rows > per_group[plan.group_bucket]).any():
        raise ValueError("a group has more rows than its microbatches")
    sizes = plan.buckets.row_sizes
    num_groups = plan.groups_of_buckets().values()
    padded = sum(n * b * size for n, b, size in zip(num_groups, per_group.tolist(), sizes.tolist(), strict=True))
    if padded > INT64_MAX:
        raise ValueError(f"all steps together have {padded} tokens with padding, too many for int64")
    too_few = plan.group_tokens < np.diff(plan.group_offsets)
    if (too_few | (plan.group_tokens > rows * sizes[plan.group_bucket])).any():
        raise ValueError("group_tokens are fewer than the samples of a group, or more than its rows hold")
    if plan.has_many_groups:
        _check_groups(plan, rows == per_group[plan.group_bucket])
    if plan.row_offsets is not None:
        _check_samples_per_row(plan, np.diff(plan.row_offsets), np.repeat(plan.group_bucket, rows))
    if plan.is_split and (plan.row_offsets is None or not isinstance(shapes[0], Bucket)):
        raise ValueError("only packed samples of one length have chunks")
    if with_ids:
        _check_ids(plan)
    if plan.group_ids is not None:
        check_one_step_each(plan.group_ids, ids, plan.step_offsets)


def _check_groups(plan: Plan, is_full: NDArray[np.bool_]) -> None:
    """Raise ValueError for groups of a step that its samples would not open."""
    buckets, lengths = plan.group_bucket.tolist(), [bucket[1:] for bucket in plan.buckets.shapes]
    most = [later != length for length, later in zip(lengths, [*lengths[1:], None], strict=True)]
    for step in range(plan.num_steps):
        groups = plan.groups(step)
        for one, other in pairwise(groups):
            if buckets[one] > buckets[other]:
                raise ValueError(f"the groups of step {step} do not come by ascending bucket")
            if buckets[one] == buckets[other] and not is_full[one]:
                raise ValueError(f"step {step} has padding rows before its last group of a bucket")
        if len(lengths[0]) == 1 and any(not is_full[g] and buckets[g] != buckets[groups.start] for g in groups):
            raise ValueError(f"step {step} has padding rows in groups of others than its shortest bucket")
        fewer = [lengths[buckets[group]] for group in groups if not most[buckets[group]]]
        if len(set(fewer)) < len(fewer):
            raise ValueError(f"step {step} has several groups of one length with fewer than its most rows")


def _check_samples_per_row(plan: Plan, sizes: NDArray[np.int64], bucket_of_row: NDArray[np.int32]) -> None:
    if plan.size != "sum":
        raise ValueError(f"size={plan.size!r} counts samples that are not packed")
    most = np.array(plan.samples_per_row)
    longest = np.array([bucket[1] for bucket in plan.buckets.shapes])
    if most.shape != longest.shape or not ((most >= 1) & (most <= longest)).all():
        raise ValueError(f"samples_per_row must be between 1 and the length of each bucket, got {plan.samples_per_row}")
    if (sizes > most[bucket_of_row]).any():
        raise ValueError("a row holds more samples than samples_per_row")


def _check_offsets(name: str, offsets: NDArray[np.int64], last: int, counted: str) -> None:
    if not len(offsets) > 1 or offsets[0] != 0 or offsets[-1] != last or not (offsets[:-1] < offsets[1:]).all():
        raise ValueError(f"{name} do not ascend strictly from 0 to {last}, the number of {counted}")


def _check_ids(plan: Plan) -> None:
    ids, starts = plan.sample_ids, plan.chunk_starts
    if (ids < 0).any():
        raise ValueError("a sample id is below 0")
    if starts is not None:
        num_sides = len(plan.longest)
        if starts.shape != ((len(ids),) if num_sides == 1 else (len(ids), num_sides)) or (starts < 0).any():
            raise ValueError("chunk_starts must be one number of tokens, at least 0, for each chunk")
        num_cut = np.count_nonzero(starts.reshape(len(ids), -1).any(axis=1))
        may_cut = plan.num_truncated if plan.overlong in WINDOWS else 0
        if not plan.is_split and num_cut > may_cut:
            raise ValueError(f"{num_cut} samples begin later than overlong={plan.overlong!r} of {may_cut} allows")
    if plan.is_split and starts is not None:
        order = np.lexsort((starts, ids))
        twice = (np.diff(ids[order]) == 0) & (np.diff(starts[order]) == 0)
    else:
        ordered = np.sort(ids)
        twice = ordered[1:] == ordered[:-1]
    if twice.any():
        raise ValueError("a sample, or a chunk of one, comes twice")
