"""Applies a function to ranges of samples in worker processes.

NumPy only. The caller decides what the values mean and where they are kept.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int64

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
    """

    dataset: DataSource
    function: Callable[[Any], Any]
    to_words: Callable[[list[Any], range], tuple[Words, IsFloat]]
    careful_function: Callable[[Any], Any] | None = None


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


def measure_ranges(work: Work, missing: Sequence[range], num_workers: int) -> Generator[Part, None, None]:
    """Measures samples, in ranges that take about a quarter of a second each.

    Workers are spawned when the first part is requested, and end with the generator: if it is closed early, they are
    killed. Ctrl-C reaches only this process.

    Args:
      work: what is measured of which samples.
      missing: ids of the samples to measure; each part lies within one of these ranges.
      num_workers: processes that measure, at most one a sample; 0 measures in this process.

    Yields:
      The parts, in the order in which they are done.

    Raises:
      ValueError: values that `work.to_words` rejects; or, with workers, `work` does not pickle.
      RuntimeError: the dataset or the function failed on a sample, whose id is given; the cause is the original error,
        with its traceback as a note if it comes from a worker. Or a worker died; its samples are given.
    """
    ranges = _Ranges(missing)
    num_workers = min(num_workers, sum(map(len, missing)))
    if num_workers:
        yield from _measure_in_workers(work, ranges, num_workers)
        return
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
    values = []
    dataset, function, careful = work.dataset, work.function, work.careful_function or work.function
    try:
        for sample_id in samples:
            is_careful = sample_id < _FIRST_CAREFUL or not sample_id % _CAREFUL_EVERY
            values.append((careful if is_careful else function)(dataset[sample_id]))
    except Exception as error:
        raise RuntimeError(f"sample {sample_id} could not be measured: {error!r}") from error
    return Part(samples, *work.to_words(values, samples), time.perf_counter() - start)


class _Worker:
    """A process that measures ranges of samples, one at a time.

    An executor cannot say which samples a dead process had, nor, before Python 3.14, end its processes in the middle of
    a task.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._samples = range(0)
        with theirs:
            self._process.start()

    def prepare(self, pickled: bytes) -> None:
        """Hands over what all ranges need."""
        with self._alive():
            self.connection.send_bytes(pickled)

    def begin(self, samples: range) -> None:
        """Hands over a range."""
        self._samples = samples
        with self._alive():
            self.connection.send(samples)

    def end(self) -> Part:
        """The range it measured; raises what it failed with."""
        with self._alive():
            answer = self.connection.recv()
        if isinstance(answer, Part):
            return answer
        error, cause = answer
        raise error from cause

    def close(self, *, kill: bool) -> None:
        """Ends the process: at once, or after what it does at its exit."""
        self.connection.close()
        if kill:
            self._process.kill()
        self._process.join()
        self._process.close()

    @contextlib.contextmanager
    def _alive(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            self._process.join()
            code = self._process.exitcode or 0
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            had = f"samples {self._samples.start} to {self._samples.stop - 1}" if self._samples else "no samples yet"
            raise RuntimeError(
                f"a worker process {how}; it had {had}. Where memory ran out, take fewer workers; otherwise see what "
                "it printed. Shards that were finished are kept"
            ) from error


def _measure_in_workers(work: Work, ranges: _Ranges, num_workers: int) -> Generator[Part, None, None]:
    try:
        pickled = pickle.dumps(work, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise ValueError(f"workers need a dataset and a function that pickle: {error!r}") from error
    workers: list[_Worker] = []
    is_done = False
    resource_tracker.ensure_running()  # started within the block of Ctrl-C, it would end it
    try:
        with without_interrupts():  # Ctrl-C is for this process to handle, which then ends the others
            for _ in range(num_workers):
                workers.append(_Worker())
        for worker in workers:
            worker.prepare(pickled)
        del pickled
        busy: dict[Any, _Worker] = {}  # by connection
        idle = workers[::-1]
        while True:
            while idle and (samples := next(ranges, None)) is not None:
                worker = idle.pop()
                worker.begin(samples)
                busy[worker.connection] = worker
            if not busy:
                break
            for ready in wait(list(busy)):
                worker = busy.pop(ready)
                part = worker.end()
                idle.append(worker)
                ranges.adapt(part)
                yield part
        is_done = True
    finally:
        for worker in workers:
            worker.close(kill=not is_done)


def _serve(connection: Connection) -> None:
    """Measures ranges in a worker process until the other side closes or dies."""
    with contextlib.suppress(EOFError, ConnectionError):
        pickled = connection.recv_bytes()
        try:
            work = pickle.loads(pickled)
        except Exception as error:
            refused = ValueError(f"the dataset or the function does not unpickle in a worker process: {error!r}")
            connection.send((refused, portable_error(error)))
            return
        del pickled
        while True:
            samples = connection.recv()
            try:
                answer: Any = _measure_range(work, samples)
            except Exception as error:
                answer = error, None if error.__cause__ is None else portable_error(error.__cause__)
            connection.send(answer)
