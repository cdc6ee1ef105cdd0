"""Measures ranges of samples in worker processes."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Generator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.workers import WorkerPool, portable_error
from jvarlen.data.sample_ranges import MeasuredRange, Ranges, Work, measure_range

__all__ = ["measure_elsewhere"]

_Answer = MeasuredRange | tuple[Exception, list[bytes] | None]  # an error comes with its packed cause


def measure_elsewhere(work: Work, ranges: Ranges, num_workers: int) -> Generator[MeasuredRange, None, None]:
    """The parts of `measure_ranges` as worker processes finish them."""
    pending: dict[Future[_Answer], range] = {}
    with WorkerPool(work, num_workers) as pool:

        def failure(error: Exception, of: Future[_Answer] | None = None) -> RuntimeError:
            had = pending.values() if of is None or isinstance(error, BrokenExecutor) else [pending[of]]
            listed = list_first((f"{samples.start} to {samples.stop - 1}" for samples in had), " or ")
            return RuntimeError(
                f"a worker process {pool.kill()}; it had {f'samples {listed}' if listed else 'no samples'}. Where "
                "memory ran out, take fewer workers; otherwise see what it printed. Shards that were finished are "
                f"kept; {ranges.num_left:,} samples are left"
            )

        while True:
            try:
                for samples in itertools.islice(ranges, num_workers - len(pending)):
                    pending[pool.apply(_answer, samples)] = samples
            except Exception as error:
                raise failure(error) from error
            if not pending:
                return
            finished = wait(pending, return_when=FIRST_COMPLETED).done
            for future in sorted(finished, key=lambda each: each.exception() is not None):
                try:
                    answer = future.result()
                except UserError:  # the work does not unpickle in a worker
                    raise
                except Exception as error:
                    raise failure(error, future) from error
                samples = pending.pop(future)
                if not isinstance(answer, MeasuredRange):
                    of_sample, packed = answer
                    raise of_sample from None if packed is None else _unpacked(packed)
                ranges.adapt(answer, samples)
                yield answer


def _answer(work: Work, samples: range) -> _Answer:
    """A part; or an error and its cause, which pickling would lose."""
    try:
        return measure_range(work, samples)
    except Exception as error:
        cause = None if error.__cause__ is None else _packed(error.__cause__)
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
