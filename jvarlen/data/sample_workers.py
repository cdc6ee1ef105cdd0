"""Applies a function to ranges of samples in worker processes.

The caller decides what the values mean and where they are kept.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor
from multiprocessing.queues import Queue
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int64

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.interrupts import without_interrupts
from jvarlen._common.worker_errors import PackedError, pack_error
from jvarlen.planning.lengths import DataSource

__all__ = ["IsFloat", "MeasuredRange", "Words", "Work", "measure_ranges"]

Words = Int64[np.ndarray, " n"]  # ints as they are, floats as their bits
IsFloat = bool | Bool[np.ndarray, " n"]  # one for all, or one each

_SECONDS_PER_RANGE = 0.25  # long against handing a range over, short to wait for
_FIRST_RANGE = 16  # samples
_LARGEST_RANGE = 32_768
_MOST_SECONDS = 1.0  # after which a range is handed back, measured in part
_PIECES = 64  # of a range, between which the time is looked at
_MOST_KEPT = 2  # datasets that a process of an executor holds
_FIRST_CAREFUL = 4_096  # samples
_CAREFUL_EVERY = 1_024  # of those after them


class Work(NamedTuple):
    """Everything needed to measure ranges of samples; a worker process gets it once, pickled.

    `to_words` takes the values of a range and the range; it raises ValueError that lists the values that it rejects.
    `careful_function` replaces `function` for the first 4,096 samples and every 1,024th after them: inspecting every
    sample would take longer than measuring it. `read_values` gives the values of consecutive samples at once, or None
    where it cannot.
    """

    dataset: DataSource
    function: Callable[[Any], Any]
    to_words: Callable[[list[Any], range], tuple[Words, IsFloat]]
    careful_function: Callable[[Any], Any] | None = None
    read_values: Callable[[range], list[int] | None] | None = None


class MeasuredRange(NamedTuple):
    """The values of a range of samples, and the seconds that measuring them took."""

    samples: range
    words: Words
    is_float: IsFloat
    seconds: float


_Answer = MeasuredRange | tuple[Exception, PackedError | None] | None  # None: the process has yet to be handed the work


def measure_ranges(
    work: Work,
    missing: Sequence[range],
    num_workers: int,
    executor: Executor | None = None,
    executor_timeout_s: float | None = None,
) -> Generator[MeasuredRange, None, None]:
    """Measures the missing samples in ranges that take about a quarter of a second each; gives each when it is done.

    Workers are spawned when the first part is requested, and end with the generator: if it is closed early, they are
    killed, and tasks of an executor that have not begun are cancelled. Ctrl-C reaches only this process. The options
    and errors are those of `measure_lengths`.
    """
    ranges = _Ranges(missing)
    num_workers = min(num_workers, sum(map(len, missing)))
    if executor is not None:
        num_ranges = num_workers or os.cpu_count() or 1
        engine = _Engine(executor, work, num_ranges)
        try:
            yield from _measure_in(engine, ranges, num_ranges, executor_timeout_s)
        finally:
            engine.forget()
    elif num_workers:
        workers = _Workers(work, num_workers)
        try:
            yield from _measure_in(workers, ranges, num_workers, None)
            workers.shutdown()
        finally:
            workers.kill()
    else:
        for samples in ranges:
            part = _measure_range(work, samples)
            ranges.adapt(part, samples)
            yield part


class _Ranges:
    """Cuts ranges of samples into smaller ones that take about equally long, whatever one sample takes."""

    def __init__(self, missing: Sequence[range]):
        self.num_left = sum(map(len, missing))
        self._missing = iter(missing)
        self._returned: list[range] = []
        self._rest = range(0)
        self._size = _FIRST_RANGE

    def __iter__(self) -> Iterator[range]:
        return self

    def __next__(self) -> range:
        while not self._rest:
            self._rest = self._returned.pop() if self._returned else next(self._missing)
        cut, self._rest = self._rest[: self._size], self._rest[self._size :]
        return cut

    def adapt(self, part: MeasuredRange, samples: range) -> None:
        """Sizes the next ranges by what a part took; what it lacks of its range is measured later."""
        self.num_left -= len(part.samples)
        if len(part.samples) < len(samples):
            self._returned.append(samples[len(part.samples) :])
        fitting = int(len(part.samples) * _SECONDS_PER_RANGE / max(part.seconds, 1e-9))
        self._size = max(1, min(fitting, 2 * self._size, _LARGEST_RANGE))


def _measure_range(work: Work, samples: range) -> MeasuredRange:
    """The values of a range; of its first samples alone, where they take long."""
    start = time.perf_counter()
    dataset, function, careful = work.dataset, work.function, work.careful_function or work.function
    if work.read_values is not None:
        try:
            known = work.read_values(samples)
        except Exception as error:
            told = f"samples {samples.start} to {samples.stop - 1} could not be measured: {error!r}"
            raise RuntimeError(told) from error
        if known is not None:
            return MeasuredRange(samples, *work.to_words(known, samples), time.perf_counter() - start)
    values: list[Any] = []
    size = -(-len(samples) // _PIECES)
    try:
        for first in range(0, len(samples), size):
            for sample_id in samples[first : first + size]:
                is_careful = sample_id < _FIRST_CAREFUL or not sample_id % _CAREFUL_EVERY
                values.append((careful if is_careful else function)(dataset[sample_id]))
            if time.perf_counter() - start > _MOST_SECONDS:
                break
    except Exception as error:
        raise RuntimeError(f"sample {sample_id} could not be measured: {error!r}") from error
    samples = samples[: len(values)]
    return MeasuredRange(samples, *work.to_words(values, samples), time.perf_counter() - start)


def _measure_in(
    engine: _Engine | _Workers, ranges: _Ranges, num_ranges: int, timeout_s: float | None
) -> Generator[MeasuredRange, None, None]:
    """The parts, as an engine with this many ranges at a time finishes them."""
    pending: dict[Future[_Answer], range] = {}
    done: queue.SimpleQueue[Future[_Answer]] = queue.SimpleQueue()

    def submit(samples: range, asked_for_work: bool = False) -> None:
        future = engine.submit_range(samples, asked_for_work)
        pending[future] = samples
        future.add_done_callback(done.put)  # `wait` would not see what a shutdown cancels

    try:
        while True:
            with _told(engine, ranges, pending):
                for samples in itertools.islice(ranges, num_ranges - len(pending)):
                    submit(samples)
                if not pending:
                    return
                try:
                    finished = [done.get(timeout=timeout_s and min(timeout_s, threading.TIMEOUT_MAX))]
                except queue.Empty:
                    raise TimeoutError(f"no task was done within executor_timeout_s={timeout_s:g}") from None
                while not done.empty():  # only this thread takes from it
                    finished.append(done.get())
            for future in sorted(finished, key=lambda each: each.cancelled() or each.exception() is not None):
                with _told(engine, ranges, pending, future):
                    answer = future.result()
                samples = pending.pop(future)
                if answer is None:
                    with _told(engine, ranges, pending):
                        submit(samples, asked_for_work=True)
                    continue
                if not isinstance(answer, MeasuredRange):
                    error, cause = answer
                    raise error from cause and cause.unpack()
                ranges.adapt(answer, samples)
                yield answer
    finally:
        for future in pending:
            future.cancel()


@contextlib.contextmanager
def _told(
    engine: _Engine | _Workers, ranges: _Ranges, pending: dict[Future[_Answer], range], future: Future | None = None
) -> Iterator[None]:
    """Tells of errors of an engine, not of samples, what it had and what is left to measure."""
    try:
        yield
    except engine.errors as error:
        is_of_all = future is None or isinstance(error, BrokenExecutor | CancelledError)
        had = [samples for of, samples in pending.items() if is_of_all or of is future]
        listed = list_first((f"{samples.start} to {samples.stop - 1}" for samples in had), " or ")
        it_had = f"it had {f'samples {listed}' if had else 'no samples'}"
        raise RuntimeError(
            f"{engine.end(error)}; {it_had}. {engine.advice}. Shards that were finished are kept; {ranges.num_left:,} "
            "samples are left"
        ) from error


class _Engine:
    """An executor of any kind, whose processes are handed the work with their first range, and keep it."""

    errors = Exception  # those of samples come as answers
    advice = (
        "To resume, repeat the call with one that works; the dataset and the function must pickle for its processes"
    )

    def __init__(self, executor: Executor, work: Work, num_ranges: int):
        self._executor = executor
        self._work = work
        self._key = uuid.uuid4().hex
        self._num_unaware = num_ranges

    def submit_range(self, samples: range, asked_for_work: bool = False) -> Future[_Answer]:
        self._num_unaware -= 1
        handed = self._work if asked_for_work or self._num_unaware >= 0 else None
        return self._executor.submit(_answer_of_executor, self._key, handed, samples)

    def end(self, error: Exception) -> str:
        return f"{type(self._executor).__name__} failed: {error!r}"

    def forget(self) -> None:
        """Drops the work where the executor runs threads of this process."""
        _kept.pop(self._key, None)


class _Workers(ProcessPoolExecutor):
    """Spawned processes that see no Ctrl-C, end with this process, however it ends, and can be killed in a task."""

    errors = BrokenExecutor
    advice = "Where memory ran out, take fewer workers; otherwise see what it printed"

    def __init__(self, work: Work, num_workers: int) -> None:
        try:
            pickled = pickle.dumps(work, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise UserError(f"workers need a dataset and a function that pickle: {error!r}") from error
        context = multiprocessing.get_context("spawn")
        handed_over = context.Queue()  # as an argument of theirs, one worker would wait for the start of the other
        handed_over.cancel_join_thread()
        for _ in range(num_workers):
            handed_over.put(pickled)
        super().__init__(num_workers, context, _begin_worker, (handed_over,))

    def submit_range(self, samples: range, asked_for_work: bool = False) -> Future[_Answer]:
        with without_interrupts():  # which a process that is started here inherits; this one then ends the others
            return self.submit(_answer, _work_of_worker, samples)

    def end(self, error: Exception) -> str:
        return f"a worker process {self.kill()}"

    def kill(self) -> str:
        """Ends all processes at once, and tells how one had ended before; nothing happens after `shutdown`."""
        # `kill_workers` is of Python 3.14.
        processes = list((self._processes or {}).values())
        for process in processes:
            process.kill()
        self.shutdown()
        killed = -signal.SIGKILL
        code = next((process.exitcode or 0 for process in processes if process.exitcode != killed), killed)
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


_handed_over = b""  # in a worker: the pickled work


def _begin_worker(handed_over: Queue[bytes]) -> None:
    global _handed_over

    def end_with_parent() -> None:
        multiprocessing.parent_process().join()  # type: ignore[union-attr]
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    _handed_over = handed_over.get()


@functools.cache
def _work_of_worker() -> Work:
    try:
        return pickle.loads(_handed_over)
    except Exception as error:
        raise UserError(f"the dataset or the function does not unpickle in a worker process: {error!r}") from error


_kept: dict[str, Work] = {}  # in a process of an executor: the work by its key


def _answer_of_executor(key: str, work: Work | None, samples: range) -> _Answer:
    if work is not None:
        for old in list(_kept)[: 1 - _MOST_KEPT]:
            _kept.pop(old, None)
        _kept[key] = work
    kept = _kept.get(key)
    return kept and _answer(lambda: kept, samples)


def _answer(find_work: Callable[[], Work], samples: range) -> _Answer:
    """A part; or an error and its cause, which pickling would lose."""
    try:
        return _measure_range(find_work(), samples)
    except Exception as error:
        cause = pack_error(error.__cause__) if error.__cause__ else None
        error.__cause__ = error.__context__ = None  # Dask's pickling would take them along
        return error, cause
