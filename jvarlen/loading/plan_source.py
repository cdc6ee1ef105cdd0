"""Reads the steps of a plan, compares the samples with the plan, and collates them.

It runs wherever samples are read: in a thread or in a worker process. Letters: N samples of the dataset, n of a step, m
microbatches of a process, S steps.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import numpy.typing as npt
from jaxtyping import Int64

from jvarlen._common.checks import UserError, check_choices, list_first
from jvarlen._common.pytree import plain_names
from jvarlen.batches.batches import arrays_by_name
from jvarlen.batches.shapes import BatchSpec
from jvarlen.loading.collate import (
    CollateFields,
    CollateFn,
    StepSamples,
    collate_tokens,
    count_without_target,
    is_own,
)
from jvarlen.loading.fields import find_fields_of_plan
from jvarlen.loading.forward import IterationError, only_iterates
from jvarlen.planning.buckets import AnyBucket
from jvarlen.planning.lengths import DataSource, check_lengths, check_pair_lengths
from jvarlen.planning.samples import OnBadSample, WeightedTokens, fields_of, samples_at_once
from jvarlen.planning.steps import OwnRows, PlannedSteps

__all__ = [
    "OnMismatch",
    "PaddingRows",
    "PlanSource",
    "ReadStep",
    "SkippedSample",
    "by_microbatch",
    "read_sample",
    "read_samples",
    "spec_of_steps",
]

OnMismatch = Literal["error", "adjust"]
PaddingRows = Literal["zeros", "repeat"]

_MOST_TOLD = 500  # characters of why a sample is bad


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
        if plan.largest_id >= len(dataset):
            raise UserError(f"the plan holds sample {plan.largest_id}, the dataset only {len(dataset)} samples")
        plan.own_rows(0, microbatches)  # raises ValueError now where a plan holds others
        check_choices(
            on_mismatch=(on_mismatch, OnMismatch),
            on_bad_sample=(on_bad_sample, OnBadSample),
            padding_rows=(padding_rows, PaddingRows),
        )
        for option, value, needs in (
            ("on_mismatch", on_mismatch, on_mismatch == "adjust"),
            ("on_bad_sample", on_bad_sample, on_bad_sample == "skip" and (collate is None or is_own(collate))),
        ):
            if lengths is None and needs:
                raise UserError(f'{option}="{value}" needs the lengths that the plan was made for, lengths=')
        self._plan = plan
        self._microbatches = microbatches
        self._adjusts = on_mismatch == "adjust"
        self._skips = on_bad_sample == "skip"
        self._repeats = padding_rows == "repeat"
        self._num_values = dict(num_values)
        longest = np.max([bucket.lengths for bucket in plan.buckets], axis=0)
        self._longest = longest if len(longest) == 2 else longest[0]  # of pairs, of each side
        self._lengths = None
        if lengths is not None:
            checked = check_pair_lengths(lengths) if len(longest) == 2 else check_lengths(lengths)
            if len(checked) != len(dataset):
                raise UserError(f"lengths are of {len(checked)} samples, the dataset holds {len(dataset)}")
            self._lengths = np.minimum(checked, self._longest) if plan.overlong == "truncate" else checked
        if collate is None:
            found, dataset = find_fields_of_plan(plan, dataset, fields, lengths)
            collate = collate_tokens if found is None else CollateFields(found)
        if self._repeats and not is_own(collate):
            raise UserError('padding_rows="repeat" is for batches that the library collates: leave out collate=')
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
        bad: dict[int, str] | None = {} if self._skips else None
        samples = read_samples(self._dataset, ids.tolist(), bad)
        if bad is not None:
            bad |= {place: "no token" for place, sample in enumerate(samples) if self._is_empty(sample)}
        num_adjusted = 0
        if self._lengths is not None:
            num_adjusted = self._compare(ids, samples, bad)
            rows = rows._replace(num_tokens=None)  # every sample was compared, and some may be shorter by choice
        step_samples = self._step_samples(step, rows, samples, bad)
        try:
            batch = self._collated(step, step_samples)
        except MemoryError:
            raise
        except Exception:
            if bad is None or not is_own(self._collate) or not (refused := self._refused(step, rows, samples, bad)):
                raise
            bad |= refused
            step_samples = self._step_samples(step, rows, samples, bad)
            batch = self._collated(step, step_samples)
        if self._repeats:
            self._repeat_first_row(step, batch)
        num_without_target = count_without_target(batch) if is_own(self._collate) else 0
        num_samples = len(ids) - len(bad or {})
        return ReadStep(
            step, batch, num_samples, num_adjusted, ids, num_without_target=num_without_target, bad=bad or {}
        )

    def _collated(self, step: int, samples: StepSamples) -> Any:
        """The batch of these samples, whose values were checked."""
        batch = self._collate(samples)
        if self._num_values:
            _check_values(step, batch, self._num_values)
        return batch

    def _step_samples(self, step: int, rows: OwnRows, samples: list[Any], bad: Mapping[int, str] | None) -> StepSamples:
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
        return StepSamples(
            bucket=self._plan.buckets[bucket_index],
            ids=rows.ids,
            samples=by_microbatch(rows.ids, samples),
            num_tokens=rows.num_tokens,
            truncate=self._plan.overlong == "truncate",
            num_sequences=int(self._plan.num_sequences[step]),
            starts=rows.starts,
            stops=rows.stops,
            pair_size=getattr(self._plan.buckets, "pair_size", "sum"),
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
                first = arrays_by_name(self._collate(self._step_samples(step, row, samples, None)))
                places = np.zeros((1, 2), int)
        if len(places):
            for name in arrays.keys() - {"weights", "num_sequences", "ids", "is_real"}:
                arrays[name][~has_sample] = first[name][tuple(places[0])]

    def _is_empty(self, sample: Any) -> bool:
        try:
            if isinstance(self._collate, CollateFields):
                return not any(self._collate.lengths_of(sample))
            return len(sample) == 0
        except (LookupError, AttributeError, TypeError, ValueError):
            return False

    def _refused(self, step: int, rows: OwnRows, samples: list[Any], bad: Mapping[int, str]) -> dict[int, str]:
        """Which other samples of a step cannot be collated alone, by their place, and why."""
        refused = {}
        for place in sorted({*range(len(samples))} - {*bad}):
            others = {other: "" for other in range(len(samples)) if other != place}
            try:
                self._collated(step, self._step_samples(step, rows, samples, others))
            except MemoryError:
                raise
            except Exception as error:
                refused[place] = _reason(error)
        return refused

    def _compare(self, ids: Int64[np.ndarray, " n"], samples: list[Any], bad: dict[int, str] | None) -> int:
        """Compares lengths with those planned; returns how many samples are adjusted, which are cut in place if longer.

        Those of other lengths are otherwise bad, or listed in an error.
        """
        assert self._lengths is not None
        kept = np.delete(np.arange(len(ids)), [*(bad or ())])
        planned = self._lengths[ids[kept]]
        fields = self._collate if isinstance(self._collate, CollateFields) else None
        found, unknown = _lengths_of([samples[place] for place in kept.tolist()], planned, fields)
        # The rest is cut by the plan's own rule, which collating follows.
        cut = np.minimum(found, self._longest) if self._plan.overlong == "truncate" else found
        differs = cut != planned if planned.ndim == 1 else (cut != planned).any(axis=1)
        differs[[*unknown]] = True
        others, num_adjusted = {}, 0
        for index in np.flatnonzero(differs).tolist():
            place, length = kept.item(index), planned[index].tolist()
            if index in unknown:
                others[place] = f"no tokens alone, but {unknown[index]}"
            elif self._adjusts:
                samples[place] = _cut(samples[place], length, fields)
                num_adjusted += 1
            else:
                others[place] = f"{_format_length(found[index].tolist())}, planned {_format_length(length)}"
        if bad is not None:
            bad |= others
        elif others:
            raise UserError(
                "samples have other lengths than planned: "
                + list_first((f"id {ids[place]}: {text}" for place, text in others.items()), "; ")
                + "; the dataset has changed, or is not the one whose lengths were planned. Plan again, or load with "
                'on_mismatch="adjust"; or without lengths, where `len()` does not count the tokens of a sample'
            )
        return num_adjusted


def _check_values(step: int, batch: Any, num_values: Mapping[str, int]) -> None:
    """Raises ValueError where an array of the batch has more values than it may."""
    arrays = dict(zip(plain_names(batch), jax.tree.leaves(batch), strict=True))
    for name in num_values.keys() & arrays.keys():
        values, limit = arrays[name], num_values[name]
        if values.size and values.max() >= limit:
            ids = arrays.get("ids")
            of_samples = ""
            if ids is not None and ids.shape[:2] == values.shape[:2]:
                in_rows = ids[(values >= limit).any(axis=tuple(range(2, values.ndim)))]
                listed = list_first(map(str, np.unique(in_rows[in_rows >= 0])))
                of_samples = f", in {'rows with ' if ids.ndim > 2 else ''}the samples {listed}"
            raise UserError(
                f"{name} of step {step} reach {values.max()}{of_samples}, but only values below {limit} have "
                "a row in the table that the loss reads by them: JAX would read another row, without an error"
            )


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


def _reason(error: Exception) -> str:
    """What an error says, in one line."""
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:_MOST_TOLD]


def spec_of_steps(
    datasets: Mapping[PlannedSteps, DataSource], collate: CollateFn, on_bad_sample: OnBadSample = "error"
) -> BatchSpec:
    """The shapes of what a collate function makes of the first step of a bucket in these plans, which is read."""

    def batch_spec(bucket: AnyBucket, microbatches_per_step: int) -> Any:
        def spec(leaf: Any) -> jax.ShapeDtypeStruct:
            shape, dtype = np.shape(leaf), leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
            # A plan may hold a part of the microbatches.
            return jax.ShapeDtypeStruct((microbatches_per_step, *shape[1:]) if shape else (), dtype)

        for plan, dataset in datasets.items():
            if only_iterates(dataset):
                raise UserError(
                    "a dataset that can only be iterated has no step to read before, which would tell what your "
                    "collate function makes: compile for BatchShapes, with batch_spec="
                )
            index = plan.buckets.index(bucket) if bucket in plan.buckets else -1
            for step in np.flatnonzero(plan.step_bucket == index)[:1].tolist():
                return jax.tree.map(spec, PlanSource(plan, dataset, collate, on_bad_sample=on_bad_sample)[step])
        raise UserError(f"no step of the bucket {bucket} is planned, to tell the shapes of its batch: give batch_spec")

    return batch_spec


def read_sample(dataset: Any, sample_id: int) -> Any:
    """A sample of the dataset; an error says which one it was."""
    try:
        return dataset[sample_id]
    except (StopIteration, SystemExit) as error:  # would end the iteration, or the worker, without a word
        raise RuntimeError(f"the dataset raised {error!r} for sample {sample_id}") from error
    except Exception as error:
        error.add_note(f"while reading sample {sample_id}")
        raise


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
    if bad is None:
        return [read_sample(dataset, i) for i in ids]
    samples = []
    for place, i in enumerate(ids):
        try:
            samples.append(read_sample(dataset, i))
        except (MemoryError, IterationError):
            raise
        except Exception as error:
            samples.append(None)
            bad[place] = _reason(error)
    return samples


def _lengths_of(
    samples: list[Any], planned: Int64[np.ndarray, " n *sides"], fields: CollateFields | None
) -> tuple[Int64[np.ndarray, " n *sides"], dict[int, str]]:
    """The lengths of samples, or of both sides of pairs; and the fields of those that do not tell theirs."""
    if fields is not None:
        told = planned.reshape(len(samples), 1 if planned.ndim == 1 else 2).copy()
        for place, sample in enumerate(samples):
            with contextlib.suppress(LookupError, AttributeError, TypeError, ValueError):  # which collating lists
                told[place] = fields.lengths_of(sample)
        return told.reshape(planned.shape), {}
    is_pairs = planned.ndim == 2
    if not is_pairs and {*map(type, samples)} <= {np.ndarray, WeightedTokens, bytes, str}:
        return np.fromiter(map(len, samples), np.int64, len(samples)), {}
    lengths, unknown = [], {}
    for place, sample in enumerate(samples):
        found = [0, 0] if is_pairs else [0]
        try:
            sides = (sample[0], sample[1]) if is_pairs else (sample,)
            kind = next(filter(None, map(fields_of, sides)), None)
            found = [*map(len, sides)]
        except (LookupError, TypeError):
            kind = fields_of(sample) or type(sample).__name__
        lengths.append(found)
        if kind:
            unknown[place] = kind
    return np.array(lengths, np.int64).reshape((-1, 2) if is_pairs else -1), unknown


def _cut(sample: Any, length: int | list[int], fields: CollateFields | None) -> Any:
    """The sample, or both sides of a pair, cut where longer; other fields of a pair stay."""
    if fields is not None:
        return fields.cut(sample, [length] if isinstance(length, int) else length)
    if isinstance(length, int):
        return sample[:length]
    return (*(sample[side][:most] for side, most in enumerate(length)), *sample[2:])


def _format_length(length: int | list[int]) -> str:
    return f"{length} tokens" if isinstance(length, int) else f"{length[0]} and {length[1]} tokens"
