"""The callable that `compile_buckets` returns: it runs each batch with the executable of its bucket."""

from __future__ import annotations

import collections
import dataclasses
import math
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from operator import attrgetter
from typing import cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.pytree import describe, have_same_containers, leaves_by_name
from jvarlen._common.types import Array, Batch, PyTree, Shapes
from jvarlen.batches.shapes import BatchShapes
from jvarlen.compiling.lowering import CompileQueue
from jvarlen.compiling.recompiles import note_dispatch
from jvarlen.compiling.report import CompileReport
from jvarlen.compiling.step_clock import StepClock
from jvarlen.planning.buckets import AnyBucket

__all__ = ["CompiledBuckets", "UnplannedShapeError"]


class CompiledBuckets:
    """One executable per bucket, chosen by the shapes and dtypes of a batch: `state, metrics = compiled(state, batch)`.

    The state is donated: continue with the returned one. An array that the state holds twice, or the batch too, is
    copied first.

    Attributes:
      specs: the pytree of `jax.ShapeDtypeStruct` that each bucket's batches have.
    """

    def __init__(self, queue: CompileQueue, *, time_steps: bool):
        """Made by `compile_buckets`."""
        self._queue, self._step_compiler = queue, queue.step_compiler
        self.specs: dict[AnyBucket, Shapes] = {bucket: self.shapes.spec(bucket) for bucket in queue.buckets}
        self._bucket_of: dict[Hashable, AnyBucket] = {_signature(spec): bucket for bucket, spec in self.specs.items()}
        self._times_used = dict.fromkeys(self.specs, 0)
        self._stall_s = dict.fromkeys(self.specs, 0.0)
        self._last_use: dict[AnyBucket, int] = {}
        self._failure: BaseException | None = None
        # Weak references to the leaves of the last new state, which share no memory. Ids may become those of others.
        self._returned: list[Callable[[], Array]] = []
        self._clock = StepClock() if time_steps else None
        # The metrics of the last two steps. XLA's devices on one CPU share threads, which deadlock where some 30 steps
        # with a collective wait for their turn.
        splits_cpu = self._step_compiler.device.platform == "cpu" and len(self._step_compiler.own_devices) > 1
        self._in_flight: collections.deque[PyTree] | None = collections.deque(maxlen=2) if splits_cpu else None

    @property
    def shapes(self) -> BatchShapes:
        """The shapes that were compiled."""
        return self._step_compiler.shapes

    @property
    def mesh(self) -> Mesh | None:
        """The mesh on which steps run; None means the default device."""
        return self._step_compiler.mesh

    @property
    def device(self) -> str:
        """Number and kind of the devices that it was compiled for."""
        devices = self._step_compiler.devices
        return f"{len(devices)} × {', '.join(sorted({device.device_kind for device in devices}))}"

    @property
    def pending(self) -> tuple[AnyBucket, ...]:
        """Buckets that are not compiled yet, in the order in which they will be."""
        return self._queue.pending

    @property
    def report(self) -> CompileReport:
        """The cost and the use of each compiled bucket, in order; waits for what is pending."""
        self.wait()
        seconds = {} if self._clock is None else self._clock.median_seconds()
        rows = (
            dataclasses.replace(
                row,
                times_used=self._times_used[bucket],
                step_s=seconds.get(bucket, row.step_s),
                stall_s=self._stall_s[bucket],
                is_live=bucket in self._queue.executables,
            )
            for bucket in self.specs
            if (row := self._queue.rows.get(bucket)) is not None
        )
        report = CompileReport(rows, *self._step_compiler.clock.seconds)
        return report if self.shapes.plan is None else report.with_plan(self.shapes.plan)

    def __call__(self, state: PyTree, batch: Batch) -> tuple[PyTree, PyTree]:
        """Runs the step of the batch's bucket, once that is compiled; raises `UnplannedShapeError` if there is none.

        An error in the background is raised by the next call, before that runs, so that no state is lost.
        """
        self._raise_failure()
        try:
            bucket = self._bucket_of.get(_signature(batch)) or self._bucket_of[_signature(batch := _canonical(batch))]
        except (KeyError, AttributeError):  # a Python number has no shape
            raise UnplannedShapeError(_explain_unplanned(batch, self.specs)) from None
        self.wait(bucket)
        if bucket not in self._queue.executables:
            raise UnplannedShapeError(f"the executable of {bucket} was released, as no step was to use it")
        state = self._safe_to_run(bucket, state, batch)
        if self._in_flight is not None and len(self._in_flight) == 2:
            metrics = jax.tree.leaves(self._in_flight[0])  # some may have been donated since
            jax.block_until_ready([leaf for leaf in metrics if not _is_deleted(leaf)])
        note_dispatch(bucket)
        started = time.perf_counter()
        try:
            outputs = self._queue.executables[bucket](state, batch)
        except (TypeError, ValueError, RuntimeError) as error:
            self._explain(state, batch, bucket, error)
            raise
        if bucket in self._queue.keeping_state:
            outputs = state, outputs
        else:
            self._returned = [*map(weakref.ref, jax.tree.leaves(outputs[0]))]
        if self._in_flight is not None:
            self._in_flight.append(outputs[1])
        if self._clock is not None:
            self._clock.step(bucket, started, outputs[1])
        self._times_used[bucket] += 1
        if self._times_used[bucket] == self._last_use.get(bucket):
            self._queue.release(bucket)
        try:
            self.advance()
        except (Exception, KeyboardInterrupt) as error:
            self._failure = error
        return outputs

    def wait(self, bucket: tuple[int, ...] | None = None, *, timeout: float | None = None) -> bool:
        """Waits until a bucket is compiled, which then comes before the others, or until all are.

        Args:
          bucket: None for all.
          timeout: seconds that a single bucket may take; None waits as long as it takes.

        Returns:
          Whether it is compiled; always True without a timeout.

        Raises:
          ValueError: no such bucket; a program that needs more memory than the device has.
          Exception: an error of the compiler, with a note that names the bucket.
        """
        self._raise_failure()
        if bucket is None:
            self._queue.wait_for_all()
            return True
        (known,) = self._find([bucket])
        if known in self._queue.executables:
            return True
        start = time.perf_counter()
        is_compiled = self._queue.wait_for(known, timeout)
        self._stall_s[known] += time.perf_counter() - start
        return is_compiled

    def advance(self) -> None:
        """Continues with what is pending, if a thread is free: lowers a bucket here. Every step does this."""
        self._queue.advance()

    def close(self) -> None:
        """Ends compiling in the background: what is not compiled yet never will be."""
        self._queue.close()

    def release_after(self, num_steps: Mapping[AnyBucket, int]) -> None:
        """Releases the executable of each bucket once it has run the given number of further steps.

        For the rest of a plan: `compiled.release_after(plan.groups_of_buckets(start_step))`.

        Args:
          num_steps: by bucket; those with 0 are released now, and those that are missing stay.
        """
        for bucket, steps in zip(self._find(num_steps), num_steps.values(), strict=True):
            self._last_use[bucket] = self._times_used[bucket] + int(steps)
            if steps <= 0:
                self._queue.release(bucket)

    def program_text(self, bucket: tuple[int, ...]) -> str:
        """The compiled program of a bucket, in XLA's HLO; ValueError where it was not compiled or was released.

        Args:
          bucket: a compiled bucket.

        Returns:
          The text.
        """
        (known,) = self._find([bucket])
        self.wait(known)
        if known not in self._queue.executables:
            raise UserError(f"the executable of {known} was released")
        return self._queue.executables[known].as_text() or ""

    def _safe_to_run(self, bucket: AnyBucket, state: PyTree, batch: Batch) -> PyTree:
        """The state, with copies of arrays that are donated and used elsewhere too; raises for deleted arrays."""
        # On several devices, JAX may end the process for either, instead of raising.
        leaves, batch_leaves = jax.tree.leaves(state), jax.tree.leaves(batch)
        is_returned = len(leaves) == len(self._returned) and all(
            returned() is leaf and not leaf.is_deleted() for returned, leaf in zip(self._returned, leaves, strict=True)
        )
        if (
            is_returned
            and not any(map(_is_deleted, batch_leaves))
            and {*map(id, batch_leaves)}.isdisjoint(map(id, leaves))
        ):
            return state  # as in most steps: finding the memory of each array takes milliseconds
        _check_deleted(state, batch)
        donates = self._step_compiler.donate and bucket not in self._queue.keeping_state
        return _without_aliases(state, batch_leaves) if donates else state

    def _raise_failure(self) -> None:
        """Raises once what went wrong after a step had run."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _explain(self, state: PyTree, batch: Batch, bucket: AnyBucket, error: Exception) -> None:
        """Raises an error that names what the executable rejected: deleted arrays, or what was not planned."""
        _check_deleted(state, batch, error)
        device, spec = self._step_compiler.device, self._step_compiler.state_spec
        difference = (
            _explain_unplanned(batch, {bucket: self.specs[bucket]}, device)
            or _explain_unplanned_state(jax.eval_shape(lambda state: state, state), spec)
            or _explain_unplanned_state(state, spec, device)
        )
        if difference:
            raise UnplannedShapeError(difference) from error

    def _find(self, buckets: Iterable[tuple[int, ...]]) -> list[AnyBucket]:
        by_shape = {tuple(bucket): bucket for bucket in self.specs}
        if unknown := [tuple(bucket) for bucket in buckets if tuple(bucket) not in by_shape]:
            raise UserError(f"buckets were not compiled: {unknown}")
        return [by_shape[tuple(bucket)] for bucket in buckets]


_shape_and_dtype = attrgetter("shape", "dtype")


class UnplannedShapeError(UserError):
    """No executable was compiled for the structure, shape, dtype or sharding of a batch or a state."""


def _signature(batch: Batch) -> Hashable:
    """The key of a batch's executable: its containers, and the shape and dtype of every leaf."""
    leaves, structure = jax.tree.flatten(batch)
    return structure, *map(_shape_and_dtype, leaves)


def _canonical(batch: Batch) -> PyTree:
    """The batch with counts on the host in the types that they have on a device, such as float32 for float64."""

    def cast(leaf: Array) -> Array:
        if not isinstance(leaf, np.ndarray | np.generic) or leaf.ndim:
            return leaf
        return np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))

    return jax.tree.map(cast, batch)


def _without_aliases(state: PyTree, batch_leaves: Iterable[Array]) -> PyTree:
    """The state with copies of arrays that it holds twice, or that the batch holds too."""
    seen = {buffer for leaf in batch_leaves for buffer in _buffers(leaf)}

    def copy_if_seen(leaf: Array) -> Array:
        buffers = _buffers(leaf)
        if seen.isdisjoint(buffers):
            seen.update(buffers)
            return leaf
        # On the array's devices, with the same freedom to move; nothing is compiled for it.
        return jax.device_put(leaf, leaf.sharding if leaf.committed else None, may_alias=False)

    return jax.tree.map(copy_if_seen, state)


def _check_deleted(state: PyTree, batch: Batch, error: Exception | None = None) -> None:
    """Raises an error that names the arrays that were deleted, if there are any."""
    if not any(map(_is_deleted, jax.tree.leaves((state, batch)))):
        return
    gone = [
        f"{name}{path}"
        for name, tree in (("state", state), ("batch", batch))
        for path, leaf in leaves_by_name(tree).items()
        if _is_deleted(leaf)
    ]
    raise UserError(
        f"{list_first(gone)} of the arguments {'was' if len(gone) == 1 else 'were'} donated: a step wrote its results "
        "there. Use the state that the step returned, or compile_buckets(…, donate=False)"
    ) from error


def _buffers(leaf: Array) -> list[tuple[int, int]]:
    """The device and the address of each part: arrays that share memory share some of these."""
    if not isinstance(leaf, jax.Array) or leaf.size == 0 or leaf.is_deleted():
        return []
    return [(shard.device.id, shard.data.unsafe_buffer_pointer()) for shard in leaf.addressable_shards]


def _is_deleted(leaf: Array) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


def _explain_unplanned(batch: Batch, specs: Mapping[AnyBucket, Shapes], device: jax.Device | None = None) -> str | None:
    """Every leaf that differs from the bucket whose axes are nearest, by ratio; None if the batch is as planned."""
    # Leaves without a planned sharding belong on the device; with None, placement does not count.
    given = leaves_by_name(batch)

    def distance(bucket: AnyBucket) -> float:
        planned = leaves_by_name(specs[bucket])
        return sum(_distance(planned.get(name), given.get(name)) for name in planned | given)

    nearest = min(specs, key=distance)
    difference = _difference(batch, specs[nearest], device)
    if difference is None:
        return None
    buckets = ", ".join(map(str, sorted(specs, key=lambda bucket: bucket.lengths)))
    return f"no bucket was compiled for this batch. Nearest is {nearest}: {difference}. Buckets: {buckets}"


def _explain_unplanned_state(state: PyTree, spec: Shapes, device: jax.Device | None = None) -> str | None:
    """Every leaf of the state that differs from what was compiled for; None where nothing does."""
    difference = _difference(state, spec, device)
    return difference and f"the state is not the one that the step was compiled for: {difference}"


def _distance(planned: Array, given: Array) -> float:
    """How far apart two leaves' shapes are; the same for all leaves that cannot be compared."""
    planned_shape, given_shape = np.shape(planned), np.shape(given)
    if planned is None or given is None or len(planned_shape) != len(given_shape):
        return 1.0
    return sum(abs(math.log(max(a, 1) / max(b, 1))) for a, b in zip(planned_shape, given_shape, strict=True))


def _difference(given: PyTree, planned: Shapes, device: jax.Device | None) -> str | None:
    """The leaves whose shape, dtype or sharding differs, or that only containers do; None where nothing does."""
    given_leaves, planned_leaves = leaves_by_name(given), leaves_by_name(planned)
    differing = []
    for name in {**planned_leaves, **given_leaves}:
        leaf: Array = given_leaves.get(name)
        wanted = planned_leaves.get(name)
        texts = describe(leaf), describe(wanted)
        if texts[0] == texts[1]:
            if not getattr(leaf, "committed", False):  # it goes wherever it is wanted
                continue
            sharding = getattr(wanted, "sharding", None) or (device and SingleDeviceSharding(device))
            if sharding is None or leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
                continue
            texts = f"{texts[0]} {_devices_text(leaf.sharding)}", f"{texts[1]} {_devices_text(sharding)}"
        differing.append(f"{name or 'it'} is {texts[0]}, planned was {texts[1]}")
    if differing:
        return "; ".join(differing)
    return None if have_same_containers(given, planned) else "the containers of the leaves differ"


def _devices_text(sharding: Sharding) -> str:
    devices = sorted(device.id for device in cast("set[jax.Device]", sharding.device_set))
    text = f"on device{'s' * (len(devices) > 1)} {', '.join(map(str, devices))}"
    return f"{text} as {tuple(sharding.spec)}" if isinstance(sharding, NamedSharding) and sharding.spec else text
