"""Curriculum pacing: the share of samples that each step admits, and the order in which samples arrive."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from torch_ref.checks import INT64_MAX, MAX_LISTED, check_integer, check_number, known_keywords
from torch_ref.planning.order import random_keys

__all__ = [
    "Pacing",
    "competence_pacing",
    "linear_pacing",
    "num_admitted",
    "paced_arrival",
]

Pacing = Callable[[ArrayLike], ArrayLike]


@known_keywords
def linear_pacing(num_steps: int, initial: float = 0.1) -> Pacing:
    """Admit samples in proportion to the steps taken.

    Args:
        num_steps: the step from which on all samples are admitted, at least 1.
        initial: the share admitted at step 0, above 0 and at most 1.

    Returns:
        A function from a step, an integer >= 0 or an array of them, to float64 in [0, 1] that never falls.

    Raises:
        ValueError: if an argument is out of its range.

    Example:
        >>> linear_pacing(100, initial=0.5)([0, 50, 200]).tolist()
        [0.5, 0.75, 1.0]
    """
    num_steps, initial = _check(num_steps, initial)
    return _pacing(num_steps, lambda step: initial + (1 - initial) * _share(step, num_steps))


@known_keywords
def competence_pacing(num_steps: int, initial: float = 0.1, degree: float = 2) -> Pacing:
    """Admit samples as a learner's competence grows: a root curve from `initial` on.

    Args:
        num_steps: as in `linear_pacing`.
        initial: likewise.
        degree: of the root, above 0.

    Returns:
        As `linear_pacing`.

    Raises:
        ValueError: if an argument is out of its range.

    Example:
        >>> competence_pacing(4, initial=0.5)([0, 1, 9]).round(3).tolist()
        [0.5, 0.661, 1.0]

    References:
        Platanios et al., "Competence-based Curriculum Learning for Neural Machine Translation", NAACL 2019.
    """
    num_steps, initial = _check(num_steps, initial)
    degree = check_number("degree", degree, above=0)
    start = initial**degree
    return _pacing(num_steps, lambda step: (start + (1 - start) * _share(step, num_steps)) ** (1 / degree))


def num_admitted(pacing: Pacing, first_step: int, num_steps: int, num_samples: int) -> NDArray[np.int64]:
    """Return how many of the samples are admitted at each step of an epoch, int64[S], never falling.

    Raises:
        ValueError: if the function gives anything but S finite numbers in [0, 1], or the steps exceed int64.
    """
    function = pacing
    if not callable(function):
        raise ValueError(f"pacing must be a function from steps to shares of the samples, got {pacing!r}")
    if first_step + num_steps > INT64_MAX:
        raise ValueError(f"pacing needs global steps that fit int64, this epoch begins at {first_step}")
    steps = np.arange(first_step, first_step + num_steps, dtype=np.int64)
    try:
        shares = np.asarray(function(steps))
    except (TypeError, ValueError) as error:
        raise ValueError(f"pacing must take all steps at once, int64[{num_steps}]: {error}") from error
    if shares.shape != steps.shape or shares.dtype.kind not in "iuf":
        raise ValueError(
            f"pacing must give one number a step, shape {steps.shape}, got {shares.dtype} of shape {shares.shape}"
        )
    bad = np.flatnonzero(~((shares >= 0) & (shares <= 1)))
    if len(bad):
        listed = ", ".join(f"step {steps[i]}: {shares[i]}" for i in bad[:MAX_LISTED])
        raise ValueError(f"pacing must give numbers from 0 to 1: {listed}; {len(bad)} in all")
    return np.maximum.accumulate(np.ceil(shares.astype(np.float64) * num_samples).astype(np.int64))


def paced_arrival(
    admitted: NDArray[np.int64], rank_bucket: Tensor, rows_per_step: Sequence[int], seed: int, epoch: int
) -> Tensor:
    """Draw the order in which samples arrive, each from the admitted ones that are left, as ranks int64[n].

    `admitted` says how many of the first ranks are admitted at each step, int64[S]; `rank_bucket` int64[n] is the
    bucket of each rank, and `rows_per_step` what fills a step of each bucket.
    """
    num_samples = len(rank_bucket)
    bucket_of, limits = rank_bucket.tolist(), admitted.tolist()
    waiting = [0] * len(rows_per_step)
    pool = list(range(num_samples))
    emitted = 0
    for place, key in enumerate(random_keys(seed, epoch, 0, num_samples).tolist()):
        end = min(max(limits[min(emitted, len(limits) - 1)], place + 1), num_samples)
        drawn = place + (key * (end - place) >> 32)
        pool[place], pool[drawn] = pool[drawn], pool[place]
        bucket = bucket_of[pool[place]]
        waiting[bucket] += 1
        if waiting[bucket] == rows_per_step[bucket]:
            waiting[bucket] = 0
            emitted += 1
    return torch.tensor(pool)


def _check(num_steps: int, initial: float) -> tuple[int, float]:
    initial = check_number("initial", initial, above=0)
    if initial > 1:
        raise ValueError(f"initial must be at most 1, got {initial}")
    return check_integer("num_steps", num_steps), initial


def _share(step: NDArray[np.int64], num_steps: int) -> NDArray[np.float64]:
    return np.minimum(step / num_steps, 1.0)


def _pacing(num_steps: int, admitted: Callable[[NDArray[np.int64]], NDArray[np.float64]]) -> Pacing:
    """Let a formula take single numbers too, and keep rounding from what is promised: at most 1, and 1 at the end."""

    def pacing(step: ArrayLike) -> NDArray[np.float64]:
        steps = np.asarray(step)
        if steps.dtype.kind not in "iu" or bool((steps < 0).any()):
            raise ValueError(f"steps must be integers >= 0, got {step!r}")
        # At least one dimension: NumPy's powers of single numbers need not round as those of arrays do.
        values = np.minimum(admitted(np.atleast_1d(steps).astype(np.int64)), 1.0)
        return np.where(np.atleast_1d(steps) >= num_steps, 1.0, values).reshape(steps.shape)[()]

    return pacing
