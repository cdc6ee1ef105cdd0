"""Ends all processes when one of them stalls.

A process whose disk hangs stays alive, and the others would wait for it in the next collective for ever. They cannot
raise an error from inside the runtime, so a thread prints the reason and ends the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping

import jax

from jvarlen._common.checks import list_first
from jvarlen.distributed.processes import is_main_process, key_value_store

__all__ = ["Ticks", "ending_stalled_processes"]

_EXIT_CODE = 2  # that of the command for a lost process
_num_blocks = 0  # so far: all processes enter the same blocks, and each has keys of its own


class Ticks:
    """Counts the steps of this process, for the others to see; called at every step."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._num_waits = 0

    def __call__(self) -> None:
        """Counts a step."""
        self._num_steps += 1

    def wait(self) -> None:
        """Shows that this process is alive although it takes no step, as while it waits for the compiler."""
        self._num_waits += 1

    def __str__(self) -> str:
        return f"{self._num_steps}.{self._num_waits}"


@contextlib.contextmanager
def ending_stalled_processes(doing: str, stall_timeout_s: float, *, interval_s: float = 1.0) -> Iterator[Ticks]:
    """A block in which all processes end when none has ticked for too long; the error names those that are behind.

    Every process prints that error to standard error and exits with code 2; a process that is behind also prints where
    in the code it is. Nothing is saved and no exception is raised, because the main thread may be waiting in a
    collective that nothing interrupts. Processes tick at the same work, such as a step, and none can be far ahead.

    Args:
      doing: what the block does, as a noun for the error.
      stall_timeout_s: seconds; longer than the longest pause between two ticks, which a checkpoint may make.
      interval_s: seconds between two looks at the others.

    Yields:
      `Ticks`, to call at every step once this process has its own part, before the computation that needs all parts:
      processes that are behind have then ticked less. It takes no time, and does nothing in a single process.

    Example:
      >>> with ending_stalled_processes("training", 600) as tick:
      ...     for step in range(3):
      ...         tick()
    """
    if jax.process_count() == 1:
        yield Ticks()
        return
    global _num_blocks
    _num_blocks += 1
    own = Ticks()
    left = threading.Event()

    def watch(prefix: str) -> None:
        store = key_value_store()
        seen: list[tuple[str, str]] = []
        last_move = time.monotonic()
        while not left.wait(interval_s):
            try:
                store.key_value_set(f"{prefix}{jax.process_index()}", str(own), allow_overwrite=True)
                shared = sorted(store.key_value_dir_get(prefix))
            except Exception:  # process 0 is lost, which JAX notices as well: it ends this process
                return
            ticks = dict.fromkeys(range(jax.process_count()), 0) | {
                int(key.rpartition("/")[2]): int(value.partition(".")[0]) for key, value in shared
            }
            if shared != seen:
                seen, last_move = shared, time.monotonic()
            elif time.monotonic() - last_move >= stall_timeout_s:
                _end(
                    f"{doing} has stalled: no step in {stall_timeout_s:g} s; {_who_is_behind(ticks)}", ticks, interval_s
                )

    thread = threading.Thread(target=watch, args=(f"jvarlen/ticks-{_num_blocks}/",), name="watchdog", daemon=True)
    thread.start()
    try:
        yield own
    finally:
        left.set()
        thread.join()


def _who_is_behind(ticks: Mapping[int, int]) -> str:
    """The processes that have ticked least."""
    least, most = min(ticks.values()), max(ticks.values())
    behind = [process for process, count in ticks.items() if count == least]
    if least == most:
        return f"all processes stand after step {least:,}"
    stand = "stands" if len(behind) == 1 else "stand"
    return f"process{'es' * (len(behind) > 1)} {list_first(behind)} {stand} after step {least:,}, others after {most:,}"


def _end(message: str, ticks: Mapping[int, int], interval_s: float) -> None:
    print(f"jvarlen: {message}", file=sys.stderr, flush=True)
    if ticks[jax.process_index()] == min(ticks.values()):
        faulthandler.dump_traceback(sys.stderr)
    if is_main_process():
        time.sleep(3 * interval_s)  # without it, the others end before they can say why
    os._exit(_EXIT_CODE)
