"""The layout of the devices that are left."""

from __future__ import annotations

import dataclasses

from jvarlen._common.checks import UserError, check_at_least_one, check_at_least_zero
from jvarlen.distributed.layout import Layout

__all__ = ["surviving_layout"]


def surviving_layout(layout: Layout, alive: int, num_microbatches: int) -> Layout:
    """The largest layout for the devices that are left, with the same numbers in every step.

    Data-parallel shards are given up first: as many stay as fit and divide the microbatches. If not even one fits, rows
    are split into fewer parts, a divisor of their number. Stages and tensor parallelism stay, because the parameters of
    a device would not fit without them. With fewer shards, ZeRO holds more on each.

    Args:
      layout: of all devices.
      alive: how many devices are left. Some may be left over.
      num_microbatches: M.

    Returns:
      A layout of at most `alive` devices: the given one if it fits, otherwise the same but for `data`, then `context`,
      and for what means nothing on one shard (`zero`, `context_from`).

    Raises:
      ValueError: there are fewer devices than stages and tensor parallelism take, or M suits no number of shards.

    Example:
      >>> str(surviving_layout(Layout(data=4), alive=3, num_microbatches=8))
      'data2'
    """
    check_at_least_zero(alive=alive)
    check_at_least_one(num_microbatches=num_microbatches)
    per_shard = layout.stage * layout.tensor
    for context in range(layout.context, 0, -1):
        for data in range(min(layout.data, alive // (per_shard * context)), 0, -1):
            if layout.context % context or not _takes_microbatches(layout, data, context, num_microbatches):
                continue
            return dataclasses.replace(
                layout,
                data=data,
                context=context,
                zero=layout.zero if data * context > 1 else 0,
                context_from=layout.context_from if context > 1 else 0,
            )
    if alive >= per_shard:
        raise UserError(f"{num_microbatches} microbatches a step suit no number of shards of the layout {layout}")
    raise UserError(
        f"the layout {layout} goes on with {per_shard} devices at least (stage{layout.stage}.tensor{layout.tensor}), "
        f"and {alive} {'is' if alive == 1 else 'are'} left"
    )


def _takes_microbatches(layout: Layout, data: int, context: int, num_microbatches: int) -> bool:
    """Whether microbatches spread over this many shards; rows that are not spread use the axis "context" as data."""
    shards = {data, data * context} if layout.context_from and context > 1 else {data}
    multiple_of = layout.stage if layout.schedule == "interleaved" else 1
    return all(num_microbatches % (num_shards * multiple_of) == 0 for num_shards in shards)
