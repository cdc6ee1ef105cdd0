"""The data loader: an iterator over the steps of a plan or a stream, as device arrays.

Reading, collation and transfer run ahead of the computation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import numpy.typing as npt

from jvarlen._common.checks import UserError, check_at_least_one, check_at_least_zero, if_given, list_first
from jvarlen._common.keywords import check_keywords
from jvarlen._common.types import Batch, Shapes
from jvarlen.batches.batches import count_without_target
from jvarlen.batches.fields import FieldAxes
from jvarlen.batches.shapes import BatchShapes, BatchSpec, plan_specs
from jvarlen.data.samples import AnyDataset, OnBadSample, Sample
from jvarlen.distributed.placement import LayoutLike, Placement, placement_of
from jvarlen.loading import plan_source, reading
from jvarlen.loading.batch_form import BatchForm, FieldNames, flat_rows
from jvarlen.loading.collate import CollateFields, CollateFn, StepSamples, collate_tokens, is_builtin
from jvarlen.loading.epochs import Epochs, ReadAhead, Steps, of_epochs, put
from jvarlen.loading.fields import find_fields, find_fields_of_plan
from jvarlen.loading.plan_source import LoaderPlace, PlanSource, ReadStep, SkippedSample
from jvarlen.planning.buckets import AnyBucket
from jvarlen.planning.lengths import sample_sizes
from jvarlen.planning.steps import PlannedSteps
from jvarlen.planning.windows import window_stops

if TYPE_CHECKING:
    from jvarlen.planning.streams import StreamBatches, StreamStep

__all__ = ["Loader", "load"]

_MOST_KEPT = 1000  # skipped samples of a loader


class Loader(Iterator[Batch]):
    """The batches of `load`, one after the other, with counts of what was delivered.

    Steps that were only read ahead do not count. After a batch has raised an error, every later one raises it again.
    Batches are given once: a second pass, once all were given, raises ValueError. `len()` is the number of steps of all
    epochs from epoch 0 on, given or not, and plans them all at once; TypeError where there is no end.

    Attributes:
      shapes: of the batches, with their shardings, for `compile_buckets`.
      num_samples: samples of this process delivered so far, over all epochs.
      num_adjusted: how many of them were cut or are shorter than planned, under `on_mismatch="adjust"`.
      num_without_target: how many of them have weight 0 on all tokens that are left of them, of a pair on those of its
        target; 0, as unknown, if you give `collate`.
      num_skipped: bad samples of this process that were left out of the batches delivered so far; `num_samples` does
        not count them.
      skipped: list of `SkippedSample`, the first 1,000 of them.
      skipped_in_batch: those of the last batch, all of them.
    """

    def __init__(
        self, shapes: BatchShapes, first: ReadAhead | Steps, epochs: Epochs | None = None, *, place: LoaderPlace | None
    ):
        """`epochs` starts to read a later epoch when its first batch is needed; a stream has no epochs and no place."""
        self.shapes = shapes
        self._place = place
        self._reading: ReadAhead | Steps = first
        self._epochs = epochs
        self._ended: Exception | type[StopIteration] | None = None
        self.num_samples = 0
        self.num_adjusted = 0
        self.num_without_target = 0
        self.num_skipped = 0
        self.skipped: list[SkippedSample] = []
        self.skipped_in_batch: tuple[SkippedSample, ...] = ()

    @functools.cached_property
    def specs(self) -> dict[AnyBucket, Shapes]:
        """The batch of each bucket, as a pytree of `jax.ShapeDtypeStruct`; for your `collate`, a step is read."""
        return self.shapes.specs

    @property
    def place(self) -> LoaderPlace:
        """The epoch and step of the next batch: `load(…, epoch=place.epoch, start_step=place.step)` goes on with it."""
        if self._place is None:
            raise UserError(
                "the place of a stream is stream.state() after a batch: stream_batches(…, state=) goes on from it"
            )
        return self._place

    def __iter__(self) -> Loader:
        if self._ended is StopIteration:
            raise UserError(
                "all of these batches were given: for another pass, call load again, or load all epochs, by num_epochs="
            )
        return self

    def __bool__(self) -> bool:
        return True  # `len` may plan for long, or raise

    def __len__(self) -> int:
        if self._epochs is None:
            raise TypeError("a stream has no known number of steps")
        return self._epochs.num_steps()

    def __next__(self) -> Batch:
        """The next batch; raises the dataset's error for a sample, with its id and the step as notes."""
        if self._ended is not None:
            raise self._ended
        try:
            while (delivered := next(self._reading, None)) is None:
                if self._epochs is None:
                    raise StopIteration
                ended, self._reading = self._reading, self._epochs.read_next()
                ended.close()  # while the workers of the next epoch start
        except StopIteration:
            self._end(StopIteration)  # an instance would keep the caller's variables alive
            raise
        except Exception as error:
            self._end(error)
            raise
        self.num_samples += delivered.num_samples
        self.num_adjusted += delivered.num_adjusted
        self.num_without_target += delivered.num_without_target
        self.num_skipped += len(delivered.skipped)
        self.skipped += delivered.skipped[: _MOST_KEPT - len(self.skipped)]
        self.skipped_in_batch = delivered.skipped
        self._place = delivered.following
        return delivered.batch

    def close(self) -> None:
        """Ends threads and worker processes within a few seconds; the counts stay."""
        if self._ended is None:
            self._end(UserError("these batches are closed"))

    def _end(self, reason: Exception | type[StopIteration]) -> None:
        self._ended = reason
        if self._epochs is not None:
            self._epochs.close()
        self._reading.close()
        del self._reading  # with the batches that wait in it


@check_keywords
def load(
    plan: PlannedSteps | Callable[[int], PlannedSteps] | StreamBatches,
    dataset: AnyDataset | Callable[[int], AnyDataset],
    *,
    layout: LayoutLike = None,
    epoch: int = 0,
    num_epochs: int | None = None,
    start_step: int = 0,
    num_workers: int = 0,
    fields: FieldAxes | None = None,
    padding_rows: plan_source.PaddingRows = "zeros",
    collate: CollateFn | None = None,
    lengths: npt.ArrayLike | None = None,
    on_mismatch: plan_source.OnMismatch = "error",
    on_bad_sample: OnBadSample = "error",
    max_bad_fraction: float = 0.01,
    num_values: Mapping[str, int] | None = None,
    microbatches: bool = True,
    rename_fields: FieldNames | None = None,
) -> Loader:
    """The steps of a plan or a stream as device arrays, in their order.

    The steps of a plan are read ahead. Those of a stream are not, so that `stream.state()` after a batch is the state
    to resume from after training on that batch.

    Args:
      plan: the plan of one epoch; a function from the epoch to its plan; or the result of `stream_batches`, for which
        only `layout`, `fields`, `collate`, `microbatches` and `rename_fields` apply. A plan that holds only this
        process's rows needs the layout that it was made for.
      dataset: `len()` and integer indexing by sample id; with `__getitems__(ids) -> list`, the samples of a step are
        read at once. Samples are 1-D integer arrays, pairs of them, or mappings, dataclasses or named tuples of arrays.
        What can only be iterated is read forward; at most the samples of a step of each bucket are held, so that a plan
        needs `order="dataset"`. Or a function from the epoch to its dataset, which is called as an epoch is planned.
      layout: a layout or its text, a `Placement`, or a mesh: the microbatches of a step are spread over data shards;
        None puts them on the default device. Every process reads only the samples of its devices.
      epoch: the first epoch.
      num_epochs: how many epochs the training has, counted from epoch 0. None: without end if `plan` is a function, and
        else the plan alone. The epochs of a plan are `plan.of_epoch(epoch)`. Each is planned in a thread while the
        previous one is loaded. From `epoch=num_epochs` on, nothing is left.
      start_step: the first step to return; earlier steps are not read.
      num_workers: processes that read and collate; 0 does it in a thread of this process. Workers are spawned for each
        epoch, so `dataset` and `collate` must pickle.
      fields: for samples of named fields, which of them a batch has, and which axes have a sample's length: by name,
        `"length"` for the first, `"length length"` for the first two (not packed), or `"row"` for arrays of one shape.
        With two lengths, `"source"`, `"target"`, two of these, or `"row"`. Other words, as many as samples have
        lengths, name these in the order in which they come, as in `"frames height width"`: those of two, or of more,
        which always have such. A field may then have as many axes of lengths, and the batch has `frames_lengths` and so
        on. `("length", -100)` also gives the value of
        padding, which is 0 by default. In `"target of source"`, or `"length of length"`, values are positions in their
        sample along the last length: integers from 0 below that length, or equal to a negative padding value. They
        become int32 positions in the row; padding is the length of the bucket by default. None: all fields, with axes
        found from a few samples, which are read first; two lengths need `lengths` for that. A field `weights` need not
        be named.
      padding_rows: the content of rows without a sample: `"zeros"`, or the padding values of `fields`; with `"repeat"`
        the first row of the whole step, or of its group, with weight 0. `is_real` is false and `ids` −1 in both.
        `"repeat"` does not go with `collate`.
      collate: makes the arrays of one step, or of each of its groups, from its `StepSamples`. Every array that is not a
        scalar has leading axis M.
        None makes a `Batch`, `PackedBatch`, `PairBatch` or `PackedPairBatch`, as the plan says; for samples with named
        fields, a dict of these and the other arrays of those types. A field `weights` of the samples, one per sample or
        per token (of the target), becomes the loss weights, which are 1 for samples without it.
      lengths: integers[N], or [N, D] of several lengths: those that the plan was made for, with which each sample's
        are compared. None: only the tokens of a whole step are compared, if `collate` does that.
      on_mismatch: what happens to a sample of another length. `"error"`: all such samples of the step are listed.
        `"adjust"`, which needs `lengths`: a longer sample is cut to its planned length. In any bucket it keeps its end
        if the plan is by `"truncate_start"`, and otherwise its beginning. A shorter one fills less of its row, with
        weight 0 after it.
      on_bad_sample: what happens to a sample that the dataset raises for, that has no token, that the library cannot
        collate, or that has not its planned length. `"error"`: it ends the loading. `"skip"`, which needs `lengths`
        unless you give `collate`: the step has padding in its place, and is otherwise as planned.
      max_bad_fraction: the most samples of an epoch that may be skipped, as a share of those planned for this process.
      num_values: by the name of an array of the batch, such as `"tokens"`, how many values it may have, as an embedding
        has rows: JAX reads another row for a larger value, without an error. None: all that fit int32.
      microbatches: whether arrays have the leading axis M. False, for loops that know no microbatches, gives [M·B, …]:
        the rows of a group in their order, row j at j. Data shards then divide rows, so that M may be 1. A `collate`
        gets these rows as one microbatch, and its leading axis 1 is left out.
      rename_fields: for arrays of the batch, the name or names that your loop has for them, such as `{"tokens":
        "inputs", "segment_ids": "inputs_segmentation"}`: a batch, or that of each group of a step, is then a dict of
        these alone. `targets` and `target_weights` are those of `next_token_targets`. None: all arrays, under their own
        names. Not with `collate`.

    Returns:
      A `Loader` over S − start_step pytrees, or those of all epochs or of the stream. Where steps of the plan have
      several groups, every one is a `StepBatch`, also with `microbatches=False` and `rename_fields`. At its end, or
      when nothing refers to it any more, it leaves no thread or process behind; `close()` ends them at once.

    Raises:
      ValueError: arguments that are not as described or do not go together; processes with different plans; and, when a
        step comes, samples of other lengths than planned, samples that cannot be collated, −100 in an integer field
        without a padding value, or more bad samples than `max_bad_fraction`, with the first of them.
      RuntimeError: when a step comes: a worker process died.

    Example:
      >>> from jvarlen.planning.make_plan import make_plan
      >>> samples = [np.arange(length) for length in (3, 1, 4)]
      >>> batches = load(make_plan([3, 1, 4], [(2, 4)], order="length"), samples)
      >>> [batch.lengths.tolist() for batch in batches], batches.num_samples
      ([[[1, 3]], [[4, 0]]], 3)
    """
    placement = placement_of(layout)
    if collate is not None and (
        given := "fields" * (fields is not None) or "rename_fields" * (rename_fields is not None)
    ):
        raise UserError(f"{given}= are for samples that the library collates: give them without collate=")
    form = BatchForm.of(microbatches=microbatches, rename_fields=rename_fields)
    if not (callable(plan) or isinstance(plan, PlannedSteps)):
        options = {
            "epoch": epoch, "num_epochs": num_epochs, "start_step": start_step, "num_workers": num_workers,
            "lengths": lengths is not None, "on_mismatch": on_mismatch, "on_bad_sample": on_bad_sample,
            "padding_rows": padding_rows, "num_values": num_values,
        }  # fmt: skip
        if wrong := [name for name, value in options.items() if value not in (None, 0, "error", "zeros")]:
            raise UserError(f"a stream is loaded as it comes, without {list_first(wrong)}")
        return _load_stream(plan, dataset, placement, collate, fields, form)
    check_at_least_zero(epoch=epoch, start_step=start_step, num_workers=num_workers)
    check_at_least_one(**if_given(num_epochs=num_epochs))
    plan_of, dataset_of = of_epochs(plan, dataset, epoch, num_epochs, lengths)
    last_epoch = None if callable(plan) and num_epochs is None else (num_epochs or 1) - 1
    is_over = last_epoch is not None and epoch > last_epoch
    epoch = epoch if last_epoch is None else min(epoch, last_epoch)
    first, dataset = plan_of(epoch), dataset_of(epoch)
    start_step = first.num_steps if is_over else start_step
    if start_step > first.num_steps:
        raise UserError(f"start_step must be between 0 and {first.num_steps}, not {start_step}")
    if collate is None:
        collate, dataset = _find_collate(first, dataset, fields, lengths, start_step, placement)
    batch_spec = _batch_spec(first, dataset, collate, on_bad_sample, form, placement)
    make_source = functools.partial(
        PlanSource, collate=collate, lengths=lengths, on_mismatch=on_mismatch, on_bad_sample=on_bad_sample,
        padding_rows=padding_rows, num_values=num_values or {}, microbatches=microbatches, rename_fields=rename_fields,
    )  # fmt: skip
    epochs = Epochs(
        plan_of, dataset_of, lengths, make_source, placement, num_workers, max_bad_fraction, last_epoch, microbatches
    )
    steps = epochs.read(first, dataset, epoch, start_step)
    shapes = BatchShapes.of_plan(first, layout=placement, batch_spec=batch_spec, start_step=start_step)
    by_halves = True if first.sized_by and last_epoch != 0 else None  # another epoch may have steps of several groups
    shapes = dataclasses.replace(shapes, has_many_groups=by_halves, rows_per_step=epochs.rows_per_step)
    return Loader(shapes, steps, epochs, place=epochs.place_of(first, epoch, start_step))


def _find_collate(
    plan: PlannedSteps,
    dataset: AnyDataset,
    fields: FieldAxes | None,
    lengths: npt.ArrayLike | None,
    start_step: int,
    placement: Placement | None,
) -> tuple[CollateFn, AnyDataset]:
    """The library's collate function for such samples, and the dataset as `find_fields_of_plan` returns it."""
    found, dataset = find_fields_of_plan(plan, dataset, fields, lengths, start_step)
    if placement is not None and placement.mesh.is_multi_process:
        from jvarlen.distributed.processes import agree

        agree("the fields of samples", repr(found))
    return collate_tokens if found is None else CollateFields(found), dataset


def _batch_spec(
    plan: PlannedSteps,
    dataset: AnyDataset,
    collate: CollateFn,
    on_bad_sample: OnBadSample,
    form: BatchForm,
    placement: Placement | None,
) -> BatchSpec:
    """The shapes of the batches of all processes; raises ValueError where data shards do not divide microbatches."""
    if placement is not None and form.microbatches:  # every step has the same M, so that this fails now or never
        placement.batch_shardings(np.empty(plan.num_microbatches))
    if is_builtin(collate):
        return form.of_spec(plan_specs(plan, collate.fields if isinstance(collate, CollateFields) else None))
    return plan_source.read_spec({plan: dataset}, collate, on_bad_sample, microbatches=form.microbatches)


def _load_stream(
    stream: StreamBatches,
    data: AnyDataset,
    placement: Placement | None,
    collate: CollateFn | None,
    fields: FieldAxes | None,
    form: BatchForm,
) -> Loader:
    num_microbatches = stream.num_microbatches
    if placement is not None and form.microbatches:
        placement.batch_shardings(np.empty(num_microbatches))

    def unknown(bucket: AnyBucket, num_microbatches: int) -> NoReturn:
        what = "your collate function makes" if fields is None else "fields the samples have"
        raise UserError(f"a stream has no step that shows what {what}: compile for BatchShapes, with batch_spec=")

    forward = reading.StreamReader(data, stream) if reading.only_iterates(data) else None
    num_lengths = len(stream.buckets.shapes[0].lengths)

    def read_steps() -> Steps:
        make_batch = collate
        for number, step in enumerate(stream):
            if not form.microbatches:
                step = type(step)._make(flat_rows(each) if isinstance(each, np.ndarray) else each for each in step)
            ids = step.ids[step.ids >= 0]
            lengths = (step.lengths if step.whole_lengths is None else step.whole_lengths)[step.ids >= 0]
            samples = reading.read_samples(data, ids.tolist()) if forward is None else forward.read_step(ids.tolist())
            if make_batch is None:
                known = lengths if num_lengths > 1 else None
                found = find_fields(samples, fields, num_lengths, is_packed=stream.is_packed, lengths=known)
                make_batch = collate_tokens if found is None else CollateFields(found)
            if is_builtin(make_batch):
                reading.check_stream_lengths(stream, ids, lengths.reshape(len(ids), num_lengths), samples, make_batch)
            batch = make_batch(_samples_of_step(stream, step, samples))
            num_without_target = count_without_target(batch) if is_builtin(make_batch) else 0
            batch = put(form.of_batch(batch), placement)
            yield ReadStep(number, batch, len(ids), 0, ids, num_without_target=num_without_target)
        if forward is not None:
            forward.check_end()

    are_tokens = fields is None and collate in (None, collate_tokens)
    batch_spec = form.of_spec(plan_specs(stream)) if are_tokens else unknown
    shapes = BatchShapes(
        stream.buckets.shapes,
        num_microbatches=num_microbatches,
        layout=placement,
        batch_spec=batch_spec,
        has_many_groups=False,
    )
    return Loader(shapes, read_steps(), place=None)


def _samples_of_step(stream: StreamBatches, step: StreamStep, samples: list[Sample]) -> StepSamples:
    """The input of the collate function."""
    lengths = step.lengths[step.ids >= 0]
    return StepSamples(
        bucket=step.bucket,
        ids=step.ids,
        samples=reading.by_microbatch(step.ids, samples),
        num_tokens=int(sample_sizes(lengths, stream.buckets.size).sum()),
        truncate=stream.overlong == "truncate" and step.bucket == stream.buckets.shapes[-1],
        num_sequences=len(samples),
        starts=step.starts,
        stops=None if step.starts is None else window_stops(step.starts, step.bucket.lengths, stream.overlong),
        size=stream.buckets.size,
        lengths=step.lengths,
    )
