"""Curriculum pacing: the share of samples, easiest first, or the highest value, that each step may draw from.

Letters: n samples, S steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from jaxtyping import Float64, Int64, Shaped

from jvarlen._common.checks import UserError, check_at_least_one, is_number

__all__ = [
    "Pacing",
    "ValuePacing",
    "competence_pacing",
    "discrete_pacing",
    "linear_pacing",
    "num_admitted",
    "root_pacing",
]

Pacing = Callable[[Any], Float64[np.ndarray, "..."]]


class ValuePacing(NamedTuple):
    """Admits the samples whose difficulty is at most a bound that grows from step to step.

    The difficulty is that of `make_plan`, the first of several, or the length.

    Attributes:
      bound: from the step, int64[S], counted over all epochs, to the highest difficulty that is admitted, ints or
        floats[S]; where it falls, the highest so far counts.

    Example:
      >>> pacing = ValuePacing(lambda step: np.minimum(64 + step // 10, 512))
      >>> pacing.bound(np.array([0, 10, 10_000]))
      array([ 64,  65, 512])

    References:
      `difficulty_type: "value"` of DeepSpeed's data efficiency library.
    """

    bound: Callable[[Any], npt.ArrayLike]


def num_admitted(
    pacing: Pacing | ValuePacing, steps: Int64[np.ndarray, " S"], difficulty: Shaped[np.ndarray, " n"]
) -> Int64[np.ndarray, " S"]:
    """How many samples, easiest first, each step may draw from."""
    by_value = isinstance(pacing, ValuePacing)
    function = pacing.bound if isinstance(pacing, ValuePacing) else pacing
    if not callable(function):
        raise UserError(f"pacing must be a function of the step, such as linear_pacing makes, not {pacing!r}")
    try:
        values = np.asarray(function(steps))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"pacing takes all steps of the epoch at once, an int64 array, and gives one number for each: {error}"
        ) from error
    is_number = np.issubdtype(values.dtype, np.integer) or np.issubdtype(values.dtype, np.floating)
    if values.shape != steps.shape or not is_number:
        raise UserError(f"pacing must give one number a step, {len(steps)}, not {values.dtype} of shape {values.shape}")
    wrong = np.isnan(values) if by_value else ~((values >= 0) & (values <= 1))
    if wrong.any():
        first = zip(steps[wrong][:5].tolist(), values[wrong][:5].tolist(), strict=True)
        listed = ", ".join(f"step {step}: {value}" for step, value in first)
        wanted = "bounds that are not NaN" if by_value else "fractions between 0 and 1"
        raise UserError(f"pacing must give {wanted}: {listed}")
    if by_value:
        return np.maximum.accumulate(_num_up_to(difficulty, values))
    return np.maximum.accumulate(np.ceil(values.astype(np.float64) * len(difficulty)).astype(np.int64))


def _num_up_to(ascending: Shaped[np.ndarray, " n"], bounds: Shaped[np.ndarray, " S"]) -> Int64[np.ndarray, " S"]:
    """How many values are at most each bound; integers are compared as integers, which floats would round."""
    if not np.issubdtype(ascending.dtype, np.integer):
        return np.searchsorted(ascending, bounds.astype(np.float64), side="right")
    smallest, largest = int(ascending[0]), int(ascending[-1])
    whole = [math.floor(bound) if math.isfinite(bound) else bound for bound in bounds.tolist()]
    inside = np.array([min(max(bound, smallest), largest) for bound in whole], ascending.dtype)
    is_below = np.array([bound < smallest for bound in whole])
    return np.where(is_below, 0, np.searchsorted(ascending, inside, side="right"))


def linear_pacing(num_steps: int, initial: float = 0.1) -> Pacing:
    """The admitted share grows by the same amount every step.

    It is initial + (1 − initial)·x, where x = min(step / num_steps, 1).

    Args:
      num_steps: the step from which on all samples are admitted, at least 1.
      initial: the share at step 0, above 0 and at most 1.

    Returns:
      A function from the step, an integer or integers[...] of at least 0, to the admitted share, float64[...] in
      [0, 1], which never falls.

    Raises:
      ValueError: options that are not as described; from the function, steps that are not.

    Example:
      >>> linear_pacing(10, initial=0.5)(np.array([0, 5, 10, 99]))
      array([0.5 , 0.75, 1.  , 1.  ])

    References:
      Bengio et al. 2009, "Curriculum Learning"; `fixed_linear` of DeepSpeed's curriculum learning.
    """
    _check(num_steps, initial)
    return _pacing(num_steps, lambda step: initial + (1 - initial) * (step / num_steps))


def root_pacing(num_steps: int, initial: float = 0.1, degree: float = 2) -> Pacing:
    """The admitted share grows fast at first, as a root of the step.

    It is initial + (1 − initial)·x^(1/degree), where x = min(step / num_steps, 1).

    Args:
      num_steps: as in `linear_pacing`.
      initial: as in `linear_pacing`.
      degree: of the root, finite and above 0; 1 is linear, and below 1 the share grows slowly at first.

    Returns:
      As in `linear_pacing`.

    Raises:
      ValueError: as in `linear_pacing`.

    Example:
      >>> root_pacing(100, initial=0.5)(np.array([0, 25, 100]))
      array([0.5 , 0.75, 1.  ])

    References:
      Penha and Hauff 2020, "Curriculum Learning Strategies for IR"; `fixed_root` of DeepSpeed's curriculum learning.
    """
    _check(num_steps, initial, degree)
    return _pacing(num_steps, lambda step: initial + (1 - initial) * (step / num_steps) ** (1 / degree))


def competence_pacing(num_steps: int, initial: float = 0.1, degree: float = 2) -> Pacing:
    """The admitted share grows so that its power `degree` grows linearly.

    It is (initial^degree + (1 − initial^degree)·x)^(1/degree), where x = min(step / num_steps, 1). With degree 2, the
    default, new samples come at a rate inverse to the share, so that every sample gets about the same time.

    Args:
      num_steps: as in `linear_pacing`.
      initial: as in `linear_pacing`.
      degree: finite and above 0; 1 is linear.

    Returns:
      As in `linear_pacing`.

    Raises:
      ValueError: as in `linear_pacing`.

    Example:
      >>> competence_pacing(100, initial=0.5)(np.array([0, 75, 100])).round(3)
      array([0.5  , 0.901, 1.   ])

    References:
      Platanios et al. 2019, "Competence-based Curriculum Learning for Neural Machine Translation".
    """
    _check(num_steps, initial, degree)
    start = initial**degree
    return _pacing(num_steps, lambda step: (start + (1 - start) * (step / num_steps)) ** (1 / degree))


def discrete_pacing(num_steps: int, num_stages: int, initial: float = 0.1) -> Pacing:
    """The admitted share grows in equal jumps.

    It is initial + (1 − initial)·k / num_stages, where k = min(⌊step·num_stages / num_steps⌋, num_stages).

    Args:
      num_steps: as in `linear_pacing`.
      num_stages: the number of jumps, at least 1; the last one comes at step num_steps.
      initial: as in `linear_pacing`.

    Returns:
      As in `linear_pacing`.

    Raises:
      ValueError: as in `linear_pacing`, or num_steps × num_stages does not fit int64.

    Example:
      >>> discrete_pacing(10, num_stages=2, initial=0.5)(np.array([0, 4, 5, 9, 10]))
      array([0.5 , 0.5 , 0.75, 0.75, 1.  ])

    References:
      `fixed_discrete` of DeepSpeed's curriculum learning; step pacing in Penha and Hauff 2020, "Curriculum Learning
      Strategies for IR".
    """
    _check(num_steps, initial)
    check_at_least_one(num_stages=num_stages)
    num_steps, num_stages = int(num_steps), int(num_stages)
    if num_steps * num_stages >= 2**63:
        raise UserError(f"num_steps × num_stages ({num_steps} × {num_stages}) must be below 2**63")
    return _pacing(num_steps, lambda step: initial + (1 - initial) * (step * num_stages // num_steps) / num_stages)


def _check(num_steps: int, initial: float, degree: float = 1.0) -> None:
    check_at_least_one(num_steps=num_steps)
    if not is_number(initial) or not 0 < initial <= 1:
        raise UserError(f"initial must be above 0 and at most 1, not {initial!r}")
    if not is_number(degree) or not 0 < degree < math.inf:
        raise UserError(f"degree must be finite and above 0, not {degree!r}")


def _pacing(num_steps: int, share: Callable[[Int64[np.ndarray, " S"]], Float64[np.ndarray, " S"]]) -> Pacing:
    """A pacing from the share at each of S steps, none above num_steps."""

    def pacing(step: npt.ArrayLike) -> Float64[np.ndarray, ...]:
        steps = np.asarray(step)
        if not np.issubdtype(steps.dtype, np.integer) or (steps < 0).any():
            raise UserError(f"steps must be integers of at least 0, not {step!r}")
        # One axis, for a power of a NumPy scalar may be rounded otherwise than that of an array.
        reached = np.minimum(steps.reshape(-1).astype(np.uint64), np.uint64(num_steps)).astype(np.int64)
        # The end is exact, whatever the rounding.
        shares = np.where(reached == num_steps, 1.0, np.minimum(share(reached), 1.0))
        return shares.reshape(steps.shape)[()]

    return pacing
