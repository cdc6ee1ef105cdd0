"""Compiled buckets: in go a state and a batch, out come the next state and metrics, by the executable of its bucket.

What was not planned is refused. `compile_buckets` makes them.
"""

from __future__ import annotations

import dataclasses
import os
import time
import warnings
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvarlen import recompiles
from jvarlen.buckets import AnyBucket, check_buckets
from jvarlen.checks import check_at_least_one
from jvarlen.collectives import Collectives, count_collectives
from jvarlen.compilation_cache import without_compilation_cache
from jvarlen.compile_options import CompileOptions
from jvarlen.compiled_file import write_compiled
from jvarlen.executables import Executables, serialized
from jvarlen.interrupts import raise_if_interrupted
from jvarlen.ledger import Ledger, LedgerRow
from jvarlen.planned_steps import PlannedSteps
from jvarlen.progress import progress_bar
from jvarlen.recipe import Recipe
from jvarlen.row_search import most_rows
from jvarlen.step_clock import StepClock
from jvarlen.unplanned import (
    UnplannedShapeError,
    explain_unplanned,
    explain_unplanned_state,
    nearest_larger,
    pad_to_spec,
    signature,
)

__all__ = ["CompiledBuckets"]

_MAX_ROWS = 2**24  # that `suggest_rows` tries
_RUNS_TO_RECORD = 3  # of an executable on a GPU: to tune, to record its launches, and to replay them


class CompiledBuckets:
    """One executable a bucket, chosen by the shapes and dtypes of the batch: `state, metrics = compiled(state, batch)`.

    The state is donated: use the one that comes back.

    Attributes:
      specs: the pytree of `jax.ShapeDtypeStruct` that each bucket's batches have.
      num_padded: batches that no bucket was planned for and that were padded up to one, by `fallback="pad"`.
    """

    def __init__(
        self,
        recipe: Recipe,
        executables: Executables,
        rows: Iterable[LedgerRow],
        fingerprint: str,
        options: CompileOptions,
        plan: PlannedSteps | None = None,
    ):
        """Made by `compile_buckets` or `load_compiled`."""
        self._recipe = recipe
        self._executables = executables
        self._rows = {row.bucket: row for row in rows}
        self._fingerprint = fingerprint
        self._options = options
        self._plan = plan
        self.specs = {bucket: recipe.spec(bucket) for bucket in self._rows}
        self.num_padded = 0
        self._bucket_of: dict[Hashable, AnyBucket] = {signature(spec): bucket for bucket, spec in self.specs.items()}
        self._times_used = dict.fromkeys(self._rows, 0)
        self._last_use: dict[AnyBucket, int] = {}
        self._is_state_checked = False
        self._clock: StepClock[AnyBucket] | None = StepClock() if options.time_steps else None

    @property
    def microbatches_per_step(self) -> int:
        """M."""
        return self._recipe.microbatches_per_step

    @property
    def device(self) -> str:
        """Number and kind of the devices that it was compiled for."""
        return self._recipe.device_text

    @property
    def ledger(self) -> Ledger:
        """What each bucket cost and was used for until now, in the order of compilation."""
        seconds: Mapping[AnyBucket, float] = {}
        if self._clock is not None:
            self._clock.wait()
            seconds = self._clock.median_seconds()
        ledger = Ledger(
            dataclasses.replace(
                row,
                times_used=self._times_used[bucket],
                step_s=seconds.get(bucket, row.step_s),
                is_live=self._executables.is_live(bucket),
            )
            for bucket, row in self._rows.items()
        )
        return ledger if self._plan is None else ledger.with_plan(self._plan)

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Runs the step of the batch's bucket; raises `UnplannedShapeError` where there is none."""
        try:
            bucket = self._bucket_of[signature(batch)]
            executable = self._executables.get(bucket)
        except (KeyError, AttributeError):  # a Python number has no shape
            bucket, batch = self._fall_back(batch)
            executable = self._executables.get(bucket)
        if not self._is_state_checked:
            self._check_state(state)
        recompiles.dispatched(bucket)
        started = time.perf_counter()
        try:
            outputs = executable(state, batch)
        except (TypeError, ValueError) as error:
            self._explain(state, batch, bucket, error)
            raise
        if self._clock is not None:
            self._clock.step(bucket, started, outputs[1])
        self._times_used[bucket] += 1
        if self._times_used[bucket] == self._last_use.get(bucket):
            self.release(bucket)
        return outputs

    def release(self, *buckets: tuple[int, ...]) -> None:
        """Lets the executables of buckets go; a batch of such a bucket is then refused.

        Args:
          buckets: those that no later step uses; releasing one twice does nothing.

        Raises:
          ValueError: buckets that were not compiled; they are listed.
        """
        for bucket in self._known(buckets):
            self._executables.release(bucket)

    def release_after(self, num_steps: Mapping[Any, int]) -> None:
        """Releases the executable of each bucket as soon as it has run so many steps more.

        What a curriculum has passed for good then needs no memory. For a plan, the rest of which is trained on:
        `compiled.release_after(plan.steps_of_buckets(start_step))`.

        Args:
          num_steps: steps to come of each bucket; those with none are released now. Buckets that are not named stay.

        Raises:
          ValueError: buckets that were not compiled, or numbers below 0; they are listed.
        """
        negative = {tuple(bucket): steps for bucket, steps in num_steps.items() if steps < 0}
        if negative:
            raise ValueError(f"steps to come must be at least 0: {negative}")
        for bucket, steps in zip(self._known(num_steps), num_steps.values(), strict=True):
            self._last_use[bucket] = self._times_used[bucket] + int(steps)
            if steps == 0:
                self.release(bucket)

    def suggest_rows(self, bucket: tuple[int, ...], memory_limit: int | None = None, *, row_multiple: int = 1) -> int:
        """The most rows of this length whose step fits, found by compiling, not by running.

        Counted is what the program itself holds on one device: state, batch, results and temporaries. What waits there
        besides, such as batches that were loaded ahead, is for the limit to leave room for.

        Args:
          bucket: (rows, length), or (rows, source length, target length); its rows are what is tried first.
          memory_limit: bytes of one device; None for what the device says it has.
          row_multiple: rows are a multiple of it.

        Returns:
          Rows of a microbatch.

        Raises:
          ValueError: not even `row_multiple` rows fit; a limit or a multiple below 1; no limit is given, and the
            device does not tell its own; or it does not tell what programs need.
        """
        (checked,) = check_buckets([bucket])
        if memory_limit is None:
            memory_limit = (self._recipe.device.memory_stats() or {}).get("bytes_limit")
            if memory_limit is None:
                raise ValueError(f"{self.device} does not tell how many bytes it has: give memory_limit")
        check_at_least_one(memory_limit=memory_limit, row_multiple=row_multiple)
        needed: dict[int, int] = {}

        def bytes_of(rows: int) -> int:
            raise_if_interrupted()
            tried = checked._replace(rows=rows)
            row = self._recipe.compile(self._recipe.lower(tried)).row
            if not row.total_bytes:
                raise ValueError(f"{self.device} does not tell how many bytes a program needs")
            needed[rows] = row.total_bytes
            return row.total_bytes

        rows = most_rows(bytes_of, memory_limit, start=checked.rows, multiple=row_multiple, max_rows=_MAX_ROWS)
        if rows == 0:
            raise ValueError(
                f"{row_multiple} rows of length {'×'.join(map(str, checked.lengths))} need {needed[row_multiple]:,} "
                f"bytes, more than the {memory_limit:,} of the limit"
            )
        return rows

    def collectives(self, bucket: tuple[int, ...]) -> dict[str, Collectives]:
        """How often the devices talk to each other in a step of the bucket, by kind, as the compiled program says.

        Args:
          bucket: one of those that were compiled.

        Returns:
          What `count_collectives` does: a step of `make_train_step` has all-reduces outside of loops only.

        Raises:
          ValueError: no such bucket; or its program was read from a file and does not tell its text.
        """
        return count_collectives(self._executables.get(*self._known([bucket])))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes all executables to one file, for `load_compiled` in another process on the same kind of machine.

        On CPUs, those that came from the persistent cache are compiled anew for it. Of several processes, each writes a
        file of its own. It is signed with a key of this user, which is made at the first time.

        Args:
          path: the file, whose directory exists; a file of that name is replaced.

        Raises:
          ValueError: executables were released, or the backend cannot turn them into bytes.
          OSError: the file cannot be written, or the key.
        """
        buckets = list(self._rows)
        released = [bucket for bucket in buckets if not self._executables.has(bucket)]
        if released:
            raise ValueError(f"executables were released, save before: {', '.join(map(str, released))}")
        programs = [self._serialized(bucket) for bucket in buckets]
        if len({(in_tree, out_tree) for _, in_tree, out_tree in programs}) > 1:
            raise ValueError("buckets return metrics of different structures: one file holds one structure")
        header = {
            "environment": self._recipe.environment,
            "microbatches_per_step": self.microbatches_per_step,
            "buckets": [list(bucket) for bucket in buckets],
            "fingerprint": self._fingerprint,
        }
        write_compiled(Path(path), header, [program for program, _, _ in programs])

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what was compiled."""
        return self._fingerprint

    @property
    def common_environment(self) -> str:
        """Software and options of the compiler, which are the same on all processes that train together."""
        own = ("device ids", "device kinds", "process", "processor")
        return repr({name: value for name, value in self._recipe.environment.items() if name not in own})

    def warm_up(self, state: Any, *, progress: bool = True) -> None:
        """Runs every executable on batches of zeros and a copy of the state, so that nothing is left to be tuned.

        Once, and three times on GPUs, which find out what to do first, and then record it. The copy needs as many bytes
        as the state. Where several processes compiled together, all of them call it.

        Args:
          state: arrays; it is left as it is.
          progress: whether to show a progress bar.

        Raises:
          ValueError: a state of `jax.ShapeDtypeStruct`.
        """
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state)):
            raise ValueError("warming up runs the step: it needs a state of arrays, not of shapes")
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self._recipe.state_spec)
        state = jax.jit(lambda state: jax.tree.map(jnp.copy, state), out_shardings=shardings)(state)
        held = [(bucket, spec) for bucket, spec in self.specs.items() if self._executables.has(bucket)]
        bar = progress_bar(held, desc=f"warm up {self._recipe.name}", unit="bucket", progress=progress)
        for bucket, spec in bar:
            raise_if_interrupted()
            bar.set_postfix_str(str(bucket))
            for _ in range(1 if self._recipe.device.platform == "cpu" else _RUNS_TO_RECORD):
                batch = jax.tree.map(_zeros, spec)
                state, _ = jax.block_until_ready(self._executables.get(bucket)(state, batch))

    def _serialized(self, bucket: AnyBucket) -> tuple[bytes, Any, Any]:
        was_read = self._rows[bucket].cache_hit and not self._executables.is_stored(bucket)
        if was_read and not self._recipe.can_serialize_what_was_read:
            with without_compilation_cache():
                return serialized(self._recipe.compile(self._recipe.lower(bucket)).executable)
        return self._executables.serialized(bucket)

    def _fall_back(self, batch: Any) -> tuple[AnyBucket, Any]:
        if self._options.fallback == "pad":
            held = {bucket: spec for bucket, spec in self.specs.items() if self._executables.has(bucket)}
            bucket = nearest_larger(batch, held)
            if bucket is not None:
                if not self.num_padded:
                    warnings.warn(
                        f"{explain_unplanned(batch, self.specs) or 'the executable of this batch was released'}. "
                        f"It is padded up to {bucket}, as all such batches are",
                        stacklevel=3,
                    )
                self.num_padded += 1
                if bucket in self._last_use:
                    self._last_use[bucket] += 1  # it is none of the steps that were to come
                return bucket, pad_to_spec(batch, self.specs[bucket])
        difference = explain_unplanned(batch, self.specs, self._recipe.device)
        if difference is None:
            bucket = self._bucket_of[signature(batch)]
            difference = f"the executable of {bucket} was released, as no step was to use it"
        raise UnplannedShapeError(difference)

    def _check_state(self, state: Any) -> None:
        abstract = jax.eval_shape(lambda state: state, state)
        difference = explain_unplanned_state(abstract, self._recipe.state_spec)
        if difference:
            raise UnplannedShapeError(difference)
        self._is_state_checked = True

    def _explain(self, state: Any, batch: Any, bucket: AnyBucket, error: Exception) -> None:
        """Raises `UnplannedShapeError` where what the executable refused was not planned."""
        device = self._recipe.device
        difference = explain_unplanned(batch, {bucket: self.specs[bucket]}, device) or explain_unplanned_state(
            state, self._recipe.state_spec, device
        )
        if difference:
            raise UnplannedShapeError(difference) from error

    def _known(self, buckets: Iterable[tuple[int, ...]]) -> list[AnyBucket]:
        by_shape = {tuple(bucket): bucket for bucket in self._rows}
        unknown = [tuple(bucket) for bucket in buckets if tuple(bucket) not in by_shape]
        if unknown:
            raise ValueError(f"buckets were not compiled: {unknown}")
        return [by_shape[tuple(bucket)] for bucket in buckets]


def _zeros(spec: jax.ShapeDtypeStruct) -> Any:
    if spec.sharding is None:
        return np.zeros(spec.shape, spec.dtype)
    shape = spec.sharding.shard_shape(spec.shape)
    return jax.make_array_from_callback(spec.shape, spec.sharding, lambda _: np.zeros(shape, spec.dtype))
