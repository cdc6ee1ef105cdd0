"""Plans whose steps have a given number of samples or tokens, in groups of several buckets.

Letters: N samples, n rows in order, each a sample or several, S steps.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_ref.planning.assign import Items, assign_buckets
from torch_ref.planning.buckets import Buckets
from torch_ref.planning.group_ids import bring_together
from torch_ref.planning.groups import Group, group_rows
from torch_ref.planning.lengths import sample_sizes
from torch_ref.planning.order import random_keys, sample_order, stable_argsort
from torch_ref.planning.packed_plan import plan_samples_of_rows
from torch_ref.planning.packer import Packer, check_samples_per_row, join_rows
from torch_ref.planning.packing import Packing, as_packing, make_packer, wrap
from torch_ref.planning.plan import Plan
from torch_ref.planning.settings import Settings
from torch_ref.planning.step_sizes import Ordered, StepSizes

__all__ = ["plan_packed_steps", "plan_sized_steps"]


def plan_sized_steps(values: NDArray[np.int64], buckets: Buckets, settings: Settings, step_sizes: StepSizes) -> Plan:
    """Plan samples of these lengths, int64[N] or int64[N, 2], each a row."""
    sizes = sample_sizes(values, buckets.size)

    def items_of(epoch: int) -> Items:
        return assign_buckets(values, sizes, _order(sizes, settings, epoch), buckets.shapes, settings.overlong)

    def ordered(epoch: int) -> Ordered:
        items = items_of(epoch)
        return Ordered(items.ids, items.num_tokens)

    items = items_of(settings.epoch)
    lengths = items.num_tokens[:, None] if values.ndim == 1 else values[items.ids]
    offsets = step_sizes.cut(settings.epoch, ordered, group_ids=settings.group_ids)
    plan = _plan_rows(lengths, items.num_tokens, offsets, buckets, settings, len(sizes))
    return replace(
        plan,
        sample_ids=items.ids[plan.sample_ids],
        overlong=settings.overlong,
        num_dropped=items.num_dropped,
        num_truncated=items.num_truncated,
    )


def plan_packed_steps(
    values: NDArray[np.int64],
    buckets: Buckets,
    method: str,
    samples_per_row: Any,
    settings: Settings,
    step_sizes: StepSizes,
) -> Plan:
    """Plan samples of these lengths, several a row, packed step by step."""
    if settings.order.blocks is not None:
        raise ValueError(f"block_size={settings.order.blocks}: with {step_sizes.name} each step is packed by itself")
    if (method == "wrapped" or settings.overlong == "split") and not step_sizes.counts_tokens:
        raise ValueError(f"wrapped rows and split samples are cut, and take tokens_per_step, not {step_sizes.name}")
    if method == "wrapped" and settings.group_ids is not None:
        raise ValueError('packing="wrapped" cuts samples at the end of a step: with group_ids take packing="best_fit"')
    packer = _packer_for(values, buckets, method, samples_per_row, settings.overlong)
    sizes = sample_sizes(values)
    ids = _order(sizes, settings, settings.epoch)
    if method == "wrapped":
        offsets = step_sizes.cut(
            settings.epoch,
            lambda epoch: Ordered(order := _order(sizes, settings, epoch), sizes[order]),
            splits=True,
        )
        packing = wrap(packer, ids, offsets[1:].tolist())
        before = np.cumsum(packing.num_tokens) - packing.num_tokens
        row_offsets = np.append(np.searchsorted(before, offsets[:-1]), packing.num_rows)
    else:
        packing, row_offsets = _pack_steps(packer, ids, settings, step_sizes, sizes)
    tokens = packing.num_tokens
    lengths = tokens.reshape(packing.num_rows, -1)
    plan = _plan_rows(lengths, lengths.sum(axis=1), row_offsets, buckets, settings, len(sizes))
    return plan_samples_of_rows(plan, packing)


def _packer_for(
    values: NDArray[np.int64], buckets: Buckets, method: str, samples_per_row: Any, overlong: str
) -> Packer:
    """Return what packs rows as long as the buckets, some of which may have one length."""
    lengths = [tuple(bucket[1:]) for bucket in buckets.shapes]
    distinct = list(dict.fromkeys(lengths))
    if values.ndim == 2 and len(distinct) > 1:
        raise ValueError(f"packed pairs have rows of one shape, got those of {[tuple(b) for b in buckets.shapes]}")
    if method == "wrapped" and (len(distinct) > 1 or overlong != "error" or values.ndim == 2):
        raise ValueError(
            'packing="wrapped" is for samples of one length each and rows of one length, and has no rule for long '
            f"samples; got buckets {[tuple(b) for b in buckets.shapes]}, overlong={overlong!r}"
        )
    most = check_samples_per_row(samples_per_row, lengths)
    of_distinct = None if most is None else [most[lengths.index(length)] for length in distinct]
    row_lengths = list(distinct[0]) if values.ndim == 2 else [length for (length,) in distinct]
    return make_packer(values, row_lengths, overlong, of_distinct)


def _pack_steps(
    packer: Packer, ids: NDArray[np.int64], settings: Settings, step_sizes: StepSizes, sizes: NDArray[np.int64]
) -> tuple[Packing, NDArray[np.int64]]:
    """Pack each step by itself; return also int64[S + 1], the rows before each."""

    def ordered(epoch: int) -> Ordered:
        chunks = packer.fit(_order(sizes, settings, epoch))
        return Ordered(chunks.sample_ids, sample_sizes(chunks.lengths))

    fitted = packer.fit(ids)
    offsets = step_sizes.cut(settings.epoch, ordered, group_ids=settings.group_ids).tolist()
    parts = []
    for begin, end in pairwise(offsets):
        rows = packer.pack_at_once(fitted.lengths[begin:end])
        parts.append(rows._replace(chunks=rows.chunks + begin))
    num_rows = [len(part.sizes) for part in parts]
    return as_packing(packer, len(ids), fitted, join_rows(parts)), np.cumsum([0, *num_rows])


def _order(sizes: NDArray[np.int64], settings: Settings, epoch: int) -> NDArray[np.int64]:
    ids = sample_order(sizes, settings.order, difficulty=settings.difficulty, seed=settings.seed, epoch=epoch)
    return ids if settings.group_ids is None else bring_together(ids, settings.group_ids)


def _plan_rows(
    lengths: NDArray[np.int64],
    sizes: NDArray[np.int64],
    offsets: NDArray[np.int64],
    buckets: Buckets,
    settings: Settings,
    num_samples: int,
) -> Plan:
    """Plan ordered rows, int64[n, D], which count `sizes`; the steps begin at `offsets`. Ids are places of rows."""
    steps = []
    for begin, end in pairwise(offsets.tolist()):
        groups = group_rows(lengths[begin:end], sizes[begin:end], buckets)
        steps.append([group._replace(places=group.places + begin) for group in groups])
    steps = _move_steps(steps, buckets, settings, num_samples)
    of_all = [group for step in steps for group in step]
    places = np.concatenate([group.places for group in of_all])
    group_offsets = np.cumsum([0, *(len(group.places) for group in of_all)])
    return Plan(
        buckets=buckets,
        num_microbatches=buckets.num_microbatches,
        group_bucket=np.array([group.bucket for group in of_all], dtype=np.int32),
        group_offsets=group_offsets,
        group_tokens=np.add.reduceat(sizes[places], group_offsets[:-1]),
        step_groups=np.cumsum([0, *map(len, steps)]),
        sample_ids=places,
    )


def _move_steps(steps: list[list[Group]], buckets: Buckets, settings: Settings, num_samples: int) -> list[list[Group]]:
    """Put whole steps into the order in which they come."""
    if settings.order.shuffle_steps:
        keys = random_keys(settings.seed, settings.epoch, num_samples, len(steps))
        steps = [steps[step] for step in stable_argsort(keys)]
    if settings.order.longest_first:
        row_sizes = buckets.row_sizes.tolist()
        longest = max((row_sizes[group.bucket], group.bucket) for step in steps for group in step)[1]
        first = next(i for i, step in enumerate(steps) if any(group.bucket == longest for group in step))
        steps[0], steps[first] = steps[first], steps[0]
    return steps
