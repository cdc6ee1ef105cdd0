"""The queue in which buckets are lowered and compiled.

Programs are lowered in the caller's thread, whose settings of JAX count; only the compiler runs elsewhere.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor

import jax
from tqdm import tqdm

from jvarlen._common.checks import UserError
from jvarlen._common.interrupts import raise_if_interrupted
from jvarlen.compiling.compile_options import CompileOptions
from jvarlen.compiling.lowering import CompiledBucket, StepCompiler
from jvarlen.compiling.recompiles import uncounted_in_thread
from jvarlen.compiling.report import CompileRow
from jvarlen.planning.buckets import AnyBucket

__all__ = ["CompileQueue"]

_POLL_S = 0.02  # between two looks at whether Ctrl-C came


class CompileQueue:
    """Compiles buckets in their order, except that a bucket which is waited for comes before the others.

    Attributes:
      step_compiler: lowers and compiles.
      buckets: all, in the order of compilation.
      rows: the cost of each compiled bucket.
      executables: those that are held.
      keeping_state: buckets whose program returns metrics alone.
      digest: of the buckets and of the largest and the smallest program, which several processes compare.
    """

    def __init__(
        self,
        step_compiler: StepCompiler,
        buckets: Sequence[AnyBucket],
        options: CompileOptions,
        num_threads: int,
        bar: tqdm,
    ):
        self.step_compiler, self.buckets = step_compiler, tuple(buckets)
        self.rows: dict[AnyBucket, CompileRow] = {}
        self.executables: dict[AnyBucket, jax.stages.Compiled] = {}
        self.keeping_state: set[AnyBucket] = set()
        self.digest = hashlib.sha256(repr(list(buckets)).encode())
        self._compared = (buckets[0], buckets[-1]) if jax.process_count() > 1 else ()
        self._bar = bar
        self._as_planned = uncounted_in_thread if options.in_background else contextlib.nullcontext
        self._to_lower = list(buckets)
        self._compiling: dict[AnyBucket, Future[CompiledBucket]] = {}
        # In the background, one more thread is for what a step waits for; ahead, one more program waits for a thread.
        self._threads = ThreadPoolExecutor(num_threads + options.in_background, thread_name_prefix="compile")
        self._most_compiling = num_threads + (not options.in_background)

    @property
    def pending(self) -> tuple[AnyBucket, ...]:
        """Buckets that are not compiled yet, in the order in which they will be."""
        return *self._compiling, *self._to_lower

    def advance(self) -> None:
        """Collects compiled programs, and lowers a bucket here if a thread is free."""
        self._collect()
        if self._to_lower and len(self._compiling) < self._most_compiling:
            self._submit(self._to_lower[0])

    def wait_for_all(self) -> None:
        """Waits until every bucket is compiled."""
        while self.pending:
            raise_if_interrupted()
            self.advance()
            if not self._to_lower or len(self._compiling) >= self._most_compiling:
                futures.wait(self._compiling.values(), _POLL_S, futures.FIRST_COMPLETED)

    def wait_for(self, bucket: AnyBucket, timeout: float | None = None) -> bool:
        """Waits some seconds, or as long as it takes, until this bucket is compiled; returns whether it is."""
        if bucket in self._to_lower:
            self._submit(bucket)
        if bucket in self._compiling:
            futures.wait([self._compiling[bucket]], timeout)
        self._collect()
        return bucket not in self._compiling

    def release(self, bucket: AnyBucket) -> None:
        """Lets a program go for good; a step that still runs it is not disturbed."""
        self.executables.pop(bucket, None)
        if bucket in self._to_lower:
            self._to_lower.remove(bucket)
        elif bucket in self._compiling:
            self._compiling.pop(bucket).cancel()

    def close(self) -> None:
        """Ends compiling: what is not compiled yet never will be."""
        self._to_lower, self._compiling = [], {}
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._bar.close()

    def _submit(self, bucket: AnyBucket) -> None:
        """Lowers a bucket here, and has a thread compile it."""
        self._bar.set_postfix_str(str(bucket))
        with self._close_on_error(bucket), self._as_planned():
            lowered = self.step_compiler.lower(bucket)
        self._to_lower.remove(bucket)
        if lowered.keeps_state:
            self.keeping_state.add(bucket)
        if bucket in self._compared:
            self.digest.update(lowered.program.as_text().encode())

        def compile_lowered() -> CompiledBucket:
            with self._as_planned():
                return self.step_compiler.compile(lowered)

        self._compiling[bucket] = self._threads.submit(compile_lowered)

    def _collect(self) -> None:
        for bucket in [bucket for bucket, future in self._compiling.items() if future.done()]:
            with self._close_on_error(bucket):
                row, executable = self._compiling.pop(bucket).result()
                limit = self.step_compiler.bytes_limit
                if limit is not None and row.total_bytes > limit:
                    raise UserError(f"it needs {row.total_bytes:,} bytes on each device, which has {limit:,}")
            self.rows[bucket], self.executables[bucket] = row, executable
            self._bar.update()
            if not self.pending:
                self.close()

    @contextlib.contextmanager
    def _close_on_error(self, bucket: AnyBucket) -> Iterator[None]:
        """A block whose errors name the bucket, and end the compilation of the others."""
        try:
            yield
        except Exception as error:
            error.add_note(f"while compiling {self.step_compiler.name} for bucket {bucket}")
            self.close()
            raise
