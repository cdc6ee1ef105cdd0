"""Curriculum pacing: the share of samples, easiest first, that each of S steps may draw from."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from jaxtyping import Float64, Int64

from jvarlen._common.checks import UserError, check_at_least_one, is_number, list_offenders
from jvarlen._common.keywords import check_keywords

__all__ = ["Pacing", "competence_pacing", "linear_pacing", "num_admitted"]

Pacing = Callable[[Any], Float64[np.ndarray, "..."]]


def num_admitted(pacing: Pacing, steps: Int64[np.ndarray, " S"], num_samples: int) -> Int64[np.ndarray, " S"]:
    """How many samples, easiest first, each step may draw from."""
    try:
        values = np.asarray(pacing(steps))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"pacing takes all steps of the epoch at once, an int64 array, and gives one number for each: {error}"
        ) from error
    if values.shape != steps.shape or values.dtype.kind not in "iuf":
        raise UserError(f"pacing must give one number a step, {len(steps)}, not {values.dtype} of shape {values.shape}")
    if (wrong := ~((values >= 0) & (values <= 1))).any():
        listed = list_offenders(steps[wrong], values[wrong], name="step")
        raise UserError(f"pacing must give fractions between 0 and 1: {listed}")
    return np.maximum.accumulate(np.ceil(values.astype(np.float64) * num_samples).astype(np.int64))


@check_keywords
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
    return competence_pacing(num_steps, initial, degree=1)


@check_keywords
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
    check_at_least_one(num_steps=num_steps)
    if not is_number(initial) or not 0 < initial <= 1:
        raise UserError(f"initial must be above 0 and at most 1, not {initial!r}")
    if not is_number(degree) or not 0 < degree < math.inf:
        raise UserError(f"degree must be finite and above 0, not {degree!r}")
    start = initial**degree

    def pacing(step: npt.ArrayLike) -> Float64[np.ndarray, ...]:
        steps = np.asarray(step)
        if steps.dtype.kind not in "iu" or (steps < 0).any():
            raise UserError(f"steps must be integers of at least 0, not {step!r}")
        # One axis, for a power of a NumPy scalar may be rounded otherwise than that of an array.
        reached = np.minimum(steps.reshape(-1) / num_steps, 1.0)
        shares = np.where(reached == 1, 1.0, np.minimum((start + (1 - start) * reached) ** (1 / degree), 1.0))
        return shares.reshape(steps.shape)[()]

    return pacing
