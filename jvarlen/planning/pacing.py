"""Curriculum pacing: the share of samples that each step may draw from.

NumPy only. A pacing is a function of the step; samples are admitted in their order, the easiest first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from jaxtyping import Float64, Int64

from jvarlen._common.checks import UserError, check_at_least_one, is_number

__all__ = ["Pacing", "competence_pacing", "discrete_pacing", "linear_pacing", "root_pacing"]

Pacing = Callable[[Any], Float64[np.ndarray, "..."]]


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
