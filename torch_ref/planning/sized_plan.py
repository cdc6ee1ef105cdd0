"""Plans whose steps have a given number of samples or tokens, in groups of several buckets."""

import numpy as np
from numpy.typing import NDArray

from torch_ref.planning.assign import Items, assign_buckets
from torch_ref.planning.buckets import Buckets
from torch_ref.planning.groups import Group, Rows, group_rows
from torch_ref.planning.lengths import sample_sizes
from torch_ref.planning.order import random_keys, sample_order, stable_argsort
from torch_ref.planning.plan import Plan
from torch_ref.planning.settings import Settings
from torch_ref.planning.step_sizes import StepSizes

__all__ = ["plan_sized_steps"]


def plan_sized_steps(values: NDArray[np.int64], buckets: Buckets, settings: Settings, step_sizes: StepSizes) -> Plan:
    """Plan samples of these lengths, int64[N] or int64[N, 2], each a row."""
    sizes = sample_sizes(values, buckets.pair_size)

    def items_of(epoch: int) -> Items:
        ids = sample_order(sizes, settings.order, difficulty=settings.difficulty, seed=settings.seed, epoch=epoch)
        return assign_buckets(values, sizes, ids, buckets.shapes, settings.overlong)

    items = items_of(settings.epoch)
    lengths = items.num_tokens[:, None] if values.ndim == 1 else values[items.ids]
    one = np.ones(len(items.ids), dtype=np.int64)
    offsets = step_sizes.cut(settings.epoch, items_of)
    steps: list[list[Group]] = []
    for step in map(slice, offsets[:-1], offsets[1:]):
        rows = Rows(lengths[step], items.num_tokens[step], one[step])
        groups = group_rows(rows, buckets, np.ones(len(buckets.shapes), dtype=np.int64))
        steps.append([Group(group.bucket, group.places + step.start) for group in groups])
    steps = _move_steps(steps, buckets, settings, len(sizes))
    groups = [group for step in steps for group in step]
    places = np.concatenate([group.places for group in groups])
    group_offsets = np.cumsum([0, *(len(group.places) for group in groups)])
    return Plan(
        buckets=buckets,
        num_microbatches=buckets.num_microbatches,
        group_bucket=np.array([group.bucket for group in groups], dtype=np.int32),
        group_offsets=group_offsets,
        group_tokens=np.add.reduceat(items.num_tokens[places], group_offsets[:-1]),
        step_groups=np.cumsum([0, *map(len, steps)]),
        sample_ids=items.ids[places],
        overlong=settings.overlong,
        num_dropped=items.num_dropped,
        num_truncated=items.num_truncated,
    )


def _move_steps(steps: list[list[Group]], buckets: Buckets, settings: Settings, num_samples: int) -> list[list[Group]]:
    """Put whole steps into the order in which they come."""
    if settings.order.shuffle_steps:
        keys = random_keys(settings.seed, settings.epoch, num_samples, len(steps))
        steps = [steps[step] for step in stable_argsort(keys)]
    if settings.order.longest_first:
        sizes = buckets.row_sizes.tolist()
        longest = max((sizes[group.bucket], group.bucket) for step in steps for group in step)[1]
        first = next(i for i, step in enumerate(steps) if any(group.bucket == longest for group in step))
        steps[0], steps[first] = steps[first], steps[0]
    return steps
