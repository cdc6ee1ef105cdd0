"""Applies a function to ranges of samples in worker processes."""

from __future__ import annotations

import itertools
import os
import pickle
import queue
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int64

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.workers import WorkerPool, portable_error
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
    """What measures ranges of samples; a worker process gets it once, pickled."""

    dataset: DataSource
    function: Callable[[Any], Any]
    to_words: Callable[[list[Any], range], tuple[Words, IsFloat]]  # raises ValueError that lists rejected values
    careful_function: Callable[[Any], Any] | None = None  # for a few of the samples: inspecting all takes too long
    read_values: Callable[[range], list[int] | None] | None = None  # of consecutive samples; None where it cannot


class MeasuredRange(NamedTuple):
    """The values of a range of samples, and the seconds that measuring them took."""

    samples: range
    words: Words
    is_float: IsFloat
    seconds: float


# An error comes with its packed cause. None: the process has yet to be handed the work.
_Answer = MeasuredRange | tuple[Exception, list[bytes] | None] | None
_Submit = Callable[[range, bool], Future[_Answer]]  # True hands the work over once more


def measure_ranges(
    work: Work,
    missing: Sequence[range],
    num_workers: int,
    executor: Executor | None = None,
    executor_timeout_s: float | None = None,
) -> Generator[MeasuredRange, None, None]:
    """Measures the missing samples in ranges of about a quarter of a second, with the options of `measure_lengths`."""
    ranges = _Ranges(missing)
    num_workers = min(num_workers, ranges.num_left)
    if executor is not None:
        num_ranges = num_workers or os.cpu_count() or 1
        key, num_unaware = uuid.uuid4().hex, itertools.count(num_ranges, -1)

        def submit(samples: range, hands_work: bool) -> Future[_Answer]:
            handed = work if hands_work or next(num_unaware) > 0 else None
            return executor.submit(_answer_of_executor, key, handed, samples)

        try:
            yield from _measure_in(submit, ranges, num_ranges, executor_timeout_s, executor)
        finally:
            _kept.pop(key, None)  # of an executor that runs threads of this process
    elif num_workers:
        with WorkerPool(work, num_workers) as pool:
            yield from _measure_in(lambda samples, _: pool.apply(_answer, samples), ranges, num_workers, None, pool)
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
    submit: _Submit, ranges: _Ranges, num_ranges: int, timeout_s: float | None, executor: Executor
) -> Generator[MeasuredRange, None, None]:
    """The parts, as an executor with this many ranges at a time finishes them."""
    pending: dict[Future[_Answer], range] = {}
    done: queue.SimpleQueue[Future[_Answer]] = queue.SimpleQueue()

    def add(samples: range, hands_work: bool = False) -> None:
        future = submit(samples, hands_work)
        pending[future] = samples
        future.add_done_callback(done.put)  # `wait` would not see what a shutdown cancels

    def failure(error: Exception, had: Iterable[range]) -> RuntimeError:
        listed = list_first((f"{samples.start} to {samples.stop - 1}" for samples in had), " or ")
        it_had = f"it had {f'samples {listed}' if listed else 'no samples'}"
        if isinstance(executor, WorkerPool):
            told = f"a worker process {executor.kill()}; {it_had}. Where memory ran out, take fewer workers; otherwise "
            told += "see what it printed"
        else:
            told = f"{type(executor).__name__} failed: {error!r}; {it_had}. To resume, repeat the call with one that "
            told += "works; the dataset and the function must pickle for its processes"
        return RuntimeError(f"{told}. Shards that were finished are kept; {ranges.num_left:,} samples are left")

    try:
        while True:
            try:
                for samples in itertools.islice(ranges, num_ranges - len(pending)):
                    add(samples)
                if not pending:
                    return
                finished = [done.get(timeout=timeout_s and min(timeout_s, threading.TIMEOUT_MAX))]
            except queue.Empty:
                cause = TimeoutError(f"no task was done within executor_timeout_s={timeout_s:g}")
                raise failure(cause, pending.values()) from cause
            except Exception as error:
                raise failure(error, pending.values()) from error
            while not done.empty():  # only this thread takes from it
                finished.append(done.get())
            for future in sorted(finished, key=lambda each: each.cancelled() or each.exception() is not None):
                try:
                    answer = future.result()
                except UserError:  # the work does not unpickle in a worker
                    raise
                except Exception as error:
                    is_of_all = isinstance(error, BrokenExecutor | CancelledError)
                    raise failure(error, pending.values() if is_of_all else [pending[future]]) from error
                samples = pending.pop(future)
                if answer is None:
                    add(samples, hands_work=True)
                    continue
                if not isinstance(answer, MeasuredRange):
                    of_sample, packed = answer
                    raise of_sample from None if packed is None else _unpacked(packed)
                ranges.adapt(answer, samples)
                yield answer
    finally:
        for future in pending:
            future.cancel()


_kept: dict[str, Work] = {}  # in a process of an executor: the work by its key


def _answer_of_executor(key: str, work: Work | None, samples: range) -> _Answer:
    if work is not None:
        for old in list(_kept)[: 1 - _MOST_KEPT]:
            _kept.pop(old, None)
        _kept[key] = work
    kept = _kept.get(key)
    return kept and _answer(kept, samples)


def _answer(work: Work, samples: range) -> _Answer:
    """A part; or an error and its cause, which pickling would lose."""
    try:
        return _measure_range(work, samples)
    except Exception as error:
        cause = None if error.__cause__ is None else _packed(error.__cause__)
        error.__cause__ = error.__context__ = None  # Dask's pickling would take them along
        return error, cause


def _packed(error: BaseException) -> list[bytes]:
    """The error, and its text and notes as a RuntimeError, for a process that may lack its type."""
    portable, plain = portable_error(error), RuntimeError(repr(error))
    plain.__notes__ = portable.__notes__
    return [pickle.dumps(portable), pickle.dumps(plain)]


def _unpacked(cause: list[bytes]) -> BaseException:
    try:
        return pickle.loads(cause[0])
    except Exception:  # whatever the type's module raises here
        return pickle.loads(cause[1])
