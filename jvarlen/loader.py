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
from jaxtyping import Int64

from jvarlen.collate import StepSamples, pad_to_bucket
from jvarlen.distributed import batch_shardings, own_microbatches
from jvarlen.distributed_plan import DistributedPlan
from jvarlen.interrupts import without_interrupts
from jvarlen.lengths import DataSource
from jvarlen.plan import Plan
from jvarlen.processes import agree
from jvarlen.streams import StreamStep

__all__ = ["PlanSource", "load", "load_stream"]

AnyPlan = Plan | DistributedPlan
CollateFn = Callable[[StepSamples], Any]

_HOST_BUFFER = 4  # collated steps that wait on the host
_DEVICE_BUFFER = 2  # steps that wait on the device


class PlanSource:
    """A Grain data source whose element t is the collated step t of a plan, or this process's part of it."""

    def __init__(
        self,
        plan: AnyPlan,
        dataset: DataSource,
        collate: CollateFn = pad_to_bucket,
        microbatches: Int64[np.ndarray, " m"] | None = None,
    ):
        """Of a `Plan`, `microbatches` are those to read; None reads all. A `DistributedPlan` has its own."""
        ids = plan.row_ids if isinstance(plan, DistributedPlan) else plan.sample_ids
        if ids.max() >= len(dataset):
            raise ValueError(f"the plan holds sample {ids.max()}, the dataset only {len(dataset)} samples")
        self._plan = plan
        self._dataset = dataset
        self._collate = collate
        self._microbatches = microbatches

    def __len__(self) -> int:
        return self._plan.num_steps

    def __getitem__(self, step: int) -> Any:
        plan = self._plan
        ids_MxB = plan.rows(step)
        num_tokens: int | None = int(plan.num_tokens[step])
        if isinstance(plan, DistributedPlan):
            num_tokens = int(plan.own_num_tokens[step])
        elif self._microbatches is not None:
            ids_MxB, num_tokens = ids_MxB[self._microbatches], None
        return self._collate(
            StepSamples(
                bucket=plan.buckets[plan.step_bucket[step]],
                ids=ids_MxB,
                samples=[[read_sample(self._dataset, i) for i in ids_B[ids_B >= 0].tolist()] for ids_B in ids_MxB],
                num_tokens=num_tokens,
                truncate=plan.overlong == "truncate",
                num_sequences=int(plan.num_sequences[step]),
            )
        )

    def __repr__(self) -> str:
        return f"PlanSource({self._plan.digest[:12]}, {len(self)} steps)"


def load(
    plan: AnyPlan | Callable[[int], AnyPlan],
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
      plan: the plan of one epoch, or a function from the epoch to its plan, for training over epochs without end. A
        `DistributedPlan` goes with the mesh that it was made for.
      dataset: random access by sample id: `len()` and integer indexing. Its items are what `collate` takes; 1-D integer
        arrays for the default.
      mesh: spreads the microbatches of a step over the mesh axis "data"; None puts them on the default device. Where
        its devices belong to several processes, all of them load, and each reads only the samples of its own devices.
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
      ValueError: start_step out of range; the dataset is smaller than the plan; shards that do not divide M; processes
        with plans that differ; and, when a step comes, what `collate` refuses.
    """
    if num_workers < 0:
        raise ValueError(f"num_workers must be at least 0, not {num_workers}")
    if not callable(plan) and epoch:
        raise ValueError(f"epoch {epoch} needs a function from the epoch to its plan; a Plan is one epoch")
    plan_of_epoch = plan if callable(plan) else None
    first = plan(epoch) if callable(plan) else plan
    if not 0 <= start_step <= first.num_steps:
        raise ValueError(f"start_step must be between 0 and {first.num_steps}, not {start_step}")
    if mesh is not None:  # all of the plan's steps have the same M, so that this fails now or never
        batch_shardings(np.empty(first.microbatches_per_step), mesh)
    steps = _iterate_epoch(first, dataset, collate, mesh, start_step, num_workers)
    if plan_of_epoch is None:
        return steps
    later = (
        _iterate_epoch(planned, dataset, collate, mesh, 0, num_workers)
        for planned in _plan_ahead(plan_of_epoch, epoch + 1, num_epochs)
    )
    return itertools.chain(steps, itertools.chain.from_iterable(later))


def _plan_ahead(plan_of_epoch: Callable[[int], AnyPlan], first_epoch: int, num_epochs: int | None) -> Iterator[AnyPlan]:
    """The plans of the epochs from `first_epoch` on, each made in a thread while the steps before it are taken."""
    if num_epochs is not None and first_epoch >= num_epochs:
        return iter(())
    planner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="plan")
    planned = planner.submit(plan_of_epoch, first_epoch)

    def plans() -> Iterator[AnyPlan]:
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
        num_tokens, num_sequences = int(step.lengths.sum()), len(step.lengths)
        yield _put(collate(StepSamples(step.bucket, step.ids, samples, num_tokens, truncate, num_sequences)), mesh)


def read_sample(dataset: Any, sample_id: int) -> Any:
    """A sample of the dataset; an error says which one it was."""
    try:
        return dataset[sample_id]
    except Exception as error:
        error.add_note(f"while reading sample {sample_id}")
        raise


def _iterate_epoch(
    plan: AnyPlan, dataset: DataSource, collate: CollateFn, mesh: Mesh | None, start_step: int, num_workers: int
) -> Iterator[Any]:
    num_microbatches = plan.microbatches_per_step
    own = None if mesh is None else own_microbatches(mesh, num_microbatches)
    if isinstance(plan, DistributedPlan) and not np.array_equal(
        plan.microbatches, np.arange(num_microbatches) if own is None else own
    ):
        raise ValueError(
            f"the plan was made for a mesh where this process has the microbatches {plan.microbatches.tolist()}"
        )
    if mesh is None or not mesh.is_multi_process:
        own = None
    else:
        agree("the plan", plan.digest)
    source = PlanSource(plan, dataset, collate, own)
    # Imported here: planning, compiling and training do without Grain.
    import grain

    steps = grain.MapDataset.source(source)[start_step:]
    # The only thread that collates; several would only compete with the device's own threads on a small machine.
    batches = steps.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=_HOST_BUFFER))
    if num_workers:
        _mark_absl_flags_as_parsed()
        batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers, per_worker_buffer_size=_HOST_BUFFER))
    on_device = batches.map(lambda batch: _put(batch, mesh, None if own is None else num_microbatches))
    prefetched = grain.experimental.ThreadPrefetchIterDataset(on_device, prefetch_buffer_size=_DEVICE_BUFFER)
    with without_interrupts():  # Ctrl-C is for the main thread to handle; workers that die of it would never be missed
        iterator = iter(prefetched)
        first = list(itertools.islice(iterator, 1))  # starts the threads and processes
    return itertools.chain(first, iterator)


def _put(batch: Any, mesh: Mesh | None, num_microbatches: int | None = None) -> Any:
    """The batch on its devices; of several processes, each has a part of the `num_microbatches`."""
    if mesh is None or num_microbatches is None:
        return jax.device_put(batch, None if mesh is None else batch_shardings(batch, mesh))

    def whole(part: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_microbatches, *part.shape[1:]) if part.shape else (), part.dtype)

    shapes = jax.tree.map(whole, batch)
    return jax.tree.map(
        lambda part, shape, sharding: jax.make_array_from_process_local_data(sharding, part, shape.shape),
        batch,
        shapes,
        batch_shardings(shapes, mesh),
    )


def _mark_absl_flags_as_parsed() -> None:
    """Grain's workers read absl flags, which refuse in a program that never parsed its command line with absl."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
