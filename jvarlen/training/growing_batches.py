"""Seesaw: larger batches in place of the decay of the learning rate. Letters: K stages, n counts of tokens."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from jvarlen._common.checks import UserError, check_at_least_one, if_given, is_number, list_first, list_offenders
from jvarlen._common.keywords import check_keywords
from jvarlen._common.types import Array
from jvarlen.planning.ramps import BatchSizeStages
from jvarlen.training.rates import base_rates

__all__ = ["Seesaw", "seesaw"]

_PLACES = 2**14  # as many as a table of rates has, so that one program evaluates them
_ROUNDING = 1e-9  # relative
_LEAST_FACTOR = 1.01  # some thousands of stages


class Seesaw(NamedTuple):
    """Batch sizes, and the schedule for the first of them."""

    batch_sizes: BatchSizeStages
    """The size of a step, by what came before."""
    schedule: Callable[[Array], Array]
    """The base rate by tokens seen."""


@check_keywords
def seesaw(
    schedule: Callable[[Array], Array],
    num_tokens: int,
    batch_size: int,
    *,
    factor: float = 2.0,
    max_batch_size: int | None = None,
) -> Seesaw:
    """Batch sizes that grow where a schedule decays: the same tokens in fewer steps.

    Wherever the schedule has fallen by another `factor` from its peak, the batch grows by `factor`. The schedule that
    is returned holds its value from there to the next such place. Both go to the rules that scale rates by batch size,
    with the base batch size `batch_size`: by "sqrt", the rule of Adam, the rate then falls by √factor alone; by
    "linear", the rule of SGD, it stays. Once batches have `max_batch_size`, the rate falls as the schedule does.

    In numbers: k counts from 0 at the first count of tokens with the highest rate p. Stage k begins at the least count
    with a rate of at most p / factor^k · (1 + 10⁻⁹), and has round(batch_size · factor^k) samples or tokens, at most
    `max_batch_size`. Before p, and in the stage of `max_batch_size`, the rate is that of `schedule`.

    The proof is for SGD, and for SGD with normalized gradients in place of Adam, on linear regression whose gradients
    are mostly noise: for batches below the critical batch size, which is what `max_batch_size` is for. Rates that
    decay by less than √factor for a batch of `factor` times the size diverge there.

    Args:
      schedule: the base rate by the real tokens of the steps before, such as an Optax schedule: warm-up to a peak, then
        decay, which ends above or at 0.
      num_tokens: real tokens of the whole run, of all epochs.
      batch_size: the size of the first steps, in samples or tokens.
      factor: by how much the schedule falls from stage to stage, at least 1.01. Near 1, the rate follows the
        schedule closely.
      max_batch_size: the largest size; None for no limit.

    Returns:
      `batch_sizes` for `sequences_per_step` or `tokens_per_step` of `make_plan`, and `schedule` for `lr_sequence`,
      `scale_by_planned_rate` and `adamw_by_batch_size`, of the plans of all epochs, with counted_in="tokens" and the
      base batch size `batch_size`.

    Raises:
      ValueError: a schedule that rises after its peak, or whose rates are negative, not finite or all 0; sizes that are
        not integers of at least 1, a factor below 1.01.

    Example:
      >>> from jvarlen import lr_sequence, make_plan
      >>> ramp = seesaw(lambda tokens: 1e-3 * 0.5 ** (tokens // 40), 120, 1)
      >>> ramp.batch_sizes.stages
      ((0, 1), (40, 2), (80, 4))
      >>> plan = make_plan([10] * 12, [(1, 10)], sequences_per_step=ramp.batch_sizes)
      >>> plan.num_sequences.tolist()
      [1, 1, 1, 1, 2, 2, 4]
      >>> lr_sequence(plan, ramp.schedule, 1, rule="sqrt", counted_in="tokens").round(6).tolist()
      [0.001, 0.001, 0.001, 0.001, 0.000707, 0.000707, 0.0005]

    References:
      Meterez et al. 2025, "Seesaw: Accelerating Training by Balancing Learning Rate and Batch Size Scheduling",
      arXiv:2510.14717.
    """
    check_at_least_one(num_tokens=num_tokens, batch_size=batch_size, **if_given(max_batch_size=max_batch_size))
    most = max(batch_size, num_tokens) if max_batch_size is None else max_batch_size
    if most < batch_size:
        raise UserError(f"max_batch_size ({most}) is below batch_size ({batch_size})")
    if not is_number(factor) or not _LEAST_FACTOR <= factor < math.inf:
        raise UserError(f"factor must be finite and at least {_LEAST_FACTOR}, not {factor!r}")
    if not callable(schedule):
        raise UserError(f"schedule must be a function of tokens seen, not {schedule!r}")
    rates_at = functools.partial(base_rates, schedule)
    peak_at = _peak_of(rates_at, num_tokens)
    growth, sizes = [1.0], [batch_size]
    while sizes[-1] < most:
        growth.append(factor ** len(growth))
        sizes.append(min(round(batch_size * growth[-1]), most))
    starts = _first_at_most(rates_at, peak_at, num_tokens, np.array(growth))
    is_reached = starts < num_tokens
    stages = dict(zip(starts[is_reached].tolist(), sizes, strict=False))  # of several that start at once, the last
    edges = np.array(list(stages))
    is_capped = is_reached.all() and max_batch_size is not None
    released = int(edges[-1]) if is_capped else num_tokens
    return Seesaw(
        BatchSizeStages(list({0 if start == peak_at else start: size for start, size in stages.items()}.items())),
        lambda count: schedule(_held(count, edges, released)),
    )


def _held(count: Array, edges: Int64[np.ndarray, " K"], released: int) -> Array:
    """The count at which a stage begins, in place of each count within it; others as they are."""
    import jax

    numpy = jax.numpy if isinstance(count, jax.Array) else np
    begins = numpy.asarray(edges)[numpy.searchsorted(edges, count, side="right") - 1]
    return numpy.where((count < edges[0]) | (count >= released), count, begins)[()]


def _peak_of(rates_at: Callable[[Int64[np.ndarray, " n"]], Float64[np.ndarray, " n"]], num_tokens: int) -> int:
    """The first count of the highest rate; ValueError for a schedule that is no warm-up and decay."""
    first, last = 0, num_tokens - 1
    while True:
        counts = np.unique(np.linspace(first, last, _PLACES).astype(np.int64))
        rates = rates_at(counts)
        wrong = np.flatnonzero(~(np.isfinite(rates) & (rates >= 0)))
        if len(wrong):
            listed = list_offenders(counts[wrong], rates[wrong], 0, name="at token")
            raise UserError(f"rates of schedule must be finite and at least 0: {listed}")
        highest = int(rates.argmax())
        if last - first < _PLACES:
            break
        first, last = int(counts[max(highest - 1, 0)]), int(counts[min(highest + 1, len(counts) - 1)])
    peak_at = int(counts[highest])
    if rates[highest] == 0:
        raise UserError("schedule is 0 for the whole run: it must have a peak to decay from")
    counts = np.unique(np.linspace(peak_at, num_tokens - 1, _PLACES).astype(np.int64))
    rates = rates_at(counts)
    rises = np.flatnonzero(rates[1:] > rates[:-1] * (1 + _ROUNDING)) + 1
    if len(rises):
        risen = (f"from {rates[i - 1]:.6g} at token {counts[i - 1]} to {rates[i]:.6g} at {counts[i]}" for i in rises)
        raise UserError(f"schedule rises after its peak, at token {peak_at}: {list_first(risen)}; batches only grow")
    return peak_at


def _first_at_most(
    rates_at: Callable[[Int64[np.ndarray, " n"]], Float64[np.ndarray, " n"]],
    peak_at: int,
    num_tokens: int,
    growth: Float64[np.ndarray, " K"],
) -> Int64[np.ndarray, " K"]:
    """The first count at which the schedule is at most its peak over each number; `num_tokens` where it never is."""
    below = rates_at(np.array([peak_at]))[0] / growth * (1 + _ROUNDING)
    before, begins = np.full(len(growth), peak_at), np.full(len(growth), num_tokens)
    begins[0] = peak_at
    while (begins - before > 1).any():
        middle = (before + begins) // 2
        is_below = rates_at(middle) <= below
        before, begins = np.where(is_below, before, middle), np.where(is_below, middle, begins)
    return begins
