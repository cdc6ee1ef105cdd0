"""Applies a function to ranges of samples in worker processes.

NumPy only. The caller decides what the values mean and where they are kept.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from multiprocessing.queues import Queue
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int64

from jvarlen._common.checks import UserError
from jvarlen._common.interrupts import without_interrupts
from jvarlen._common.worker_errors import portable_error
from jvarlen.planning.lengths import DataSource

__all__ = ["IsFloat", "Part", "Words", "Work", "measure_ranges"]

Words = Int64[np.ndarray, " n"]  # ints as they are, floats as their bits
IsFloat = bool | Bool[np.ndarray, " n"]  # one for all, or one each

_SECONDS_PER_RANGE = 0.25  # long against handing a range over, short to wait for
_FIRST_RANGE = 16  # samples
_LARGEST_RANGE = 32_768
_FIRST_CAREFUL = 4_096  # samples
_CAREFUL_EVERY = 1_024  # of those after them


class Work(NamedTuple):
    """Everything needed to measure ranges of samples; a worker process gets it once, pickled.

    Attributes:
      dataset: has `len()` and integer indexing.
      function: returns the value of a sample.
      to_words: takes the n values of a range of samples and the range; returns int64[n], ints as they are and floats as
        their bits, and which are floats, bool or bool[n]. A ValueError lists the values that it rejects.
      careful_function: replaces `function` for the first 4,096 samples and every 1,024th after them; inspecting every
        sample would take longer than measuring it. None: `function`.
      read_values: the values of consecutive samples, read at once in place of `function`; None, also as its result,
        where that is not possible.
    """

    dataset: DataSource
    function: Callable[[Any], Any]
    to_words: Callable[[list[Any], range], tuple[Words, IsFloat]]
    careful_function: Callable[[Any], Any] | None = None
    read_values: Callable[[range], list[int] | None] | None = None


class Part(NamedTuple):
    """The values of a range of samples, n of them.

    Attributes:
      samples: the range.
      words: int64[n], ints as they are, floats as their bits.
      is_float: bool or bool[n], which are floats.
      seconds: what measuring them took.
    """

    samples: range
    words: Words
    is_float: IsFloat
    seconds: float


_Answer = Part | tuple[Exception, BaseException | None]


def measure_ranges(
    work: Work, missing: Sequence[range], num_workers: int, executor: Executor | None = None
) -> Generator[Part, None, None]:
    """Measures samples, in ranges that take about a quarter of a second each.

    Workers are spawned when the first part is requested, and end with the generator: if it is closed early, they are
    killed. Ctrl-C reaches only this process.

    Args:
      work: what is measured of which samples.
      missing: ids of the samples to measure; each part lies within one of these ranges.
      num_workers: processes that measure, at most one per sample; 0 measures in this process. With an executor: the
        number of ranges submitted at a time; 0: as many as there are CPUs here.
      executor: used instead of worker processes. If the generator is closed early, tasks that have not begun are
        cancelled.

    Yields:
      The parts, in the order in which they are done.

    Raises:
      ValueError: values that `work.to_words` rejects; or, with workers, `work` does not pickle.
      RuntimeError: the dataset or the function failed on a sample, whose id is given; the cause is the original error,
        with its traceback as a note if it comes from a worker. Or a worker died; its samples are given.
    """
    ranges = _Ranges(missing)
    num_workers = min(num_workers, sum(map(len, missing)))
    if executor is not None:
        yield from _measure_in(executor, work, ranges, num_workers or os.cpu_count() or 1)
    elif num_workers:
        workers = _Workers(work, num_workers)
        try:
            yield from _measure_in(workers, None, ranges, num_workers)
            workers.shutdown()
        finally:
            workers.kill()
    else:
        for samples in ranges:
            part = _measure_range(work, samples)
            ranges.adapt(part)
            yield part


class _Ranges:
    """Cuts ranges of samples into smaller ones that take about equally long, whatever one sample takes."""

    def __init__(self, missing: Sequence[range]):
        self._missing = iter(missing)
        self._rest = range(0)
        self._size = _FIRST_RANGE

    def __iter__(self) -> Iterator[range]:
        return self

    def __next__(self) -> range:
        while not self._rest:
            self._rest = next(self._missing)
        cut, self._rest = self._rest[: self._size], self._rest[self._size :]
        return cut

    def adapt(self, part: Part) -> None:
        """Sizes the next ranges by what the samples of this one took."""
        fitting = int(len(part.samples) * _SECONDS_PER_RANGE / max(part.seconds, 1e-9))
        self._size = max(1, min(fitting, 2 * self._size, _LARGEST_RANGE))


def _measure_range(work: Work, samples: range) -> Part:
    start = time.perf_counter()
    dataset, function, careful = work.dataset, work.function, work.careful_function or work.function
    if work.read_values is not None and (known := work.read_values(samples)) is not None:
        return Part(samples, *work.to_words(known, samples), time.perf_counter() - start)
    values = []
    try:
        for sample_id in samples:
            is_careful = sample_id < _FIRST_CAREFUL or not sample_id % _CAREFUL_EVERY
            values.append((careful if is_careful else function)(dataset[sample_id]))
    except Exception as error:
        raise RuntimeError(f"sample {sample_id} could not be measured: {error!r}") from error
    return Part(samples, *work.to_words(values, samples), time.perf_counter() - start)


def _measure_in(executor: Executor, work: Work | None, ranges: _Ranges, num_ranges: int) -> Generator[Part, None, None]:
    """The parts, as an executor that has so many ranges at a time is done with them."""
    pending: dict[Future[_Answer], range] = {}
    try:
        while True:
            for samples in itertools.islice(ranges, num_ranges - len(pending)):
                pending[executor.submit(_answer, work, samples)] = samples
            if not pending:
                return
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                part = future.result()
                if not isinstance(part, Part):
                    error, cause = part
                    raise error from cause
                del pending[future]
                ranges.adapt(part)
                yield part
    except BrokenExecutor as error:
        how = executor.kill() if isinstance(executor, _Workers) else f"died ({error})"
        had = " or ".join(f"{samples.start} to {samples.stop - 1}" for samples in pending.values())
        raise RuntimeError(
            f"a worker process {how}; it had samples {had}. Where memory ran out, take fewer workers; otherwise see "
            "what it printed. Shards that were finished are kept"
        ) from error
    finally:
        for future in pending:
            future.cancel()


class _Workers(ProcessPoolExecutor):
    """Spawned processes that see no Ctrl-C, end with this process, however it ends, and can be killed in a task."""

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

    def submit(self, *args: Any, **kwargs: Any) -> Future:
        with without_interrupts():  # which a process that is started here inherits; this one then ends the others
            return super().submit(*args, **kwargs)

    def kill(self) -> str:
        """Ends all processes at once, and tells how one had ended before; nothing happens after `shutdown`."""
        # `kill_workers` is of Python 3.14.
        processes = list((self._processes or {}).values())
        for process in processes:
            process.kill()
        self.shutdown()
        codes = [process.exitcode or 0 for process in processes]
        code = next((code for code in codes if code != -signal.SIGKILL), -signal.SIGKILL)
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


def _answer(work: Work | None, samples: range) -> _Answer:
    """A part; or an error and its cause, which pickling would lose. None: of the work that the worker was given."""
    try:
        return _measure_range(work or _work_of_worker(), samples)
    except Exception as error:
        return error, error.__cause__ and portable_error(error.__cause__)
