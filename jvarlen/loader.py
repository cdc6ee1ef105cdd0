"""Loader: in go a plan and a dataset, out comes an iterator of device arrays, one step at a time.

The only module that moves data to devices. Collation and transfer run ahead of the step that is computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jvarlen.collate import StepSamples, pad_to_bucket
from jvarlen.distributed import batch_shardings
from jvarlen.interrupts import without_interrupts
from jvarlen.lengths import DataSource
from jvarlen.plan import Plan
from jvarlen.streams import StreamStep

__all__ = ["PlanSource", "load", "load_stream"]

CollateFn = Callable[[StepSamples], Any]

_HOST_BUFFER = 4  # collated steps that wait on the host
_DEVICE_BUFFER = 2  # steps that wait on the device


class PlanSource:
    """A Grain data source whose element t is the collated step t of a plan."""

    def __init__(self, plan: Plan, dataset: DataSource, collate: CollateFn = pad_to_bucket):
        if plan.sample_ids.max() >= len(dataset):
            raise ValueError(f"the plan holds sample {plan.sample_ids.max()}, the dataset only {len(dataset)} samples")
        self._plan = plan
        self._dataset = dataset
        self._collate = collate

    def __len__(self) -> int:
        return self._plan.num_steps

    def __getitem__(self, step: int) -> Any:
        plan = self._plan
        ids_MxB = plan.rows(step)
        return self._collate(
            StepSamples(
                bucket=plan.buckets[plan.step_bucket[step]],
                ids=ids_MxB,
                samples=[[read_sample(self._dataset, i) for i in ids_B[ids_B >= 0].tolist()] for ids_B in ids_MxB],
                num_tokens=int(plan.num_tokens[step]),
                truncate=plan.overlong == "truncate",
            )
        )

    def __repr__(self) -> str:
        return f"PlanSource({self._plan.digest[:12]}, {len(self)} steps)"


def load(
    plan: Plan | Callable[[int], Plan],
    dataset: DataSource,
    *,
    mesh: Mesh | None = None,
    epoch: int = 0,
    num_epochs: int | None = None,
    start_step: int = 0,
    num_workers: int = 0,
    collate: CollateFn = pad_to_bucket,
) -> Iterator[Any]:
    """The steps of a plan as device arrays, in the plan's order.

    Args:
      plan: the plan of one epoch, or a function from the epoch to its plan, for training over epochs without end.
      dataset: random access by sample id: `len()` and integer indexing. Its items are what `collate` takes; 1-D integer
        arrays for the default.
      mesh: spreads the microbatches of a step over the mesh axis "data"; None puts them on the default device.
      epoch: the epoch to start in, where `plan` is a function.
      num_epochs: the epoch to end before, where `plan` is a function; None for no end. Each epoch is planned in a
        thread while the one before is loaded.
      start_step: the first step to give; no step before it is read.
      num_workers: processes that read and collate; 0 does it in a thread of this process. The order is the plan's
        whatever their number. Workers are spawned, so that `dataset` and `collate` must pickle.
      collate: makes the arrays of one step from its `StepSamples`. What is not a scalar has leading axis M.

    Returns:
      An iterator over S − start_step pytrees (those of all epochs where `plan` is a function), `Batch` for the default
      `collate`.

    Raises:
      ValueError: start_step out of range; the dataset is smaller than the plan; shards that do not divide M; and, when
        a step comes, what `collate` refuses.
    """
    if num_workers < 0:
        raise ValueError(f"num_workers must be at least 0, not {num_workers}")
    if isinstance(plan, Plan) and epoch:
        raise ValueError(f"epoch {epoch} needs a function from the epoch to its plan; a Plan is one epoch")
    plan_of_epoch = plan if callable(plan) else None
    first = plan if isinstance(plan, Plan) else plan(epoch)
    if not 0 <= start_step <= first.num_steps:
        raise ValueError(f"start_step must be between 0 and {first.num_steps}, not {start_step}")
    if mesh is not None:  # all of the plan's steps have the same M, so that this fails now or never
        batch_shardings(np.empty(first.microbatches_per_step), mesh)
    steps = _iterate_epoch(PlanSource(first, dataset, collate), mesh, start_step, num_workers)
    if plan_of_epoch is None:
        return steps
    later = (
        _iterate_epoch(PlanSource(planned, dataset, collate), mesh, 0, num_workers)
        for planned in _plan_ahead(plan_of_epoch, epoch + 1, num_epochs)
    )
    return itertools.chain(steps, itertools.chain.from_iterable(later))


def _plan_ahead(plan_of_epoch: Callable[[int], Plan], first_epoch: int, num_epochs: int | None) -> Iterator[Plan]:
    """The plans of the epochs from `first_epoch` on, each made in a thread while the steps before it are taken."""
    if num_epochs is not None and first_epoch >= num_epochs:
        return iter(())
    planner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="plan")
    planned = planner.submit(plan_of_epoch, first_epoch)

    def plans() -> Iterator[Plan]:
        nonlocal planned
        try:
            for epoch in itertools.count(first_epoch + 1):
                plan = planned.result()
                if epoch == num_epochs:
                    yield plan
                    return
                planned = planner.submit(plan_of_epoch, epoch)
                yield plan
        finally:
            planner.shutdown(wait=False, cancel_futures=True)

    return plans()


def load_stream(
    stream: Iterator[StreamStep],
    dataset: Any,
    *,
    mesh: Mesh | None = None,
    truncate: bool = False,
    collate: CollateFn = pad_to_bucket,
) -> Iterator[Any]:
    """The steps of a stream as device arrays.

    Nothing is read ahead, so that `stream.state()` after a batch is where training with that batch leaves the stream.
    Where no result is waited for, the device computes a step while the next one is collated all the same.

    Args:
      stream: what `stream_batches` gives.
      dataset: `dataset[i]` is the payload of sample i; read once, when its step comes.
      mesh: as in `load`.
      truncate: whether the stream cuts samples that are longer than the longest bucket.
      collate: as in `load`.

    Returns:
      An iterator over pytrees, `Batch` for the default `collate`.

    Raises:
      ValueError: shards that do not divide M; and, when a step comes, what the stream or `collate` refuses.

    Example:
      >>> from jvarlen.streams import stream_batches
      >>> samples = [np.arange(length) for length in (3, 1, 4)]
      >>> stream = stream_batches(map(len, samples), [(2, 4)])
      >>> [batch.lengths.tolist() for batch in load_stream(stream, samples)]
      [[[3, 1]], [[4, 0]]]
    """
    for step in stream:
        samples = [[read_sample(dataset, i) for i in ids_B[ids_B >= 0].tolist()] for ids_B in step.ids]
        yield _put(collate(StepSamples(step.bucket, step.ids, samples, int(step.lengths.sum()), truncate)), mesh)


def read_sample(dataset: Any, sample_id: int) -> Any:
    """A sample of the dataset; an error says which one it was."""
    try:
        return dataset[sample_id]
    except Exception as error:
        error.add_note(f"while reading sample {sample_id}")
        raise


def _iterate_epoch(source: PlanSource, mesh: Mesh | None, start_step: int, num_workers: int) -> Iterator[Any]:
    # Imported here: planning, compiling and training do without Grain.
    import grain

    steps = grain.MapDataset.source(source)[start_step:]
    # The only thread that collates; several would only compete with the device's own threads on a small machine.
    batches = steps.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=_HOST_BUFFER))
    if num_workers:
        _mark_absl_flags_as_parsed()
        batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers, per_worker_buffer_size=_HOST_BUFFER))
    on_device = batches.map(lambda batch: _put(batch, mesh))
    prefetched = grain.experimental.ThreadPrefetchIterDataset(on_device, prefetch_buffer_size=_DEVICE_BUFFER)
    with without_interrupts():  # Ctrl-C is for the main thread to handle; workers that die of it would never be missed
        iterator = iter(prefetched)
        first = list(itertools.islice(iterator, 1))  # starts the threads and processes
    return itertools.chain(first, iterator)


def _put(batch: Any, mesh: Mesh | None) -> Any:
    return jax.device_put(batch, None if mesh is None else batch_shardings(batch, mesh))


def _mark_absl_flags_as_parsed() -> None:
    """Grain's workers read absl flags, which refuse in a program that never parsed its command line with absl."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
