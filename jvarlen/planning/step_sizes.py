"""How many samples or tokens each step has, as numbers, arrays and ramps, and which samples share a step.

Letters: N samples, n of them in order, Q group ids among these, S steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from jaxtyping import Int64, Integer

from jvarlen._common.checks import UserError, if_given, list_offenders, offenders_where
from jvarlen.planning.order import stable_argsort

__all__ = ["GroupIds", "OrderedSamples", "StepSize", "StepSizes", "check_shared_steps", "step_sizes_of"]

StepSize: TypeAlias = npt.ArrayLike | Callable[[int, int], int]
"""One for all steps; one for each step of all epochs; or f(step, tokens_seen), from what came before the step."""

_MOST = 2**63 - 1
_WIDE = 8  # group ids up to this many times the samples number a table as they are


class OrderedSamples(NamedTuple):
    """The samples of an epoch in their order."""

    ids: Int64[np.ndarray, " n"]
    tokens: Integer[np.ndarray, " n"]


class GroupIds:
    """The group ids of all samples; samples of one group id share a step."""

    def __init__(self, group_ids: npt.ArrayLike, num_samples: int):
        values = np.asarray(group_ids)
        if values.shape != (num_samples,) or values.dtype.kind not in "iu":
            raise UserError(
                f"group_ids must be {num_samples:,} integers, one a sample, not {values.dtype} of shape {values.shape}"
            )
        refused = (values < 0) | (values > np.iinfo(np.int64).max)
        if refused.any():
            listed = list_offenders(*offenders_where(refused, values))
            raise UserError(
                "group_ids must be from 0 to 2**63 - 1, and a sample that belongs to no others has one of its own: "
                f"{listed}"
            )
        self.of_samples: Int64[np.ndarray, " N"] = values.astype(np.int64)
        self._numbers = _numbers_of(self.of_samples)

    def bring_together(self, ids: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """Samples in an order, in which all of a group id come where its first one came."""
        numbers = self._numbers[ids]
        first = np.empty(int(numbers.max()) + 1, np.int64)
        first[numbers[::-1]] = np.arange(len(ids) - 1, -1, -1)  # the first place is written last, and stays
        return ids[stable_argsort(first[numbers])]

    def offsets(self, ids: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " Q_plus_1"]:
        """The samples before those of each group id, where they come together."""
        begins = np.flatnonzero(np.diff(self.of_samples[ids])) + 1
        return np.concatenate([[0], begins, [len(ids)]])


class StepSizes:
    """Cuts the samples of any epoch into steps; an epoch's end ends a step.

    Where samples have group ids, those of one come together and are in one step.
    """

    def __init__(self, name: str, size: StepSize, group_ids: GroupIds | None = None):
        self.name, self.counts_tokens, self.group_ids = name, name == "tokens_per_step", group_ids
        self._size: int | Int64[np.ndarray, " s"] | Callable[[int, int], int]
        self._before = {0: (0, 0)}  # steps and tokens before each epoch, as far as they were counted
        if callable(size):
            self._size = size
            return
        sizes = np.asarray(size)
        if sizes.ndim > 1 or not _are_sizes(sizes):
            raise UserError(
                f"{name} must be an integer from 1 to 2**63 - 1, such integers, or a function, not {size!r}"
            )
        self._size = int(sizes) if sizes.ndim == 0 else sizes.astype(np.int64)

    def cut(
        self, samples: OrderedSamples, epoch: int, samples_of: Callable[[int], OrderedSamples], *, splits: bool = False
    ) -> Int64[np.ndarray, " S_plus_1"]:
        """The samples before each step of an epoch; the tokens before it, where steps split samples.

        `samples_of` orders those of earlier epochs, whose steps decide where this one goes on.
        """
        if isinstance(self._size, int):
            return self._cut(samples, epoch, 0, 0, splits)
        counted = max(each for each in tuple(self._before) if each <= epoch)
        for each in range(counted, epoch):  # threads that plan epochs at once write the same
            earlier, (first_step, tokens_seen) = samples_of(each), self._before[each]
            num_steps = len(self._cut(earlier, each, first_step, tokens_seen, splits)) - 1
            self._before[each + 1] = first_step + num_steps, tokens_seen + int(earlier.tokens.sum())
        return self._cut(samples, epoch, *self._before[epoch], splits)

    def _cut(
        self, samples: OrderedSamples, epoch: int, first_step: int, tokens_seen: int, splits: bool
    ) -> Int64[np.ndarray, " S_plus_1"]:
        ends = np.cumulative_sum(samples.tokens, dtype=np.int64, include_initial=True)
        last = int(ends[-1]) if splits else len(samples.ids)
        is_exact = splits or not (self.counts_tokens or self.group_ids)
        if is_exact and isinstance(self._size, int):
            return np.append(np.arange(0, last, min(self._size, last)), last)
        places = np.arange(len(ends)) if self.group_ids is None else self.group_ids.offsets(samples.ids)
        counted = ends[places] if self.counts_tokens else places
        offsets = [0]
        while (begin := offsets[-1]) < last:
            seen = begin if splits else int(ends[begin])
            step = first_step + len(offsets) - 1
            size = self._size_of(step, epoch, tokens_seen + seen)
            if is_exact:
                offsets.append(min(begin + size, last))
                continue
            limit = min((seen if self.counts_tokens else begin) + size, int(counted[-1]))
            offsets.append(int(places[np.searchsorted(counted, limit, side="right") - 1]))
            if offsets[-1] == begin:
                first = np.searchsorted(places, [begin])
                # All steps of one size refuse the same samples.
                large = np.flatnonzero(np.diff(counted) > size) if isinstance(self._size, int) else first
                where = "a step" if isinstance(self._size, int) else f"step {step} of all epochs, in epoch {epoch},"
                raise UserError(self._refusal(samples.ids[places[large]], np.diff(counted)[large], size, where))
        return np.array(offsets)

    def _refusal(self, ids: Int64[np.ndarray, " m"], counted: Int64[np.ndarray, " m"], size: int, where: str) -> str:
        """The text of the error for samples, or for all of the group ids of these, that are too large for a step."""
        if self.group_ids is None:
            return f"samples longer than {where} may be (tokens_per_step): {list_offenders(ids, counted, size)}"
        listed = list_offenders(self.group_ids.of_samples[ids], counted, size, name="group id")
        what = "tokens" if self.counts_tokens else "samples"
        return (
            f"samples of one group id have more {what} than {where} may have ({self.name}): {listed}; give larger "
            "steps, or these samples several group ids"
        )

    def _size_of(self, step: int, epoch: int, tokens_seen: int) -> int:
        """The size of a step, counted over all epochs."""
        if isinstance(self._size, int):
            return self._size
        if isinstance(self._size, np.ndarray):
            if step >= len(self._size):
                raise UserError(
                    f"{self.name} has {len(self._size):,} values, none of which is for step {step} of all epochs, in "
                    f"epoch {epoch}"
                )
            return int(self._size[step])
        size = self._size(step, tokens_seen)
        if np.ndim(size) or not _are_sizes(np.asarray(size)):
            raise UserError(f"{self.name}({step}, {tokens_seen}) must be an integer from 1 to 2**63 - 1, not {size!r}")
        return int(size)


def _are_sizes(sizes: np.ndarray) -> bool:
    """Whether they are integers that steps can have, at least one."""
    return sizes.size > 0 and sizes.dtype.kind in "iu" and 1 <= int(sizes.min()) <= int(sizes.max()) <= _MOST


def step_sizes_of(
    sequences_per_step: StepSize | None,
    tokens_per_step: StepSize | None,
    group_ids: npt.ArrayLike | None,
    num_samples: int,
) -> StepSizes | None:
    """What cuts the samples into steps; None where neither is given."""
    given: dict[str, StepSize] = if_given(sequences_per_step=sequences_per_step, tokens_per_step=tokens_per_step)
    if len(given) > 1:
        raise UserError("sequences_per_step and tokens_per_step both say how large steps are: give one of them")
    together = None if group_ids is None else GroupIds(group_ids, num_samples)
    for name, size in given.items():
        return StepSizes(name, size, together)
    if together is not None:
        raise UserError(
            "group_ids say which samples share a step: give its size, sequences_per_step or tokens_per_step"
        )
    return None


def check_shared_steps(
    group_ids: Int64[np.ndarray, " N"],
    sample_ids: Int64[np.ndarray, " n"],
    step_offsets: Int64[np.ndarray, " S_plus_1"],
) -> None:
    """Raises ValueError where samples of one group id are in several steps, or a sample has no group id."""
    if len(group_ids) <= sample_ids.max() or group_ids.min() < 0:
        raise UserError("group_ids must be at least 0, one for every sample")
    numbers = _numbers_of(group_ids)[sample_ids]
    step = np.repeat(np.arange(len(step_offsets) - 1), np.diff(step_offsets))
    last = np.empty(int(numbers.max()) + 1, np.int64)
    last[numbers] = step
    if (apart := last[numbers] != step).any():
        listed = list_offenders(np.unique(group_ids[sample_ids[apart]]), name="group id")
        raise UserError(f"samples of one group id are in several steps: {listed}")


def _numbers_of(group_ids: Int64[np.ndarray, " N"]) -> Int64[np.ndarray, " N"]:
    """Small numbers that are equal where group ids are."""
    if group_ids.max() < _WIDE * len(group_ids):
        return group_ids
    return np.unique(group_ids, return_inverse=True)[1]
