"""The programs of a step: lowered in the caller's thread, compiled in others, held until they are released.

JAX's settings belong to a thread, so only the compiler runs elsewhere.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from tqdm import tqdm

from jvarlen._common.checks import UserError
from jvarlen._common.interrupts import raise_if_interrupted
from jvarlen.compiling.lowering import CompiledBucket, StepCompiler
from jvarlen.compiling.recompiles import uncounted_in_thread
from jvarlen.compiling.report import CompileRow
from jvarlen.planning.buckets import AnyBucket

__all__ = ["Programs"]

_POLL_S = 0.02  # between two looks at whether Ctrl-C came


class Programs:
    """Compiles buckets in the given order; in the background, a bucket that a step waits for comes beside the others.

    Attributes:
      rows: what each compiled bucket cost.
      executables: those that are held.
    """

    def __init__(
        self,
        step_compiler: StepCompiler,
        buckets: Sequence[AnyBucket],
        num_threads: int,
        bar: tqdm,
        *,
        in_background: bool = False,
    ):
        self.rows: dict[AnyBucket, CompileRow] = {}
        self.executables: dict[AnyBucket, jax.stages.Compiled] = {}
        self._step_compiler = step_compiler
        self._keeping_state: set[AnyBucket] = set()  # buckets whose program gives metrics alone
        # Of the largest and the smallest program, which several processes compare.
        self.digest = hashlib.sha256(repr(list(buckets)).encode())
        self._compared = (buckets[0], buckets[-1]) if jax.process_count() > 1 else ()
        self._bar = bar
        self._planned = uncounted_in_thread if in_background else contextlib.nullcontext
        self._to_lower = list(buckets)
        self._compiling: dict[AnyBucket, Future[CompiledBucket]] = {}
        # In the background, a thread more is for what a step waits for; ahead, a program more waits for a thread.
        self._threads = ThreadPoolExecutor(num_threads + in_background, thread_name_prefix="compile")
        self._most_compiling = num_threads + (not in_background)

    @property
    def pending(self) -> list[AnyBucket]:
        """Those that are not compiled yet: first those that are being compiled."""
        return [*self._compiling, *self._to_lower]

    def advance(self) -> None:
        """Takes what the threads have compiled, and lowers a bucket if there is a thread for it."""
        self._collect()
        if self._to_lower and len(self._compiling) < self._most_compiling:
            self._lower(self._to_lower[0])

    def wait(self, bucket: AnyBucket, timeout: float | None = None) -> bool:
        """Waits for a bucket, which then comes before all others; False: it is not compiled in that time."""
        if bucket in self._to_lower:
            self._lower(bucket)
        if bucket in self._compiling:
            futures.wait([self._compiling[bucket]], timeout)
        self._collect()
        return bucket not in self._compiling

    def wait_for_all(self) -> None:
        """Waits until nothing is pending."""
        while self.pending:
            raise_if_interrupted()
            self.advance()
            if not self._to_lower or len(self._compiling) >= self._most_compiling:
                futures.wait(self._compiling.values(), _POLL_S, futures.FIRST_COMPLETED)

    def release(self, bucket: AnyBucket) -> None:
        """Lets a program go for good; a step that still runs it is not disturbed."""
        self.executables.pop(bucket, None)
        if bucket in self._to_lower:
            self._to_lower.remove(bucket)
        elif bucket in self._compiling:
            self._compiling.pop(bucket).cancel()

    def close(self) -> None:
        """Compiles nothing more, but for what a thread is busy with."""
        self._to_lower, self._compiling = [], {}
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._bar.close()

    def run(self, bucket: AnyBucket, state: Any, batch: Any) -> tuple[Any, Any]:
        """Runs a program: the next state, and the metrics."""
        outputs = self.executables[bucket](state, batch)
        return (state, outputs) if bucket in self._keeping_state else outputs

    def donates(self, bucket: AnyBucket) -> bool:
        """Whether a program writes the next state over the one that it takes."""
        return self._step_compiler.donate and bucket not in self._keeping_state

    def _lower(self, bucket: AnyBucket) -> None:
        self._bar.set_postfix_str(str(bucket))
        with self._telling(bucket), self._planned():
            lowered = self._step_compiler.lower(bucket)
        self._to_lower.remove(bucket)
        if lowered.keeps_state:
            self._keeping_state.add(bucket)
        if bucket in self._compared:
            self.digest.update(lowered.program.as_text().encode())

        def compile_it() -> CompiledBucket:
            with self._planned():
                return self._step_compiler.compile(lowered)

        self._compiling[bucket] = self._threads.submit(compile_it)

    def _collect(self) -> None:
        for bucket in [bucket for bucket, future in self._compiling.items() if future.done()]:
            with self._telling(bucket):
                row, executable = self._compiling.pop(bucket).result()
                limit = self._step_compiler.bytes_limit
                if limit is not None and row.total_bytes > limit:
                    raise UserError(f"it needs {row.total_bytes:,} bytes on each device, which has {limit:,}")
            self.rows[bucket], self.executables[bucket] = row, executable
            self._bar.update()
            if not self.pending:
                self.close()

    @contextlib.contextmanager
    def _telling(self, bucket: AnyBucket) -> Iterator[None]:
        """A block whose errors name the bucket, and end the compilation of the others."""
        try:
            yield
        except Exception as error:
            error.add_note(f"while compiling {self._step_compiler.name} for bucket {bucket}")
            self.close()
            raise
