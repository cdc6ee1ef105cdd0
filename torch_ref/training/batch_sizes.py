"""Batch sizes of the steps: of plans, which may be read as they come, or given as numbers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torch_ref.planning.plan import Plan

__all__ = ["UNITS", "StepValues", "step_sizes"]

UNITS = ("sequences", "tokens")


def step_sizes(plan: Plan | Iterable[Plan | int] | ArrayLike, *units: str) -> list[NDArray[np.int64]]:
    """Return the sizes int64[S] of all steps in each unit: "steps" (1), "sequences", "tokens".

    `plan` is a plan, several, or sizes in the first unit, which do not tell the other.
    """
    if _are_numbers(plan):
        given = np.asarray(plan)
        if given.ndim != 1 or given.dtype.kind not in "iu" or not given.size:
            raise ValueError(f"batch sizes must be 1-D integers, got {given.dtype} of shape {given.shape}")
        known = {"steps": np.ones_like(given, dtype=np.int64), units[0]: given.astype(np.int64)}
        for unit in units:
            if unit not in known:
                raise ValueError(
                    f"batch sizes in {units[0]} do not tell {unit}: counted_in must be 'steps' or {units[0]!r}"
                )
        return [known[unit] for unit in units]
    sizes = [[_sizes_of(each, unit) for unit in units] for each in _plans_of(plan)]
    if not sizes:
        raise ValueError("plan is empty: it must be a plan, several of them, or batch sizes")
    return [np.concatenate(column) for column in zip(*sizes, strict=True)]


def _are_numbers(given: Any) -> bool:
    """Return whether batch sizes are given in place of plans."""
    return hasattr(given, "dtype") or (isinstance(given, Sequence) and bool(given) and isinstance(given[0], Real))


def _plans_of(given: Any) -> Iterable[Any]:
    return given if isinstance(given, Iterable) else [given]


def _sizes_of(plan: Any, unit: str) -> NDArray[np.int64]:
    if not isinstance(plan, Plan):
        raise ValueError(f"plan must be a plan or several of them, or batch sizes, got {plan!r}")
    if unit == "tokens" and plan.size != "sum":
        raise ValueError(
            "a plan whose size is not the sum does not count tokens: count sequences, or give batch sizes "
            "in place of the plan, such as plan.num_tokens"
        )
    counts = {"steps": np.ones(plan.num_steps, np.int64), "sequences": plan.num_sequences, "tokens": plan.num_tokens}
    return counts[unit]


class StepValues:
    """What follows from the batch size of each step, by the step's number over all epochs.

    An iterator of plans is read as far as steps are asked for; with one, there can be no copy and no pickle.
    """

    def __init__(
        self,
        batch_sizes: Plan | Iterable[Plan] | ArrayLike,
        unit: str,
        value_of: Callable[[NDArray[Any]], NDArray[np.float64]],
        *,
        repeat: bool = False,
    ) -> None:
        """Read the first plan, or all that is no iterator, through `value_of`; `repeat`: begin again after the last."""
        to_come = (value_of(sizes) for sizes in _sizes_of_epochs(batch_sizes, unit))
        # A generator cannot be copied or pickled; what is there already is read now.
        self._to_come = to_come if isinstance(batch_sizes, Iterator) else iter(list(to_come))
        self._values: NDArray[np.float64] = np.zeros(0)
        self._repeat = repeat
        if not self.has(0):
            raise ValueError("batch_sizes are empty: give a plan, plans, or the batch size of each step")

    def has(self, step: int) -> bool:
        """Return whether a step has a value; read plans up to it."""
        while step >= len(self._values) and (values := next(self._to_come, None)) is not None:
            self._values = np.concatenate([self._values, values])
        return step < len(self._values) or (self._repeat and len(self._values) > 0)

    def check(self, step: int, instead: str = "") -> None:
        """Raise ValueError unless a step has a value; `instead` says what else one may do."""
        if not self.has(step):
            raise ValueError(
                f"step {step} has no batch size, there are {len(self._values)}: give the plans of all epochs, and step "
                f"once for each of their steps, not once a microbatch{instead}"
            )

    def at(self, step: int) -> float:
        """Return the value of a step, after the last one that of the last."""
        is_known = self.has(step)  # which may read more values
        return float(self._values[step % len(self._values) if is_known else -1])


def _sizes_of_epochs(batch_sizes: Any, unit: str) -> Iterator[NDArray[Any]]:
    """Yield the batch sizes of one plan after the other, or those that are given."""
    if not _are_numbers(batch_sizes):
        yield from (_sizes_of(plan, unit) for plan in _plans_of(batch_sizes))
    elif (sizes := np.asarray(batch_sizes)).ndim == 1:
        yield sizes
    else:
        raise ValueError(f"batch_sizes must be plans or numbers [S], got shape {sizes.shape}")
