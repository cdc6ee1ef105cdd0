"""Programs of a step that are still to be compiled: lowered in the caller's thread, compiled in others.

JAX's settings belong to a thread, so only the compiler runs elsewhere. Several processes tell each other through the
key-value store what they have compiled: a thread in the background must not take part in a collective.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from tqdm import tqdm

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.interrupts import raise_if_interrupted
from jvarlen.compiling.lowering import CompiledBucket, LoweredBucket, Recipe
from jvarlen.compiling.program_store import Executables
from jvarlen.compiling.recompiles import uncounted_in_thread
from jvarlen.compiling.report import CompileRow
from jvarlen.distributed.processes import ProcessesError, key_value_store
from jvarlen.planning.buckets import AnyBucket

__all__ = ["PendingPrograms", "Programs", "largest_first"]

_POLL_S = 0.02  # between two looks at what is compiled
_CACHED_S = 0.1  # to read a program from a cache: a step that waits longer lets another bucket be lowered meanwhile


def largest_first(buckets: Sequence[AnyBucket]) -> list[AnyBucket]:
    """Buckets by positions, descending."""
    return sorted(buckets, key=lambda bucket: -bucket.padded_tokens)


@dataclasses.dataclass
class Programs:
    """The compiled programs of a step.

    Attributes:
      executables: those that were not released.
      rows: what each has cost.
      constants: arrays that the program of each bucket takes besides state and batch.
      texts: of the lowered programs of the largest and the smallest bucket, by which saved sets are told apart.
      metrics: what a step returns besides the state, as `jax.stages.OutInfo`.
      keeps_state: whether the step returns the very state that it takes.
    """

    executables: Executables
    rows: dict[AnyBucket, CompileRow] = dataclasses.field(default_factory=dict)
    constants: dict[AnyBucket, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    texts: dict[AnyBucket, str] = dataclasses.field(default_factory=dict)
    metrics: Any = None
    keeps_state: bool = False

    def run(self, executable: jax.stages.Compiled, bucket: AnyBucket, state: Any, batch: Any) -> tuple[Any, Any]:
        """Runs a bucket's executable: the next state, and the metrics."""
        constants = self.constants.get(bucket)
        outputs = executable(state, batch, *([constants] if constants else []))
        return (state, outputs) if self.keeps_state else outputs

    def fingerprint(self, recipe: Recipe, buckets: Sequence[AnyBucket]) -> str:
        """SHA-256 of the buckets, and of the lowered programs of the largest and the smallest."""
        ordered = largest_first(buckets)
        digest = hashlib.sha256(
            repr((recipe.shapes.microbatches_per_step, [tuple(bucket) for bucket in ordered])).encode()
        )
        for bucket in dict.fromkeys((ordered[0], ordered[-1])):
            digest.update(hashlib.sha256(self.texts[bucket].encode()).digest())
        return digest.hexdigest()


class PendingPrograms:
    """Compiles the programs of buckets in the given order; in the caller's thread nothing happens but inside methods.

    One more than `num_threads` starts if a step waits for a bucket that none is busy with. `check` is called with the
    first lowered program. `with_others`: a bucket is ready when all processes have compiled it.
    """

    def __init__(
        self,
        recipe: Recipe,
        buckets: Sequence[AnyBucket],
        programs: Programs,
        num_threads: int,
        bar: tqdm,
        *,
        check: Callable[[LoweredBucket], None] = lambda lowered: None,
        in_background: bool = False,
        with_others: bool = False,
    ):
        self._recipe = recipe
        self._check: Callable[[LoweredBucket], None] | None = check
        self._programs = programs
        self._num_threads = num_threads
        self._bar = bar
        self._planned = uncounted_in_thread if in_background else contextlib.nullcontext
        self._others = _Others(buckets) if with_others else None
        by_size = largest_first(buckets)
        self._ends = (by_size[0], by_size[-1])
        self._to_lower = list(buckets)
        self._compiling: dict[AnyBucket, Future[CompiledBucket]] = {}  # lowered, and not yet taken from the threads
        self._lock = threading.Lock()  # of what follows
        self._lowered: deque[tuple[LoweredBucket, Future[CompiledBucket]]] = deque()
        self._num_busy = 0
        self._pool = ThreadPoolExecutor(num_threads + 1, thread_name_prefix="compile")

    @property
    def buckets(self) -> list[AnyBucket]:
        """Those that are not compiled yet: first those that are being compiled."""
        return [*self._compiling, *self._to_lower]

    @property
    def is_done(self) -> bool:
        """Whether all are compiled, by all processes."""
        return not self.buckets and (self._others is None or self._others.have_all())

    def advance(self) -> None:
        """Takes what the threads have compiled, and lowers a bucket if one of them will soon be free.

        It raises what the compiler raised, with a note that names the bucket, and ProcessesError where another process
        could not compile.
        """
        self._collect()
        if self._has_room:
            self._lower(self._to_lower[0])

    def wait(self, bucket: AnyBucket | None = None, timeout: float | None = None) -> bool:
        """Waits for a bucket, which then comes before all others, or for all."""
        start = time.monotonic()
        self._collect()
        while not (self.is_done if bucket is None else self._is_ready(bucket)):
            if bucket is None:
                raise_if_interrupted()
            elif bucket in self._to_lower:
                self._lower(bucket, is_awaited=True)
            elif bucket in self._compiling:
                self._hurry(bucket)
            waited_s = time.monotonic() - start
            if self._has_room and (bucket is None or waited_s >= _CACHED_S):
                self._lower(self._to_lower[0])
            else:
                awaited = [self._compiling[bucket]] if bucket in self._compiling else list(self._compiling.values())
                pause = _POLL_S if timeout is None else min(_POLL_S, max(0.0, timeout - waited_s))
                if awaited:
                    futures.wait(awaited, pause, futures.FIRST_COMPLETED)
                else:
                    time.sleep(pause)
            self._collect()
            if timeout is not None and time.monotonic() - start >= timeout:
                return self.is_done if bucket is None else self._is_ready(bucket)
        return True

    def drop(self, bucket: AnyBucket) -> None:
        """Leaves out a bucket that no step will use; if it is being compiled, the result is not kept."""
        if bucket in self._to_lower:
            self._to_lower.remove(bucket)
        elif bucket in self._compiling:
            self._compiling.pop(bucket).cancel()
        if self._others is not None:
            self._others.drop(bucket)

    def close(self) -> None:
        """Compiles nothing more, but for what a thread is busy with."""
        with self._lock:
            self._lowered.clear()
        self._to_lower, self._compiling, self._others = [], {}, None
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._bar.close()

    @property
    def _has_room(self) -> bool:
        """Whether to lower one more: each thread has a bucket, and one waits for the first that is free."""
        return bool(self._to_lower) and len(self._compiling) <= self._num_threads

    def _is_ready(self, bucket: AnyBucket) -> bool:
        if bucket in self._to_lower or bucket in self._compiling:
            return False
        return self._others is None or self._others.have(bucket)

    def _lower(self, bucket: AnyBucket, *, is_awaited: bool = False) -> None:
        self._bar.set_postfix_str(str(bucket))
        try:
            with self._planned():
                lowered = self._recipe.lower(bucket)
            if self._check is not None:
                self._check(lowered)
                self._check = None
        except Exception as error:
            self._fail(bucket, error)
            raise
        self._to_lower.remove(bucket)
        self._programs.keeps_state, self._programs.metrics = lowered.keeps_state, lowered.metrics
        if lowered.constants:
            self._programs.constants[bucket] = lowered.constants
        is_end = bucket in self._ends
        text = lowered.program.as_text() if is_end or self._others is not None else ""
        if is_end:
            self._programs.texts[bucket] = text
        future: Future[CompiledBucket] = Future()
        if self._others is not None:
            self._others.announce(bucket, future, text)
        self._compiling[bucket] = future
        with self._lock:
            self._lowered.append((lowered, future))
        self._start_thread(extra=False)
        if is_awaited:
            self._hurry(bucket)

    def _hurry(self, bucket: AnyBucket) -> None:
        """Compiles a bucket next, in a thread of its own if no other is free."""
        with self._lock:
            waiting = [lowered.bucket for lowered, _ in self._lowered]
            if bucket not in waiting:
                return
            self._lowered.rotate(-waiting.index(bucket))
        self._start_thread(extra=True)

    def _start_thread(self, *, extra: bool) -> None:
        with self._lock:
            if self._num_busy >= self._num_threads + extra:
                return
            self._num_busy += 1
        self._pool.submit(self._work)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._lowered:
                    self._num_busy -= 1
                    return
                lowered, future = self._lowered.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                with self._planned():
                    compiled = self._recipe.compile(lowered)
            except BaseException as error:  # for the thread that waits for it
                future.set_exception(error)
            else:
                future.set_result(compiled)

    def _collect(self) -> None:
        for bucket in [bucket for bucket, future in self._compiling.items() if future.done()]:
            try:
                row, executable = self._compiling[bucket].result()
                self._check_memory(row)
                self._programs.executables.add(bucket, executable)
            except Exception as error:
                self._fail(bucket, error)
                raise
            del self._compiling[bucket]
            self._programs.rows[bucket] = row
            self._bar.update()
        if self._others is not None:
            self._others.check()
        if self.is_done:
            self._bar.close()

    def _check_memory(self, row: CompileRow) -> None:
        limit = self._recipe.bytes_limit
        if limit is not None and row.total_bytes > limit:
            raise UserError(f"it needs {row.total_bytes:,} bytes on each device, which has {limit:,}")

    def _fail(self, bucket: AnyBucket, error: Exception) -> None:
        error.add_note(f"while compiling {self._recipe.name} for bucket {bucket}")
        if self._others is not None:
            self._others.tell_error(bucket, error)
        self.close()


class _Others:
    """What all processes tell of their programs through the key-value store."""

    _numbers = itertools.count()  # all processes compile the same steps, in the same order

    def __init__(self, buckets: Sequence[AnyBucket]):
        self._prefix = f"jvarlen/compiled-{next(self._numbers)}/"
        self._process = jax.process_index()
        self._buckets = {_key(bucket): bucket for bucket in buckets}
        self._missing = set(buckets)  # compiled not yet by all
        self._last_look = 0.0

    def announce(self, bucket: AnyBucket, future: Future[CompiledBucket], text: str) -> None:
        """Tells the others when a bucket is compiled, from whatever thread that is."""
        digest = hashlib.sha256(text.encode()).hexdigest()

        def tell(done: Future[CompiledBucket]) -> None:
            if done.cancelled():
                return
            if (error := done.exception()) is not None:
                self.tell_error(bucket, error)
            else:
                self._tell(bucket, digest=digest)

        future.add_done_callback(tell)

    def tell_error(self, bucket: AnyBucket, error: BaseException) -> None:
        """Tells the others that a bucket could not be compiled."""
        self._tell(bucket, error=f"{type(error).__name__}: {error}")

    def _tell(self, bucket: AnyBucket, **what: str) -> None:
        key = f"{self._prefix}{self._process}/{_key(bucket)}"
        key_value_store().key_value_set(key, json.dumps(what), allow_overwrite=True)

    def drop(self, bucket: AnyBucket) -> None:
        """Expects nothing of a bucket."""
        self._missing.discard(bucket)

    def have(self, bucket: AnyBucket) -> bool:
        """Whether all processes have compiled a bucket."""
        return bucket not in self._missing

    def have_all(self) -> bool:
        """Whether all processes have compiled all buckets."""
        return not self._missing

    def check(self) -> None:
        """Looks at what was told."""
        if not self._missing or time.monotonic() - self._last_look < _POLL_S:
            return
        self._last_look = time.monotonic()
        try:
            entries = key_value_store().key_value_dir_get(self._prefix)
        except Exception as error:  # its type depends on the backend
            raise ProcessesError("process 0, where all meet, does not answer") from error
        told: dict[AnyBucket, dict[int, dict[str, str]]] = {}
        for name, text in entries:
            process, key = name.removeprefix(self._prefix).rsplit("/", 1)
            told.setdefault(self._buckets[key], {})[int(process.rpartition("/")[2])] = json.loads(text)
        failed = {
            f"process {process}, bucket {bucket}: {what['error']}"
            for bucket, of_process in told.items()
            for process, what in of_process.items()
            if "error" in what and process != self._process
        }
        if failed:
            raise ProcessesError(f"other processes could not compile: {list_first(sorted(failed), '; ')}")
        for bucket, of_process in told.items():
            digests = {process: what["digest"] for process, what in of_process.items() if "digest" in what}
            if len(set(digests.values())) > 1:
                listed = ", ".join(f"process {process}: {digest[:12]}…" for process, digest in sorted(digests.items()))
                raise UserError(f"processes compiled different programs for bucket {bucket} (SHA-256 of {listed})")
            if len(digests) == jax.process_count():
                self._missing.discard(bucket)


def _key(bucket: AnyBucket) -> str:
    return "x".join(map(str, bucket))
