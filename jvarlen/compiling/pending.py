"""Programs of a step that are still to be compiled: lowered in the caller's thread, compiled in others.

JAX's settings belong to a thread, so only the compiler runs elsewhere. Several processes tell each other through the
key-value store what they have compiled: a thread in the background must not take part in a collective.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import time
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor

import jax
from tqdm import tqdm

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.interrupts import raise_if_interrupted
from jvarlen.compiling.lowering import CompiledBucket, LoweredBucket, Programs, Recipe, largest_first
from jvarlen.compiling.recompiles import uncounted_in_thread
from jvarlen.distributed.processes import ProcessesError, key_value_store
from jvarlen.planning.buckets import AnyBucket

__all__ = ["PendingPrograms"]

_POLL_S = 0.02  # between two looks at what is compiled
_CACHED_S = 0.1  # to read a program from a cache: a step that waits longer lets another bucket be lowered meanwhile


class PendingPrograms:
    """Compiles buckets in the given order, with one thread more for a bucket that a step waits for.

    The caller's thread does nothing but inside methods. `with_others`: a bucket is ready when all processes have it.
    """

    def __init__(
        self,
        recipe: Recipe,
        buckets: Sequence[AnyBucket],
        programs: Programs,
        num_threads: int,
        bar: tqdm,
        *,
        in_background: bool = False,
        with_others: bool = False,
    ):
        self._recipe = recipe
        self._programs = programs
        self._num_threads = num_threads
        self._bar = bar
        self._planned = uncounted_in_thread if in_background else contextlib.nullcontext
        self._others = _Others(buckets) if with_others else None
        by_size = largest_first(buckets)
        self._ends = (by_size[0], by_size[-1])
        self._to_lower = list(buckets)
        self._compiling: dict[AnyBucket, tuple[LoweredBucket, Future[CompiledBucket]]] = {}  # by threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="compile")
        self._extra_thread = ThreadPoolExecutor(1, thread_name_prefix="compile")

    @property
    def buckets(self) -> list[AnyBucket]:
        """Those that are not compiled yet: first those that are being compiled."""
        return [*self._compiling, *self._to_lower]

    def is_ready(self, bucket: AnyBucket | None = None) -> bool:
        """Whether all processes have compiled a bucket; None: all buckets."""
        missing = self.buckets if self._others is None else [*self.buckets, *self._others.missing]
        return bucket not in missing if bucket is not None else not missing

    def advance(self) -> None:
        """Takes what the threads have compiled, and lowers a bucket if one of them will soon be free."""
        self._collect()
        if self._has_room:
            self._lower(self._to_lower[0])

    def wait(self, bucket: AnyBucket | None = None, timeout: float | None = None) -> bool:
        """Waits for a bucket, which then comes before all others, or for all; False: not compiled in that time."""
        start = time.monotonic()
        self._collect()
        while not self.is_ready(bucket):
            waited_s = time.monotonic() - start
            if timeout is not None and waited_s >= timeout:
                return False
            if bucket is None:
                raise_if_interrupted()
            elif bucket in self._to_lower:
                self._lower(bucket)
            if bucket in self._compiling:
                self._hurry(bucket)
            if self._has_room and (bucket is None or waited_s >= _CACHED_S):
                self._lower(self._to_lower[0])
            else:
                awaited = [bucket] if bucket in self._compiling else list(self._compiling)
                if awaited:
                    futures.wait([self._compiling[each][1] for each in awaited], _POLL_S, futures.FIRST_COMPLETED)
                else:  # for other processes
                    time.sleep(_POLL_S)
            self._collect()
        return True

    def drop(self, bucket: AnyBucket) -> None:
        """Leaves out a bucket that no step will use; if it is being compiled, the result is not kept."""
        if bucket in self._to_lower:
            self._to_lower.remove(bucket)
        elif bucket in self._compiling:
            self._compiling.pop(bucket)[1].cancel()
        if self._others is not None:
            self._others.missing.discard(bucket)

    def close(self) -> None:
        """Compiles nothing more, but for what a thread is busy with."""
        self._to_lower, self._compiling, self._others = [], {}, None
        for threads in (self._threads, self._extra_thread):
            threads.shutdown(wait=False, cancel_futures=True)
        self._bar.close()

    @property
    def _has_room(self) -> bool:
        """Whether to lower one more: each thread has a bucket, and one waits for the first that is free."""
        return bool(self._to_lower) and len(self._compiling) <= self._num_threads

    def _lower(self, bucket: AnyBucket) -> None:
        self._bar.set_postfix_str(str(bucket))
        try:
            with self._planned():
                lowered = self._recipe.lower(bucket)
        except Exception as error:
            self._fail(bucket, error)
            raise
        self._to_lower.remove(bucket)
        self._programs.lowered(lowered, with_text=bucket in self._ends)
        self._compiling[bucket] = lowered, self._start(lowered, self._threads)

    def _hurry(self, bucket: AnyBucket) -> None:
        """Compiles a bucket in the extra thread if the others are busy."""
        lowered, future = self._compiling[bucket]
        num_unfinished = sum(not future.done() for _, future in self._compiling.values())
        if num_unfinished > self._num_threads and future.cancel():
            self._compiling[bucket] = lowered, self._start(lowered, self._extra_thread)

    def _start(self, lowered: LoweredBucket, threads: ThreadPoolExecutor) -> Future[CompiledBucket]:
        def compile_it() -> CompiledBucket:
            with self._planned():
                return self._recipe.compile(lowered)

        future = threads.submit(compile_it)
        if self._others is not None:
            digest = hashlib.sha256(lowered.program.as_text().encode()).hexdigest()
            future.add_done_callback(functools.partial(self._others.tell, lowered.bucket, digest))
        return future

    def _collect(self) -> None:
        for bucket, (_, future) in list(self._compiling.items()):
            if not future.done():
                continue
            try:
                row, executable = future.result()
                limit = self._recipe.bytes_limit
                if limit is not None and row.total_bytes > limit:
                    raise UserError(f"it needs {row.total_bytes:,} bytes on each device, which has {limit:,}")
                self._programs.add(row, executable)
            except Exception as error:
                self._fail(bucket, error)
                raise
            del self._compiling[bucket]
            self._bar.update()
        if self._others is not None:
            self._others.check()
        if self.is_ready():
            self._bar.close()

    def _fail(self, bucket: AnyBucket, error: Exception) -> None:
        error.add_note(f"while compiling {self._recipe.name} for bucket {bucket}")
        if self._others is not None:
            self._others.tell_error(bucket, error)
        self.close()


class _Others:
    """What all processes tell of their programs through the key-value store; `missing`: not compiled yet by all."""

    _numbers = itertools.count()  # all processes compile the same steps, in the same order

    def __init__(self, buckets: Sequence[AnyBucket]):
        self._prefix = f"jvarlen/compiled-{next(self._numbers)}/"
        self._process = jax.process_index()
        self._places = {bucket: place for place, bucket in enumerate(buckets)}
        self.missing = set(buckets)
        self._last_look = 0.0

    def tell(self, bucket: AnyBucket, digest: str, done: Future[CompiledBucket]) -> None:
        """Tells the others that a bucket is compiled, or why not; from whatever thread that was in."""
        if done.cancelled():
            return
        if (error := done.exception()) is not None:
            self.tell_error(bucket, error)
        else:
            self._tell(bucket, digest=digest)

    def tell_error(self, bucket: AnyBucket, error: BaseException) -> None:
        """Tells the others that a bucket could not be compiled."""
        self._tell(bucket, error=f"{type(error).__name__}: {error}")

    def _tell(self, bucket: AnyBucket, **what: str) -> None:
        key = f"{self._prefix}{self._process}/{self._places[bucket]}"
        told = {"process": self._process, "bucket": str(bucket), **what}
        key_value_store().key_value_set(key, json.dumps(told), allow_overwrite=True)

    def check(self) -> None:
        """Looks at what was told: raises if another process failed or compiled another program."""
        if not self.missing or time.monotonic() - self._last_look < _POLL_S:
            return
        self._last_look = time.monotonic()
        try:
            entries = key_value_store().key_value_dir_get(self._prefix)
        except Exception as error:  # its type depends on the backend
            raise ProcessesError("process 0, where all meet, does not answer") from error
        told = [json.loads(text) for _, text in entries]
        failed = [
            f"process {each['process']}, bucket {each['bucket']}: {each['error']}"
            for each in told
            if "error" in each and each["process"] != self._process
        ]
        if failed:
            raise ProcessesError(f"other processes could not compile: {list_first(sorted(failed), '; ')}")
        for bucket in list(self.missing):
            compiled = [each for each in told if each["bucket"] == str(bucket) and "digest" in each]
            digests = {each["process"]: each["digest"] for each in compiled}
            if len(set(digests.values())) > 1:
                listed = ", ".join(f"process {process}: {digest[:12]}…" for process, digest in sorted(digests.items()))
                raise UserError(f"processes compiled different programs for bucket {bucket} (SHA-256 of {listed})")
            if len(digests) == jax.process_count():
                self.missing.discard(bucket)
