"""Reads the steps of a plan, compares the samples with the plan, and collates them.

It runs wherever samples are read: in a thread or in a worker process. Letters: N samples of the dataset, n of a step, m
microbatches of a process, S steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import numpy.typing as npt
from jaxtyping import Bool, Int64

from jvarlen._common.checks import UserError, check_choices, list_first
from jvarlen._common.pytree import plain_names
from jvarlen.batches.batches import arrays_by_name
from jvarlen.batches.shapes import BatchSpec
from jvarlen.data.samples import OnBadSample, WeightedTokens, fields_of, num_samples_of, samples_at_once
from jvarlen.loading.collate import (
    CollateFields,
    CollateFn,
    StepSamples,
    collate_tokens,
    count_without_target,
    is_own,
    reason_of,
    refused_error,
    refused_samples,
)
from jvarlen.loading.fields import find_fields_of_plan
from jvarlen.loading.forward import IterationError, only_iterates
from jvarlen.planning.buckets import AnyBucket
from jvarlen.planning.lengths import DataSource, check_lengths, check_pair_lengths
from jvarlen.planning.steps import OwnRows, PlannedSteps

__all__ = [
    "LoaderPlace", "OnMismatch", "PaddingRows", "PlanSource", "ReadStep", "SkippedSample", "by_microbatch",
    "read_samples", "spec_of_steps",
]  # fmt: skip

OnMismatch = Literal["error", "adjust"]
PaddingRows = Literal["zeros", "repeat"]

_SIZED = {np.ndarray, WeightedTokens, bytes, str}  # whose `len` counts tokens


class SkippedSample(NamedTuple):
    """A sample that was left out of its step.

    Attributes:
      epoch: as `load` counts it.
      step: the step of the epoch.
      id: the sample.
      reason: what the dataset raised, or what is wrong with the sample, in one line.
    """

    epoch: int
    step: int
    id: int
    reason: str


class LoaderPlace(NamedTuple):
    """Where a `Loader` is.

    Attributes:
      epoch: that of the next batch, as `load` takes it.
      step: the next batch's step in the plan of its epoch, `start_step` of `load`.
    """

    epoch: int
    step: int


class ReadStep(NamedTuple):
    """A step that was read."""

    step: int
    batch: Any
    num_samples: int
    num_adjusted: int  # samples that were cut or are shorter than planned
    ids: Int64[np.ndarray, " n"]  # in the order in which they were read
    num_without_target: int = 0  # samples without a token that has weight, if the library collates them
    bad: Mapping[int, str] = MappingProxyType({})  # by place in `ids`: samples that the batch lacks, and why
    skipped: tuple[SkippedSample, ...] = ()  # the same, as they are told
    following: LoaderPlace | None = None  # the place after it, unless it is of a stream


class PlanSource:
    """The batches of a plan by step, as NumPy arrays on the host: a sequence for a loader of your own.

    `load` puts them on devices, in their order, read ahead. It pickles if the dataset does.

    Args:
      plan: the plan of an epoch.
      dataset: as for `load`, with random access.
      collate: as for `load`.
      microbatches: integers[m], those of this process; None: all.
      lengths: as for `load`.
      on_mismatch: as for `load`.
      on_bad_sample: as for `load`.
      padding_rows: as for `load`.
      num_values: as for `load`.
      fields: as for `load`.

    Raises:
      ValueError: arguments that `load` rejects; and, when a step is read, what `load` raises then.

    Example:
      >>> from jvarlen.planning.plan import make_plan
      >>> batches = PlanSource(make_plan([3, 1, 4], [(2, 4)], order="length"), [[7, 7, 7], [5], [9, 9, 9, 9]])
      >>> [batches[step].tokens.tolist() for step in range(len(batches))]
      [[[[5, 0, 0, 0], [7, 7, 7, 0]]], [[[9, 9, 9, 9], [0, 0, 0, 0]]]]
    """

    def __init__(
        self,
        plan: PlannedSteps,
        dataset: DataSource,
        collate: CollateFn | None = None,
        microbatches: Int64[np.ndarray, " m"] | None = None,
        *,
        lengths: npt.ArrayLike | None = None,
        on_mismatch: OnMismatch = "error",
        on_bad_sample: OnBadSample = "error",
        padding_rows: PaddingRows = "zeros",
        num_values: Mapping[str, int] = MappingProxyType({}),
        fields: Mapping[str, str] | None = None,
    ):
        num_samples = num_samples_of(dataset)
        if plan.largest_id >= num_samples:
            raise UserError(f"the plan holds sample {plan.largest_id}, the dataset only {num_samples} samples")
        plan.own_rows(0, microbatches)  # raises ValueError now where a plan holds others
        check_choices(
            on_mismatch=(on_mismatch, OnMismatch),
            on_bad_sample=(on_bad_sample, OnBadSample),
            padding_rows=(padding_rows, PaddingRows),
        )
        is_others = collate is not None and not is_own(collate)
        if lengths is None and (on_mismatch == "adjust" or (on_bad_sample == "skip" and not is_others)):
            option = 'on_mismatch="adjust"' if on_mismatch == "adjust" else 'on_bad_sample="skip"'
            raise UserError(f"{option} needs the lengths that the plan was made for, lengths=")
        if padding_rows == "repeat" and is_others:
            raise UserError('padding_rows="repeat" is for batches that the library collates: leave out collate=')
        self._plan, self._microbatches, self._num_values = plan, microbatches, dict(num_values)
        self._adjusts, self._skips = on_mismatch == "adjust", on_bad_sample == "skip"
        self._repeats = padding_rows == "repeat"
        self._longest = np.max([bucket.lengths for bucket in plan.buckets.shapes], axis=0)  # on each side
        self._lengths: Int64[np.ndarray, "N sides"] | None = None
        if lengths is not None:
            checked = check_pair_lengths(lengths) if len(self._longest) == 2 else check_lengths(lengths)
            if len(checked) != num_samples:
                raise UserError(f"lengths are of {len(checked)} samples, the dataset holds {num_samples}")
            self._lengths = checked.reshape(len(checked), -1)
        if collate is None:
            found, dataset = find_fields_of_plan(plan, dataset, fields, lengths)
            collate = collate_tokens if found is None else CollateFields(found)
        self._dataset, self._collate = dataset, collate

    def __len__(self) -> int:
        return self._plan.num_steps

    def __getitem__(self, step: int) -> Any:
        return self.read(step).batch

    def read(self, step: int) -> ReadStep:
        """Reads and collates a step; an error says which one it was.

        Args:
          step: 0 ≤ step < S.

        Returns:
          Its batch, with what was read: ids, and samples that were adjusted or are bad.
        """
        try:
            return self._read(step)
        except Exception as error:
            error.add_note(f"while reading step {step}")
            raise

    def _read(self, step: int) -> ReadStep:
        rows = self._plan.own_rows(step, self._microbatches)
        ids = rows.ids[rows.ids >= 0]
        bad: dict[int, str] = {}
        samples = read_samples(self._dataset, ids.tolist(), bad if self._skips else None)
        num_adjusted = 0
        if self._lengths is not None:
            num_adjusted = self._compare(ids, samples, bad)
            rows = rows._replace(num_tokens=None)  # every sample was compared, and some may be shorter by choice
        step_samples = self._step_samples(step, rows, samples, bad)
        try:
            batch = self._collated(step_samples)
        except MemoryError:
            raise
        except Exception:
            refused = refused_samples(self._collated, step_samples) if is_own(self._collate) else {}
            if not refused:
                raise
            if not self._skips:
                raise refused_error(step_samples, refused) from None
            good = [place for place in range(len(samples)) if place not in bad]
            bad |= {good[place]: reason for place, reason in refused.items()}
            batch = self._collated(self._step_samples(step, rows, samples, bad))
        if self._repeats:
            self._repeat_first_row(step, batch)
        num_without_target = count_without_target(batch) if is_own(self._collate) else 0
        return ReadStep(step, batch, len(ids) - len(bad), num_adjusted, ids, num_without_target, bad)

    def _collated(self, samples: StepSamples) -> Any:
        """The batch of these samples, whose values were checked."""
        batch = self._collate(samples)
        arrays = dict(zip(plain_names(batch), jax.tree.leaves(batch), strict=True))
        for name in self._num_values.keys() & arrays.keys():
            if arrays[name].max(initial=0) >= self._num_values[name]:
                raise UserError(
                    f"{name} reach {arrays[name].max()}, but only values below {self._num_values[name]} have a row in "
                    "the table that the loss reads by them: JAX would read another row, without an error"
                )
        return batch

    def _step_samples(self, step: int, rows: OwnRows, samples: list[Any], bad: Mapping[int, str]) -> StepSamples:
        """What is collated of the samples that were read: those that are not bad."""
        bucket_index = self._plan.step_bucket[step]
        if rows.ids.ndim == 3:
            missing = [(0, 0), (0, 0), (0, self._plan.samples_per_row[bucket_index] - rows.ids.shape[2])]

            def padded(each: np.ndarray) -> np.ndarray:
                return np.pad(each, missing, constant_values=-1)

            starts, stops = (each if each is None else padded(each) for each in (rows.starts, rows.stops))
            rows = OwnRows(padded(rows.ids), starts, rows.num_tokens, stops)
        if bad:
            rows = _without(rows, bad)
            samples = [sample for place, sample in enumerate(samples) if place not in bad]
        bucket = self._plan.buckets.shapes[bucket_index]
        return StepSamples(
            bucket=bucket,
            ids=rows.ids,
            samples=by_microbatch(rows.ids, samples),
            num_tokens=rows.num_tokens,
            truncate=self._plan.overlong == "truncate" and bucket.lengths == tuple(self._longest),
            num_sequences=int(self._plan.num_sequences[step]),
            starts=rows.starts,
            stops=rows.stops,
            pair_size=self._plan.buckets.pair_size,
        )

    def _repeat_first_row(self, step: int, batch: Any) -> None:
        """Copies the first row of the step, the same on any number of processes, to padding rows, without weights."""
        arrays: Any = arrays_by_name(batch)
        has_sample = arrays["is_real"].reshape(*arrays["is_real"].shape[:2], -1).any(axis=2)
        if has_sample.all():
            return
        first, places = arrays, np.argwhere(has_sample)
        if self._microbatches is not None and 0 not in self._microbatches:  # it is read by another process
            whole, bad = self._plan.own_rows(step), dict[int, str]()
            starts, stops = (each if each is None else each[:1, :1] for each in (whole.starts, whole.stops))
            row = OwnRows(whole.ids[:1, :1], starts, None, stops)
            samples = read_samples(self._dataset, row.ids[row.ids >= 0].tolist(), bad if self._skips else None)
            if not bad:
                first = arrays_by_name(self._collate(self._step_samples(step, row, samples, bad)))
                places = np.zeros((1, 2), int)
        if len(places):
            for name in arrays.keys() - {"weights", "num_sequences", "ids", "is_real"}:
                arrays[name][~has_sample] = first[name][tuple(places[0])]

    def _are_as_planned(
        self, lengths: Int64[np.ndarray, "n sides"], planned: Int64[np.ndarray, "n sides"]
    ) -> Bool[np.ndarray, " n"]:
        """Which samples have the planned lengths, or at least all that the plan leaves of those that it cuts."""
        is_as_planned = lengths == planned
        if self._plan.overlong == "truncate":
            is_as_planned |= (planned > self._longest) & (lengths >= self._longest)
        return is_as_planned.all(axis=1)

    def _compare(self, ids: Int64[np.ndarray, " n"], samples: list[Any], bad: dict[int, str]) -> int:
        """Compares lengths with those planned; returns how many samples are adjusted, which are cut in place if longer.

        Those of other lengths are otherwise bad, or listed in an error.
        """
        assert self._lengths is not None
        planned = self._lengths[ids]
        to_compare = list(range(len(samples)))
        if planned.shape[1] == 1 and {*map(type, samples)} <= _SIZED:
            found = np.fromiter(map(len, samples), np.int64, len(samples))[:, None]
            to_compare = np.flatnonzero(~self._are_as_planned(found, planned)).tolist()
        fields = self._collate if isinstance(self._collate, CollateFields) else None
        others, num_adjusted = {}, 0
        for place in to_compare:
            if place in bad:
                continue
            try:
                lengths = _lengths_of(samples[place], len(self._longest), fields)
            except UserError as error:
                others[place] = str(error)
                continue
            except (LookupError, AttributeError, TypeError, ValueError):
                if fields is None:
                    others[place] = f"no tokens alone, but {fields_of(samples[place]) or type(samples[place]).__name__}"
                continue  # of fields, collating tells
            length = planned[place].tolist()
            if not any(lengths) and (self._skips or not self._adjusts):
                others[place] = "no token"
            elif not self._are_as_planned(np.array([lengths]), planned[place : place + 1]).all():
                if self._adjusts:
                    samples[place] = _cut(samples[place], length, fields)
                    num_adjusted += 1
                else:
                    others[place] = (
                        f"{' and '.join(map(str, lengths))} tokens, planned {' and '.join(map(str, length))} tokens"
                    )
        if self._skips:
            bad |= others
        elif others:
            raise UserError(
                "samples have other lengths than planned: "
                + list_first((f"id {ids[place]}: {text}" for place, text in others.items()), "; ")
                + "; the dataset has changed, or is not the one whose lengths were planned. Plan again, or load with "
                'on_mismatch="adjust"; or without lengths, where `len()` does not count the tokens of a sample'
            )
        return num_adjusted


def by_microbatch(ids: Int64[np.ndarray, "m B *P"], samples: list[Any]) -> list[list[Any]]:
    """The samples of these rows as one list a microbatch."""
    left = iter(samples)
    sizes = (ids >= 0).sum(axis=tuple(range(1, ids.ndim))).tolist()
    return [list(itertools.islice(left, size)) for size in sizes]


def _without(rows: OwnRows, bad: Mapping[int, str]) -> OwnRows:
    """Rows without these samples: their places, and rows that are then empty, are the last ones, as in any step."""
    ids, starts, stops = rows.ids.copy(), rows.starts, rows.stops
    flat = ids[ids >= 0]
    flat[[*bad]] = -1
    ids[ids >= 0] = flat
    for axis in range(ids.ndim - 1, 0, -1):  # within packed rows, then the rows of microbatches
        is_empty = ids < 0 if axis == ids.ndim - 1 else ids[:, :, :1] < 0
        order = np.argsort(is_empty, axis=axis, kind="stable")
        ids = np.take_along_axis(ids, order, axis)
        starts, stops = (each if each is None else np.take_along_axis(each, order, axis) for each in (starts, stops))
    starts, stops = (each if each is None else np.where(ids >= 0, each, -1) for each in (starts, stops))
    return OwnRows(ids, starts, None, stops)


def spec_of_steps(
    datasets: Mapping[PlannedSteps, DataSource], collate: CollateFn, on_bad_sample: OnBadSample = "error"
) -> BatchSpec:
    """The shapes of what a collate function makes of the first step of a bucket in these plans, which is read."""

    def batch_spec(bucket: AnyBucket, num_microbatches: int) -> Any:
        def spec(leaf: Any) -> jax.ShapeDtypeStruct:
            shape, dtype = np.shape(leaf), leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
            # A plan may hold a part of the microbatches.
            return jax.ShapeDtypeStruct((num_microbatches, *shape[1:]) if shape else (), dtype)

        for plan, dataset in datasets.items():
            if only_iterates(dataset):
                raise UserError(
                    "a dataset that can only be iterated has no step to read before, which would tell what your "
                    "collate function makes: compile for BatchShapes, with batch_spec="
                )
            index = plan.buckets.shapes.index(bucket) if bucket in plan.buckets.shapes else -1
            for step in np.flatnonzero(plan.step_bucket == index)[:1].tolist():
                return jax.tree.map(spec, PlanSource(plan, dataset, collate, on_bad_sample=on_bad_sample)[step])
        raise UserError(f"no step of the bucket {bucket} is planned, to tell the shapes of its batch: give batch_spec")

    return batch_spec


def read_samples(dataset: Any, ids: list[int], bad: dict[int, str] | None = None) -> list[Any]:
    """The samples of these ids, at once if the dataset can; `bad` gets why samples cannot be read, by their place."""
    if ids and hasattr(dataset, "__getitems__"):
        try:
            samples = samples_at_once(dataset, ids)
        except MemoryError:
            raise
        except (Exception, SystemExit):
            pass  # one by one, to tell which
        else:
            if len(samples) != len(ids):
                raise UserError(f"`__getitems__` of the dataset returned {len(samples)} samples for {len(ids)} ids")
            return samples
    samples = []
    for place, i in enumerate(ids):
        try:
            samples.append(dataset[i])
        except (Exception, SystemExit) as raised:
            error: Exception = (  # what would end the iteration, or the worker, without a word
                RuntimeError(f"the dataset raised {raised!r} for sample {i}")
                if isinstance(raised, StopIteration | SystemExit)
                else raised
            )
            if bad is None or isinstance(error, MemoryError | IterationError):
                error.add_note(f"while reading sample {i}")
                if error is raised:
                    raise
                raise error from raised
            samples.append(None)
            bad[place] = reason_of(error)
    return samples


def _lengths_of(sample: Any, num_lengths: int, fields: CollateFields | None) -> list[int]:
    """The lengths of a sample; raises ValueError where `len` would count its fields."""
    if fields is not None:
        return fields.lengths_of(sample)
    sides = [sample] if num_lengths == 1 else [sample[0], sample[1]]
    if kind := next(filter(None, map(fields_of, sides)), None):
        raise UserError(f"no tokens alone, but {kind}")
    return [*map(len, sides)]


def _cut(sample: Any, lengths: list[int], fields: CollateFields | None) -> Any:
    """The sample, or both sides of a pair, cut where longer; other fields of a pair stay."""
    if fields is not None:
        return fields.cut(sample, lengths)
    if len(lengths) == 1:
        return sample[: lengths[0]]
    return (*(sample[side][:most] for side, most in enumerate(lengths)), *sample[2:])
