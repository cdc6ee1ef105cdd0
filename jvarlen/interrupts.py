"""Interrupts: in goes Ctrl-C, out comes an end at a place where nothing is cut in two."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["is_interrupted", "raise_if_interrupted", "remembered_interrupts", "without_interrupts"]

_pressed = threading.Event()
_remembering = threading.Event()  # inside the outermost block


@contextmanager
def remembered_interrupts() -> Iterator[threading.Event]:
    """Inside, the first Ctrl-C only sets the event, and long work looks at it where it can stop; the second one raises.

    An exception out of a signal handler can strike anywhere: inside the compiler, or where a library prints and forgets
    it. In other threads than the main one nothing changes, nor in a block inside another: the outer one remembers.

    Yields:
      The event.
    """
    if threading.current_thread() is not threading.main_thread() or _remembering.is_set():
        yield _pressed
        return

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        _pressed.set()
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        _remembering.set()
        yield _pressed
    finally:
        _remembering.clear()
        signal.signal(signal.SIGINT, previous)
        _pressed.clear()


def is_interrupted() -> bool:
    """Whether Ctrl-C was pressed inside `remembered_interrupts`."""
    return _pressed.is_set()


def raise_if_interrupted() -> None:
    """Raises KeyboardInterrupt where Ctrl-C was pressed inside `remembered_interrupts`; else nothing happens."""
    if is_interrupted():
        raise KeyboardInterrupt


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Threads and processes started inside never see Ctrl-C: they inherit that it is blocked here."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
