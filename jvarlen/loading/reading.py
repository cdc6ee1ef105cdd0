"""Reads samples by their ids: at once, one by one, or forward from a dataset that can only be iterated."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from types import GeneratorType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Int64

from jvarlen._common.checks import UserError
from jvarlen.data.samples import AnyDataset, OnBadSample, Sample, describe_error, samples_at_once
from jvarlen.planning.steps import PlannedSteps, StepRows

if TYPE_CHECKING:
    from jvarlen.planning.streams import StreamBatches

__all__ = [
    "BadSample", "ForwardReader", "IterationError", "StreamReader", "by_microbatch", "only_iterates", "read_samples",
    "reader_of_plan",
]  # fmt: skip

_TEE: type = type(itertools.tee(())[0])


class IterationError(UserError):
    """Iterating failed: there are no more samples, even if bad ones are skipped."""


class BadSample(NamedTuple):
    """Stands for a sample that is left out of its batch."""

    reason: str


def read_samples(dataset: AnyDataset, ids: list[int], on_bad_sample: OnBadSample = "error") -> list[Sample | BadSample]:
    """The samples of these ids, at once if the dataset can; an error names the sample, if bad ones are not skipped."""
    if ids and hasattr(dataset, "__getitems__"):
        try:
            samples = samples_at_once(dataset, ids)
        except MemoryError:
            raise
        except (Exception, SystemExit):
            pass  # reads one by one, to find the bad ones
        else:
            if len(samples) != len(ids):
                raise UserError(f"`__getitems__` of the dataset returned {len(samples)} samples for {len(ids)} ids")
            return samples
    return [_read_sample(dataset, i, on_bad_sample) for i in ids]


def _read_sample(dataset: AnyDataset, i: int, on_bad_sample: OnBadSample) -> Sample | BadSample:
    try:
        return dataset[i]
    except (Exception, SystemExit) as raised:
        error: Exception = (  # StopIteration and SystemExit would end the iteration, or the worker, silently
            RuntimeError(f"the dataset raised {raised!r} for sample {i}")
            if isinstance(raised, StopIteration | SystemExit)
            else raised
        )
        if on_bad_sample == "skip" and not isinstance(error, MemoryError | IterationError):
            return BadSample(describe_error(error))
        error.add_note(f"while reading sample {i}")
        if error is raised:
            raise
        raise error from raised


def by_microbatch(ids: Int64[np.ndarray, "m B *P"], samples: Iterable[Sample]) -> list[list[Sample]]:
    """The samples of these rows as one list a microbatch."""
    left = iter(samples)
    sizes = (ids >= 0).sum(axis=tuple(range(1, ids.ndim))).tolist()
    return [list(itertools.islice(left, size)) for size in sizes]


def only_iterates(dataset: AnyDataset) -> bool:
    """Whether a dataset has no random access, like generators and PyTorch's `IterableDataset`."""
    is_marked = any(kind.__name__ == "IterableDataset" for kind in type(dataset).__mro__)  # has a `__getitem__`, too
    return hasattr(dataset, "__iter__") and (is_marked or not hasattr(dataset, "__getitem__"))


class ForwardReader:
    """Samples by id, each as often as `num_uses` says when it is passed; those in between are held."""

    def __init__(self, dataset: Iterable[Sample], num_uses: Callable[[int], int], num_samples: int = 0):
        self._iterator = iter(dataset)
        self._num_uses = num_uses
        self._num_samples = num_samples
        self._num_read = 0
        self._held: dict[int, tuple[Sample, int]] = {}
        self._failed: IterationError | None = None

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, i: int) -> Sample:
        while self._num_read <= i:
            sample = self._next(i)
            if num_uses := self._num_uses(self._num_read):
                self._held[self._num_read] = sample, num_uses
            self._num_read += 1
        sample, num_left = self._held.pop(i)
        if num_left > 1:
            self._held[i] = sample, num_left - 1
        return sample

    def _next(self, i: int) -> Sample:
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
    dataset: Iterable[Sample],
    plan: PlannedSteps,
    rows: Callable[[PlannedSteps, int], StepRows],
    start_step: int,
    num_lengths: int | None,
) -> ForwardReader:
    """Reads the rows of each group of a plan that a function of plan and group gives.

    Raises ValueError where more samples would be held than a group of each bucket has, or a step.
    """
    num_samples = plan.largest_id + 1 if num_lengths is None else num_lengths
    uses = np.zeros(max(num_samples, plan.largest_id + 1), np.int64)
    last_step = np.full(len(uses), -1)
    furthest = np.full(plan.num_steps, -1)
    for step in range(start_step, plan.num_steps):
        ids = np.concatenate([rows(plan, group).ids.ravel() for group in plan.groups(step)])
        ids = ids[ids >= 0]
        np.add.at(uses, ids, 1)
        last_step[ids] = step
        furthest[step] = ids.max(initial=-1)
    num_wanted = np.concatenate([[0], np.cumsum(uses > 0)])[np.maximum.accumulate(furthest) + 1]
    done_after = np.cumsum(np.bincount(last_step[last_step >= 0], minlength=plan.num_steps))
    most_held = int((num_wanted[1:] - done_after[:-1]).max(initial=num_wanted[0] if len(num_wanted) else 0))
    group_sizes = np.zeros(len(plan.buckets.shapes), np.int64)  # the largest group of each bucket
    np.maximum.at(group_sizes, plan.group_bucket, np.diff(plan.group_offsets))
    may_be_held = max(group_sizes.sum(), plan.num_sequences.max())
    if most_held > may_be_held:
        # Best fit packs long samples first, whatever the order.
        wrapped = ', packed rows with packing="wrapped"' if plan.is_packed else ""
        raise UserError(
            "this dataset can only be iterated, and the plan takes its samples in another order: "
            f"{most_held:,} would wait in memory, and at most {may_be_held:,} may, a "
            f"{'group of each bucket or a step' if plan.has_many_groups else 'step of each bucket'}. Plan "
            f'with order="dataset"{wrapped}, or batch the samples as they come, with stream_batches'
        )
    return ForwardReader(dataset, uses.item, num_samples)


class StreamReader(ForwardReader):
    """Samples of a stream by id, from a dataset that can only be iterated; the stream holds those to come.

    Raises ValueError for an iterator whose samples may be gone, because measuring the lengths took them.
    """

    def __init__(self, dataset: Iterable[Sample], stream: StreamBatches):
        self._wanted: set[int] = set()
        super().__init__(dataset, self._wanted.__contains__)
        self._dataset, self._stream, self._is_first = dataset, stream, True
        if isinstance(dataset, Iterator) and stream.is_from_iterator and not isinstance(dataset, _TEE):
            raise UserError(
                f"a {type(dataset).__name__} gives each sample once, to stream_batches or to load: use lengths, "
                "samples = itertools.tee(dataset), stream_batches(map(len, lengths), …) and load(stream, samples); or "
                "give stream_batches lengths that are known, as an array or a list"
            )

    def read_step(self, ids: list[int]) -> list[Sample | BadSample]:
        """The samples of a step; raises ValueError for a generator that someone else has read from."""
        is_new, self._is_first = self._is_first, False
        generator = self._dataset
        if is_new and isinstance(generator, GeneratorType) and inspect.getgeneratorstate(generator) != "GEN_CREATED":
            raise UserError(
                "the generator has given samples before load read the first, so that others would come in their place: "
                "give load a new one"
            )
        self._wanted.clear()
        self._wanted.update(self._stream.ids_to_come, ids)
        for i in self._held.keys() - self._wanted:  # samples that are not needed after all
            del self._held[i]
        return read_samples(self, ids)

    def check_end(self) -> None:
        """Raises ValueError where an iterator has more samples than the stream has lengths."""
        if not isinstance(self._dataset, Iterator):
            return
        num_left = self._stream.num_read - self._num_read
        if sum(1 for _ in itertools.islice(self._iterator, num_left + 1)) > num_left:
            raise UserError(
                f"the dataset has more samples than the stream has lengths, {self._stream.num_read:,}: the lengths are "
                "not those of these samples, or of a part of them"
            )
