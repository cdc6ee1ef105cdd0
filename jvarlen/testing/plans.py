"""Checks of plans, loaders and their batches. Letters: M microbatches, B rows of each, N samples, S steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from jvarlen._common.checks import UserError, list_first, list_offenders, offenders_where
from jvarlen._common.pytree import leaves_by_name

__all__ = ["assert_exactly_once", "assert_same_batches"]


def assert_exactly_once(plan: Any, num_samples: int | None = None) -> None:
    """Asserts that every sample comes exactly once in an epoch.

    Args:
      plan: a plan of this package or of `torch_ref`; or a result of `batch_by_tokens` or `pack_samples`; or, from a
        loader or anything else, an iterable of arrays or lists of sample ids, −1 for a padding row.
      num_samples: N: ids are 0 to N − 1. None: as many as came, plus those that the plan says it dropped; then missing
        last samples go unnoticed.

    Raises:
      AssertionError: ids are missing, but for as many as the plan says it dropped; repeated; or out of range. The first
        are listed, with their counts.

    Example:
      >>> from jvarlen import make_plan
      >>> assert_exactly_once(make_plan([3, 1, 2], [(2, 2), (1, 3)], order="length"), 3)
      >>> assert_exactly_once([[[0, 1], [2, -1]], [[1, 4]]], 5)
      Traceback (most recent call last):
      AssertionError: of samples 0 to 4, 1 is missing: id 3; samples that come more than once: id 1: 2
    """
    if (starts := getattr(plan, "piece_starts", None)) is not None:  # then a sample is its first piece
        ids = np.asarray(plan.sample_ids)[np.asarray(starts) == 0]
    elif _is_plan(plan):
        ids = _flat_ids([plan.rows(step) for step in range(plan.num_steps)])
    else:
        ids = np.asarray(plan.sample_ids) if hasattr(plan, "sample_ids") else _flat_ids(list(plan))
    ids = ids[ids != -1]
    num_dropped = getattr(plan, "num_dropped", 0)
    if num_samples is None:
        num_samples = len(ids) + num_dropped
    if problems := _problems_of_ids(ids, num_samples, num_dropped):
        raise AssertionError("; ".join(problems))


def assert_same_batches(plan_a: Any, plan_b: Any) -> None:
    """Asserts that two plans, or two loaders, give the same batches in the same order.

    Args:
      plan_a: a plan: made, loaded from a file, or of `torch_ref`. Or a finite iterable of batches: pytrees of JAX or
        NumPy arrays or PyTorch tensors on the host. Their leaves are compared by name, in shape and value, but not in
        dtype or container, because frameworks differ in these.
      plan_b: likewise.

    Raises:
      AssertionError: the message names the first step that differs, and its bucket, places and ids, leaves and values.
      ValueError: one is a plan and the other is not.

    Example:
      >>> from jvarlen import make_plan
      >>> plan = make_plan([3, 1, 2], [(2, 3)], order="length")
      >>> assert_same_batches(plan, make_plan([3, 1, 2], [(2, 3)], order=[1, 2, 0]))
      >>> assert_same_batches(plan, make_plan([3, 1, 2], [(2, 3)], order=[1, 0, 2]))
      Traceback (most recent call last):
      AssertionError: step 0 differs: rows[0, 1] is 2 and 0; num_tokens is 3 and 4
    """
    are_plans = _is_plan(plan_a)
    if are_plans != _is_plan(plan_b):
        raise UserError("a plan is compared with a plan, and batches with batches")
    num_same = 0
    for leaves_a, leaves_b in itertools.zip_longest(_leaves_by_step(plan_a), _leaves_by_step(plan_b)):
        if leaves_a is None or leaves_b is None:
            ended = "first" if leaves_a is None else "second"
            raise AssertionError(f"the {ended} ends after {num_same} steps, which are the same in both")
        names = leaves_a | leaves_b
        differences = [_difference(name, leaves_a.get(name), leaves_b.get(name)) for name in names]
        if any(differences):
            raise AssertionError(f"step {num_same} differs: {list_first(filter(None, differences), '; ')}")
        num_same += 1
    if are_plans and plan_a.digest != plan_b.digest:
        raise AssertionError(
            f"all {num_same} steps are the same, but the digests differ, as buckets that no step uses do: "
            f"{list_first(map(tuple, plan_a.buckets), ', ')}, and {list_first(map(tuple, plan_b.buckets), ', ')}"
        )


def _flat_ids(ids: Any) -> np.ndarray:
    """The ids in an array, or in lists of different sizes."""
    if isinstance(ids, list):
        return np.concatenate([np.zeros(0, np.int64), *map(_flat_ids, ids)])
    return np.asarray(ids).ravel()


def _is_plan(plan: Any) -> bool:
    return hasattr(plan, "rows") and hasattr(plan, "step_bucket")


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
        f"ids that are none of 0 to {num_samples - 1}": np.unique(ids[~is_sample], return_counts=True),
    }
    return problems + [f"{what}: {list_offenders(*found)}" for what, found in groups.items() if len(found[0])]


def _leaves_by_step(plan: Any) -> Iterator[dict[str, Any]]:
    """For each step, the values that must be the same, by name."""
    if not _is_plan(plan):
        yield from map(leaves_by_name, plan)
        return
    for step, bucket in enumerate(plan.step_bucket):
        shape = "×".join(map(str, plan.buckets[bucket]))
        yield {"bucket": shape, "rows": plan.rows(step), "num_tokens": plan.num_tokens[step]}


def _difference(name: str, one: Any, other: Any) -> str | None:
    """How two leaves differ; None if they do not."""
    if one is None or other is None:
        return f"{name} is only in the {'first' if other is None else 'second'}"
    one, other = np.asarray(one), np.asarray(other)
    if one.shape != other.shape:
        return f"{name} has shape {one.shape} and {other.shape}"
    differs = (one != other) & ~((one != one) & (other != other))  # NaN is the same as NaN
    texts = [f"{at or ''} is {one[tuple(at)]} and {other[tuple(at)]}" for at in np.argwhere(differs).tolist()]
    return name + list_first(texts, ", ") if texts else None
