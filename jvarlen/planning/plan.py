"""The plan: every step of an epoch, fixed before training.

Letters: N samples, n samples in the plan, R rows, S steps, G groups, K buckets, M microbatches of a group, B rows of a
microbatch, P samples of a row.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
from jaxtyping import Int64

from jvarlen._common.checks import UserError, check_at_least_zero, list_first
from jvarlen.planning.buckets import Buckets
from jvarlen.planning.lengths import PackedOverlong, check_lengths
from jvarlen.planning.plan_file import Values, chunk_digests, plan_digest, read_plan_file, write_plan_file
from jvarlen.planning.step_sizes import check_shared_steps
from jvarlen.planning.steps import PlannedSteps, StepRows, check_offsets, check_steps
from jvarlen.planning.windows import is_window, window_stops

__all__ = ["Plan", "check_plan"]

# Other names in files, and those of plans whose steps have one group each.
_FILE_NAMES = {
    "num_microbatches": "microbatches_per_step",
    "chunk_starts": "piece_starts",
    "group_tokens": "num_tokens",
}
_NAMES_OF_ONE_GROUP = {"group_bucket": "step_bucket", "group_offsets": "step_offsets"}
_WIDE = 8  # ids up to this many times their number are looked up in a table, a byte each


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Plan(PlannedSteps):
    """The steps of an epoch: which samples, in which shape, in which order.

    It has the attributes of `PlannedSteps`, and these:

    Attributes:
      sample_ids: int64[n], real samples in order of step, group, then row; step t holds
        `sample_ids[step_offsets[t]:step_offsets[t+1]]`.
      row_offsets: int64[R+1] of a packed plan: row r, in order of group, holds
        `sample_ids[row_offsets[r]:row_offsets[r+1]]`. None where every sample is a row.
      chunk_starts: int64[n], the token of its sample with which each chunk begins, where packed samples are split or
        wrapped; with `"truncate_start"` and `"truncate_random"`, that with which what stays of each sample begins, of
        packed pairs int64[n, 2]. None where all samples begin with their first token.
      group_ids: int64[N], of all samples by id: those of one group id share a step. None where nothing but the order
        decides which samples do.
      epoch: that of `make_plan`; None where it is not known, as in a plan from a file. Neither in the digest nor in a
        plan's file.
      plan_epoch: makes the plan of another epoch, as `of_epoch` does; None where the lengths are not known. Neither in
        the digest nor in a plan's file, nor in a pickle.
    """

    sample_ids: Int64[np.ndarray, " n"]
    row_offsets: Int64[np.ndarray, " R_plus_1"] | None = None
    chunk_starts: Int64[np.ndarray, " n *D"] | None = None
    group_ids: Int64[np.ndarray, " N"] | None = None
    epoch: int | None = None
    plan_epoch: Callable[[int], Plan] | None = None

    def __repr__(self) -> str:
        return self.report()

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"plan_epoch": None}  # it holds the lengths of all samples

    def of_epoch(self, epoch: int) -> Plan:
        """Another epoch of the same samples, in this plan's buckets.

        Args:
          epoch: 0 ≤ epoch < 2**63.

        Returns:
          What `make_plan` makes with the arguments of this plan, its buckets, its `samples_per_row` and this epoch.

        Raises:
          ValueError: the plan does not know the lengths of its samples, as when it was read from a file.

        Example:
          >>> from jvarlen import make_plan
          >>> plan = make_plan([3, 1, 4, 2, 8], max_tokens=8, max_shapes=2)
          >>> plan.of_epoch(1).buckets == plan.buckets, plan.of_epoch(0).digest == plan.digest
          (True, True)
        """
        check_at_least_zero(epoch=epoch)
        if self.plan_epoch is None:
            raise UserError(
                "this plan does not know the lengths of its samples, because it was read from a file or another "
                "process, is of a single step, or is balanced by costs of packed rows: call "
                f"make_plan(lengths, plan.buckets, epoch={epoch}, …)"
            )
        plan = self.plan_epoch(int(epoch))
        plan_epoch = plan.plan_epoch or self.plan_epoch
        return dataclasses.replace(plan, samples_per_row=self.samples_per_row, plan_epoch=plan_epoch)

    @property
    def num_rows(self) -> int:
        """R, the number of rows that hold samples; n where nothing is packed."""
        return self.num_samples if self.row_offsets is None else len(self.row_offsets) - 1

    @property
    def is_packed(self) -> bool:
        """Whether a row can hold several samples."""
        return self.row_offsets is not None

    @property
    def longest(self) -> tuple[int, ...]:
        """The length of the longest bucket on each side, to which samples are cut."""
        return tuple(map(max, zip(*(bucket.lengths for bucket in self.buckets.shapes), strict=True)))

    @property
    def is_split(self) -> bool:
        """Whether `sample_ids` are those of chunks, several of one sample maybe."""
        return self.chunk_starts is not None and self.overlong == "split"

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 in hex of everything that decides the batches: equal digests mean equal batches."""
        return plan_digest(self._file_fields, chunk_digests(self.sample_ids))

    @property
    def _file_fields(self) -> Values:
        """Arrays and numbers by their names in files."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["buckets"] = self.buckets.shapes
        names = _FILE_NAMES
        if not self.has_many_groups:
            names = names | _NAMES_OF_ONE_GROUP
            del values["step_groups"]
        return {names.get(name, name): value for name, value in values.items() if value is not None}

    @functools.cached_property
    def largest_id(self) -> int:
        """The largest of `sample_ids`."""
        return int(self.sample_ids.max())

    def rows(self, group: int) -> Int64[np.ndarray, "M B *P"]:
        """The sample of every row of a group; for a packed plan, the samples of every row.

        Args:
          group: 0 ≤ group < G, such as those of `groups(step)`; the step itself where every step is one group.

        Returns:
          int64[M, B] of sample ids, −1 for a padding row. For a packed plan int64[M, B, P]: a row's samples from its
          beginning, then −1, where P is the most samples of any row of the group. Row j of the group is in microbatch
          j mod M, slot j // M, so that all microbatches hold nearly the same number of tokens.

        Raises:
          IndexError: no such group.
        """
        return self._lay_out(self.sample_ids, group)

    def chunks(self, group: int) -> Int64[np.ndarray, "M B *P_D"] | None:
        """The `chunk_starts` of a group; None where the plan has none.

        Args:
          group: 0 ≤ group < G.

        Returns:
          int64[M, B, P], placed as in `rows`, int64[M, B] where nothing is packed, and int64[M, B, P, 2] for pairs; −1
          where there is no sample. A chunk ends at the end of its row or with its sample, where the next chunk of the
          sample begins or with none left.

        Raises:
          IndexError: no such group.
        """
        return None if self.chunk_starts is None else self._lay_out(self.chunk_starts, group)

    def local_rows(self, group: int, microbatches: Int64[np.ndarray, " m"] | None = None) -> StepRows:
        """The rows of a group in these microbatches, those of one process; None means all."""
        ids, starts = self.rows(group), self.chunks(group)
        ends = None if self.chunk_ends is None else self._lay_out(self.chunk_ends, group)
        if microbatches is None or len(microbatches) == self.num_microbatches:
            return StepRows(ids, starts, int(self.group_tokens[group]), ends)
        starts, ends = (None if part is None else part[microbatches] for part in (starts, ends))
        return StepRows(ids[microbatches], starts, None, ends)

    @property
    def first_rows(self) -> Int64[np.ndarray, " G_plus_1"]:
        """int64[G+1], the rows before each group."""
        return self.group_offsets if self.row_offsets is None else np.searchsorted(self.row_offsets, self.group_offsets)

    @functools.cached_property
    def chunk_ends(self) -> Int64[np.ndarray, " n *D"] | None:
        """int64[n] or [n, 2], the token of its sample before which each chunk ends; at most, where it is the last."""
        if self.chunk_starts is None:
            return None
        stops = window_stops(self.chunk_starts, self.longest, self.overlong)
        if not self.is_split:
            return stops
        chunks = np.flatnonzero(np.isin(self.sample_ids, self.sample_ids[self.chunk_starts > 0]))
        chunks = chunks[np.lexsort([self.chunk_starts[chunks], self.sample_ids[chunks]])]
        before, after = chunks[:-1], chunks[1:]
        is_next = self.sample_ids[before] == self.sample_ids[after]
        stops[before[is_next]] = np.minimum(stops[before], self.chunk_starts[after])[is_next]
        return stops

    def planned_lengths(self, lengths: Int64[np.ndarray, " N *sides"]) -> Int64[np.ndarray, " n *sides"]:
        """The tokens that each of `sample_ids` was planned with, cut at the longest bucket, from those of N samples."""
        planned = lengths[self.sample_ids]
        if self.chunk_starts is None or self.chunk_ends is None or not self.is_split:
            return np.minimum(planned, self.longest)
        return np.minimum(planned, self.chunk_ends) - self.chunk_starts

    def pairs_of_samples(self, lengths: npt.ArrayLike | None) -> Int64[np.ndarray, " n"]:
        """The pairs of tokens, l², of each of `sample_ids`, packed into rows of samples of one length.

        Args:
          lengths: integers[N], tokens of the samples by id, as they were packed.

        Returns:
          int64[n].

        Raises:
          ValueError: a plan of pairs or without packed rows; lengths of another plan.
        """
        if self.row_offsets is None or len(self.buckets.shapes[0].lengths) > 1:
            raise UserError("pairs of tokens are counted of packed rows of one feature, as from make_plan(packing=…)")
        if lengths is None:
            raise UserError("what packed rows cost depends on their samples: give lengths, the tokens of each")
        tokens = self.planned_lengths(check_lengths(lengths))
        found = np.add.reduceat(tokens, self.step_offsets[:-1])
        if wrong := np.flatnonzero(found != self.num_tokens).tolist():
            listed = list_first(f"step {step} has {self.num_tokens[step]} tokens, not {found[step]}" for step in wrong)
            raise UserError(f"the plan was made with other lengths: {listed}")
        return tokens**2

    def _lay_out(self, values: Int64[np.ndarray, " n *D"], group: int) -> Int64[np.ndarray, "M B *P_D"]:
        """The values of a group's samples in its microbatches and rows."""
        if not 0 <= group < self.num_groups:
            what = "groups" if self.has_many_groups else "steps"
            raise IndexError(f"{what[:-1]} {group} of a plan of {self.num_groups} {what}")
        num_rows = self.buckets.shapes[self.group_bucket[group]].rows
        start, end = self.group_offsets[group : group + 2]
        ids = values[start:end]
        if self.row_offsets is None:
            rows_BxM = np.full((num_rows, self.num_microbatches), -1, np.int64)
            rows_BxM.reshape(-1)[: len(ids)] = ids
            return rows_BxM.T
        first, last = np.searchsorted(self.row_offsets, [start, end])
        num_in_row = np.diff(self.row_offsets[first : last + 1])
        most = num_in_row.max()
        rows_BMxP = np.full((num_rows * self.num_microbatches, most, *values.shape[1:]), -1, np.int64)
        rows_BMxP[: len(num_in_row)][np.arange(most) < num_in_row[:, None]] = ids
        return rows_BMxP.reshape(num_rows, self.num_microbatches, *rows_BMxP.shape[1:]).swapaxes(0, 1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to one uncompressed `.npz` file, atomically.

        Args:
          path: the file; its directory must exist, and an existing file is replaced.

        Raises:
          OSError: it cannot be written; an existing file stays.
        """
        write_plan_file(Path(path), {**self._file_fields, "digest": self.digest}, self.buckets.size)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Reads a plan that `save` wrote, and verifies it.

        Args:
          path: the file.

        Returns:
          The plan.

        Raises:
          ValueError: the file is not a plan, is damaged, of another version, or was edited; or its steps are not
            such as `make_plan` makes, with every sample once.
        """
        fields, counted = read_plan_file(Path(path))
        num_microbatches = int(fields["microbatches_per_step"])
        try:
            plan = Plan(
                buckets=Buckets(tuple(fields["buckets"].tolist()), num_microbatches, counted),
                num_microbatches=num_microbatches,
                group_bucket=fields["group_bucket" if "group_bucket" in fields else "step_bucket"],
                group_offsets=fields["group_offsets" if "group_offsets" in fields else "step_offsets"],
                group_tokens=fields["num_tokens"],
                step_groups=fields.get("step_groups"),  # type: ignore[arg-type]  # None: one group a step
                sample_ids=fields["sample_ids"],
                row_offsets=fields.get("row_offsets"),
                chunk_starts=fields.get("piece_starts"),
                group_ids=fields.get("group_ids"),
                overlong=cast(PackedOverlong, str(fields["overlong"])),
                num_dropped=int(fields["num_dropped"]),
                num_truncated=int(fields["num_truncated"]),
                samples_per_row=tuple(fields["samples_per_row"].tolist()) if "samples_per_row" in fields else (),
            )
            check_plan(plan)
        except UserError as error:
            raise UserError(f"{path} is not a readable plan file: {error}") from None
        return plan


def check_plan(plan: Plan) -> None:
    """Raises ValueError for a plan whose steps, rows or samples are not as `make_plan` makes them.

    Every sample comes once, or every chunk of it. A sample that is missing looks like one that the order left out.
    """
    num_samples, row_offsets = len(plan.sample_ids), plan.row_offsets
    rows = plan.group_offsets
    if row_offsets is not None:
        check_offsets("row_offsets", row_offsets, num_samples)
        rows = np.minimum(plan.first_rows, len(row_offsets) - 1)
        if (row_offsets[rows] != plan.group_offsets).any():
            raise UserError("groups begin within packed rows")
        if plan.size != "sum":
            raise UserError(f"size ({plan.size!r}) is for samples that are not packed")
    check_steps(plan, num_samples, rows)
    if plan.sample_ids.min() < 0:
        raise UserError("sample ids must be at least 0")
    if not plan.is_split:
        _check_each_once(plan.sample_ids)
    elif row_offsets is None or len(plan.buckets.shapes[0].lengths) > 1:
        raise UserError("only packed samples of one length are split into chunks")
    if plan.chunk_starts is not None:
        _check_chunks(plan, plan.chunk_starts)
    if plan.group_ids is not None:
        check_shared_steps(plan.group_ids, plan.sample_ids, plan.step_offsets)
    if row_offsets is not None:
        most = np.array(plan.samples_per_row)
        limits = np.array([bucket.lengths[0] for bucket in plan.buckets.shapes])
        bucket_of_row = np.repeat(plan.group_bucket, np.diff(rows))
        if most.shape != limits.shape or (most < 1).any() or (most > limits).any():
            raise UserError(f"samples_per_row must be from 1 to the length of each bucket, not {plan.samples_per_row}")
        if (np.diff(row_offsets) > most[bucket_of_row]).any():
            raise UserError("rows hold more samples than samples_per_row")


def _check_each_once(ids: Int64[np.ndarray, " n"]) -> None:
    largest = int(ids.max())
    if largest < _WIDE * len(ids):
        seen = np.zeros(largest + 1, bool)
        seen[ids] = True
        num_distinct = int(np.count_nonzero(seen))
    else:
        num_distinct = len(np.unique(ids))
    if num_distinct < len(ids):
        raise UserError("a sample comes twice")


def _check_chunks(plan: Plan, starts: Int64[np.ndarray, " n *D"]) -> None:
    ids, num_sides = plan.sample_ids, len(plan.buckets.shapes[0].lengths)
    if starts.shape != (len(ids), *[num_sides] * (num_sides > 1)) or starts.min() < 0:
        raise UserError("every chunk must begin at a token of its sample, from 0")
    if not plan.is_split:
        num_without = np.count_nonzero(starts.reshape(len(ids), -1).any(axis=1))
        if num_without > plan.num_truncated * is_window(plan.overlong):
            raise UserError(
                f"{num_without:,} samples lack their beginning, by overlong={plan.overlong!r}, which cut "
                f"{plan.num_truncated:,}"
            )
        return
    order = np.lexsort((starts, ids))
    if ((np.diff(ids[order]) == 0) & (np.diff(starts[order]) == 0)).any():
        raise UserError("a chunk of a sample comes twice")
