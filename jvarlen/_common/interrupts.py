"""Ctrl-C and SIGTERM, deferred to a point where the program can stop safely."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any

__all__ = [
    "exit_code_of_interrupt", "interrupt_signal", "is_interrupted", "raise_if_interrupted", "remembered_interrupts",
    "take_interrupt", "without_interrupts",
]  # fmt: skip

_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # Ctrl-C, and what comes before a machine or a job's time is taken away

_pressed = threading.Event()
_remembering = threading.Event()  # inside the outermost block
_remembered: int = signal.SIGINT


@contextmanager
def remembered_interrupts() -> Iterator[threading.Event]:
    """A block in which the first Ctrl-C or SIGTERM only sets the event; long work checks it where it can stop.

    The second one, of either kind, acts as before the block: Ctrl-C raises, SIGTERM ends the process. An
    exception raised by a signal handler could strike anywhere: inside the compiler, or in library code that prints and
    drops it. Outside the main thread nothing changes, nor in a nested block: the outer block handles the signal.

    Yields:
      The event.
    """
    if threading.current_thread() is not threading.main_thread() or _remembering.is_set():
        yield _pressed
        return

    global _remembered
    _remembered = signal.SIGINT
    previous: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        global _remembered
        _remembered = signum
        _pressed.set()
        restore()

    try:
        _remembering.set()
        for number in _SIGNALS:
            previous[number] = signal.getsignal(number)
            signal.signal(number, on_interrupt)
        yield _pressed
    finally:
        _remembering.clear()
        restore()
        _pressed.clear()


def is_interrupted() -> bool:
    """Whether Ctrl-C or SIGTERM came inside `remembered_interrupts`."""
    return _pressed.is_set()


def interrupt_signal() -> int:
    """The signal that came inside `remembered_interrupts`; 0 if none did."""
    return _remembered if is_interrupted() else 0


def take_interrupt(number: int) -> None:
    """Inside `remembered_interrupts`, treats a signal that another process received as one of this process."""
    global _remembered
    _remembered = number
    _pressed.set()


def raise_if_interrupted() -> None:
    """Raises KeyboardInterrupt if Ctrl-C or SIGTERM came inside `remembered_interrupts`."""
    if is_interrupted():
        raise KeyboardInterrupt


def exit_code_of_interrupt() -> int:
    """The exit code of an interrupted program: 143 if the latest block remembered SIGTERM, otherwise 130.

    That is 128 plus the signal number, as shells report a process that was ended by a signal.

    Example:
      >>> exit_code_of_interrupt()
      130
    """
    return 128 + _remembered


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Threads and processes started inside never see Ctrl-C or SIGTERM; their owner ends them, by SIGKILL at worst."""
    resource_tracker.ensure_running()  # started within the block, as by workers, it would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
