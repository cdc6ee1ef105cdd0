"""Checks that every sample comes once. Letters: N samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from jvarlen._common.checks import list_offenders, offenders_where

__all__ = ["assert_exactly_once"]


def assert_exactly_once(plan: Any, num_samples: int | None = None) -> None:
    """Asserts that every sample comes exactly once in an epoch.

    Args:
      plan: a plan of this package or of `torch_ref`; or a result of `batch_by_tokens` or `pack_samples`; or, from a
        loader or anything else, an iterable of arrays or lists of sample ids, −1 for a padding row.
      num_samples: N: ids are 0 to N − 1. None: as many as came, plus those that the plan says it dropped; then missing
        last samples go unnoticed.

    Raises:
      AssertionError: ids are missing, more than the plan says it dropped; repeated; or out of range. The first are
        listed, with their counts.

    Example:
      >>> from jvarlen import make_plan
      >>> assert_exactly_once(make_plan([3, 1, 2], [(2, 2), (1, 3)], order="length"), 3)
      >>> assert_exactly_once([[[0, 1], [2, -1]], [[1, 4]]], 5)
      Traceback (most recent call last):
      AssertionError: of samples 0 to 4, 1 is missing: id 3; samples that come more than once: id 1: 2
    """
    starts = getattr(plan, "chunk_starts", None)
    if starts is not None and getattr(plan, "overlong", "") == "split":  # then a sample is its first chunk
        ids = np.asarray(plan.sample_ids)[np.asarray(starts) == 0]
    elif hasattr(plan, "rows"):
        ids = _flat_ids([plan.rows(group) for group in range(getattr(plan, "num_groups", plan.num_steps))])
    else:
        ids = np.asarray(plan.sample_ids) if hasattr(plan, "sample_ids") else _flat_ids(list(plan))
    ids = ids[ids != -1]
    num_dropped = getattr(plan, "num_dropped", 0)
    if num_samples is None:
        num_samples = len(ids) + num_dropped
    if problems := _problems_of_ids(ids, num_samples, num_dropped):
        raise AssertionError("; ".join(problems))


def _flat_ids(ids: npt.ArrayLike) -> np.ndarray:
    """The ids in an array, or in lists of different sizes."""
    if isinstance(ids, list):
        return np.concatenate([np.zeros(0, np.int64), *map(_flat_ids, ids)])
    return np.asarray(ids).ravel()


def _problems_of_ids(ids: np.ndarray, num_samples: int, num_dropped: int) -> list[str]:
    """How the ids differ from each of 0 to N − 1 once, without the dropped ones."""
    is_sample = (ids >= 0) & (ids < num_samples)
    times = np.bincount(ids[is_sample], minlength=num_samples)
    problems = []
    missing = np.flatnonzero(times == 0)
    if len(missing) != num_dropped:
        said = f", not {num_dropped} as the plan says" if num_dropped else ""
        listed = f": {list_offenders(missing)}" if len(missing) else ""
        verb = "is" if len(missing) == 1 else "are"
        problems.append(f"of samples 0 to {num_samples - 1}, {len(missing):,} {verb} missing{said}{listed}")
    groups = {
        "samples that come more than once": offenders_where(times > 1, times),
        f"ids outside 0 to {num_samples - 1}": np.unique(ids[~is_sample], return_counts=True),
    }
    return problems + [f"{what}: {list_offenders(*found)}" for what, found in groups.items() if len(found[0])]
