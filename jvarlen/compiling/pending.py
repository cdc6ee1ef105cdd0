"""Programs of a step that are still to be compiled: lowered in the caller's thread, compiled in others.

JAX's settings belong to a thread, so only the compiler runs elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from tqdm import tqdm

from jvarlen._common.checks import UserError
from jvarlen._common.interrupts import raise_if_interrupted
from jvarlen.compiling.lowering import CompiledBucket, LoweredBucket, Programs, StepCompiler, largest_first
from jvarlen.compiling.recompiles import uncounted_in_thread
from jvarlen.planning.buckets import AnyBucket

if TYPE_CHECKING:
    from jvarlen.compiling.other_processes import OtherProcesses

__all__ = ["PendingPrograms"]

_POLL_S = 0.02  # between two looks at what is compiled
_CACHED_S = 0.1  # to read a program from a cache: a step that waits longer lets another bucket be lowered meanwhile


class PendingPrograms:
    """Compiles buckets in the given order, with one thread more for a bucket that a step waits for."""

    def __init__(
        self,
        step_compiler: StepCompiler,
        buckets: Sequence[AnyBucket],
        programs: Programs,
        num_threads: int,
        bar: tqdm,
        *,
        in_background: bool = False,
        with_others: bool = False,  # a bucket is ready when all processes have it
    ):
        self._step_compiler = step_compiler
        self._programs = programs
        self._num_threads = num_threads
        self._bar = bar
        self._planned = uncounted_in_thread if in_background else contextlib.nullcontext
        self._others: OtherProcesses | None = None
        if with_others:
            from jvarlen.compiling.other_processes import OtherProcesses

            self._others = OtherProcesses(buckets)
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
                lowered = self._step_compiler.lower(bucket)
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
                return self._step_compiler.compile(lowered)

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
                limit = self._step_compiler.bytes_limit
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
        error.add_note(f"while compiling {self._step_compiler.name} for bucket {bucket}")
        if self._others is not None:
            self._others.tell_error(bucket, error)
        self.close()
