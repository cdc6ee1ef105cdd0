"""The strategies that the bucket benchmark compares, planned from lengths and measured seconds.

Letters: K buckets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import jvarlen

PACKED_LENGTH_MULTIPLE = 8

Shape = tuple[bool, int, int]  # whether packed, rows, length


class Sizes(NamedTuple):
    """How much is measured."""

    model: dict[str, int]
    longest: int
    max_tokens: int
    length_multiple: int
    cost_lengths: tuple[int, ...]  # the first and the last are the shortest and the longest that is planned
    num_shapes: tuple[int, ...]
    main_shapes: int
    packed_shapes: int
    torch_shapes: int
    torch_backend: str
    torch_limit_s: int
    num_rounds: int
    max_steps: int | None
    start_all: bool
    start_repeats: int
    raw_limit_s: float
    dispatch_models: dict[str, dict[str, int]]
    dispatch_repeats: int
    idle_repeats: int


class MeasuredCost(NamedTuple):
    """Seconds of a microbatch: a line between the measured seconds a token of neighbouring lengths."""

    lengths: tuple[int, ...]
    seconds_per_token: tuple[float, ...]

    def __call__(self, rows: Any, length: Any) -> Any:
        """Seconds; rows and length broadcast."""
        return np.asarray(rows) * length * np.interp(length, self.lengths, self.seconds_per_token)


class Strategy(NamedTuple):
    """The plan of an epoch, and the figures of it that do not depend on the machine."""

    name: str
    buckets: tuple[jvarlen.Bucket, ...]
    num_steps: tuple[int, ...]  # of each bucket
    padding: float
    is_packed: bool
    is_started: bool

    @property
    def shapes(self) -> list[Shape]:
        """The shape of each bucket."""
        return [(self.is_packed, *bucket) for bucket in self.buckets]

    def seconds(self, seconds: Callable[[Shape], float]) -> float:
        """Seconds of an epoch, from those of a step of each bucket."""
        return sum(seconds(shape) * steps for shape, steps in zip(self.shapes, self.num_steps, strict=True))


def by_shape(rows: list[list[Any]]) -> dict[Shape, float]:
    return {(is_packed, num_rows, length): seconds for is_packed, num_rows, length, seconds in rows}


def cost_shapes(sizes: Sizes, *, is_packed: bool = False) -> list[Shape]:
    """Full microbatches of all lengths, whose cost is planned with."""
    return [(is_packed, sizes.max_tokens // length, length) for length in sizes.cost_lengths]


def quarter_shapes(sizes: Sizes) -> list[Shape]:
    """Quarters of some of these, which a fitted model needs besides to tell the cost of a step from that of a token."""
    return [(False, sizes.max_tokens // 4 // length, length) for length in sizes.cost_lengths[::5]]


def measured_cost(sizes: Sizes, seconds: dict[Shape, float], *, is_packed: bool = False) -> MeasuredCost:
    shapes = cost_shapes(sizes, is_packed=is_packed)
    return MeasuredCost(sizes.cost_lengths, tuple(seconds[shape] / (shape[1] * shape[2]) for shape in shapes))


def planned(
    name: str,
    plan: jvarlen.Plan,
    *,
    is_started: bool = False,
) -> Strategy:
    num_steps = np.bincount(plan.step_bucket, minlength=len(plan.buckets.shapes))
    return Strategy(name, plan.buckets.shapes, tuple(num_steps.tolist()), plan.padding, plan.is_packed, is_started)


def in_buckets(sizes: Sizes, name: str, lengths: np.ndarray, *, is_started: bool = False, **options: Any) -> Strategy:
    buckets = jvarlen.make_buckets(lengths, sizes.max_tokens, length_multiple=sizes.length_multiple, **options)
    return planned(name, jvarlen.make_plan(lengths, buckets, order="length"), is_started=is_started)


def by_time(sizes: Sizes, lengths: np.ndarray, cost: MeasuredCost, num_shapes: int) -> Strategy:
    name = f"optimal by time, {num_shapes}"
    return in_buckets(sizes, name, lengths, max_shapes=num_shapes, cost=cost, is_started=True)


def make_strategies(
    sizes: Sizes, lengths: np.ndarray, cost: MeasuredCost, packed_cost: MeasuredCost
) -> dict[str, Strategy]:
    main = sizes.main_shapes
    row_lengths = jvarlen.planning.choose_row_lengths(
        lengths,
        sizes.max_tokens,
        max_shapes=sizes.packed_shapes,
        length_multiple=PACKED_LENGTH_MULTIPLE,
        cost=packed_cost,
    )
    packed = {"packing": "best_fit", "row_lengths": row_lengths, "order": "length"}
    strategies = [
        in_buckets(sizes, "pad to the longest", lengths, strategy="pad_to_max", is_started=True),
        in_buckets(sizes, "powers of two", lengths, strategy="powers_of_two", is_started=True),
        in_buckets(sizes, f"quantiles, {main}", lengths, strategy="quantile", max_shapes=main, is_started=True),
        in_buckets(sizes, f"equal tokens, {main}", lengths, strategy="equal_tokens", max_shapes=main, is_started=True),
        *(
            in_buckets(sizes, f"optimal by tokens, {num_shapes}", lengths, max_shapes=num_shapes, is_started=is_main)
            for num_shapes in sizes.num_shapes
            for is_main in [num_shapes == main]
        ),
        *(by_time(sizes, lengths, cost, num_shapes) for num_shapes in sizes.num_shapes),
        planned("packed", jvarlen.make_plan(lengths, max_tokens=sizes.max_tokens, **packed), is_started=True),
    ]
    return {strategy.name: strategy for strategy in strategies}
