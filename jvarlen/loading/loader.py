"""The data loader: an iterator over the steps of a plan, as device arrays.

The only module that moves data to devices. Collation and transfer run ahead of the computation.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, cast

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh
from jaxtyping import Int64

from jvarlen._common.checks import UserError
from jvarlen.batches.shapes import BatchShapes
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.mesh import batch_shardings, mesh_of, own_microbatches
from jvarlen.distributed.processes import agree
from jvarlen.loading.collate import (
    StepSamples,
    pack_pairs_to_bucket,
    pack_to_bucket,
    pad_pairs_to_bucket,
    pad_to_bucket,
)
from jvarlen.loading.ids_digest import IdsDigest
from jvarlen.loading.plan_source import (
    CollateFn,
    OnMismatch,
    PlanSource,
    ReadStep,
    StepSource,
    read_sample,
    spec_of_steps,
)
from jvarlen.loading.read_ahead import ReadAhead, end_with_parent
from jvarlen.loading.shared_memory import check_room
from jvarlen.planning.lengths import DataSource
from jvarlen.planning.steps import PlannedSteps, ReadPlan
from jvarlen.planning.streams import StreamBatches, StreamStep

__all__ = ["BatchIterator", "Delivered", "PlanSource", "load", "load_stream", "put"]

_OWN = (pad_to_bucket, pack_to_bucket, pad_pairs_to_bucket, pack_pairs_to_bucket)
_HOST_BUFFER = 4  # collated steps that wait on the host


class Delivered(NamedTuple):
    """A step on its devices, with what is counted when it is delivered."""

    batch: Any
    num_samples: int
    num_adjusted: int
    ids_digest: str | None


class BatchIterator(Iterator[Any]):
    """The batches of `load`, one after the other, with counts of what was delivered.

    Steps that were only read ahead do not count. After a batch has raised an error, every later one raises it again.

    Attributes:
      shapes: of the batches of every bucket, for `compile_buckets`.
      num_samples: samples of this process delivered so far, over all epochs.
      num_adjusted: how many of them were cut or are shorter than planned, under `on_mismatch="adjust"`.
      ids_digest: 64 hex digits: the hash of the ids that were read for the batches delivered since the epoch began, or
        since `start_step`. At the end of the epoch it equals `planned_ids_digest` of the plan. None before the first
        batch, and without `verify`.
    """

    def __init__(
        self, shapes: BatchShapes, first: ReadAhead, later: Iterator[ReadAhead], close_later: Callable[[], None]
    ):
        """`later` starts reading an epoch when it is asked for it."""
        self.shapes = shapes
        self._epoch = first
        self._later = later
        self._close_later = close_later
        self._ended: Exception | None = None
        self.num_samples = 0
        self.num_adjusted = 0
        self.ids_digest: str | None = None

    def __next__(self) -> Any:
        """The next batch.

        Raises:
          ValueError: a sample was rejected, or the iterator is closed.
          RuntimeError: a worker process died, or samples other than planned were read.
          Exception: what the dataset raised for a sample; its id and the step are notes.
        """
        if self._ended is not None:
            raise self._ended
        try:
            delivered = self._next_delivered()
        except Exception as error:
            self._end(error)
            raise
        self.num_samples += delivered.num_samples
        self.num_adjusted += delivered.num_adjusted
        self.ids_digest = delivered.ids_digest
        return delivered.batch

    def close(self) -> None:
        """Ends threads and worker processes within a few seconds; the counts stay."""
        if self._ended is None:
            self._end(UserError("these batches are closed"))

    def _next_delivered(self) -> Delivered:
        while True:
            try:
                return next(self._epoch)
            except StopIteration:
                ended, self._epoch = self._epoch, next(self._later)
                ended.close()  # while the workers of the next epoch start

    def _end(self, reason: Exception) -> None:
        self._ended = reason
        self._close_later()
        self._epoch.close()


def load(
    plan: ReadPlan | Callable[[int], ReadPlan],
    dataset: DataSource,
    *,
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    epoch: int = 0,
    num_epochs: int | None = None,
    start_step: int = 0,
    num_workers: int = 0,
    collate: CollateFn = pad_to_bucket,
    lengths: npt.ArrayLike | None = None,
    on_mismatch: OnMismatch = "error",
    verify: bool = False,
) -> BatchIterator:
    """The steps of a plan as device arrays, in the plan's order.

    Args:
      plan: the plan of one epoch, or a function from the epoch to its plan, for training over any number of epochs. A
        plan that holds only this process's rows needs the mesh that it was made for.
      dataset: random access by sample id: `len()` and integer indexing. Its items are passed to `collate`; the default
        takes 1-D integer arrays.
      mesh: the microbatches of a step are spread over the mesh axis "data"; None puts them on the default device. If
        its devices belong to several processes, all of them load, and each reads only the samples of its own devices.
      layout: a `jvarlen.parallel.Layout`, whose mesh is used if none is given; otherwise their sizes are compared.
      epoch: the first epoch, if `plan` is a function.
      num_epochs: the epoch to end before, if `plan` is a function; None for no end. Each epoch is planned in a thread
        while the previous one is loaded.
      start_step: the first step to return; earlier steps are not read.
      num_workers: processes that read and collate; 0 does it in a thread of this process. The order is always the
        plan's. Workers are spawned for each epoch, so `dataset` and `collate` must pickle; they end with this process,
        however it ends. Each keeps up to 10 steps in /dev/shm, which in a Docker container has 64 MB unless
        `--shm-size` says more.
      collate: makes the arrays of one step from its `StepSamples`. Every array that is not a scalar has leading axis M.
      lengths: integers[N], or [N, 2] of pairs: the lengths that the plan was made for. Each sample's `len()` is
        compared with its entry, both cut if the plan truncates. None: only the tokens of a whole step are compared, if
        `collate` does that.
      on_mismatch: what happens to a sample of another length. `"error"`: all such samples of the step are listed.
        `"adjust"`, which needs `lengths`: a longer sample is cut to its planned length, a shorter one fills less of its
        row, with weight 0 after it; `num_adjusted` counts both.
      verify: compares the ids that were read for each step, in the process that read them, with this process's rows of
        the plan, and hashes them into `ids_digest`.

    Returns:
      A `BatchIterator` over S − start_step pytrees (over those of all epochs if `plan` is a function), `Batch` for the
      default `collate`. At its end, or when nothing refers to it any more, it leaves no thread or process behind;
      `close()` ends them at once.

    Raises:
      ValueError: start_step out of range; the dataset is smaller than the plan, or has another number of samples than
        `lengths`; shards that do not divide M; a mesh of other sizes than the layout; processes with different plans;
        and, when a step comes, samples of other lengths than planned, or samples that `collate` rejects.
      RuntimeError: when a step comes: a worker process died, or has too little room in /dev/shm; or, with `verify`,
        other samples were read.

    Example:
      >>> from jvarlen.planning.plan import make_plan
      >>> samples = [np.arange(length) for length in (3, 1, 4)]
      >>> batches = load(make_plan([3, 1, 4], [(2, 4)], order="length"), samples, verify=True)
      >>> [batch.lengths.tolist() for batch in batches], batches.num_samples
      ([[[1, 3]], [[4, 0]]], 3)
    """
    if num_workers < 0:
        raise UserError(f"num_workers must be at least 0, not {num_workers}")
    if not callable(plan) and epoch:
        raise UserError(f"epoch {epoch} needs a function from the epoch to its plan; a Plan is one epoch")
    plan_of_epoch = plan if callable(plan) else None
    first = plan(epoch) if callable(plan) else plan
    if not 0 <= start_step <= first.num_steps:
        raise UserError(f"start_step must be between 0 and {first.num_steps}, not {start_step}")
    mesh = mesh_of(mesh, layout)
    if mesh is not None:  # all of the plan's steps have the same M, so that this fails now or never
        batch_shardings(np.empty(first.microbatches_per_step), mesh)
    read = functools.partial(
        _read_epoch,
        dataset=dataset,
        collate=collate,
        mesh=mesh,
        num_workers=num_workers,
        lengths=lengths,
        on_mismatch=on_mismatch,
        verify=verify,
    )
    reading = read(first, start_step=start_step)
    batch_spec = None if collate in _OWN else spec_of_steps({first: dataset}, collate)
    shapes = BatchShapes.of_plan(cast(PlannedSteps, first), layout=mesh, batch_spec=batch_spec, start_step=start_step)
    if plan_of_epoch is None:
        return BatchIterator(shapes, reading, iter(()), lambda: None)
    planned = _PlanAhead(plan_of_epoch, epoch + 1, num_epochs)
    return BatchIterator(shapes, reading, (read(plan, start_step=0) for plan in planned), planned.close)


class _PlanAhead(Iterator[ReadPlan]):
    """The plans of the epochs from `first_epoch` on, each made in a thread while the epoch before it is used."""

    def __init__(self, plan_of_epoch: Callable[[int], ReadPlan], first_epoch: int, num_epochs: int | None):
        self._plan_of_epoch = plan_of_epoch
        self._epochs = itertools.count(first_epoch) if num_epochs is None else iter(range(first_epoch, num_epochs))
        self._planner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="plan")
        self._submit()

    def __next__(self) -> ReadPlan:
        if self._planned is None:
            raise StopIteration
        plan = self._planned.result()
        self._submit()
        return plan

    def close(self) -> None:
        self._planner.shutdown(wait=False, cancel_futures=True)

    def _submit(self) -> None:
        epoch = next(self._epochs, None)
        self._planned = None if epoch is None else self._planner.submit(self._plan_of_epoch, epoch)


def load_stream(
    stream: Iterator[StreamStep],
    dataset: Any,
    *,
    mesh: Mesh | None = None,
    truncate: bool | None = None,
    collate: CollateFn = pad_to_bucket,
) -> Iterator[Any]:
    """The steps of a stream as device arrays.

    Nothing is read ahead, so `stream.state()` after a batch is the state to resume from after training on that batch.
    The device still computes a step while the next one is collated, unless the loop waits for results.

    Args:
      stream: the result of `stream_batches`, or its steps from any other iterator.
      dataset: `dataset[i]` is sample i; it is read once, when its step comes.
      mesh: as in `load`.
      truncate: whether samples that are longer than the longest bucket are cut to it. None: as the stream's `overlong`
        says; other iterators of steps don't.
      collate: as in `load`.

    Returns:
      An iterator over pytrees, `Batch` for the default `collate`.

    Raises:
      ValueError: shards that do not divide M; and, when a step comes, samples that the stream or `collate` rejects.

    Example:
      >>> from jvarlen.planning.streams import stream_batches
      >>> samples = [np.arange(length) for length in (3, 1, 4)]
      >>> stream = stream_batches(map(len, samples), [(2, 4)])
      >>> [(batch.lengths.tolist(), float(batch.num_sequences)) for batch in load_stream(stream, samples)]
      [([[3, 1]], 2.0), ([[4, 0]], 1.0)]
    """
    if truncate is None:
        truncate = isinstance(stream, StreamBatches) and stream.overlong == "truncate"
    for step in stream:
        samples = [[read_sample(dataset, i) for i in ids_B[ids_B >= 0].tolist()] for ids_B in step.ids]
        num_tokens, num_sequences = int(step.lengths.sum()), int((step.ids >= 0).sum())
        yield put(collate(StepSamples(step.bucket, step.ids, samples, num_tokens, truncate, num_sequences)), mesh)


def _read_epoch(
    plan: ReadPlan,
    *,
    dataset: DataSource,
    collate: CollateFn,
    mesh: Mesh | None,
    start_step: int,
    num_workers: int,
    lengths: npt.ArrayLike | None,
    on_mismatch: OnMismatch,
    verify: bool,
) -> ReadAhead:
    """Starts reading an epoch."""
    num_microbatches = plan.microbatches_per_step
    own = np.arange(num_microbatches) if mesh is None else own_microbatches(mesh, num_microbatches)
    is_part = mesh is not None and mesh.is_multi_process
    if is_part:
        agree("the plan", plan.digest)
    source = PlanSource(plan, dataset, collate, own, lengths=lengths, on_mismatch=on_mismatch)
    # Imported here: planning, compiling and training do without Grain.
    import grain

    steps = grain.MapDataset.source(StepSource(source, in_worker=num_workers > 0))[start_step:]
    # The only thread that collates; several would only compete with the device's own threads on a small machine.
    read = steps.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=_HOST_BUFFER))
    if num_workers:
        _mark_absl_flags_as_parsed()
        options = grain.MultiprocessingOptions(num_workers, per_worker_buffer_size=_HOST_BUFFER)
        read = read.map(check_room).mp_prefetch(options, worker_init_fn=end_with_parent)
    planned_steps = itertools.count(start_step)
    digest = IdsDigest() if verify else None

    def deliver(step: ReadStep) -> Delivered:
        planned_step = next(planned_steps)
        if step.step != planned_step:
            raise RuntimeError(f"step {step.step} was read where step {planned_step} comes")
        if digest is not None:
            _check_ids(plan, step, own)
            digest.add(step.step, step.ids)
        # On a CPU, JAX would keep using the shared memory that holds the arrays of workers.
        host_batch = jax.tree.map(_copied, step.batch) if num_workers else step.batch
        batch = put(host_batch, mesh, num_microbatches if is_part else None)
        return Delivered(batch, step.num_samples, step.num_adjusted, None if digest is None else digest.hexdigest())

    num_steps = plan.num_steps - start_step
    return ReadAhead(read, deliver, first_step=start_step, num_steps=num_steps, num_workers=num_workers)


def _check_ids(plan: ReadPlan, step: ReadStep, microbatches: Int64[np.ndarray, " m"] | None) -> None:
    """Raises RuntimeError where other samples were read than planned."""
    ids_MxB = plan.own_rows(step.step, microbatches).ids
    planned = ids_MxB[ids_MxB >= 0]
    if not np.array_equal(step.ids, planned):
        raise RuntimeError(
            f"step {step.step} was planned with the samples {_format_ids(planned)}, "
            f"but read were {_format_ids(step.ids)}"
        )


def _format_ids(ids: Int64[np.ndarray, " n"]) -> str:
    """All ids, or the first and the last of many."""
    return np.array2string(
        ids, threshold=32, edgeitems=16, separator=", ", max_line_width=10**6, formatter={"int_kind": str}
    )


def _copied(leaf: Any) -> Any:
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf


def put(batch: Any, mesh: Mesh | None, num_microbatches: int | None = None) -> Any:
    """The batch on its devices; of several processes, each has a part of the `num_microbatches`."""
    batch = jax.tree.map(lambda leaf: leaf if hasattr(leaf, "shape") else np.asarray(leaf), batch)
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
    """Marks absl's flags as parsed: Grain's workers read them, which fails in a program without absl's command line."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
