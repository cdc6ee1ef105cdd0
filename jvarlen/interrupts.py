"""Interrupts: in goes Ctrl-C, out comes an end at a place where nothing is cut in two."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupts", "without_interrupts"]


class Interrupts:
    """While it is open as a context, the first Ctrl-C is remembered.

    Outside `postponed` it raises KeyboardInterrupt as usual; should a library swallow that, `check` raises it again.
    Inside `postponed` it only sets `pressed`. The second Ctrl-C always raises. In other threads than the main one
    nothing changes.

    Attributes:
      pressed: set once Ctrl-C was pressed.
    """

    def __init__(self) -> None:
        self.pressed = threading.Event()
        self._postponed = False

    def __enter__(self) -> Interrupts:
        self._in_main_thread = threading.current_thread() is threading.main_thread()
        if self._in_main_thread:
            self._previous = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._in_main_thread:
            signal.signal(signal.SIGINT, self._previous)

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        is_second = self.pressed.is_set()
        self.pressed.set()
        if is_second or not self._postponed:
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raises KeyboardInterrupt where Ctrl-C was pressed."""
        if self.pressed.is_set():
            raise KeyboardInterrupt

    @contextmanager
    def postponed(self) -> Iterator[threading.Event]:
        """A region that looks at the event itself, and ends where it suits it."""
        self.check()
        self._postponed = True
        try:
            yield self.pressed
        finally:
            self._postponed = False


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Threads and processes started inside never see Ctrl-C: they inherit that it is blocked here."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
