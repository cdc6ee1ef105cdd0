"""The guard against recompiling: the programs that were compiled in a region, and after which bucket."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import warnings
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax

from jvarlen._common.checks import check_choices, list_first
from jvarlen._common.keywords import check_keywords
from jvarlen.planning.buckets import AnyBucket

__all__ = [
    "Recompilation", "RecompileCount", "RecompileError", "counting_in_thread", "no_recompiles", "note_dispatch",
    "uncounted_in_thread",
]  # fmt: skip

Action = Literal["raise", "warn", "count"]

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"


class RecompileError(RuntimeError):
    """Something was compiled inside `no_recompiles`."""


class Recompilation(NamedTuple):
    """One program that was compiled, or taken from the persistent cache.

    Attributes:
      function: the name of the function or of the eager operation, such as "cumsum".
      bucket: the bucket that was dispatched last inside the region; None before the first.
      cache_hit: whether the executable came from the persistent cache.
      thread: the name of the thread that compiled.
      seconds: in the compiler, or of reading from the persistent cache.
    """

    function: str
    bucket: str | None
    cache_hit: bool
    thread: str
    seconds: float


@dataclasses.dataclass
class RecompileCount:
    """The programs that have been compiled in a region so far.

    Attributes:
      recompilations: every program that was compiled, or taken from the persistent cache, in order.
    """

    recompilations: list[Recompilation] = dataclasses.field(default_factory=list)

    @property
    def functions(self) -> list[str]:
        """The names of all programs, in order."""
        return [recompilation.function for recompilation in self.recompilations]

    @property
    def num_compilations(self) -> int:
        """Programs that were compiled or taken from the persistent cache."""
        return len(self.recompilations)

    @property
    def num_cache_hits(self) -> int:
        """Programs that were taken from the persistent cache."""
        return sum(recompilation.cache_hit for recompilation in self.recompilations)

    @property
    def num_compiled(self) -> int:
        """Programs that the compiler made."""
        return self.num_compilations - self.num_cache_hits


@check_keywords
@contextlib.contextmanager
def no_recompiles(action: Action = "raise") -> Iterator[RecompileCount]:
    """Guards a region in which nothing may be compiled, eager operations and other threads included.

    A program from the persistent cache counts too, because the cache may be empty next time. Guards may be nested and
    may overlap in several threads; each sees everything that is compiled. JAX logs which argument has changed since
    the last call if the environment variable `JAX_EXPLAIN_CACHE_MISSES` is 1.

    Args:
      action: `"raise"` raises where the compilation happens (and at the end of the region, where that was in another
        thread, or the error was caught); `"warn"` warns there; `"count"` only counts.

    Yields:
      A `RecompileCount` that counts while the region runs.

    Raises:
      RecompileError: under `"raise"`; it names the function and the last bucket.
      ValueError: an unknown action.

    Example:
      >>> import jax.numpy as jnp
      >>> with no_recompiles("count") as count:
      ...     _ = jax.jit(lambda x: x * 3)(jnp.ones(7))
      >>> count.functions[-1]
      '<lambda>'
    """
    check_choices(action=(action, Action))
    with _register(_Guard(RecompileCount(), action, None)) as count:
        yield count
    if action == "raise" and count.recompilations:
        raise RecompileError(_explain(count.recompilations))


def counting_in_thread() -> contextlib.AbstractContextManager[RecompileCount]:
    """Counts the programs that this thread compiles, while others may compile as well."""
    return _register(_Guard(RecompileCount(), "count", threading.get_ident()))


@contextlib.contextmanager
def uncounted_in_thread() -> Iterator[None]:
    """A block in which `no_recompiles` does not count the programs that this thread compiles, as they are planned."""
    before, _this_thread.is_uncounted = _this_thread.is_uncounted, True
    try:
        yield
    finally:
        _this_thread.is_uncounted = before


def note_dispatch(bucket: AnyBucket) -> None:
    """Tells the guards whose step is dispatched now: they name the bucket with what is compiled later."""
    with _lock:
        for guard in _guards:
            guard.last_bucket = bucket


@dataclasses.dataclass(eq=False)
class _Guard:
    count: RecompileCount
    action: Action
    thread: int | None  # None: all threads, since a data thread that compiles delays the step as well
    last_bucket: AnyBucket | None = None  # that was dispatched since the region began


class _ThisThread(threading.local):
    is_uncounted = False
    is_cache_hit = False  # whether its current program came from the persistent cache


_guards: list[_Guard] = []
_lock = threading.RLock()  # reentrant: collecting garbage may run code that compiles
_this_thread = _ThisThread()


@contextlib.contextmanager
def _register(guard: _Guard) -> Iterator[RecompileCount]:
    _listen()
    with _lock:
        _guards.append(guard)
    try:
        yield guard.count
    finally:
        with _lock:
            _guards.remove(guard)


@functools.cache
def _listen() -> None:
    """Has JAX report what it compiles, from the first guard on."""
    jax.monitoring.register_event_duration_secs_listener(_on_duration)
    jax.monitoring.register_event_listener(_on_event)


def _on_event(event: str, **details: Any) -> None:
    if event == _CACHE_HIT_EVENT:
        _this_thread.is_cache_hit = True


def _on_duration(event: str, duration_secs: float, **details: Any) -> None:
    if event != _COMPILE_EVENT:
        return
    is_hit, _this_thread.is_cache_hit = _this_thread.is_cache_hit, False
    thread = threading.current_thread()
    counting = (thread.ident,) if _this_thread.is_uncounted else (None, thread.ident)
    with _lock:
        guards = [guard for guard in _guards if guard.thread in counting]
        if not guards:
            return
        function = str(details.get("fun_name", "an unnamed function"))
        function = function.removeprefix("jit(").removesuffix(")") if function.startswith("jit(") else function
        for guard in guards:
            bucket = None if guard.last_bucket is None else str(guard.last_bucket)
            recompilation = Recompilation(function, bucket, is_hit, thread.name, float(duration_secs))
            guard.count.recompilations.append(recompilation)
    for action in ("warn", "raise"):
        text = next((_explain(guard.count.recompilations[-1:]) for guard in guards if guard.action == action), "")
        if text and action == "warn":
            warnings.warn(text, stacklevel=2)
        elif text:
            raise RecompileError(text)


def _explain(recompilations: list[Recompilation]) -> str:
    first, *others = recompilations
    text = f"{first.function!r} was compiled inside no_recompiles()"
    if first.cache_hit:
        text += "; the executable came from the persistent cache"
    if first.bucket is not None:
        text += f"; the bucket dispatched last was {first.bucket}"
    if first.thread != threading.main_thread().name:
        text += f"; in thread {first.thread}"
    if others:
        names = dict.fromkeys(other.function for other in others)
        text += f". Compiled after it: {len(others)} more, of {list_first(names)}"
    return f"{text}. JAX logs why with JAX_EXPLAIN_CACHE_MISSES=1"
