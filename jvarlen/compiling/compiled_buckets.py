"""The callable that `compile_buckets` returns: it runs each batch with the executable of its bucket."""

from __future__ import annotations

import collections
import dataclasses
import os
import time
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jvarlen._common.checks import UserError
from jvarlen._common.interrupts import raise_if_interrupted
from jvarlen._common.progress import progress_bar
from jvarlen._common.pytree import zeros_of
from jvarlen.batches.shapes import BatchShapes
from jvarlen.compiling import arguments, recompiles
from jvarlen.compiling.arguments import UnplannedShapeError, canonical, signature
from jvarlen.compiling.compile_options import CompileOptions
from jvarlen.compiling.lowering import Programs, StepCompiler, largest_first
from jvarlen.compiling.pending import PendingPrograms
from jvarlen.planning.buckets import AnyBucket

if TYPE_CHECKING:
    from jvarlen.compiling.hlo import Collectives
    from jvarlen.compiling.measure import StepClock
    from jvarlen.compiling.report import CompileReport

__all__ = ["CompiledBuckets"]

_RUNS_TO_RECORD = 3  # of an executable on a GPU: to tune, to record its launches, and to replay them


class CompiledBuckets:
    """One executable a bucket, chosen by the shapes and dtypes of the batch: `state, metrics = compiled(state, batch)`.

    The state is donated: continue with the returned one. An array that the state holds twice, or that the step closes
    over, is copied first.

    Attributes:
      specs: the pytree of `jax.ShapeDtypeStruct` that each bucket's batches have.
      num_padded: batches that were not planned and were padded up to a bucket, under `fallback="pad"`.
    """

    def __init__(
        self,
        step_compiler: StepCompiler,
        programs: Programs,
        buckets: Sequence[AnyBucket],
        options: CompileOptions,
        pending: PendingPrograms | None = None,
    ):
        """Made by `compile_buckets` or `load_compiled`."""
        self._step_compiler = step_compiler
        self._programs = programs
        self._pending = pending
        self._pads = options.fallback == "pad"
        self.specs = {bucket: step_compiler.shapes.spec(bucket) for bucket in buckets}
        self.num_padded = 0
        self._bucket_of: dict[Hashable, AnyBucket] = {signature(spec): bucket for bucket, spec in self.specs.items()}
        self._times_used = dict.fromkeys(self.specs, 0)
        self._stall_s = dict.fromkeys(self.specs, 0.0)
        self._last_use: dict[AnyBucket, int] = {}
        self._failure: BaseException | None = None
        self._checked: tuple[int, ...] = ()  # tells the state that was checked, or the last step gave back
        self._clock: StepClock[AnyBucket] | None = None
        if options.time_steps:
            from jvarlen.compiling.measure import StepClock

            self._clock = StepClock()
        # The metrics of the last two steps. XLA's devices on one CPU share threads, which deadlock where some 30 steps
        # with a collective wait for their turn.
        splits_cpu = step_compiler.device.platform == "cpu" and len(step_compiler.own_devices) > 1
        self._in_flight: collections.deque[Any] | None = collections.deque(maxlen=2) if splits_cpu else None

    @property
    def microbatches_per_step(self) -> int:
        """M."""
        return self._step_compiler.shapes.microbatches_per_step

    @property
    def shapes(self) -> BatchShapes:
        """What was compiled."""
        return self._step_compiler.shapes

    @property
    def mesh(self) -> Mesh | None:
        """Where a step runs; None: the default device."""
        return self._step_compiler.mesh

    @property
    def device(self) -> str:
        """Number and kind of the devices that it was compiled for."""
        return self._step_compiler.device_text

    @property
    def report(self) -> CompileReport:
        """What each compiled bucket has cost and how often it was used, in order; waits for what is pending."""
        from jvarlen.compiling.report import CompileReport

        self.wait()
        seconds: Mapping[AnyBucket, float] = {} if self._clock is None else self._clock.median_seconds()
        rows = (
            dataclasses.replace(
                row,
                times_used=self._times_used[bucket],
                step_s=seconds.get(bucket, row.step_s),
                stall_s=self._stall_s[bucket],
                is_live=self._programs.is_live(bucket),
            )
            for bucket in self.specs
            if (row := self._programs.rows.get(bucket)) is not None
        )
        report = CompileReport(rows, *self._step_compiler.clock.seconds)
        plan = self._step_compiler.shapes.plan
        return report if plan is None else report.with_plan(plan)

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Runs the step of the batch's bucket, once that is compiled; raises `UnplannedShapeError` if there is none.

        What fails in the background is raised by the next call, before that runs, so that no state is lost.
        """
        self._raise_failure()
        try:
            bucket = self._bucket_of.get(signature(batch)) or self._bucket_of[signature(batch := canonical(batch))]
        except (KeyError, AttributeError):  # a Python number has no shape
            bucket, batch = self._fall_back(batch)
        if self._pending is not None:
            self.wait(bucket)
        if not self._programs.has(bucket):
            bucket, batch = self._fall_back(batch)
        if self._identity(state) != self._checked:
            arguments.check_deleted(state, batch)  # on several devices, JAX may end the process instead of raising
            if self._step_compiler.donate and bucket not in self._programs.keeping_state:
                state = arguments.without_aliases(state, self._programs.constants.values())
        if self._in_flight is not None and len(self._in_flight) == 2:
            arguments.wait_for(self._in_flight[0])
        recompiles.dispatched(bucket)
        started = time.perf_counter()
        try:
            outputs = self._programs.run(bucket, state, batch)
        except (TypeError, ValueError, RuntimeError) as error:
            self._explain(state, batch, bucket, error)
            raise
        self._checked = self._identity(outputs[0])
        if self._in_flight is not None:
            self._in_flight.append(outputs[1])
        if self._clock is not None:
            self._clock.step(bucket, started, outputs[1])
        self._times_used[bucket] += 1
        if self._times_used[bucket] == self._last_use.get(bucket):
            self.release(bucket)
        try:
            self.advance()
        except (Exception, KeyboardInterrupt) as error:
            self._failure = error
        return outputs

    def _raise_failure(self) -> None:
        """Raises once what went wrong after a step had run."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def advance(self) -> None:
        """Continues with what is pending, if a thread is free: lowers a bucket here. Every step does this.

        Raises:
          Exception: as for `wait`.
        """
        if self._pending is not None:
            self._pending.advance()
            if self._pending.is_ready():
                self._pending = None

    def _identity(self, state: Any) -> tuple[int, ...]:
        """Tells a state, and that programs hold the same constants as before, of which it may hold one."""
        return *arguments.identity(state), len(self._programs.constants)

    @property
    def pending(self) -> tuple[AnyBucket, ...]:
        """Buckets that are not compiled yet, in the order in which they will be."""
        return () if self._pending is None else tuple(self._pending.buckets)

    def wait(self, bucket: tuple[int, ...] | None = None, *, timeout: float | None = None) -> bool:
        """Waits until a bucket is compiled, which then comes before the others, or until all are.

        A step waits by itself; with a timeout a loop can do something else meanwhile. The report counts the seconds.

        Args:
          bucket: None for all.
          timeout: seconds; None waits as long as it takes.

        Returns:
          Whether it is compiled; always True without a timeout.

        Raises:
          ValueError: no such bucket; a program that needs more memory than the device has; processes that compiled
            different programs.
          ProcessesError: another process could not compile.
          Exception: what the compiler raised, with a note that names the bucket.
        """
        known = None if bucket is None else self._known([bucket])[0]
        self._raise_failure()
        if self._pending is None:
            return True
        start = time.perf_counter()
        is_ready = self._pending.wait(known, timeout)
        if self._pending.is_ready():
            self._pending = None
        if known is not None:
            self._stall_s[known] += time.perf_counter() - start
        return is_ready

    def close(self) -> None:
        """Ends compiling in the background: what is not compiled yet never will be."""
        if self._pending is not None:
            self._pending.close()
            self._pending = None

    def release(self, *buckets: tuple[int, ...]) -> None:
        """Releases the executables of buckets, whose batches are then rejected.

        Args:
          buckets: that no later step uses; releasing one twice does nothing.

        Raises:
          ValueError: buckets that were not compiled; they are listed.
        """
        for bucket in self._known(buckets):
            if self._pending is not None:
                self._pending.drop(bucket)
            self._programs.release(bucket)

    def release_after(self, num_steps: Mapping[Any, int]) -> None:
        """Releases the executable of each bucket once it has run the given number of further steps.

        For the rest of a plan: `compiled.release_after(plan.steps_of_buckets(start_step))`.

        Args:
          num_steps: remaining steps of each bucket: those with 0 are released now, and those that are missing stay.

        Raises:
          ValueError: buckets that were not compiled; they are listed.
        """
        for bucket, steps in zip(self._known(num_steps), num_steps.values(), strict=True):
            self._last_use[bucket] = self._times_used[bucket] + int(steps)
            if steps <= 0:
                self.release(bucket)

    def suggest_rows(self, bucket: tuple[int, ...], memory_limit: int | None = None, *, row_multiple: int = 1) -> int:
        """The most rows of this length whose step fits, found by compiling, not by running.

        It counts what the program itself holds: state, batch, results and temporaries. The limit should leave room for
        everything else, such as batches that were loaded ahead.

        Args:
          bucket: (rows, length), or (rows, source length, target length); its rows are tried first.
          memory_limit: bytes of one device; None for the limit that the device reports.
          row_multiple: rows are a multiple of this.

        Returns:
          Rows of a microbatch.

        Raises:
          ValueError: not even `row_multiple` rows fit; a limit or a multiple below 1; or the device reports no limit,
            and none is given, or does not report what programs need.
        """
        from jvarlen.compiling.measure import suggest_rows

        return suggest_rows(self._step_compiler, bucket, memory_limit, row_multiple=row_multiple)

    def collectives(self, bucket: tuple[int, ...]) -> dict[str, Collectives]:
        """How often the devices communicate in a step of the bucket, by kind of collective, from the compiled program.

        Args:
          bucket: a compiled bucket.

        Returns:
          As `count_collectives`: a step of `make_train_step` has all-reduces only outside of loops.

        Raises:
          ValueError: no such bucket, or its program was read from a file and has no text.
        """
        from jvarlen.compiling.hlo import count_collectives

        return count_collectives(self.program_text(bucket))

    def program_text(self, bucket: tuple[int, ...]) -> str:
        """The compiled program of a bucket, in XLA's HLO.

        Args:
          bucket: a compiled bucket.

        Returns:
          The text; empty where the program was read from a file.

        Raises:
          ValueError: no such bucket.
        """
        (known,) = self._known([bucket])
        self.wait(known)
        return self._programs.get(known).as_text() or ""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes all executables to one file, for `load_compiled` in another process on the same kind of machine.

        On CPUs, executables from the persistent cache are compiled again first. Each of several processes writes a file
        of its own. The file is signed with a key of this user, which is created on first use.

        Args:
          path: the file; its directory must exist, and an existing file is replaced.

        Raises:
          ValueError: executables were released, or the backend cannot serialize them.
          OSError: the file or the key cannot be written.
        """
        from jvarlen.compiling.program_file import write_compiled

        self.wait()
        buckets = largest_first(list(self.specs))
        released = [bucket for bucket in buckets if not self._programs.has(bucket)]
        if released:
            raise UserError(f"executables were released; save before releasing: {', '.join(map(str, released))}")
        programs = [self._programs.serialized(bucket) for bucket in buckets]
        if len({(in_tree, out_tree) for _, in_tree, out_tree in programs}) > 1:
            raise UserError("buckets return metrics of different structures: one file holds one structure")
        header = {
            "environment": self._step_compiler.environment,
            "microbatches_per_step": self.microbatches_per_step,
            "buckets": [list(bucket) for bucket in buckets],
            "fingerprint": self._programs.fingerprint(buckets),
        }
        write_compiled(Path(path), header, [program for program, _, _ in programs])

    def warm_up(self, state: Any, *, progress: bool = True) -> None:
        """Runs every executable on batches of zeros and a copy of the state, so that all tuning is done before step 1.

        Each runs once, on GPUs three times: to tune, to record, and to replay. The copy needs as many bytes as the
        state. If several processes compiled together, all of them must call this.

        Args:
          state: a pytree of arrays; it is not changed.
          progress: whether to show a progress bar.

        Raises:
          ValueError: a state of `jax.ShapeDtypeStruct`.
        """
        self.wait()
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state)):
            raise UserError("warming up runs the step: it needs a state of arrays, not of shapes")
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self._step_compiler.state_spec)
        state = jax.jit(lambda state: jax.tree.map(jnp.copy, state), out_shardings=shardings)(state)
        held = [bucket for bucket in self.specs if self._programs.has(bucket)]
        bar = progress_bar(held, desc=f"warm up {self._step_compiler.name}", unit="bucket", progress=progress)
        for bucket in bar:
            raise_if_interrupted()
            bar.set_postfix_str(str(bucket))
            for _ in range(1 if self._step_compiler.device.platform == "cpu" else _RUNS_TO_RECORD):
                batch = jax.tree.map(zeros_of, self.specs[bucket])
                state, _ = jax.block_until_ready(self._programs.run(bucket, state, batch))

    def _fall_back(self, batch: Any) -> tuple[AnyBucket, Any]:
        """The bucket that a batch which was not planned is padded to, and the padded batch."""
        from jvarlen.compiling import unplanned

        usable = {*self.pending, *filter(self._programs.has, self.specs)} if self._pads else set()
        bucket = unplanned.nearest_larger(
            batch, {bucket: spec for bucket, spec in self.specs.items() if bucket in usable}
        )
        if bucket is None:
            difference = unplanned.explain_unplanned(batch, self.specs, self._step_compiler.device)
            if difference is None:
                released = self._bucket_of[signature(batch)]
                difference = f"the executable of {released} was released, as no step was to use it"
            raise UnplannedShapeError(difference)
        if not self.num_padded:
            difference = unplanned.explain_unplanned(batch, self.specs) or "the executable of this batch was released"
            warnings.warn(f"{difference}. It is padded to {bucket}, like all such batches", stacklevel=3)
        self.num_padded += 1
        if bucket in self._last_use:
            self._last_use[bucket] += 1  # it is none of the steps that were to come
        return bucket, unplanned.pad_to_spec(batch, self.specs[bucket])

    def _explain(self, state: Any, batch: Any, bucket: AnyBucket, error: Exception) -> None:
        """Raises an error that names what the executable rejected: deleted arrays, or what was not planned."""
        from jvarlen.compiling import unplanned

        arguments.check_deleted(state, batch, error)
        device, spec = self._step_compiler.device, self._step_compiler.state_spec
        difference = (
            unplanned.explain_unplanned(batch, {bucket: self.specs[bucket]}, device)
            or unplanned.explain_unplanned_state(jax.eval_shape(lambda state: state, state), spec)
            or unplanned.explain_unplanned_state(state, spec, device)
        )
        if difference:
            raise UnplannedShapeError(difference) from error

    def _known(self, buckets: Iterable[tuple[int, ...]]) -> list[AnyBucket]:
        by_shape = {tuple(bucket): bucket for bucket in self.specs}
        unknown = [tuple(bucket) for bucket in buckets if tuple(bucket) not in by_shape]
        if unknown:
            raise UserError(f"buckets were not compiled: {unknown}")
        return [by_shape[tuple(bucket)] for bucket in buckets]
