"""Reads the steps of a plan, compares the samples with the plan, and collates them.

It runs in a thread or in worker processes. Letters: N samples of the dataset, n of a step, or of a group where that is
said, m microbatches of a process, S steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

import jax
import numpy as np
import numpy.typing as npt
from jaxtyping import Bool, Int64

from jvarlen._common.checks import UserError, check_choices, list_first
from jvarlen._common.pytree import plain_names
from jvarlen._common.types import Array, Batch, Shapes
from jvarlen.batches.batches import StepBatch, arrays_by_name, count_without_target
from jvarlen.batches.fields import FieldAxes
from jvarlen.batches.shapes import BatchSpec, plan_specs
from jvarlen.data.samples import OnBadSample, Sample, num_samples_of
from jvarlen.loading import reading
from jvarlen.loading.batch_form import BatchForm, FieldNames, Shard, leave_out, map_places
from jvarlen.loading.collate import (
    CollateFields,
    CollateFn,
    RefusedSamplesError,
    StepSamples,
    UnsaidPaddingError,
    collate_tokens,
    is_builtin,
    refused_samples,
)
from jvarlen.loading.fields import find_fields_of_plan
from jvarlen.loading.reading import BadSample
from jvarlen.planning.buckets import AnyBucket
from jvarlen.planning.lengths import DataSource, check_sample_lengths
from jvarlen.planning.steps import PlannedSteps, StepRows
from jvarlen.planning.windows import is_window

__all__ = [
    "LoaderPlace", "OnMismatch", "PaddingRows", "PlanSource", "ReadStep", "SkippedSample",
    "read_spec",
]  # fmt: skip

OnMismatch = Literal["error", "adjust"]
PaddingRows = Literal["zeros", "repeat"]


class SkippedSample(NamedTuple):
    """A sample that was left out of its step.

    Attributes:
      epoch: as `load` counts it.
      step: the step of the epoch.
      id: the sample.
      reason: the dataset's error, or the fault of the sample, in one line.
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
    batch: Batch
    num_samples: int
    num_adjusted: int  # samples that were cut or are shorter than planned
    ids: Int64[np.ndarray, " n"]  # in the order in which they were read
    num_without_target: int = 0  # samples without a token that has weight, if the library collates them
    bad: Mapping[int, str] = MappingProxyType({})  # by place in `ids`: samples that the batch lacks, and why
    skipped: tuple[SkippedSample, ...] = ()  # the same, for the user
    following: LoaderPlace | None = None  # the place after it, unless it is of a stream


class PlanSource:
    """The batches of a plan by step, as NumPy arrays on the host: a sequence for another loader.

    `load` puts them on devices, in their order, read ahead. Where steps have several groups, the batch of every step is
    a `StepBatch`. It pickles if the dataset does.

    Args:
      plan: the plan of an epoch.
      dataset: as for `load`, with random access.
      collate: as for `load`.
      lengths: as for `load`.
      on_mismatch: as for `load`.
      on_bad_sample: as for `load`.
      padding_rows: as for `load`.
      num_values: as for `load`.
      fields: as for `load`.
      shard: `(i, n)`, the part of this process of every group: of n equal parts the i-th, or those of several integers
        i, such as `(jax.process_index(), jax.process_count())`. The microbatches are divided, or with
        `microbatches=False` the rows. None: all.
      microbatches: as for `load`.
      rename_fields: as for `load`.

    Raises:
      ValueError: arguments that `load` rejects; and, when a step is read, what `load` raises then.

    Example:
      >>> from jvarlen.planning.make_plan import make_plan
      >>> batches = PlanSource(make_plan([3, 1, 4], [(2, 4)], order="length"), [[7, 7, 7], [5], [9, 9, 9, 9]])
      >>> [batches[step].tokens.tolist() for step in range(len(batches))]
      [[[[5, 0, 0, 0], [7, 7, 7, 0]]], [[[9, 9, 9, 9], [0, 0, 0, 0]]]]
    """

    def __init__(
        self,
        plan: PlannedSteps,
        dataset: DataSource,
        collate: CollateFn | None = None,
        *,
        lengths: npt.ArrayLike | None = None,
        on_mismatch: OnMismatch = "error",
        on_bad_sample: OnBadSample = "error",
        padding_rows: PaddingRows = "zeros",
        num_values: Mapping[str, int] = MappingProxyType({}),
        fields: FieldAxes | None = None,
        shard: Shard | None = None,
        microbatches: bool = True,
        rename_fields: FieldNames | None = None,
    ):
        num_samples = num_samples_of(dataset)
        if plan.largest_id >= num_samples:
            raise UserError(f"the plan holds sample {plan.largest_id}, the dataset only {num_samples} samples")
        self._form = BatchForm.of(shard=shard, microbatches=microbatches, rename_fields=rename_fields)
        for group in np.unique(plan.group_bucket, return_index=True)[1].tolist():
            self._form.rows(
                plan, group
            )  # raises ValueError now where a plan holds others, or shards do not divide them
        check_choices(
            on_mismatch=(on_mismatch, OnMismatch),
            on_bad_sample=(on_bad_sample, OnBadSample),
            padding_rows=(padding_rows, PaddingRows),
        )
        is_others = collate is not None and not is_builtin(collate)
        if lengths is None and (on_mismatch == "adjust" or (on_bad_sample == "skip" and not is_others)):
            option = 'on_mismatch="adjust"' if on_mismatch == "adjust" else 'on_bad_sample="skip"'
            raise UserError(f"{option} needs the lengths that the plan was made for, lengths=")
        if padding_rows == "repeat" and is_others:
            raise UserError('padding_rows="repeat" is for batches that the library collates: leave out collate=')
        if rename_fields is not None and is_others:
            raise UserError("rename_fields= are for samples that the library collates: give them without collate=")
        self._plan, self._num_values = plan, dict(num_values)
        self._adjusts, self._on_bad_sample = on_mismatch == "adjust", on_bad_sample
        self._repeats = padding_rows == "repeat"
        self._longest = np.max([bucket.lengths for bucket in plan.buckets.shapes], axis=0)  # on each side
        self._lengths: Int64[np.ndarray, "N sides"] | None = None
        if lengths is not None:
            checked = check_sample_lengths(lengths, len(self._longest))
            if len(checked) != num_samples:
                raise UserError(f"lengths are of {len(checked)} samples, the dataset holds {num_samples}")
            self._lengths = checked.reshape(len(checked), -1)
        if collate is None:
            found, dataset = find_fields_of_plan(plan, dataset, fields, lengths)
            collate = collate_tokens if found is None else CollateFields(found)
        self._dataset, self._collate = dataset, collate
        if self._form.names is not None:  # raises ValueError now for arrays that a batch lacks
            named = plan_specs(plan, collate.fields if isinstance(collate, CollateFields) else None)
            self._form.of_spec(named)(plan.buckets.shapes[0], 1)

    def __len__(self) -> int:
        return self._plan.num_steps

    def __getitem__(self, step: int) -> Batch:
        return self.read(step).batch

    def read(self, step: int) -> ReadStep:
        """Reads and collates a step; an error says which one it was.

        Args:
          step: 0 ≤ step < S.

        Returns:
          Its batch, with what was read: ids, and samples that were adjusted or are bad.
        """
        plan = self._plan
        read = self._read_groups(step, plan.groups(step))
        if not plan.has_many_groups:
            return read._replace(batch=read.batch[0])
        return read._replace(batch=StepBatch(read.batch, np.float32(plan.num_sequences[step])))

    def read_group(self, group: int) -> Batch:
        """Reads and collates a group alone; the step itself where every step is one group.

        Args:
          group: 0 ≤ group < G.

        Returns:
          Its batch.
        """
        step = np.searchsorted(self._plan.step_groups, group, side="right").item() - 1
        return self._read_groups(step, [group]).batch[0]

    def _read_groups(self, step: int, groups: Sequence[int]) -> ReadStep:
        """Reads these groups of a step, all samples at once; the batch is a tuple of theirs."""
        try:
            read = self._read_rows(step, groups, [self._form.rows(self._plan, group) for group in groups])
            if self._repeats:
                for group, batch in zip(groups, read.batch, strict=True):
                    self._repeat_first_row(step, group, batch)
        except Exception as error:
            error.add_note(f"while reading step {step}")
            raise
        num_without_target = sum(map(count_without_target, read.batch)) if is_builtin(self._collate) else 0
        return read._replace(batch=tuple(map(self._form.of_batch, read.batch)), num_without_target=num_without_target)

    def _read_rows(self, step: int, groups: Sequence[int], planned: list[StepRows]) -> ReadStep:
        """Reads these rows of groups, compares their samples, and collates them as the library has them."""
        ids = np.concatenate([rows.ids[rows.ids >= 0] for rows in planned])
        samples = reading.read_samples(self._dataset, ids.tolist(), self._on_bad_sample)
        num_adjusted = 0
        if self._lengths is not None:
            num_adjusted, lengths = self._resolve_mismatches(ids, samples)
            # Every sample was compared, and some may be shorter by choice.
            planned = [rows._replace(num_tokens=None) for rows in planned]
        batches = []
        first = 0
        for group, rows in zip(groups, planned, strict=True):
            of_group = slice(first, first := first + int(np.count_nonzero(rows.ids >= 0)))
            if num_adjusted and is_window(self._plan.overlong):
                rows = reading.move_windows(rows, lengths[of_group], self._longest)
            batch, samples[of_group] = self._collate_group(group, rows, samples[of_group])
            batches.append(batch)
        bad = {place: sample.reason for place, sample in enumerate(samples) if isinstance(sample, BadSample)}
        return ReadStep(step, tuple(batches), len(ids) - len(bad), num_adjusted, ids, bad=bad)

    def _collate_group(
        self, group: int, rows: StepRows, samples: list[Sample | BadSample]
    ) -> tuple[Batch, list[Sample | BadSample]]:
        """The batch of a group, and its samples, of which those that cannot be collated have become bad ones."""
        group_samples = self._group_samples(group, rows, samples)
        try:
            batch = self._collate_and_check(group_samples)
        except UnsaidPaddingError:
            raise
        except UserError:
            refused = refused_samples(self._collate_and_check, group_samples) if is_builtin(self._collate) else {}
            if not refused:
                raise
            if self._on_bad_sample == "error":
                raise RefusedSamplesError.of(group_samples, refused) from None
            good = [place for place, sample in enumerate(samples) if not isinstance(sample, BadSample)]
            for place, reason in refused.items():
                samples[good[place]] = BadSample(reason)
            batch = self._collate_and_check(self._group_samples(group, rows, samples))
        return batch, samples

    def _collate_and_check(self, samples: StepSamples) -> Batch:
        """The batch of these samples; raises ValueError for values beyond `num_values`."""
        batch = self._collate(samples)
        if not self._num_values:
            return batch
        arrays = dict(zip(plain_names(batch), jax.tree.leaves(batch), strict=True))
        for name in self._num_values.keys() & arrays.keys():
            if arrays[name].max(initial=0) >= self._num_values[name]:
                raise UserError(
                    f"{name} reach {arrays[name].max()}, but only values below {self._num_values[name]} have a row in "
                    "the table that the loss reads by them: JAX would read another row, without an error"
                )
        return batch

    def _group_samples(self, group: int, rows: StepRows, samples: Sequence[Sample | BadSample]) -> StepSamples:
        """The input of the collate function: the samples that are not bad."""
        bucket_index = self._plan.group_bucket[group]
        if rows.ids.ndim == 3:
            missing = [(0, 0), (0, 0), (0, self._plan.samples_per_row[bucket_index] - rows.ids.shape[2])]
            rows = map_places(rows, lambda each: np.pad(each, missing, constant_values=-1))
        if bad := [place for place, sample in enumerate(samples) if isinstance(sample, BadSample)]:
            rows = leave_out(rows, bad)
        bucket = self._plan.buckets.shapes[bucket_index]
        return StepSamples(
            bucket=bucket,
            ids=rows.ids,
            samples=reading.by_microbatch(
                rows.ids, (sample for sample in samples if not isinstance(sample, BadSample))
            ),
            num_tokens=rows.num_tokens,
            truncate=self._plan.overlong == "truncate" and bucket.lengths == tuple(self._longest),
            num_sequences=int(np.diff(self._plan.group_offsets[group : group + 2]).item()),
            starts=rows.starts,
            stops=rows.stops,
            size=self._plan.buckets.size,
        )

    def _repeat_first_row(self, step: int, group: int, batch: Batch) -> None:
        """Copies the first row of the group, the same on any number of processes, to padding rows, without weights."""
        arrays = first = arrays_by_name(batch)
        assert arrays is not None
        has_sample = _has_sample(arrays)
        if has_sample.all():
            return
        if self._form.shards is not None and not (self._form.shards[0] == 0 and has_sample[0, 0]):
            first = self._first_row(step, group)  # maybe of another process
        if first is not None and (places := np.argwhere(_has_sample(first))).size:
            for name in arrays.keys() - {"weights", "num_sequences", "ids", "is_real"}:
                arrays[name][~has_sample] = first[name][tuple(places[0])]

    def _first_row(self, step: int, group: int) -> dict[str, Array] | None:
        """The arrays of the first row of a group that has a sample which is not bad."""
        rows = self._form._replace(shards=None).rows(self._plan, group)._replace(num_tokens=None)
        for m, row in np.argwhere(rows.ids.reshape(*rows.ids.shape[:2], -1)[..., 0] >= 0).tolist():
            one = map_places(rows, lambda each: each[m : m + 1, row : row + 1])  # noqa: B023
            first = arrays_by_name(self._read_rows(step, [group], [one]).batch[0])
            if first is not None and _has_sample(first).any():
                return first
        return None

    def _resolve_mismatches(
        self, ids: Int64[np.ndarray, " n"], samples: list[Sample | BadSample]
    ) -> tuple[int, Int64[np.ndarray, "n sides"]]:
        """Compares lengths with those planned; returns how many samples are adjusted, and the lengths of all.

        Longer samples are cut in place. Other mismatches become bad samples, or are listed in an error.
        """
        assert self._lengths is not None
        planned = self._lengths[ids]
        cut_to = self._longest if self._plan.overlong == "truncate" else None
        fields = self._collate if isinstance(self._collate, CollateFields) else None
        mismatches = reading.compare_lengths(planned, samples, cut_to, fields)
        skips, num_adjusted = self._on_bad_sample == "skip", 0
        bad = []
        for mismatch in mismatches:
            place, lengths, _ = mismatch
            if self._adjusts and lengths is not None and (any(lengths) or not skips):
                keeps_end = self._plan.overlong == "truncate_start"
                samples[place] = reading.cut_sample(
                    samples[place], lengths, planned[place].tolist(), fields, keeps_end=keeps_end
                )
                planned[place] = np.minimum(planned[place], lengths)
                num_adjusted += 1
            else:
                bad.append(mismatch)
        if bad and not skips:
            raise UserError(
                "samples have other lengths than planned: "
                + list_first((f"id {ids[each.place]}: {each.reason}" for each in bad), "; ")
                + "; the dataset has changed, or is not the one whose lengths were planned. Plan again, or load with "
                'on_mismatch="adjust"; or without lengths, where `len()` does not count the tokens of a sample'
            )
        for place, _, reason in bad:
            samples[place] = BadSample(reason)
        return num_adjusted, planned


def _has_sample(arrays: Mapping[str, Array]) -> Bool[np.ndarray, "M B"]:
    """Whether rows hold any sample."""
    return arrays["is_real"].reshape(*arrays["is_real"].shape[:2], -1).any(axis=2)


def read_spec(
    datasets: Mapping[PlannedSteps, DataSource],
    collate: CollateFn,
    on_bad_sample: OnBadSample = "error",
    *,
    microbatches: bool = True,
) -> BatchSpec:
    """The shapes of what a collate function makes of a group; the first of a bucket in these plans is read."""

    def batch_spec(bucket: AnyBucket, num_microbatches: int) -> Shapes:
        def spec(leaf: Array) -> jax.ShapeDtypeStruct:
            shape, dtype = np.shape(leaf), leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
            if shape and microbatches:  # a plan may hold a part of them
                shape = (num_microbatches, *shape[1:])
            return jax.ShapeDtypeStruct(shape, dtype)

        for plan, dataset in datasets.items():
            if reading.only_iterates(dataset):
                raise UserError(
                    "a dataset that can only be iterated has no step to read first, from which to learn what your "
                    "collate function makes: compile for BatchShapes, with batch_spec="
                )
            index = plan.buckets.shapes.index(bucket) if bucket in plan.buckets.shapes else -1
            for group in np.flatnonzero(plan.group_bucket == index)[:1].tolist():
                source = PlanSource(plan, dataset, collate, on_bad_sample=on_bad_sample, microbatches=microbatches)
                return jax.tree.map(spec, source.read_group(group))
        raise UserError(f"no step of the bucket {bucket} is planned, to find the shapes of its batch: give batch_spec")

    return batch_spec
