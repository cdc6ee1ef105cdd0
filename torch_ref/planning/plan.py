"""The plan: which samples form which step of an epoch, in which static shape."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from torch_ref.checks import INT64_MAX, as_array, check_integer
from torch_ref.planning.assign import Items, assign_buckets
from torch_ref.planning.buckets import Buckets, check_steps, given_buckets, make_buckets
from torch_ref.planning.budget import Budget, as_budget, takes_budget
from torch_ref.planning.choice import choose_by_seconds, settle_packing
from torch_ref.planning.emission import emit_steps
from torch_ref.planning.lengths import (
    check_lengths,
    check_pair_lengths,
    sample_sizes,
)
from torch_ref.planning.order import Order, as_order, check_difficulty, sample_order
from torch_ref.planning.pacing import Pacing, num_admitted, paced_arrival
from torch_ref.planning.packed_plan import check_packing, hold_back_rows, hold_back_steps, unpack_rows
from torch_ref.planning.packing import PACKINGS, Packing, ShuffledSamples, pack_samples
from torch_ref.planning.pairs import make_pair_buckets
from torch_ref.planning.plan_checks import check_plan
from torch_ref.planning.plan_file import plan_digest, read_plan_file, write_plan_file
from torch_ref.planning.plan_report import steps_table
from torch_ref.planning.row_lengths import bucket_of_packed_pairs, choose_packed_buckets

__all__ = ["Plan", "make_plan"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """The steps of an epoch, fixed before training and the same on every process.

    Attributes:
        buckets: the K static shapes, `buckets.shapes`, by ascending length.
        num_microbatches: M, the microbatches of a step.
        step_bucket: int32[S], the bucket of each step.
        step_offsets: int64[S + 1]; step s holds `sample_ids[step_offsets[s]:step_offsets[s + 1]]`.
        sample_ids: int64[n], real samples only.
        num_tokens: int64[S], real tokens of each step (of cut samples what is left of them, of pairs `pair_size`).
        row_offsets: int64[R + 1] for packed rows; row r, in the order of the steps, holds
            `sample_ids[row_offsets[r]:row_offsets[r + 1]]`. None where each sample is a row.
        piece_starts: int64[n] for packed rows of split samples: how many tokens of the sample come before each piece.
            None where no sample is split.
        overlong: the rule the plan was made with: "error" | "drop" | "truncate", or of packed rows "split".
        num_dropped: samples left out because they were too long.
        num_truncated: samples cut to the longest bucket.
        new_shape_every: what the plan was made with, for its report; a plan that was loaded has 0.
        reason: why rows are packed or not, where packing="auto" chose; a plan that was loaded has none.
        shuffled: what packed rows that are shuffled were made from, for the report; a plan that was loaded has none.
        samples_per_row: K numbers, the most samples that a row of each bucket could hold in any epoch, whatever the
            order: 1 where each sample is a row. Not in the digest. A plan from a file of an earlier version counts its
            own rows.
    """

    buckets: Buckets
    num_microbatches: int
    step_bucket: NDArray[np.int32]
    step_offsets: NDArray[np.int64]
    sample_ids: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    row_offsets: NDArray[np.int64] | None = None
    piece_starts: NDArray[np.int64] | None = None
    overlong: str = "error"
    num_dropped: int = 0
    num_truncated: int = 0
    new_shape_every: int = 0
    reason: str = ""
    shuffled: ShuffledSamples | None = None
    samples_per_row: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Lock the arrays: the digest is computed once."""
        buckets = given_buckets(self.buckets, {"num_microbatches": self.num_microbatches})
        object.__setattr__(self, "buckets", buckets)
        if not self.samples_per_row:
            object.__setattr__(self, "samples_per_row", (1,) * len(self.buckets.shapes))
        for array in vars(self).values():
            if isinstance(array, np.ndarray):
                array.setflags(write=False)

    @property
    def num_steps(self) -> int:
        """S, the number of steps."""
        return len(self.step_bucket)

    @property
    def pair_size(self) -> str:
        """What a sample of two lengths counts, as in `Budget`."""
        return self.buckets.pair_size

    @property
    def num_samples(self) -> int:
        """The number of real samples, n."""
        return len(self.sample_ids)

    @property
    def num_rows(self) -> int:
        """The number of rows that hold samples; as many as samples where these are not packed."""
        return self.num_samples if self.row_offsets is None else len(self.row_offsets) - 1

    @property
    def num_sequences(self) -> NDArray[np.int64]:
        """int64[S], real samples of each step."""
        return np.diff(self.step_offsets)

    @property
    def padding(self) -> float:
        """The share of all positions, padding rows included, that hold no real token."""
        return 1.0 - int(self.num_tokens.sum()) / int(self._positions().sum())

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the plan as 64 hex digits; equal digests mean the same steps."""
        return plan_digest(
            self.num_microbatches,
            np.array(self.buckets.shapes),
            self.step_bucket,
            self.step_offsets,
            self.sample_ids,
            self.row_offsets,
            self.piece_starts,
        )

    def rows(self, step: int) -> NDArray[np.int64]:
        """Return the samples of a step as they lie in its microbatches.

        Args:
            step: 0 <= step < num_steps.

        Returns:
            int64[M, B] sample ids, -1 for a padding row. Row j of the step lies in microbatch j mod M at slot j // M.
            For packed rows int64[M, B, P], P the most samples of a row in this step, -1 where there is none.

        Raises:
            IndexError: if there is no such step.
        """
        return self._rows_of(self.sample_ids, step)

    def pieces(self, step: int) -> NDArray[np.int64] | None:
        """Return where in their samples the pieces of a step begin; None if no sample is split.

        Args:
            step: 0 <= step < num_steps.

        Returns:
            int64[M, B, P] like `rows`: the tokens of the sample before each piece, -1 where there is none.

        Raises:
            IndexError: if there is no such step.
        """
        return None if self.piece_starts is None else self._rows_of(self.piece_starts, step)

    def ends(self, step: int) -> NDArray[np.int64] | None:
        """Return where in their samples the pieces of a step end; None if no sample is split.

        Args:
            step: 0 <= step < num_steps.

        Returns:
            int64[M, B, P] like `pieces`; for the last pieces of samples, their end or more.

        Raises:
            IndexError: if there is no such step.
        """
        return None if self.piece_ends is None else self._rows_of(self.piece_ends, step)

    @cached_property
    def piece_ends(self) -> NDArray[np.int64] | None:
        """int64[n], where each piece ends: where the next piece of its sample starts, or at most a row later."""
        if self.piece_starts is None:
            return None
        longest = self.buckets.shapes[-1][1]
        ends = np.minimum(self.piece_starts, INT64_MAX - longest) + longest
        split = np.flatnonzero(np.isin(self.sample_ids, self.sample_ids[self.piece_starts > 0]))
        ordered = split[np.lexsort((self.piece_starts[split], self.sample_ids[split]))]
        has_next = self.sample_ids[ordered[1:]] == self.sample_ids[ordered[:-1]]
        one, next_one = ordered[:-1][has_next], ordered[1:][has_next]
        ends[one] = np.minimum(ends[one], self.piece_starts[next_one])
        return ends

    def _rows_of(self, values: NDArray[np.int64], step: int) -> NDArray[np.int64]:
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} is outside the plan's {self.num_steps} steps")
        begin, end = self.step_offsets[step : step + 2]
        offsets = np.arange(begin, end + 1)
        if self.row_offsets is not None:
            first, last = np.searchsorted(self.row_offsets, (begin, end))
            offsets = self.row_offsets[first : last + 1]
        sizes = np.diff(offsets)
        rows_per_microbatch = self.buckets.shapes[self.step_bucket[step]].rows
        rows = np.full((rows_per_microbatch * self.num_microbatches, sizes.max()), -1, dtype=np.int64)
        rows[: len(sizes)][np.arange(sizes.max()) < sizes[:, None]] = values[begin:end]
        split = rows.reshape(rows_per_microbatch, self.num_microbatches, -1).swapaxes(0, 1)
        return np.ascontiguousarray(split if self.row_offsets is not None else split[..., 0])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, whole or not at all.

        Args:
            path: where to; an existing file is replaced.

        Raises:
            OSError: if the file cannot be written.
        """
        packed: dict[str, Any] = {}
        if self.row_offsets is not None:
            packed = {"row_offsets": self.row_offsets, "samples_per_row": self.samples_per_row}
        if self.piece_starts is not None:
            packed["piece_starts"] = self.piece_starts
        write_plan_file(
            path,
            **packed,
            microbatches_per_step=self.num_microbatches,
            buckets=np.array(self.buckets.shapes),
            step_bucket=self.step_bucket,
            step_offsets=self.step_offsets,
            sample_ids=self.sample_ids,
            num_tokens=self.num_tokens,
            num_dropped=self.num_dropped,
            num_truncated=self.num_truncated,
            overlong=self.overlong,
            pair_size=self.pair_size,
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
            ValueError: if it is not a plan file, of another version, cut short or changed, or its steps are none that
                `make_plan` makes; the message names the file. Whether every id comes once is not checked.
        """
        fields, counted = read_plan_file(path)
        num_microbatches = int(fields["microbatches_per_step"])
        try:
            plan = cls(
                buckets=Buckets(tuple(fields["buckets"].tolist()), num_microbatches, counted),
                num_microbatches=num_microbatches,
                step_bucket=fields["step_bucket"],
                step_offsets=fields["step_offsets"],
                sample_ids=fields["sample_ids"],
                num_tokens=fields["num_tokens"],
                row_offsets=fields.get("row_offsets"),
                piece_starts=fields.get("piece_starts"),
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
        """Return a table: shape, samples, steps and padding of each bucket, then the totals.

        With `new_shape_every` it also names the first step of each bucket. If packed rows are shuffled, it says how
        many rows more their blocks need, and what share of the rows of epoch 0 recurs in epoch 1.
        """
        counts = (self.step_bucket, self.num_sequences, self.num_tokens, self._positions())
        table = steps_table(self.buckets.shapes, *counts, first_steps=self.new_shape_every > 0)
        packed = "" if self.row_offsets is None else f"{self.num_rows:,} packed rows; "
        cut = f"{self.num_dropped:,} samples dropped, {self.num_truncated:,} truncated"
        if self.overlong == "split":
            cut = "packing splits samples, and chunks count as samples"
        return (
            f"{table}\n{self.num_microbatches} microbatches a step; {packed}{cut}; digest {self.digest[:16]}"
            + ("" if self.shuffled is None else f"\n{self.shuffled.describe()}")
            + ("" if self.pair_size == "sum" else f"\na pair counts pair_size={self.pair_size!r}")
            + (f"\n{self.reason}" if self.reason else "")
        )

    def _positions(self) -> NDArray[np.int64]:
        rows = np.array([bucket[0] for bucket in self.buckets.shapes], dtype=np.int64)
        return (rows * self.buckets.row_sizes * self.num_microbatches)[self.step_bucket]


@takes_budget
def make_plan(
    lengths: ArrayLike | Packing,
    buckets: Buckets | Sequence[tuple[int, ...]] | Budget | None = None,
    *,
    order: str | Order | ArrayLike = "shuffle",
    difficulty: ArrayLike | None = None,
    pacing: Pacing | None = None,
    packing: str = "padded",
    overlong: str = "error",
    seed: int = 0,
    epoch: int = 0,
    **budget: Any,
) -> Plan:
    """Cut the ordered samples into steps of static shapes.

    Args:
        lengths: [N] integers >= 1, in tokens; or [N, 2], two lengths of each, the second of which may be 0, ordered by
            `pair_size`; or a `Packing`, whose R rows are then ordered and cut into steps as samples (or pairs) would
            be.
        buckets: (rows, length) pairs of strictly ascending lengths, or (rows, source, target) triples that ascend
            strictly by (source, target); a sample goes to the first that holds it. None, or a `Budget`, chooses them.
        order: "length" | "length_descending" | "dataset" | "shuffle", an array of unique sample (or row) ids, or an
            `Order`.
        difficulty: as in `sample_order`, to sort by in place of the lengths. Other than the lengths themselves, it
            makes the steps come in the order in which they fill up; so does `Order.block_size`.
        pacing: a function from global steps, int64[S], to the shares of the samples that are admitted by then, first
            ones in the order first; `linear_pacing` and its like make them. Samples then come
            at random from the admitted ones, and steps as they fill up. Only for "length" and "length_descending", and
            with nothing else that moves steps but `longest_first`.
        packing: "padded": each sample is a row. Else samples are packed into rows as long as the buckets, as
            `pack_samples` does, shuffled anew in each epoch if the order is "shuffle". An order array chooses which.
            "best_fit": buckets are given, or as long as `choose_row_lengths` says, of one length without a cost and for
            pairs. "wrapped": there is one bucket, given or as long as a single row length of `choose_row_lengths`; rows
            are in the order of their samples unless it is "shuffle", or with `chunks_in_order`. "auto": single samples,
            packed rows ("best_fit") of several lengths, or of one, whichever has the fewest seconds in the first epoch
            by the cost and `compile_seconds`; but packed rows with overlong="split" or `chunks_in_order`, and single
            samples with a difficulty, pacing, another order than "shuffle", a block_size or a strategy that takes
            another word than "optimal".
        overlong: samples above the longest bucket: "error" | "drop" | "truncate" (not for pairs) | "split" (packed).
        seed: 0 <= seed < 2**63, chooses the random keys.
        epoch: 0 <= epoch < 2**63, likewise.
        budget: fields of `Budget` as keywords, `max_tokens` among them, to choose buckets; with given ones only
            `pair_size` and `num_microbatches`: M, data-parallel shards times accumulation.

    Returns:
        The plan; it depends on nothing but these arguments.

    Raises:
        ValueError: if an argument is out of its range, or a sample is too long (the first offenders are listed).

    Example:
        >>> plan = make_plan([1, 2, 2, 4], [(2, 2), (1, 4)], order="length")
        >>> [plan.rows(step).tolist() for step in range(plan.num_steps)]
        [[[0, 1]], [[2, -1]], [[3]]]
    """
    order = as_order(order)
    seed, epoch = check_integer("seed", seed, minimum=0), check_integer("epoch", epoch, minimum=0)
    _check_pacing(pacing, order)
    if packing not in PACKINGS:
        raise ValueError(f"packing must be one of {', '.join(PACKINGS)}, got {packing!r}")
    if packing == "auto":
        where: dict[str, Any] = {"order": order, "overlong": overlong, "seed": seed}
        is_ranked = {"difficulty": difficulty is not None, "pacing": pacing is not None}
        packing, chosen_by, reason = _settle(lengths, buckets, budget, is_ranked, where)
        where |= {"difficulty": difficulty, "pacing": pacing, "packing": packing, "epoch": epoch}
        return replace(make_plan(lengths, chosen_by, **where), reason=reason)
    if packing != "padded":
        _check_packing(packing, lengths, order, difficulty is not None or pacing is not None)
    if buckets is not None and not isinstance(buckets, Budget):
        checked = given_buckets(buckets, budget)
    else:
        checked = _choose(lengths, _limits(buckets, budget), overlong, packing, order, seed)
    if checked.pair_size != "sum" and (packing != "padded" or isinstance(lengths, Packing)):
        raise ValueError(f"pair_size={checked.pair_size!r} counts pairs that are not packed")
    check_steps(checked)
    shapes, num_microbatches = checked.shapes, checked.num_microbatches
    if packing != "padded":
        assert not isinstance(lengths, Packing)
        lengths = pack_samples(
            lengths,
            _row_lengths_of(shapes),
            method=packing,
            order=_order_of_packing(order, packing),
            seed=seed,
            epoch=epoch,
            overlong=overlong,
        )
        keeps_order = order.name == "array" or (packing == "wrapped" and order.name != "shuffle")
        order = replace(order, by="dataset" if keeps_order else order.by, block_size=None)
        overlong = "error"
    packed = lengths if isinstance(lengths, Packing) else None
    if packed is not None:
        check_packing(packed, shapes, overlong)
    if order.chunks_in_order and packed is None:
        raise ValueError("chunks_in_order needs a Packing: only packed samples can be split")
    if packed is not None and packed.method == "wrapped":
        if order.name == "array" and np.size(order.by) < packed.num_rows:
            raise ValueError(
                f"an order of {np.size(order.by)} of {packed.num_rows} wrapped rows would leave out parts of samples: "
                "choose the samples where they are packed"
            )
        # A row begins where the one before it ended, so that pieces come in their order where rows do.
        order = replace(order, by="dataset" if order.chunks_in_order else order.by, chunks_in_order=False)
    if packed is not None and order.chunks_in_order and packed.piece_starts is not None:
        rows = sample_order(packed.num_tokens, order, difficulty=difficulty, seed=seed, epoch=epoch)
        held = hold_back_rows(packed, rows)
        plan = make_plan(packed, checked, order=held)
        return hold_back_steps(plan, longest_first=order.longest_first)
    values = _check_values(lengths)
    if values.ndim != len(shapes[0]) - 1:
        raise ValueError(
            f"lengths of shape {list(values.shape)} do not go with buckets like {tuple(shapes[0])}: "
            "lengths [N] need (rows, length), pairs [N, 2] need (rows, source length, target length)"
        )
    sums, bucket_sizes = sample_sizes(values, checked.pair_size), checked.row_sizes
    by_length = np.array_equal(check_difficulty(difficulty, sums), sums)
    ids = sample_order(sums, order, difficulty=difficulty, seed=seed, epoch=epoch)
    items = assign_buckets(values, sums, ids, shapes, overlong, packed=packed is not None)
    rows_per_step = torch.tensor([bucket.rows * num_microbatches for bucket in shapes])
    if pacing is not None:
        items = _pace(items, pacing, rows_per_step, seed, epoch)
    by_arrival = order.name in ("dataset", "array") or not by_length or order.blocks is not None
    by_arrival = by_arrival or pacing is not None
    steps = emit_steps(
        items.bucket,
        rows_per_step,
        by_arrival=by_arrival,
        descending=order.name == "length_descending",
        # Shuffled samples without a curriculum are grouped by bucket only to cut them: their steps always mix.
        shuffle_stream=(seed, epoch, len(sums))
        if order.shuffle_steps or (order.name == "shuffle" and not by_arrival)
        else None,
        longest_first=torch.from_numpy(bucket_sizes) if order.longest_first else None,
        new_shape_every=order.new_shape_every,
    )
    places = steps.places.numpy()
    offsets = np.concatenate([[0], np.cumsum(steps.num_sequences.numpy())])
    tokens_before = np.concatenate([[0], np.cumsum(items.num_tokens[places])])
    fields: dict[str, Any] = {
        "sample_ids": items.ids[places],
        "step_offsets": offsets,
        "overlong": overlong,
        "num_dropped": items.num_dropped,
        "num_truncated": items.num_truncated,
    }
    if packed is not None:
        fields = unpack_rows(packed, shapes, items.ids[places], offsets)
    plan = Plan(
        buckets=checked,
        num_microbatches=num_microbatches,
        step_bucket=steps.bucket.to(torch.int32).numpy(),
        num_tokens=np.diff(tokens_before[offsets]),
        new_shape_every=order.new_shape_every,
        **fields,
    )
    check_plan(plan)
    return plan


def _check_values(lengths: ArrayLike | Packing) -> NDArray[np.int64]:
    if isinstance(lengths, Packing):
        return lengths.num_tokens
    values = as_array("lengths", lengths)
    return check_pair_lengths(values) if values.ndim == 2 and values.shape[1] == 2 else check_lengths(lengths)


def _limits(buckets: Budget | None, fields: dict[str, Any]) -> Budget:
    """Return the budget that chooses buckets, with other fields as keywords."""
    if buckets is None and "max_tokens" not in fields:
        raise ValueError("give buckets, or max_tokens to choose them by")
    return Budget(**fields) if buckets is None else as_budget(buckets, fields)


def _settle(
    lengths: ArrayLike | Packing,
    buckets: Buckets | Sequence[tuple[int, ...]] | Budget | None,
    fields: dict[str, Any],
    is_ranked: dict[str, bool],
    where: dict[str, Any],
) -> tuple[str, Buckets | Budget, str]:
    """Return what packing="auto" comes to: the method, the buckets or what chooses them, and why."""
    if isinstance(lengths, Packing):
        raise ValueError('packing="auto" packs samples, got a Packing')
    if buckets is not None and not isinstance(buckets, Budget):
        raise ValueError('packing="auto" chooses the buckets: give max_tokens and cost, not buckets')
    limits, order = _limits(buckets, fields), where["order"]
    is_other = isinstance(limits.strategy, str) and limits.strategy != "optimal"
    is_single = {"order": order.name != "shuffle", "block_size": order.blocks is not None, "strategy": is_other}
    is_packed = {'overlong="split"': where["overlong"] == "split", "chunks_in_order": order.chunks_in_order}
    method, reason = settle_packing(is_packed, is_ranked | is_single)
    if method != "auto":
        return method, limits, reason
    first, reason = choose_by_seconds(
        lambda budget, method: make_plan(lengths, budget, packing=method, **where), lengths, limits
    )
    return "padded" if first.row_offsets is None else "best_fit", first.buckets, reason


def _choose(
    lengths: ArrayLike | Packing, budget: Budget, overlong: str, packing: str, order: Order, seed: int
) -> Buckets:
    """Choose the buckets of samples, pairs, or packed rows."""
    if packing != "padded":
        assert not isinstance(lengths, Packing)
        return choose_packed_buckets(lengths, budget, overlong, _order_of_packing(order, packing), seed, packing)
    values = _check_values(lengths)
    if isinstance(lengths, Packing) and values.ndim == 2 and len(lengths.row_lengths) == 2:
        return bucket_of_packed_pairs(lengths, budget)
    if values.ndim == 2:
        return make_pair_buckets(values, budget, overlong=overlong)
    if isinstance(lengths, Packing) and budget.strategy == "optimal":
        budget = replace(budget, strategy=lengths.row_lengths, max_length=None)
    return make_buckets(values, budget, overlong=overlong)


def _row_lengths_of(buckets: Sequence[tuple[int, ...]]) -> list[int]:
    """Return the lengths of rows that these buckets hold, of pairs those of both sides."""
    if len(buckets[0]) == 2:
        return [length for _, length in buckets]
    if len(buckets) > 1:
        raise ValueError(f"packed pairs have rows of one shape and one bucket, got {[tuple(b) for b in buckets]}")
    return list(buckets[0][1:])


def _order_of_packing(order: Order, method: str) -> Order | ArrayLike | str:
    """Return in which order samples are packed; by best fit, sorted ones make rows of the same sizes in any."""
    return order if order.name in ("shuffle", "array") or method == "wrapped" else "dataset"


def _check_packing(packing: str, lengths: ArrayLike | Packing, order: Order, is_ranked: bool) -> None:
    if isinstance(lengths, Packing):
        raise ValueError(f"packing={packing!r} packs samples, got a Packing")
    if is_ranked:
        raise ValueError(f"packing={packing!r} goes with neither difficulty nor pacing")
    if order.blocks is not None and order.name != "shuffle":
        raise ValueError(f'packing={packing!r} takes a block_size for "shuffle", not for {order.name!r}')


def _check_pacing(pacing: Pacing | None, order: Order) -> None:
    if pacing is None:
        return
    if order.name not in ("length", "length_descending"):
        raise ValueError(f'pacing needs order="length" or "length_descending", got {order.name!r}')
    if order.blocks is not None:
        raise ValueError(f"pacing draws samples at random by itself: block_size must be None, got {order.block_size}")
    if order.shuffle_steps:
        raise ValueError("pacing decides when steps come: shuffle_steps must be False")
    if order.new_shape_every or order.chunks_in_order:
        raise ValueError(
            f"pacing decides when steps come: new_shape_every must be 0, got {order.new_shape_every}, "
            f"and chunks_in_order False, got {order.chunks_in_order}"
        )


def _pace(items: Items, pacing: Pacing, rows_per_step: Tensor, seed: int, epoch: int) -> Items:
    num_samples = torch.bincount(items.bucket, minlength=len(rows_per_step))
    num_steps = int((-(-num_samples // rows_per_step)).sum())
    admitted = num_admitted(pacing, epoch * num_steps, num_steps, len(items.ids))
    arrival = paced_arrival(admitted, items.bucket, rows_per_step, seed, epoch)
    places = arrival.numpy()
    return items._replace(ids=items.ids[places], num_tokens=items.num_tokens[places], bucket=items.bucket[arrival])
