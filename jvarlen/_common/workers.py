"""Worker processes that hold one value, and errors that survive pickling between processes."""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.queues import Queue
from typing import Any

from jvarlen._common.checks import UserError
from jvarlen._common.interrupts import without_interrupts

__all__ = ["WorkerPool", "portable_error"]


class WorkerPool(ProcessPoolExecutor):
    """Spawned processes that hold a value, see no Ctrl-C, and end with this process, or when a block ends early."""

    def __init__(self, held: Any, num_workers: int) -> None:
        try:
            pickled = pickle.dumps(held, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise UserError(f"workers need a dataset and functions that pickle: {error!r}") from error
        context = multiprocessing.get_context("spawn")
        handed_over = context.Queue()  # as an argument of theirs, one worker would wait for the start of the other
        handed_over.cancel_join_thread()
        for _ in range(num_workers):
            handed_over.put(pickled)
        super().__init__(num_workers, context, _begin_worker, (handed_over,))
        self.num_workers = num_workers

    def apply(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Submits `function(held, *args)`."""
        with without_interrupts():  # inherited by processes that start here; this one ends them
            return self.submit(_apply, function, *args)

    def kill(self) -> str:
        """Ends all processes at once, and returns how one had ended before; nothing happens after `shutdown`."""
        processes = self.kill_processes()
        self.shutdown()
        killed = -signal.SIGKILL
        code = next((process.exitcode or 0 for process in processes if process.exitcode != killed), killed)
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def kill_processes(self) -> list[Any]:
        """Kills all processes, so that submitted calls fail, and waits for nothing."""
        processes = list((self._processes or {}).values())  # `kill_workers` is of Python 3.14
        for process in processes:
            process.kill()
        return processes

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is None:
            self.shutdown()
        else:
            self.kill()


_handed_over = b""  # in a worker: the pickled value


def _begin_worker(handed_over: Queue[bytes]) -> None:
    global _handed_over

    def end_with_parent() -> None:
        multiprocessing.parent_process().join()  # type: ignore[union-attr]
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    _handed_over = handed_over.get()


def _apply(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(_held(), *args)
    except Exception as error:
        raise portable_error(error) from None


@functools.cache
def _held() -> Any:
    try:
        return pickle.loads(_handed_over)
    except Exception as error:
        raise UserError(f"the dataset or a function does not unpickle in a worker process: {error!r}") from error


def portable_error(error: BaseException) -> BaseException:
    """The error with its traceback as a note; a RuntimeError with its text and notes if it cannot be pickled."""
    trace = "".join(traceback.format_exception(error))
    try:
        portable = pickle.loads(pickle.dumps(error))  # what this process itself pickled
        if type(portable) is not type(error):
            raise TypeError("pickled as another type")
    except Exception:
        portable = RuntimeError(repr(error))
        for note in getattr(error, "__notes__", ()):
            portable.add_note(note)
    portable.add_note(f"In a worker process:\n{trace}")
    return portable
