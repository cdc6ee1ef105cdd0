"""The callable that `compile_buckets` returns: it runs each batch with the executable of its bucket."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jvarlen._common.checks import UserError
from jvarlen.batches.shapes import BatchShapes
from jvarlen.compiling import arguments, recompiles
from jvarlen.compiling.arguments import UnplannedShapeError, canonical, signature
from jvarlen.compiling.compile_options import CompileOptions
from jvarlen.compiling.lowering import StepCompiler
from jvarlen.compiling.measure import StepClock
from jvarlen.compiling.programs import Programs
from jvarlen.compiling.report import CompileReport
from jvarlen.planning.buckets import AnyBucket

__all__ = ["CompiledBuckets"]


class CompiledBuckets:
    """One executable a bucket, chosen by the shapes and dtypes of the batch: `state, metrics = compiled(state, batch)`.

    The state is donated: continue with the returned one. An array that the state holds twice is copied first.

    Attributes:
      specs: the pytree of `jax.ShapeDtypeStruct` that each bucket's batches have.
    """

    def __init__(
        self,
        step_compiler: StepCompiler,
        programs: Programs,
        buckets: Sequence[AnyBucket],
        options: CompileOptions,
    ):
        """Made by `compile_buckets`."""
        self._step_compiler = step_compiler
        self._programs = programs
        self.specs = {bucket: step_compiler.shapes.spec(bucket) for bucket in buckets}
        self._bucket_of: dict[Hashable, AnyBucket] = {signature(spec): bucket for bucket, spec in self.specs.items()}
        self._times_used = dict.fromkeys(self.specs, 0)
        self._stall_s = dict.fromkeys(self.specs, 0.0)
        self._last_use: dict[AnyBucket, int] = {}
        self._failure: BaseException | None = None
        self._checked: tuple[int, ...] = ()  # tells the state that was checked, or the last step gave back
        self._clock: StepClock[AnyBucket] | None = StepClock() if options.time_steps else None
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
        self.wait()
        seconds: Mapping[AnyBucket, float] = {} if self._clock is None else self._clock.median_seconds()
        rows = (
            dataclasses.replace(
                row,
                times_used=self._times_used[bucket],
                step_s=seconds.get(bucket, row.step_s),
                stall_s=self._stall_s[bucket],
                is_live=bucket in self._programs.executables,
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
            raise UnplannedShapeError(arguments.explain_unplanned(batch, self.specs)) from None
        self.wait(bucket)
        if bucket not in self._programs.executables:
            raise UnplannedShapeError(f"the executable of {bucket} was released, as no step was to use it")
        if arguments.identity(state) != self._checked:
            arguments.check_deleted(state, batch)  # on several devices, JAX may end the process instead of raising
            if self._programs.donates(bucket):
                state = arguments.without_aliases(state)
        if self._in_flight is not None and len(self._in_flight) == 2:
            arguments.wait_for(self._in_flight[0])
        recompiles.dispatched(bucket)
        started = time.perf_counter()
        try:
            outputs = self._programs.run(bucket, state, batch)
        except (TypeError, ValueError, RuntimeError) as error:
            self._explain(state, batch, bucket, error)
            raise
        self._checked = arguments.identity(outputs[0])
        if self._in_flight is not None:
            self._in_flight.append(outputs[1])
        if self._clock is not None:
            self._clock.step(bucket, started, outputs[1])
        self._times_used[bucket] += 1
        if self._times_used[bucket] == self._last_use.get(bucket):
            self._programs.release(bucket)
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
        self._programs.advance()

    @property
    def pending(self) -> tuple[AnyBucket, ...]:
        """Buckets that are not compiled yet, in the order in which they will be."""
        return tuple(self._programs.pending)

    def wait(self, bucket: tuple[int, ...] | None = None, *, timeout: float | None = None) -> bool:
        """Waits until a bucket is compiled, which then comes before the others, or until all are.

        A step waits by itself; with a timeout a loop can do something else meanwhile. The report counts the seconds.

        Args:
          bucket: None for all.
          timeout: seconds that a single bucket may take; None waits as long as it takes.

        Returns:
          Whether it is compiled; always True without a timeout.

        Raises:
          ValueError: no such bucket; a program that needs more memory than the device has.
          Exception: what the compiler raised, with a note that names the bucket.
        """
        self._raise_failure()
        if bucket is None:
            self._programs.wait_for_all()
            return True
        (known,) = self._known([bucket])
        if known in self._programs.executables:
            return True
        start = time.perf_counter()
        is_ready = self._programs.wait(known, timeout)
        self._stall_s[known] += time.perf_counter() - start
        return is_ready

    def close(self) -> None:
        """Ends compiling in the background: what is not compiled yet never will be."""
        self._programs.close()

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
                self._programs.release(bucket)

    def program_text(self, bucket: tuple[int, ...]) -> str:
        """The compiled program of a bucket, in XLA's HLO.

        Args:
          bucket: a compiled bucket.

        Returns:
          The text.

        Raises:
          ValueError: no such bucket, or its executable was released.
        """
        (known,) = self._known([bucket])
        self.wait(known)
        if known not in self._programs.executables:
            raise UserError(f"the executable of {known} was released")
        return self._programs.executables[known].as_text() or ""

    def _explain(self, state: Any, batch: Any, bucket: AnyBucket, error: Exception) -> None:
        """Raises an error that names what the executable rejected: deleted arrays, or what was not planned."""
        arguments.check_deleted(state, batch, error)
        device, spec = self._step_compiler.device, self._step_compiler.state_spec
        difference = (
            arguments.explain_unplanned(batch, {bucket: self.specs[bucket]}, device)
            or arguments.explain_unplanned_state(jax.eval_shape(lambda state: state, state), spec)
            or arguments.explain_unplanned_state(state, spec, device)
        )
        if difference:
            raise UnplannedShapeError(difference) from error

    def _known(self, buckets: Iterable[tuple[int, ...]]) -> list[AnyBucket]:
        by_shape = {tuple(bucket): bucket for bucket in self.specs}
        unknown = [tuple(bucket) for bucket in buckets if tuple(bucket) not in by_shape]
        if unknown:
            raise UserError(f"buckets were not compiled: {unknown}")
        return [by_shape[tuple(bucket)] for bucket in buckets]
