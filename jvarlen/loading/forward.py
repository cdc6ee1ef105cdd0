"""Datasets that can only be iterated: read forward once, with the samples of later steps held in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Int64

from jvarlen._common.checks import UserError
from jvarlen.planning.steps import PlannedSteps

__all__ = ["ForwardReader", "IterationError", "check_iterator_of_stream", "only_iterates", "reader_of_plan"]

_TEE: type = type(itertools.tee(())[0])


class IterationError(UserError):
    """Iterating failed, so that there are no more samples, whatever is done about bad ones."""


def only_iterates(dataset: Any) -> bool:
    """Whether a dataset has no random access, as generators and PyTorch's `IterableDataset` have none."""
    is_marked = any(kind.__name__ == "IterableDataset" for kind in type(dataset).__mro__)  # has a `__getitem__`, too
    return hasattr(dataset, "__iter__") and (is_marked or not hasattr(dataset, "__getitem__"))


class ForwardReader:
    """Samples by id, each as often as `num_uses` says when it is passed; those in between are held."""

    def __init__(self, dataset: Iterable[Any], num_uses: Callable[[int], int], num_samples: int = 0):
        self._iterator = iter(dataset)
        self._num_uses = num_uses
        self._num_samples = num_samples
        self._num_read = 0
        self._held: dict[int, tuple[Any, int]] = {}
        self._failed: IterationError | None = None

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, i: int) -> Any:
        while self._num_read <= i:
            sample = self._next(i)
            if num_uses := self._num_uses(self._num_read):
                self._held[self._num_read] = sample, num_uses
            self._num_read += 1
        sample, num_left = self._held.pop(i)
        if num_left > 1:
            self._held[i] = sample, num_left - 1
        return sample

    def hold_only(self, ids: set[int]) -> None:
        """Forgets samples that are not needed after all."""
        for i in self._held.keys() - ids:
            del self._held[i]

    def _next(self, i: int) -> Any:
        if self._failed is None:
            try:
                return next(self._iterator)
            except StopIteration:
                self._failed = IterationError(f"the dataset has only {self._num_read:,} samples, and not sample {i}")
            except Exception as error:
                self._failed = IterationError(f"the dataset raised {error!r} after {self._num_read:,} samples")
                self._failed.__cause__ = error
        raise self._failed


def reader_of_plan(
    dataset: Iterable[Any],
    plan: PlannedSteps,
    microbatches: Int64[np.ndarray, " m"] | None,
    start_step: int,
    num_lengths: int | None,
) -> ForwardReader:
    """Reads for these microbatches of a plan; raises ValueError where more would be held than a step of each bucket."""
    num_samples = plan.largest_id + 1 if num_lengths is None else num_lengths
    uses = np.zeros(max(num_samples, plan.largest_id + 1), np.int64)
    last_step = np.full(len(uses), -1)
    furthest = np.full(plan.num_steps, -1)
    for step in range(start_step, plan.num_steps):
        ids = plan.own_rows(step, microbatches).ids
        ids = ids[ids >= 0]
        np.add.at(uses, ids, 1)
        last_step[ids] = step
        furthest[step] = ids.max(initial=-1)
    num_wanted = np.concatenate([[0], np.cumsum(uses > 0)])[np.maximum.accumulate(furthest) + 1]
    done_after = np.cumsum(np.bincount(last_step[last_step >= 0], minlength=plan.num_steps))
    most_held = int((num_wanted[1:] - done_after[:-1]).max(initial=num_wanted[0] if len(num_wanted) else 0))
    of_buckets = np.zeros(len(plan.buckets.shapes), np.int64)
    np.maximum.at(of_buckets, plan.step_bucket, plan.num_sequences)
    if most_held > of_buckets.sum():
        # Best fit packs long samples first, whatever the order.
        wrapped = ', packed rows with packing="wrapped"' if plan.is_packed else ""
        raise UserError(
            "this dataset can only be iterated, and the plan takes its samples in another order: "
            f"{most_held:,} would wait in memory, and at most {of_buckets.sum():,} may, a step of each bucket. Plan "
            f'with order="dataset"{wrapped}, or batch the samples as they come, with stream_batches'
        )
    return ForwardReader(dataset, uses.item, num_samples)


def check_iterator_of_stream(dataset: Any) -> None:
    """Raises ValueError for an iterator whose samples the lengths of the stream may have taken."""
    if isinstance(dataset, Iterator) and not isinstance(dataset, _TEE):
        raise UserError(
            f"a {type(dataset).__name__} gives each sample once, to stream_batches or to load: use lengths, samples = "
            "itertools.tee(dataset), stream_batches(map(len, lengths), …) and load(stream, samples)"
        )
