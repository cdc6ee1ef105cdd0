"""The batches of plans as a dataset of Grain.

Letters: N samples of the source, S steps of an epoch.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from jaxtyping import Int64

from jvarlen._common.checks import UserError, check_at_least_one, check_at_least_zero, if_given
from jvarlen._common.keywords import check_keywords
from jvarlen._common.types import Batch
from jvarlen.batches.fields import FieldAxes
from jvarlen.data.samples import OnBadSample, Sample, num_samples_of, samples_at_once
from jvarlen.loading.batch_form import FieldNames, Shard
from jvarlen.loading.collate import CollateFields, CollateFn, collate_tokens
from jvarlen.loading.fields import find_fields_of_plan
from jvarlen.loading.plan_source import OnMismatch, PaddingRows, PlanSource
from jvarlen.planning.lengths import DataSource
from jvarlen.planning.steps import PlannedSteps

if TYPE_CHECKING:
    import grain

__all__ = ["SampleTransform", "grain_dataset"]

SampleTransform: TypeAlias = Callable[[Any, np.random.Generator], Any]
"""`transform(sample, rng)` gives the sample of which a batch is made."""

_MOST_OPEN = 2  # epochs, where one ends and the next begins


@check_keywords
def grain_dataset(
    plan: PlannedSteps | Callable[[int], PlannedSteps],
    source: DataSource,
    transform: SampleTransform | None = None,
    *,
    seed: int = 0,
    epoch: int | None = None,
    num_epochs: int | None = None,
    fields: FieldAxes | None = None,
    shard: Shard | None = None,
    microbatches: bool = True,
    rename_fields: FieldNames | None = None,
    padding_rows: PaddingRows = "zeros",
    collate: CollateFn | None = None,
    lengths: npt.ArrayLike | None = None,
    on_mismatch: OnMismatch = "error",
    on_bad_sample: OnBadSample = "error",
    num_values: Mapping[str, int] = MappingProxyType({}),
) -> grain.MapDataset:
    """The steps of a plan as a dataset of Grain, whose element i is the batch of step i, as NumPy arrays.

    Grain reads it by index, in threads or worker processes, maps it and keeps its place: the state of an iterator is a
    step, the same on any number of processes. Nothing is put on devices.

    `dataset.repeat()` gives in each pass the plan of the next epoch, as a dataset of Grain shuffles anew in each pass;
    an error where that has another number of steps, as packed plans can have. `num_epochs` counts them in advance.

    Args:
      plan: the plan of any epoch, whose others are `plan.of_epoch(epoch)`; or a function from an epoch to its plan,
        such as `lambda epoch: plan`, with `epoch=`, for a plan of a later epoch from a file, which doesn't know it.
      source: the samples, N, with `len()` and integer indexing; with `__getitems__(ids) -> list`, those of a step are
        read at once.
      transform: `transform(sample, rng)` gives the sample of a batch. `rng` is `numpy.random.default_rng((seed, epoch,
        id))`, so that it draws the same whatever the processes, the workers and the order in which they read. The
        result has the planned length, or `on_mismatch="adjust"`.
      seed: of `rng` alone. The order of samples has the plan's own.
      epoch: the only epoch of the dataset, or the first one with `num_epochs`. None: `plan.epoch`, that of the plan, or
        0 with `num_epochs` or a function.
      num_epochs: how many epochs the training has, counted from epoch 0, as for `load`: the dataset has the steps of
        all from `epoch` on, and plans them all, for its length. None: one epoch.
      fields: as for `load`.
      shard: as for `PlanSource`: `(jax.process_index(), jax.process_count())` gives each process its part of every
        batch.
      microbatches: as for `load`.
      rename_fields: as for `load`.
      padding_rows: as for `load`.
      collate: as for `load`.
      lengths: as for `load`.
      on_mismatch: as for `load`.
      on_bad_sample: as for `load`.
      num_values: as for `load`.

    Returns:
      `grain.MapDataset` of S elements, or of the steps of all epochs; `StepBatch`es as from `load`.

    Raises:
      ValueError: arguments that `load` rejects; Grain is not installed; and, when an element is read, what `load`
        raises then.

    Example:
      >>> from jvarlen.planning.make_plan import make_plan
      >>> plan = make_plan([3, 1, 4], [(2, 4)], order="shuffle")
      >>> dataset = grain_dataset(plan, [[7, 7, 7], [5], [9, 9, 9, 9]], rename_fields={"tokens": "inputs"})
      >>> dataset[0]["inputs"].shape, len(dataset), len(dataset.repeat(3))
      ((1, 2, 4), 2, 6)
    """
    try:
        import grain
    except ModuleNotFoundError:
        raise UserError("grain_dataset needs Grain: pip install grain") from None
    own_epoch = getattr(plan, "epoch", None) or 0
    if epoch is None:
        epoch = own_epoch if num_epochs is None else 0
    check_at_least_zero(seed=seed, epoch=epoch)
    check_at_least_one(**if_given(num_epochs=num_epochs))
    if num_epochs is not None and epoch >= num_epochs:
        raise UserError(f"epoch={epoch} is after the last one of num_epochs={num_epochs}, counted from 0")
    plan_of = plan if callable(plan) else _plan_of_epoch(plan, own_epoch if num_epochs is None else None)
    first = plan_of(epoch)
    samples_of = functools.partial(_samples_of, source, transform, seed)
    if collate is None:
        found, _ = find_fields_of_plan(first, samples_of(epoch), fields, lengths)
        collate, fields = collate_tokens if found is None else CollateFields(found), None
    make_source = functools.partial(
        PlanSource, collate=collate, lengths=lengths, on_mismatch=on_mismatch, on_bad_sample=on_bad_sample,
        padding_rows=padding_rows, num_values=num_values, fields=fields, shard=shard, microbatches=microbatches,
        rename_fields=rename_fields,
    )  # fmt: skip
    later = range(epoch + 1, epoch + 1 if num_epochs is None else num_epochs)
    num_steps = np.array([first.num_steps, *(plan_of(each).num_steps for each in later)])
    epochs = _Epochs(plan_of, samples_of, make_source, epoch, num_steps)
    epochs.open(epoch, first)
    return grain.MapDataset.range(int(num_steps.sum())).map_with_index(epochs.read)


def _plan_of_epoch(plan: PlannedSteps, own_epoch: int | None) -> Callable[[int], PlannedSteps]:
    """The function from an epoch to its plan; its own epoch is the plan, wherever it is from."""
    plan_epoch = getattr(plan, "plan_epoch", None)  # workers get it by itself, because plans leave it out

    def plan_of(epoch: int) -> PlannedSteps:
        if epoch == own_epoch:
            return plan
        if not hasattr(plan, "of_epoch"):
            raise UserError(f"epoch {epoch} needs a function from the epoch to its plan, for such a plan")
        return dataclasses.replace(plan, plan_epoch=plan_epoch).of_epoch(epoch)  # type: ignore[call-arg]

    return plan_of


def _samples_of(source: DataSource, transform: SampleTransform | None, seed: int, epoch: int) -> DataSource:
    """The samples of an epoch."""
    return source if transform is None else _Transformed(source, transform, seed, epoch)


class _Transformed:
    """The samples of an epoch, each transformed by the random numbers of its id."""

    def __init__(self, source: DataSource, transform: SampleTransform, seed: int, epoch: int):
        self._source, self._transform, self._seeds = source, transform, (seed, epoch)

    def __len__(self) -> int:
        return num_samples_of(self._source)

    def __getitem__(self, i: int) -> Sample:
        return self._transform(self._source[i], np.random.default_rng((*self._seeds, int(i))))

    def __getitems__(self, ids: list[int]) -> list[Sample]:
        rngs = [np.random.default_rng((*self._seeds, int(i))) for i in ids]
        return [*map(self._transform, samples_at_once(self._source, ids), rngs)]


@dataclasses.dataclass
class _Epochs:
    """The batches of epochs, one after the other, which threads and worker processes read."""

    plan_of: Callable[[int], PlannedSteps]
    samples_of: Callable[[int], DataSource]
    make_source: Callable[[PlannedSteps, DataSource], PlanSource]
    first: int
    num_steps: Int64[np.ndarray, " epochs"]

    def __post_init__(self):
        self._opened: dict[int, PlanSource] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def read(self, index: int, step: int) -> Batch:
        """The batch of an index, in whose pass over all steps it is that of a step."""
        ends = np.cumsum(self.num_steps)
        repeat, rest = divmod(index, ends[-1].item())
        if rest != step:
            raise UserError("sequential_slice=True gives a worker steps of another place: leave it out")
        place = np.searchsorted(ends, step, side="right").item()
        epoch = self.first + max(repeat, 0) * len(ends) + place
        with self._lock:
            batches = self._opened[epoch] if epoch in self._opened else self.open(epoch, self.plan_of(epoch))
        if len(batches) != self.num_steps[place]:
            raise UserError(
                f"epoch {epoch} has {len(batches)} steps, and epoch {self.first + place} {self.num_steps[place]}: "
                "give grain_dataset num_epochs= in place of repeat()"
            )
        return batches[step - (ends[place] - self.num_steps[place]).item()]

    def open(self, epoch: int, plan: PlannedSteps) -> PlanSource:
        """Keeps the batches of this epoch and the one opened last."""
        self._opened[epoch] = opened = self.make_source(plan, self.samples_of(epoch))
        while len(self._opened) > _MOST_OPEN:
            del self._opened[next(iter(self._opened))]
        return opened
