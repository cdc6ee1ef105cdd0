"""The queue in which the programs of a step are compiled, before the first step or while steps run."""

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
from jvarlen.compiling.lowering import CompiledProgram, StepCompiler
from jvarlen.compiling.programs import LOSS, ProgramKey, StepPart
from jvarlen.compiling.recompiles import uncounted_in_thread
from jvarlen.compiling.report import CompileRow

__all__ = ["CompileQueue"]

_POLL_S = 0.02  # between two looks at whether Ctrl-C came


class CompileQueue:
    """Compiles programs in their order, except that one which is waited for comes before the others.

    Attributes:
      step_compiler: lowers and compiles.
      keys: of all programs, in the order of compilation.
      rows: the cost of each compiled program.
      executables: those that are held.
      keeping_state: programs that return metrics alone.
      digest: of the keys and of the first and the last program, which several processes compare.
    """

    def __init__(
        self,
        step_compiler: StepCompiler,
        keys: Sequence[ProgramKey],
        options: CompileOptions,
        num_threads: int,
        bar: tqdm,
    ):
        self.step_compiler, self.keys = step_compiler, tuple(keys)
        self.rows: dict[ProgramKey, CompileRow] = {}
        self.executables: dict[ProgramKey, jax.stages.Compiled] = {}
        self.keeping_state: set[ProgramKey] = set()
        self.digest = hashlib.sha256(repr(list(keys)).encode())
        self._compared = (keys[0], keys[-1]) if jax.process_count() > 1 else ()
        self._bar = bar
        self._as_planned = uncounted_in_thread if options.in_background else contextlib.nullcontext
        self._to_lower = list(keys)
        self._compiling: dict[ProgramKey, Future[CompiledProgram]] = {}
        # In the background, one more thread is for what a step waits for; ahead, one more program waits for a thread.
        self._threads = ThreadPoolExecutor(num_threads + options.in_background, thread_name_prefix="compile")
        self._most_compiling = num_threads + (not options.in_background)
        if step_compiler.has_two_passes:  # the shapes of what is added in the second pass follow from it
            with self._close_on_error(LOSS), self._as_planned():
                self.rows[LOSS], self.executables[LOSS] = step_compiler.between

    @property
    def pending(self) -> tuple[ProgramKey, ...]:
        """Programs that are not compiled yet, in the order in which they will be."""
        return *self._compiling, *self._to_lower

    def advance(self) -> None:
        """Collects compiled programs, and lowers one here if a thread is free."""
        self._collect()
        if self._to_lower and len(self._compiling) < self._most_compiling:
            self._submit(self._to_lower[0])

    def wait_for_all(self) -> None:
        """Waits until every program is compiled."""
        while self.pending:
            raise_if_interrupted()
            self.advance()
            if not self._to_lower or len(self._compiling) >= self._most_compiling:
                futures.wait(self._compiling.values(), _POLL_S, futures.FIRST_COMPLETED)

    def wait_for(self, key: ProgramKey, timeout: float | None = None) -> bool:
        """Waits some seconds, or as long as it takes, until this program is compiled; returns whether it is."""
        if key in self._to_lower:
            self._submit(key)
        if key in self._compiling:
            futures.wait([self._compiling[key]], timeout)
        self._collect()
        return key not in self._compiling

    def release(self, key: ProgramKey) -> None:
        """Lets a program go for good; a step that still runs it is not disturbed."""
        self.executables.pop(key, None)
        if key in self._to_lower:
            self._to_lower.remove(key)
        elif key in self._compiling:
            self._compiling.pop(key).cancel()

    def close(self) -> None:
        """Ends compiling: what is not compiled yet never will be."""
        self._to_lower, self._compiling = [], {}
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._bar.close()

    def _submit(self, key: ProgramKey) -> None:
        """Lowers a program here, and has a thread compile it."""
        self._bar.set_postfix_str(str(key))
        with self._close_on_error(key), self._as_planned():
            lowered = self.step_compiler.lower(key)
        self._to_lower.remove(key)
        if lowered.keeps_state:
            self.keeping_state.add(key)
        if key in self._compared:
            self.digest.update(lowered.program.as_text().encode())

        def compile_lowered() -> CompiledProgram:
            with self._as_planned():
                return self.step_compiler.compile(lowered)

        self._compiling[key] = self._threads.submit(compile_lowered)

    def _collect(self) -> None:
        for key in [key for key, future in self._compiling.items() if future.done()]:
            with self._close_on_error(key):
                row, executable = self._compiling.pop(key).result()
                limit = self.step_compiler.bytes_limit
                if limit is not None and row.total_bytes > limit:
                    raise UserError(f"it needs {row.total_bytes:,} bytes on each device, which has {limit:,}")
            self.rows[key], self.executables[key] = row, executable
            self._bar.update()
            if not self.pending:
                self.close()

    @contextlib.contextmanager
    def _close_on_error(self, key: ProgramKey) -> Iterator[None]:
        """A block whose errors name the program, and end the compilation of the others."""
        try:
            yield
        except Exception as error:
            what = "and its " if isinstance(key, StepPart) and key.bucket is None else "for bucket "
            error.add_note(f"while compiling {self.step_compiler.name} {what}{key}")
            self.close()
            raise
