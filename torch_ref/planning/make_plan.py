"""Makes plans, of single samples and of packed rows."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Unpack

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from torch_ref.checks import as_array, check_integer
from torch_ref.planning.assign import Items, assign_buckets
from torch_ref.planning.buckets import Buckets, buckets_or_budget, check_distinct, check_steps
from torch_ref.planning.budget import Budget, PlanBudgetFields, takes_budget
from torch_ref.planning.choice import choose_by_seconds, settle_packing
from torch_ref.planning.emission import Steps, emit_steps
from torch_ref.planning.group_ids import check_group_ids
from torch_ref.planning.lengths import check_lengths, check_several_lengths, sample_sizes
from torch_ref.planning.make_buckets import make_buckets
from torch_ref.planning.order import Order, as_order, check_difficulty, sample_order
from torch_ref.planning.pacing import Pacing, num_admitted, paced_arrival
from torch_ref.planning.packed_plan import plan_samples_of_rows
from torch_ref.planning.packing import PACKINGS, Packing, pack_samples
from torch_ref.planning.plan import Plan, check_plan
from torch_ref.planning.row_lengths import choose_packed_buckets
from torch_ref.planning.settings import Settings
from torch_ref.planning.sized_plan import plan_packed_steps, plan_sized_steps
from torch_ref.planning.step_sizes import StepSize, StepSizes, step_sizes
from torch_ref.planning.windows import WINDOWS, begin_windows

__all__ = ["make_plan", "plan_rows"]


@takes_budget
def make_plan(
    lengths: ArrayLike,
    buckets: Buckets | Sequence[tuple[int, ...]] | Budget | None = None,
    *,
    order: str | Order | ArrayLike = "shuffle",
    difficulty: ArrayLike | None = None,
    pacing: Pacing | None = None,
    packing: str = "padded",
    row_lengths: Sequence[int] | None = None,
    overlong: str = "error",
    sequences_per_step: StepSize | None = None,
    tokens_per_step: StepSize | None = None,
    group_ids: ArrayLike | None = None,
    samples_per_row: int | Sequence[int] | None = None,
    seed: int = 0,
    epoch: int = 0,
    **budget: Unpack[PlanBudgetFields],
) -> Plan:
    """Cut the ordered samples into steps of static shapes.

    With `sequences_per_step` or `tokens_per_step`, consecutive samples of the order are a step, which has a group or
    several, of M microbatches of one bucket each. From the longest length down, samples of a length fill groups of the
    most rows, and what is left goes into one of the least rows that hold it, whose free rows take the longest samples
    left. Groups come by ascending bucket, and rows of a group as in the step.

    Args:
        lengths: [N] integers >= 1, in tokens; or [N, 2], two lengths of each, the second of which may be 0, ordered by
            `size`.
        buckets: (rows, length) pairs of strictly ascending lengths, or (rows, first, second, ...) that ascend
            strictly by (source, target); a sample goes to the first that holds it. Where steps have several groups,
            those of one length may differ in rows, ascending. None, or a `Budget`, chooses them, for steps of one
            group.
        order: "length" | "length_descending" | "dataset" | "shuffle", an array of unique sample ids, or an
            `Order`.
        difficulty: as in `sample_order`, to sort by in place of the lengths. Other than the lengths themselves, it
            makes the steps come in the order in which they fill up; so does `Order.block_size`.
        pacing: a function from global steps, int64[S], to the shares of the samples that are admitted by then, first
            ones in the order first; `linear_pacing` and its like make them. Samples then come at random from the
            admitted ones, and steps as they fill up. Only for "length" and "length_descending", and with nothing else
            that moves steps but `longest_first`.
        packing: "padded": each sample is a row. "best_fit" and "wrapped" pack samples into rows as long as the buckets,
            by that method of `pack_samples`, with the order "shuffle" anew in each epoch; an order array says which
            samples. Without buckets, `choose_row_lengths` gives the lengths of rows: one without a cost, for pairs or
            for "wrapped". Wrapped rows come in the order of their samples, but with "shuffle". "auto" takes "padded",
            or "best_fit" with several lengths or one: whichever has the fewest seconds in the first epoch by the cost
            and `compile_seconds`. `row_lengths` and overlong="split" decide for "best_fit"; a difficulty, pacing,
            another order than "shuffle", a block_size or a named strategy other than "optimal" for "padded".
        row_lengths: the lengths of packed rows, strictly ascending, where the buckets are chosen; for pairs the two of
            every row. None: as above.
        overlong: samples above the longest bucket: "error" | "drop" | "split" (packed, not for pairs), or cut to it
            (pairs only where they are packed, on both sides): "truncate" keeps their beginning, "truncate_start" their
            end, "truncate_random" a window that seed and epoch draw.
        sequences_per_step: the samples of a step, the last of an epoch excepted: an integer; an array, one for each
            step of all epochs; or f(step, tokens_seen) of the steps and tokens before it in all epochs. For given
            buckets. Without pacing and `new_shape_every`. Steps are cut first, then `shuffle_steps` and `longest_first`
            move them whole, so that arrays and functions count steps in the order of cutting.
        tokens_per_step: likewise, the most tokens of a step. No sample may be longer. Wrapped rows and split samples
            take it alone, and steps of wrapped rows have exactly so many.
        group_ids: [N] integers >= 0, equal for samples that must share a step: rollouts of a prompt, a query with its
            negatives. They come together at the place of the first of them in the order, and a step ends before those
            it has no room for, so that `sequences_per_step` is the most it has. Dropped samples are missing in theirs.
            For steps of a given size, and not for wrapped rows.
        samples_per_row: the most samples of a packed row, or of a row of each bucket, which may not descend; a row that
            holds so many is full. None: as many as fit.
        seed: 0 <= seed < 2**63, chooses the random keys.
        epoch: 0 <= epoch < 2**63, likewise.
        budget: fields of `Budget` as keywords, `max_tokens` among them, to choose buckets; with given ones only
            `size` and `num_microbatches`: M, data-parallel shards times accumulation.

    Returns:
        The plan; it depends on nothing but these arguments.

    Raises:
        ValueError: if an argument is out of its range, or a sample is too long (the first offenders are listed).

    Example:
        >>> plan = make_plan([1, 2, 2, 4], [(2, 2), (1, 4)], order="length")
        >>> [plan.rows(step).tolist() for step in range(plan.num_steps)]
        [[[0, 1]], [[2, -1]], [[3]]]
    """
    if isinstance(lengths, Packing) or isinstance(packing, Packing):
        raise ValueError(
            'make_plan takes no Packing: give it the lengths of the samples and packing="best_fit" or "wrapped", with '
            "row_lengths= for those of the rows"
        )
    settings = Settings(
        order=as_order(order),
        difficulty=difficulty,
        pacing=pacing,
        overlong=overlong,
        seed=check_integer("seed", seed, minimum=0),
        epoch=check_integer("epoch", epoch, minimum=0),
        group_ids=None if group_ids is None else check_group_ids(group_ids, lengths),
    )
    _check_pacing(pacing, settings.order)
    if packing not in PACKINGS:
        raise ValueError(f"packing must be one of {', '.join(PACKINGS)}, got {packing!r}")
    given = buckets_or_budget(buckets, budget)
    if row_lengths is not None and (packing == "padded" or isinstance(given, Buckets)):
        raise ValueError(f"row_lengths={row_lengths} is for packed rows, whose buckets are chosen by a budget")
    if samples_per_row is not None and packing == "padded":
        raise ValueError(f"samples_per_row={samples_per_row} is for packed rows, and others hold one sample")
    reason, sizes = "", step_sizes(sequences_per_step, tokens_per_step)
    _check_sized(sizes, given, packing, settings)
    rows = _Rows(packing, row_lengths, samples_per_row)
    if packing == "auto":
        rows, given, reason = _choose_packing(lengths, given, rows, settings)
    plan = _plan(lengths, given, rows, settings, sizes)
    return replace(plan, reason=reason or plan.reason)


class _Rows(NamedTuple):
    """How samples lie in rows: the arguments of `make_plan`, with what "auto" stands for in `packing`."""

    packing: str
    lengths: Sequence[int] | None = None
    most_samples: int | Sequence[int] | None = None


def _plan(
    lengths: ArrayLike, given: Buckets | Budget, rows: _Rows, settings: Settings, sizes: StepSizes | None
) -> Plan:
    plan = (_plan_samples if rows.packing == "padded" else _pack)(lengths, given, rows, settings, sizes)
    if settings.overlong in WINDOWS:
        ids, of_samples = plan.sample_ids, as_array("lengths", lengths)[plan.sample_ids].astype(np.int64)
        starts = begin_windows(settings.overlong, ids, of_samples, plan.longest, settings.seed, settings.epoch)
        plan = replace(plan, chunk_starts=starts)
    check_plan(plan)

    def plan_epoch(epoch: int) -> Plan:
        return _plan(lengths, plan.buckets, rows._replace(lengths=None), settings._replace(epoch=epoch), sizes)

    return replace(plan, group_ids=settings.group_ids, plan_epoch=plan_epoch)


def _choose_packing(
    lengths: ArrayLike, given: Buckets | Budget, rows: _Rows, settings: Settings
) -> tuple[_Rows, Buckets | Budget, str]:
    """Choose what packing="auto" stands for: the method, the buckets or what chooses them, and why."""
    if isinstance(given, Buckets):
        raise ValueError('packing="auto" chooses the buckets: give max_tokens and cost, not buckets')
    order = settings.order
    only_packed = {
        "row_lengths": rows.lengths is not None,
        "samples_per_row": rows.most_samples is not None,
        'overlong="split"': settings.overlong == "split",
    }
    only_single = {
        "difficulty": settings.difficulty is not None,
        "pacing": settings.pacing is not None,
        "order": order.name != "shuffle",
        "block_size": order.blocks is not None,
        "strategy": isinstance(given.strategy, str) and given.strategy != "optimal",
    }
    method, reason = settle_packing(only_packed, only_single)
    if method != "auto":
        return rows._replace(packing=method), given, reason
    first_epoch = settings._replace(epoch=0)
    plan, reason = choose_by_seconds(
        lambda budget, method: _plan(lengths, budget, _Rows(method), first_epoch, None), lengths, given
    )
    return _Rows("padded" if plan.row_offsets is None else "best_fit"), plan.buckets, reason


def _plan_samples(
    lengths: ArrayLike, given: Buckets | Budget, rows: _Rows, settings: Settings, sizes: StepSizes | None
) -> Plan:
    """Plan samples that have a row each."""
    array = as_array("lengths", lengths)
    values = check_several_lengths(array) if array.ndim == 2 else check_lengths(lengths)
    buckets = given if isinstance(given, Buckets) else make_buckets(values, given, overlong=settings.overlong)
    if sizes is None:
        return _plan_lengths(values, buckets, settings)
    _check_sides(values, buckets)
    return plan_sized_steps(values, buckets, settings, sizes)


def _pack(
    lengths: ArrayLike, given: Buckets | Budget, rows: _Rows, settings: Settings, sizes: StepSizes | None
) -> Plan:
    """Pack samples, or pairs, into rows as long as the buckets, and plan the rows."""
    order, method = settings.order, rows.packing
    if as_array("lengths", lengths).shape[1:] > (2,):
        raise ValueError(f'samples of more than two lengths are not packed: pass packing="padded", got {method!r}')
    if settings.difficulty is not None or settings.pacing is not None:
        raise ValueError(
            f"packing={method!r} goes with neither difficulty nor pacing: pass ids as order, and tokens_per_step"
        )
    if order.blocks is not None and order.name != "shuffle":
        raise ValueError(f'packing={method!r} takes a block_size for "shuffle", not for {order.name!r}')
    if sizes is not None and isinstance(given, Buckets):
        array = as_array("lengths", lengths)
        values = check_several_lengths(array) if array.ndim == 2 else check_lengths(lengths)
        _check_sides(values, given)
        _check_packed_buckets(given)
        return plan_packed_steps(values, given, method, rows.most_samples, settings, sizes)
    # Sorted samples make rows of the same sizes by best fit, whatever their order.
    of_samples = order if order.name in ("shuffle", "array") or method == "wrapped" else Order("dataset")
    keeps_order = order.name == "array" or (method == "wrapped" and order.name != "shuffle")
    of_rows = replace(order, by="dataset" if keeps_order else order.by, block_size=None)
    buckets = given
    if isinstance(buckets, Budget):
        buckets = choose_packed_buckets(
            lengths,
            buckets,
            rows.lengths,
            method=method,
            order=of_samples,
            seed=settings.seed,
            overlong=settings.overlong,
            samples_per_row=rows.most_samples,
        )
    check_distinct(buckets)
    packed = pack_samples(
        lengths,
        _row_lengths_of(buckets),
        method=method,
        order=of_samples,
        seed=settings.seed,
        epoch=settings.epoch,
        overlong=settings.overlong,
        samples_per_row=rows.most_samples,
    )
    plan = plan_rows(packed, buckets, of_rows, settings.seed, settings.epoch)
    if method == "wrapped" or order.name == "shuffle":
        return plan
    return replace(
        plan, reason="a row has samples from anywhere in the order; pass tokens_per_step for steps that follow it"
    )


def _row_lengths_of(buckets: Buckets) -> list[int]:
    """Return the lengths of rows that these buckets hold, of pairs those of both sides."""
    shapes = buckets.shapes
    if len(shapes[0]) == 2:
        return [length for _, length in shapes]
    if len(shapes) > 1:
        raise ValueError(f"packed pairs have rows of one shape and one bucket, got {[tuple(b) for b in shapes]}")
    return list(shapes[0][1:])


def plan_rows(packing: Packing, buckets: Buckets, order: Order, seed: int, epoch: int) -> Plan:
    """Plan packed rows as if each were a sample, or a pair, and put their samples in their place."""
    _check_packed_buckets(buckets)
    settings = Settings(order, None, None, "error", seed, epoch)
    plan = plan_samples_of_rows(_plan_lengths(packing.num_tokens, buckets, settings), packing)
    check_plan(plan)
    return plan


def _check_packed_buckets(buckets: Buckets) -> None:
    if buckets.size != "sum":
        raise ValueError(f"size={buckets.size!r} counts samples that are not packed")


def _check_sides(values: NDArray[np.int64], buckets: Buckets) -> None:
    check_steps(buckets)
    shape = buckets.shapes[0]
    if (values.ndim == 1) != (len(shape) == 2) or values.size // len(values) != len(shape) - 1:
        raise ValueError(
            f"lengths of shape {list(values.shape)} do not go with buckets like {tuple(shape)}: "
            "lengths [N] need (rows, length), several [N, D] need (rows, first length, second length, ...)"
        )


def _plan_lengths(values: NDArray[np.int64], buckets: Buckets, settings: Settings) -> Plan:
    """Plan rows of these lengths, each a sample or a row of several."""
    _check_sides(values, buckets)
    check_distinct(buckets)
    shapes, order = buckets.shapes, settings.order
    sizes = sample_sizes(values, buckets.size)
    ids = sample_order(sizes, order, difficulty=settings.difficulty, seed=settings.seed, epoch=settings.epoch)
    items = assign_buckets(values, sizes, ids, shapes, settings.overlong)
    rows_per_step = [bucket.rows * buckets.num_microbatches for bucket in shapes]
    if settings.pacing is not None:
        items = _pace(items, settings.pacing, rows_per_step, settings.seed, settings.epoch)
    steps = _emit_steps(items, rows_per_step, buckets, settings, sizes)
    offsets = np.concatenate([[0], np.cumsum(steps.num_sequences)])
    tokens_before = np.concatenate([[0], np.cumsum(items.num_tokens[steps.places])])
    return Plan(
        buckets=buckets,
        num_microbatches=buckets.num_microbatches,
        group_bucket=steps.bucket,
        group_offsets=offsets,
        sample_ids=items.ids[steps.places],
        group_tokens=np.diff(tokens_before[offsets]),
        overlong=settings.overlong,
        num_dropped=items.num_dropped,
        num_truncated=items.num_truncated,
        new_shape_every=order.new_shape_every,
    )


def _emit_steps(
    items: Items, rows_per_step: list[int], buckets: Buckets, settings: Settings, sizes: NDArray[np.int64]
) -> Steps:
    """Cut ordered rows into steps, which come as the order says."""
    order = settings.order
    is_by_length = np.array_equal(check_difficulty(settings.difficulty, sizes), sizes)
    by_arrival = (
        order.name in ("dataset", "array")
        or not is_by_length
        or order.blocks is not None
        or settings.pacing is not None
    )
    # Shuffled samples without a curriculum are grouped by bucket only to cut them: their steps always mix.
    shuffles = order.shuffle_steps or (order.name == "shuffle" and not by_arrival)
    return emit_steps(
        items.bucket,
        rows_per_step,
        by_arrival=by_arrival,
        descending=order.name == "length_descending",
        shuffle_stream=(settings.seed, settings.epoch, len(sizes)) if shuffles else None,
        longest_first=buckets.row_sizes.tolist() if order.longest_first else None,
        new_shape_every=order.new_shape_every,
    )


def _check_sized(sizes: StepSizes | None, given: Buckets | Budget, packing: str, settings: Settings) -> None:
    if sizes is None:
        if settings.group_ids is not None:
            raise ValueError("group_ids decide what shares a step of sequences_per_step or tokens_per_step: give one")
        return
    if packing == "auto":
        raise ValueError(f'{sizes.name} excludes packing="auto": pass "padded", "best_fit" or "wrapped"')
    if isinstance(given, Budget):
        raise ValueError(f"{sizes.name} takes given buckets: torch_ref chooses them for steps of one group alone")
    if settings.pacing is not None or settings.order.new_shape_every:
        raise ValueError(f"pacing and new_shape_every move steps by their bucket, and {sizes.name} makes several of it")


def _check_pacing(pacing: Pacing | None, order: Order) -> None:
    if pacing is None:
        return
    if order.name not in ("length", "length_descending"):
        raise ValueError(f'pacing needs order="length" or "length_descending", got {order.name!r}')
    if order.blocks is not None:
        raise ValueError(f"pacing draws samples at random by itself: block_size must be None, got {order.block_size}")
    if order.shuffle_steps:
        raise ValueError("pacing decides when steps come: shuffle_steps must be False")
    if order.new_shape_every:
        raise ValueError(f"pacing decides when steps come: new_shape_every must be 0, got {order.new_shape_every}")


def _pace(items: Items, pacing: Pacing, rows_per_step: list[int], seed: int, epoch: int) -> Items:
    """Put ordered rows into the order in which they arrive."""
    num_samples = torch.bincount(items.bucket, minlength=len(rows_per_step)).tolist()
    num_steps = sum(-(-number // rows) for number, rows in zip(num_samples, rows_per_step, strict=True))
    admitted = num_admitted(pacing, epoch * num_steps, num_steps, len(items.ids))
    arrival = paced_arrival(admitted, items.bucket, rows_per_step, seed, epoch)
    places = arrival.numpy()
    return items._replace(ids=items.ids[places], num_tokens=items.num_tokens[places], bucket=items.bucket[arrival])
