"""Measures ranges of samples in worker processes, or in those of an executor."""

from __future__ import annotations

import itertools
import os
import pickle
import queue
import threading
import uuid
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.workers import WorkerPool, portable_error
from jvarlen.data.sample_ranges import MeasuredRange, Ranges, Work, measure_range

__all__ = ["measure_elsewhere"]

_MOST_KEPT = 2  # datasets that a process of an executor holds

# An error comes with its packed cause. None: the process has yet to be handed the work.
_Answer = MeasuredRange | tuple[Exception, list[bytes] | None] | None
_Submit = Callable[[range, bool], Future[_Answer]]  # True hands the work over once more


def measure_elsewhere(
    work: Work, ranges: Ranges, num_workers: int, executor: Executor | None, executor_timeout_s: float | None
) -> Generator[MeasuredRange, None, None]:
    """The parts of `measure_ranges` as other processes finish them."""
    if executor is None:
        with WorkerPool(work, num_workers) as pool:
            yield from _measure_in(lambda samples, _: pool.apply(_answer, samples), ranges, num_workers, None, pool)
        return
    num_ranges = num_workers or os.cpu_count() or 1
    key, num_unaware = uuid.uuid4().hex, itertools.count(num_ranges, -1)

    def submit(samples: range, hands_work: bool) -> Future[_Answer]:
        handed = work if hands_work or next(num_unaware) > 0 else None
        return executor.submit(_answer_of_executor, key, handed, samples)

    try:
        yield from _measure_in(submit, ranges, num_ranges, executor_timeout_s, executor)
    finally:
        _kept.pop(key, None)  # of an executor that runs threads of this process


def _measure_in(
    submit: _Submit, ranges: Ranges, num_ranges: int, timeout_s: float | None, executor: Executor
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
        return measure_range(work, samples)
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
