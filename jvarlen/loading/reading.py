"""Reads samples by their ids: at once, one by one, or forward from a dataset that can only be iterated.

Samples that have other lengths than were planned are found and adjusted. Letters: n samples of a step or group, m of
them.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import GeneratorType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Bool, Int64

from jvarlen._common.checks import UserError, list_first
from jvarlen.data.samples import (
    AnyDataset,
    OnBadSample,
    Sample,
    WeightedTokens,
    describe_error,
    describe_fields,
    samples_at_once,
)
from jvarlen.loading.collate import CollateFields, CollateFn
from jvarlen.planning.steps import PlannedSteps, StepRows

if TYPE_CHECKING:
    from jvarlen.planning.streams import StreamBatches

__all__ = [
    "BadSample", "ForwardReader", "IterationError", "Mismatch", "StreamReader", "by_microbatch", "check_stream_lengths",
    "compare_lengths", "cut_sample", "move_windows", "only_iterates", "read_samples", "reader_of_plan",
]  # fmt: skip

_TEE: type = type(itertools.tee(())[0])
_SIZED = {np.ndarray, WeightedTokens, bytes, str}  # their `len` counts tokens


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


class Mismatch(NamedTuple):
    """A sample whose length is not the planned one."""

    place: int  # among the samples of its step
    lengths: list[int] | None  # None where they are unknown
    reason: str


def compare_lengths(
    planned: Int64[np.ndarray, "n sides"],
    samples: Sequence[Sample | BadSample],
    cut_to: Int64[np.ndarray, " sides"] | None,
    fields: CollateFields | None,
) -> list[Mismatch]:
    """The samples whose lengths differ from the planned ones; with `cut_to`, longer plans need only these lengths."""

    def are_as_planned(
        lengths: Int64[np.ndarray, "m sides"], planned: Int64[np.ndarray, "m sides"]
    ) -> Bool[np.ndarray, " m"]:
        is_as_planned = lengths == planned
        if cut_to is not None:
            is_as_planned |= (planned > cut_to) & (lengths >= cut_to)
        return is_as_planned.all(axis=1)

    to_compare = [place for place, sample in enumerate(samples) if not isinstance(sample, BadSample)]
    if planned.shape[1] == 1 and {*map(type, samples)} <= _SIZED:
        found = np.fromiter(map(len, samples), np.int64, len(samples))[:, None]
        to_compare = np.flatnonzero(~are_as_planned(found, planned)).tolist()
    mismatches = []
    for place in to_compare:
        try:
            lengths = _lengths_of(samples[place], planned.shape[1], fields)
        except (LookupError, AttributeError, TypeError, ValueError) as error:
            if isinstance(error, UserError):
                mismatches.append(Mismatch(place, None, str(error)))
            elif fields is None:
                kind = describe_fields(samples[place]) or type(samples[place]).__name__
                mismatches.append(Mismatch(place, None, f"no tokens alone, but {kind}"))
            continue  # collating rejects fields
        if not are_as_planned(np.array([lengths]), planned[place : place + 1]).all():
            found_text, planned_text = (" and ".join(map(str, each)) for each in (lengths, planned[place].tolist()))
            reason = f"{found_text} tokens, planned {planned_text} tokens" if any(lengths) else "no token"
            mismatches.append(Mismatch(place, lengths, reason))
    return mismatches


def check_stream_lengths(
    stream: StreamBatches,
    ids: Int64[np.ndarray, " n"],
    lengths: Int64[np.ndarray, "n sides"],
    samples: Sequence[Sample | BadSample],
    collate: CollateFn,
) -> None:
    """Raises ValueError that lists samples of a step which have not the whole lengths that the stream was given."""
    cut_to = np.array(stream.buckets.shapes[-1].lengths) if stream.overlong == "truncate" else None
    fields = collate if isinstance(collate, CollateFields) else None
    if mismatches := compare_lengths(lengths, samples, cut_to, fields):
        listed = list_first((f"id {ids[each.place]}: {each.reason}" for each in mismatches), "; ")
        raise UserError(f"samples have other lengths than the stream, whose lengths are not of this dataset: {listed}")


def _lengths_of(sample: Sample, num_lengths: int, fields: CollateFields | None) -> list[int]:
    """The lengths of a sample; raises ValueError where `len` would count its fields."""
    if fields is not None:
        return fields.lengths_of(sample)
    sides = [sample] if num_lengths == 1 else [sample[side] for side in range(num_lengths)]
    if kind := next(filter(None, map(describe_fields, sides)), None):
        raise UserError(f"no tokens alone, but {kind}")
    return [*map(len, sides)]


def cut_sample(
    sample: Sample, lengths: list[int], most: list[int], fields: CollateFields | None, *, keeps_end: bool
) -> Sample:
    """The sample, or both sides of a pair, of these lengths, cut where longer; other fields of a pair stay."""
    begins = [max(length - limit, 0) * keeps_end for length, limit in zip(lengths, most, strict=True)]
    parts = [slice(begin, begin + limit) for begin, limit in zip(begins, most, strict=True)]
    if fields is not None:
        return fields.cut(sample, parts)
    if len(parts) == 1:
        return sample[parts[0]]
    return (*(sample[side][part] for side, part in enumerate(parts)), *sample[2:])


def move_windows(
    rows: StepRows, lengths: Int64[np.ndarray, "n sides"], longest: Int64[np.ndarray, " sides"]
) -> StepRows:
    """Rows of samples of these lengths, whose windows begin earlier where they would end after their sample."""
    if rows.starts is None or rows.stops is None:
        return rows
    is_sample, starts, stops = rows.ids >= 0, rows.starts.copy(), rows.stops.copy()
    last = np.maximum(lengths - longest, 0).reshape(starts[is_sample].shape)
    starts[is_sample] = np.minimum(starts[is_sample], last)
    stops[is_sample] -= rows.starts[is_sample] - starts[is_sample]
    return rows._replace(starts=starts, stops=stops)
