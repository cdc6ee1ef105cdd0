"""Chooses the number of shapes with which compiling and training together take the least time.

NumPy only. Letters: K shapes, C seconds of compiling one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from jvarlen._common.checks import UserError
from jvarlen.planning.buckets import Bucket, make_buckets
from jvarlen.planning.budget import Budget
from jvarlen.planning.lengths import Overlong, fit_lengths

__all__ = ["Compiler", "ShapeChoice", "choose_shapes", "seconds_of_epoch", "simulated_seconds"]

_MOST_SHAPES = 24
_LEAST_DELAY = 0.05  # the share of the seconds of compiling that a shape costs, even where steps go on undisturbed
_SPACING = 1.1  # between two new shapes, over the seconds of compiling one


class Compiler(NamedTuple):
    """When programs are compiled, and how long it takes.

    Attributes:
      seconds: of compiling one shape, C.
      threads: that compile at the same time.
      slowdown: seconds by which steps are delayed per second of compiling, as on a CPU, which both share; 0 on
        accelerators.
      in_background: whether steps run meanwhile.
    """

    seconds: float
    threads: int = 1
    slowdown: float = 0.0
    in_background: bool = True


class ShapeChoice(NamedTuple):
    """The chosen shapes.

    Attributes:
      buckets: the shapes.
      new_shape_every: steps between two new shapes, for `make_plan`; 0 where the order cannot be changed.
      seconds: predicted, of compiling and training.
    """

    buckets: tuple[Bucket, ...]
    new_shape_every: int
    seconds: float


def choose_shapes(
    lengths: Int64[np.ndarray, " N"],
    budget: Budget,
    compiler: Compiler,
    *,
    num_epochs: float = 1.0,
    num_steps: int | None = None,
    compiled: Iterable[Sequence[int]] = (),
    can_space: bool = True,
    max_length: int | None = None,
    overlong: Overlong = "error",
) -> ShapeChoice:
    """Chooses the number of shapes with the least predicted seconds of waiting for the compiler and of training.

    For each number the shapes are the optimum of `make_buckets`. Training is simulated with each: the first step waits
    for its shape; the others are compiled meanwhile in the order in which they appear, and a shape that is not ready
    when it is needed is waited for. All numbers are compared for the same samples: with `num_steps`, those of that many
    steps of the plan with the most shapes.

    Args:
      lengths: int64[N], tokens a sample.
      budget: of a microbatch, with a cost in seconds.
      compiler: how long compiling takes.
      num_epochs: passes over the samples.
      num_steps: steps to take instead.
      compiled: (rows, length) shapes that are compiled already, and cost nothing.
      can_space: whether new shapes can be spaced out by `new_shape_every`.
      max_length: as for `make_buckets`.
      overlong: as for `make_buckets`.

    Returns:
      `ShapeChoice`.

    Raises:
      ValueError: the budget has no cost; or as `make_buckets`.

    Example:
      >>> lengths = np.arange(1, 301)
      >>> budget = Budget(max_tokens=4000, cost=lambda rows, length: 1e-5 * rows * length)
      >>> compiler = Compiler(0.2, slowdown=0.5)
      >>> [len(choose_shapes(lengths, budget, compiler, num_epochs=n).buckets) for n in (1, 10, 100)]
      [2, 4, 12]
    """
    if budget.cost is None:
        raise UserError("the number of shapes is chosen by seconds: the budget needs a cost")
    budget = dataclasses.replace(budget, compile_seconds=None)
    fitted = fit_lengths(lengths, max_length, overlong).lengths
    optimum = functools.partial(make_buckets, lengths, max_length=max_length, overlong=overlong)
    if num_steps is not None:
        _, steps_of_epoch = seconds_of_epoch(fitted, optimum(budget, max_shapes=_MOST_SHAPES), budget)
        num_epochs = num_steps / int(steps_of_epoch.sum())
    known = {tuple(shape) for shape in compiled}
    if known:  # what is delayed by compiling one shape, in seconds of an epoch
        delay_s = max(compiler.slowdown, _LEAST_DELAY) * compiler.seconds
        optimum = functools.partial(optimum, compiled=sorted(known))
        priced = dataclasses.replace(budget, compile_seconds=delay_s / num_epochs)
    choices = []
    for max_shapes in range(1, _MOST_SHAPES + 1):
        buckets = optimum(priced if known else budget, max_shapes=max_shapes)
        if len(buckets) < max_shapes:  # more do not help
            break
        of_shape, of_steps = seconds_of_epoch(fitted, buckets, budget)
        work = num_epochs * of_shape
        new = [tuple(bucket) not in known for bucket in buckets]
        spacing = 0
        if can_space and len(buckets) > 1 and any(new):
            step_s = of_shape.sum() / max(1, of_steps.sum())
            needed = _SPACING * compiler.seconds / compiler.threads / step_s
            first_epoch = int(of_steps.sum() * min(1.0, num_epochs))
            spacing = max(1, min(math.ceil(needed), first_epoch // len(buckets)))
        predicted = simulated_seconds(work, new, compiler, spacing * step_s if spacing else None)
        choices.append(ShapeChoice(buckets, spacing, predicted))
    return min(choices, key=lambda choice: choice.seconds)


def seconds_of_epoch(
    lengths: Int64[np.ndarray, " N"], buckets: tuple[Bucket, ...], budget: Budget
) -> tuple[Float64[np.ndarray, " K"], Int64[np.ndarray, " K"]]:
    """Predicted seconds of all steps of each bucket in an epoch, and their number."""
    rows, bucket_lengths = np.array(buckets).T
    num_samples = np.bincount(np.searchsorted(bucket_lengths, lengths), minlength=len(buckets))
    num_steps = -(-num_samples // (rows * budget.microbatches_per_step))
    assert budget.cost is not None
    cost = np.asarray(budget.cost(rows, bucket_lengths), np.float64)
    return num_steps * budget.microbatches_per_step * cost, num_steps


def simulated_seconds(
    work: Float64[np.ndarray, " K"], is_new: Sequence[bool], compiler: Compiler, spacing_s: float | None = None
) -> float:
    """Seconds of training, waiting for the compiler included.

    Args:
      work: float64[K], seconds of all steps of each shape, in the order in which the shapes appear.
      is_new: whether each shape is still to be compiled.
      compiler: what that takes.
      spacing_s: seconds of steps between two new shapes; None: a shape appears when the one before has no steps left.

    Returns:
      Seconds.

    Example:
      >>> background, ahead = Compiler(2.0), Compiler(2.0, in_background=False)
      >>> work = np.array([5.0, 5.0, 5.0])
      >>> [simulated_seconds(work, [True, True, True], how, spacing_s=2.0) for how in (background, ahead)]
      [17.0, 21.0]
    """
    total = float(work.sum())
    num_new = sum(is_new)
    if not compiler.in_background:
        return total + compiler.seconds * math.ceil(num_new / compiler.threads)
    between = work.tolist() if spacing_s is None else [spacing_s] * (len(work) - 1)
    now, left, num_compiled = 0.0, total, 0
    for i, new in enumerate(is_new):
        if new:
            num_compiled += 1
            # The first alone; then as many at a time as there are threads.
            now = max(now, compiler.seconds * (1 + math.ceil((num_compiled - 1) / compiler.threads)))
        steps_s = min(left, between[i]) if i < len(between) else left
        now, left = now + steps_s, left - steps_s
    return now + left + compiler.slowdown * compiler.seconds * max(0, num_new - 1)
