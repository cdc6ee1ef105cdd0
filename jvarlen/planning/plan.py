"""The plan: every step of an epoch, fixed before training.

Letters: N samples, n samples in the plan, R rows, S steps, K buckets, M microbatches a step, B rows of a
microbatch, P samples of a row.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
from jaxtyping import Int64

from jvarlen._common.checks import UserError, check_choices
from jvarlen.planning._kernels import take_segments
from jvarlen.planning.buckets import AnyBucket, Bucket, Buckets, given_buckets, make_buckets, rows_of_steps
from jvarlen.planning.budget import Budget, in_place_of_buckets, takes_budget
from jvarlen.planning.grouping import Ordering, canonical_steps, emitted_steps, group_by_bucket, sum_segments
from jvarlen.planning.lengths import (
    Overlong,
    PackedOverlong,
    as_array,
    check_lengths_for,
    ends_to_offsets,
    sample_sizes,
)
from jvarlen.planning.order import Order, as_order, check_difficulty, check_seed
from jvarlen.planning.pacing import Pacing
from jvarlen.planning.packing import (
    Packing,
    PackingChoice,
    RowPacking,
    orders_of_packing,
    pack_samples,
    with_samples,
)
from jvarlen.planning.pair_buckets import make_pair_buckets
from jvarlen.planning.plan_checks import check_plan
from jvarlen.planning.plan_file import chunk_digests, plan_digest, read_plan_file, write_plan_file
from jvarlen.planning.row_lengths import (
    bucket_of_packed_pairs,
    choose_candidate,
    choose_packed_buckets,
    decided_packing,
)
from jvarlen.planning.steps import OwnRows, PlannedSteps

__all__ = ["Plan", "make_plan"]

_FILE_NAMES = {"num_microbatches": "microbatches_per_step", "chunk_starts": "piece_starts"}  # of fields in plan files


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Plan(PlannedSteps):
    """The steps of an epoch: which samples, in which shape, in which order.

    It has the attributes of `PlannedSteps`, and these:

    Attributes:
      sample_ids: int64[n], real samples in order of step, then row; step t holds
        `sample_ids[step_offsets[t]:step_offsets[t+1]]`.
      row_offsets: int64[R+1] of a packed plan: row r, in order of step, holds
        `sample_ids[row_offsets[r]:row_offsets[r+1]]`. None where every sample is a row.
      chunk_starts: int64[n] of a packed plan that splits samples: the token of its sample with which each chunk begins.
        None where no sample is split.
    """

    sample_ids: Int64[np.ndarray, " n"]
    row_offsets: Int64[np.ndarray, " R_plus_1"] | None = None
    chunk_starts: Int64[np.ndarray, " n"] | None = None

    @property
    def num_rows(self) -> int:
        """R, the number of rows that hold samples; n where nothing is packed."""
        return self.num_samples if self.row_offsets is None else len(self.row_offsets) - 1

    @property
    def is_packed(self) -> bool:
        """Whether a row can hold several samples."""
        return self.row_offsets is not None

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 in hex of everything that decides the batches: equal digests mean equal batches."""
        return plan_digest(
            self.num_microbatches,
            self.buckets.shapes,
            self.step_bucket,
            self.step_offsets,
            chunk_digests(self.sample_ids),
            self.row_offsets,
            self.chunk_starts,
        )

    @functools.cached_property
    def largest_id(self) -> int:
        """The largest of `sample_ids`."""
        return int(self.sample_ids.max())

    def rows(self, step: int) -> Int64[np.ndarray, "M B *P"]:
        """The sample of every row of a step; for a packed plan, the samples of every row.

        Args:
          step: 0 ≤ step < S.

        Returns:
          int64[M, B] of sample ids, −1 for a padding row. For a packed plan int64[M, B, P]: a row's samples from its
          beginning, then −1, where P is the most samples of any row of the step. Row j of the step is in microbatch j
          mod M, slot j // M, so that all microbatches hold nearly the same number of tokens.

        Raises:
          IndexError: no such step.
        """
        return self._laid_out(self.sample_ids, step)

    def chunks(self, step: int) -> Int64[np.ndarray, "M B P"] | None:
        """The token of its sample with which every chunk of a step begins; None where no sample is split.

        Args:
          step: 0 ≤ step < S.

        Returns:
          int64[M, B, P], placed as in `rows`; −1 where there is no sample. A chunk ends at the end of its row or with
          its sample, where the next chunk of the sample begins or with none left.

        Raises:
          IndexError: no such step.
        """
        return None if self.chunk_starts is None else self._laid_out(self.chunk_starts, step)

    def own_rows(self, step: int, microbatches: Int64[np.ndarray, " m"] | None = None) -> OwnRows:
        """The rows of a step in some of its microbatches, which a process of several reads; None: in all."""
        ids, starts = self.rows(step), self.chunks(step)
        stops = None if self.chunk_ends is None else self._laid_out(self.chunk_ends, step)
        if microbatches is None or len(microbatches) == self.num_microbatches:
            return OwnRows(ids, starts, int(self.num_tokens[step]), stops)
        starts, stops = (None if part is None else part[microbatches] for part in (starts, stops))
        return OwnRows(ids[microbatches], starts, None, stops)

    @functools.cached_property
    def chunk_ends(self) -> Int64[np.ndarray, " n"] | None:
        """int64[n], the token of its sample before which each chunk ends; at most, where it is the last one."""
        if self.chunk_starts is None:
            return None
        longest = self.buckets.shapes[-1].lengths[0]
        stops = np.minimum(self.chunk_starts, np.iinfo(np.int64).max - longest) + longest
        chunks = np.flatnonzero(np.isin(self.sample_ids, self.sample_ids[self.chunk_starts > 0]))
        chunks = chunks[np.lexsort([self.chunk_starts[chunks], self.sample_ids[chunks]])]
        before, after = chunks[:-1], chunks[1:]
        is_next = self.sample_ids[before] == self.sample_ids[after]
        stops[before[is_next]] = np.minimum(stops[before], self.chunk_starts[after])[is_next]
        return stops

    def planned_lengths(self, lengths: Int64[np.ndarray, " N *sides"]) -> Int64[np.ndarray, " n *sides"]:
        """The tokens that each of `sample_ids` was planned with, cut at the longest bucket, from those of N samples."""
        planned = lengths[self.sample_ids]
        longest = np.max([bucket.lengths for bucket in self.buckets.shapes], axis=0)
        if planned.ndim == 2:
            return np.minimum(planned, longest)
        if self.chunk_starts is None or self.chunk_ends is None:
            return np.minimum(planned, longest[0])
        return np.minimum(planned, self.chunk_ends) - self.chunk_starts

    def _laid_out(self, values: Int64[np.ndarray, " n"], step: int) -> Int64[np.ndarray, "M B *P"]:
        """The values of a step's samples in its microbatches and rows."""
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} of a plan of {self.num_steps} steps")
        num_rows = self.buckets.shapes[self.step_bucket[step]].rows
        start, end = self.step_offsets[step : step + 2]
        ids = values[start:end]
        if self.row_offsets is None:
            rows_BxM = np.full((num_rows, self.num_microbatches), -1, np.int64)
            rows_BxM.reshape(-1)[: len(ids)] = ids
            return rows_BxM.T
        first, last = np.searchsorted(self.row_offsets, [start, end])
        num_in_row = np.diff(self.row_offsets[first : last + 1])
        rows_BMxP = np.full((num_rows * self.num_microbatches, num_in_row.max()), -1, np.int64)
        rows_BMxP[: len(num_in_row)][np.arange(rows_BMxP.shape[1]) < num_in_row[:, None]] = ids
        return rows_BMxP.reshape(num_rows, self.num_microbatches, -1).swapaxes(0, 1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to one uncompressed `.npz` file, atomically.

        Args:
          path: the file; its directory must exist, and an existing file is replaced.

        Raises:
          OSError: it cannot be written; an existing file stays.
        """
        values = {
            _FILE_NAMES.get(field.name, field.name): getattr(self, field.name) for field in dataclasses.fields(self)
        }
        values["buckets"] = self.buckets.shapes
        fields = {name: np.asarray(value) for name, value in values.items() if value is not None}
        write_plan_file(Path(path), fields | {"digest": np.array(self.digest)}, self.buckets.pair_size)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Reads a plan that `save` wrote, and verifies it.

        Args:
          path: the file.

        Returns:
          The plan.

        Raises:
          ValueError: the file is not a plan, is damaged, of another version, or was edited; or its steps are none that
            `make_plan` makes, of which every sample comes once.
        """
        fields, counted = read_plan_file(Path(path))
        num_microbatches = int(fields["microbatches_per_step"])
        try:
            plan = Plan(
                buckets=Buckets(tuple(fields["buckets"].tolist()), num_microbatches, counted),
                num_microbatches=num_microbatches,
                step_bucket=fields["step_bucket"],
                step_offsets=fields["step_offsets"],
                num_tokens=fields["num_tokens"],
                sample_ids=fields["sample_ids"],
                row_offsets=fields.get("row_offsets"),
                chunk_starts=fields.get("piece_starts"),
                overlong=cast(PackedOverlong, str(fields["overlong"])),
                num_dropped=int(fields["num_dropped"]),
                num_truncated=int(fields["num_truncated"]),
                samples_per_row=tuple(fields["samples_per_row"].tolist()) if "samples_per_row" in fields else (),
            )
            check_plan(plan)
        except UserError as error:
            raise UserError(f"{path} is not a readable plan file: {error}") from None
        return plan


@takes_budget
def make_plan(
    lengths: npt.ArrayLike | Packing,
    buckets: Buckets[Any] | Sequence[tuple[int, ...]] | Budget | None = None,
    *,
    order: str | Order | npt.ArrayLike = "shuffle",
    difficulty: npt.ArrayLike | None = None,
    pacing: Pacing | None = None,
    packing: PackingChoice = "padded",
    overlong: PackedOverlong = "error",
    seed: int = 0,
    epoch: int = 0,
    **budget: Any,
) -> Plan:
    """Plans an epoch: every sample exactly once, in steps of the buckets' shapes.

    A sample goes to the smallest bucket that holds it. The samples of a bucket, in order, are cut into steps of M ×
    rows; only a bucket's last step can be short, and padding rows fill it.

    Args:
      lengths: integers[N], tokens a sample. Integers[N, 2], two lengths a sample: source and target, height and width;
        the second may be 0. Or a `Packing`: then all that is said of samples here holds for its rows.
      buckets: `Buckets` of `make_buckets` or of another plan. Or, with M = 1, (rows, length) pairs, lengths strictly
        ascending; or (rows, source length, target length). None, or a `Budget`: they are chosen as `make_buckets` does,
        of pairs as `make_pair_buckets` does, of a `Packing` with the lengths of its rows.
      order: a word or an array of sample ids, as in `sample_order`, or an `Order`. A pair is as long as
        its `pair_size`. Steps come, with `"length"`, by bucket, ascending; with `"length_descending"`, descending; with
        `"shuffle"`, at random; with `"dataset"`, an array, or any order with a difficulty other than the length, a
        block size or pacing, when their last sample arrives, and short steps at the end.
      difficulty: as in `sample_order`.
      pacing: a function from the step, counted over all epochs, to the share of the samples that it may draw from,
        easiest first, as `linear_pacing` makes. As long as admitted samples are left, no step holds
        another. Needs order `"length"` or `"length_descending"`, and nothing else that orders steps.
      packing: `"padded"`: each sample is a row. `"best_fit"` and `"wrapped"`: samples are packed into rows as
        `pack_samples` does by this method, anew in every epoch of a shuffled order. Rows are as long as the buckets;
        where these are not given, as `choose_row_lengths` says, and without a cost of one length. Rows of `"wrapped"`
        have one length as well, and come in the order of the samples, except that `"shuffle"` shuffles both. Neither
        goes with difficulty or pacing, nor in other orders with a block size. `"auto"` takes padded shapes, packed
        shapes or one packed shape (`"best_fit"`), whichever the cost, in seconds, predicts to take least for an epoch,
        `compile_seconds` included; `Plan.reason` says why. Settings that only one of these has decide it instead.
      overlong: what happens to samples longer than the longest bucket: `"error"`, `"drop"`, `"truncate"`, or of packed
        samples `"split"`. A `Packing` has its own rule; pairs are never cut.
      seed: 0 ≤ seed < 2**63.
      epoch: 0 ≤ epoch < 2**63.
      budget: the fields of a `Budget` as keywords, to choose the buckets; with given buckets only `pair_size` and
        `num_microbatches`, M, the microbatches of one optimizer update, in place of those of the `Buckets`.

    Returns:
      A `Plan`, which depends on M, but not on the number of devices or processes.

    Raises:
      ValueError: arguments that are not as described, or exclude each other; samples are listed as id, value, limit.

    Example:
      >>> plan = make_plan([3, 1, 4, 2, 8], [(2, 4), (1, 8)], order="length", num_microbatches=2)
      >>> plan.num_steps, plan.rows(0).tolist()
      (2, [[1, 0], [3, 2]])
      >>> make_plan([3, 1, 4, 2, 8], max_tokens=8, max_shapes=2).buckets.shapes
      (Bucket(rows=2, length=4), Bucket(rows=1, length=8))

    References:
      Batches of near-equal lengths, shuffled: Ott et al. 2019, "fairseq". Pacing: Platanios et al. 2019,
      "Competence-based Curriculum Learning for Neural Machine Translation".
    """
    order = as_order(order)
    check_seed(seed, epoch)
    seed, epoch = int(seed), int(epoch)
    limits = in_place_of_buckets(buckets, budget)
    check_choices(packing=(packing, PackingChoice))
    if packing != "padded" and isinstance(lengths, Packing):
        raise UserError(f"packing={packing!r} is for samples that are not packed yet")
    if pacing is not None:
        _check_pacing(pacing, order)
    if packing == "auto":
        given: Any = {"difficulty": difficulty, "pacing": pacing}
        packing, chosen_by, reason = _choose_packing(lengths, limits, order, given, overlong, seed)
        given |= {"order": order, "packing": packing, "overlong": overlong, "seed": seed, "epoch": epoch}
        return dataclasses.replace(make_plan(lengths, chosen_by, **given), reason=reason)
    if packing != "padded" and (difficulty is not None or pacing is not None):
        raise UserError("packed rows mix samples, which then have no order among themselves: no difficulty, pacing")
    packed: Packing | None = None
    if limits is None:
        checked = given_buckets(cast("Buckets[Any] | Sequence[tuple[int, ...]]", buckets), budget)
    else:
        if packing == "padded":
            checked = _buckets_for(lengths, limits, overlong)
        else:
            samples = cast("npt.ArrayLike", lengths)
            checked, packed = choose_packed_buckets(samples, limits, overlong, order=order, seed=seed, method=packing)
    if packing != "padded":
        of_samples, of_rows = orders_of_packing(order, packing)
        if packed is None or (epoch > 0 and order.is_by("shuffle")):
            packed = pack_samples(
                cast("npt.ArrayLike", lengths),
                [length for bucket in checked.shapes for length in bucket.lengths],
                method=packing,
                order=of_samples,
                seed=seed,
                epoch=epoch,
                overlong=overlong,
            )
        lengths, order = packed, of_rows
        overlong = "error"
    if checked.pair_size != "sum" and isinstance(lengths, Packing):
        raise UserError(f"pair_size ({checked.pair_size!r}) is for samples of two lengths each that are not packed")
    ordering = Ordering(order, difficulty, seed, epoch, pacing)
    if not isinstance(lengths, Packing):
        values = check_lengths_for(checked.shapes, lengths)
        plan = _plan_rows(values, checked, ordering, cast("Overlong", overlong))
        check_plan(plan)
        return plan
    if overlong != "error":
        raise UserError(f"overlong={overlong!r}: a packing has cut or dropped samples by its own rule already")
    num_tokens = check_lengths_for(checked.shapes, lengths.num_tokens)
    plan = with_samples(_plan_rows(num_tokens, checked, ordering), lengths)
    check_plan(plan)
    return plan


def _choose_packing(
    lengths: npt.ArrayLike | Packing,
    limits: Budget | None,
    order: Order,
    given: Mapping[str, object],
    overlong: PackedOverlong,
    seed: int,
) -> tuple[RowPacking, Buckets[Bucket] | Budget, str]:
    """What packing="auto" comes to: the method; the shapes, or what they are to be chosen by; and why."""
    if limits is None:
        raise UserError('packing="auto" chooses the buckets: give max_tokens and cost= in their place')
    for_packed = {'overlong="split"': overlong == "split"}
    for_single = {name: value is not None for name, value in given.items()} | {
        "order": not order.is_by("shuffle"),
        "block_size": order.sample_blocks is not None,
        "strategy": limits.strategy != "optimal" and isinstance(limits.strategy, str),
    }
    decided, reason = decided_packing(*([name for name in each if each[name]] for each in (for_packed, for_single)))
    if decided != "auto":
        return decided, limits, reason
    candidate, reason = choose_candidate(cast("npt.ArrayLike", lengths), limits, overlong, order=order, seed=seed)
    return candidate.method, candidate.buckets, reason


def _buckets_for(lengths: npt.ArrayLike | Packing, limits: Budget, overlong: PackedOverlong) -> Buckets[Any]:
    """The buckets of what is planned, by the budget."""
    values = lengths.num_tokens if isinstance(lengths, Packing) else lengths
    if isinstance(lengths, Packing) and np.ndim(values) == 2:
        return bucket_of_packed_pairs(lengths, limits)
    if as_array(values).ndim == 2:
        return make_pair_buckets(values, limits, overlong=cast('Literal["error", "drop"]', overlong))
    if isinstance(lengths, Packing) and limits.strategy == "optimal":
        return make_buckets(values, limits, strategy=lengths.row_lengths, max_length=None)
    return make_buckets(values, limits, overlong=cast("Overlong", overlong))


def _check_pacing(pacing: Pacing, order: Order) -> None:
    """Raises ValueError for an order that pacing does not go with."""
    others = order.sample_blocks, order.shuffle_steps, order.new_shape_every
    if not order.is_by("length", "length_descending") or any(others):
        raise UserError(
            "pacing decides when samples come: it needs order 'length' or 'length_descending' without block_size, "
            f"shuffle_steps and new_shape_every, not {order}"
        )


def _plan_rows(
    lengths: Int64[np.ndarray, " N *sides"],
    buckets: Buckets[AnyBucket],
    ordering: Ordering,
    overlong: Overlong = "error",
) -> Plan:
    """The plan of checked lengths, each a row."""
    sizes = sample_sizes(lengths, buckets.pair_size)
    difficulty = ordering.difficulty
    if difficulty is not None and np.array_equal(check_difficulty(difficulty, len(lengths)), sizes):
        ordering = ordering._replace(difficulty=None)
    rows_per_step = rows_of_steps(buckets)
    bucket_lengths = np.array([bucket.lengths for bucket in buckets.shapes], np.int64)
    of_sides = bucket_lengths if lengths.ndim == 2 else bucket_lengths[:, 0]
    samples = group_by_bucket(lengths, sizes, of_sides, ordering, rows_per_step, overlong)
    steps = canonical_steps(samples.num_samples, rows_per_step)
    last_place = None if samples.place is None else samples.place[steps.offsets[1:] - 1]
    emitted = emitted_steps(steps, ordering, last_place, len(lengths), buckets.row_sizes)
    offsets, ids = steps.offsets, samples.ids
    if (np.diff(emitted) != 1).any():
        offsets = ends_to_offsets(np.cumsum(np.diff(steps.offsets)[emitted]))
        ids = take_segments(samples.ids, steps.offsets, emitted, offsets)
    return Plan(
        buckets=buckets,
        num_microbatches=buckets.num_microbatches,
        step_bucket=steps.bucket[emitted],
        step_offsets=offsets,
        sample_ids=ids,
        num_tokens=sum_segments(samples.lengths_by_id, steps.offsets, samples.ids)[emitted],
        overlong=overlong,
        num_dropped=samples.num_dropped,
        num_truncated=samples.num_truncated,
        new_shape_every=int(ordering.order.new_shape_every),
    )
