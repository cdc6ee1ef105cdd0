"""Recompilations: in go a region of code, out comes every program that was compiled in it, why, and near which bucket.

That something was compiled, and whether it came from the persistent cache, is what JAX reports to listeners. Types and
differences are read from its log, whose wording is no contract: what is not understood there is left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import jax

from jvarlen.buckets import AnyBucket

__all__ = [
    "Recompilation",
    "RecompileCount",
    "RecompileError",
    "counting_in_thread",
    "dispatched",
    "no_recompiles",
]

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"

_LOWERING_LOG = "jax._src.interpreters.pxla"
_TRACING_LOG = "jax._src.interpreters.partial_eval"
_CACHE_LOGS = ("jax._src.compiler", "jax._src.compilation_cache")
_EXPLAIN = "jax_explain_cache_misses"
_TRACING_MESSAGE = "TRACING CACHE MISS"
# What the loggers of the persistent cache say as a warning where cache misses are explained, and else for debugging.
_CACHE_MESSAGES = ("PERSISTENT COMPILATION CACHE MISS", "Not writing persistent cache", "Writing %s to persistent")

_MAX_LISTED = 6  # differing leaves and further programs that a message names before it only counts
_MAX_CHARS = 200  # of one leaf: the static part of a pytree can be a whole model


class RecompileError(RuntimeError):
    """Something was compiled inside `no_recompiles`."""


class Recompilation(NamedTuple):
    """One program that was compiled, or taken from the persistent cache.

    Attributes:
      function: the name of the function or of the eager operation, such as "cumsum".
      arguments: types of the arguments that the program reads, each once with its number: "float32[3,9], 2 × int32[]".
        Empty where JAX did not tell them in the same thread.
      difference: what differs from the nearest call that was seen before: "x: now f32[2,5], before f32[2,4]". Empty
        where JAX explains nothing, as for eager operations.
      bucket: the bucket that was dispatched last in the process; None before the first.
      cache_hit: whether the executable came from the persistent cache.
      thread: the name of the thread that compiled.
      seconds: in the compiler, or of reading from the persistent cache.
    """

    function: str
    arguments: str
    difference: str
    bucket: str | None
    cache_hit: bool
    thread: str
    seconds: float


@dataclasses.dataclass
class RecompileCount:
    """What was compiled in a region so far.

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


@contextlib.contextmanager
def no_recompiles(action: Literal["raise", "warn", "count"] = "raise") -> Iterator[RecompileCount]:
    """Guards a region in which nothing may be compiled, eager operations and other threads included.

    A program that comes from the persistent cache counts as well: whether it is there is chance, that it was not
    planned is the mistake. Guards may be nested and may overlap in several threads; each sees all that is compiled.
    While one is active, JAX is made to explain what it traces; that is not printed unless it was switched on before.

    Args:
      action: `"raise"` raises where the compilation happens (and at the end of the region, where that was in another
        thread, or the error was swallowed); `"warn"` warns there; `"count"` only counts.

    Yields:
      A `RecompileCount` that goes on counting inside the region.

    Raises:
      RecompileError: under `"raise"`; it names the function, its types, the leaf that differs and the last bucket.
      ValueError: an unknown action.

    Example:
      >>> import jax.numpy as jnp
      >>> with no_recompiles("count") as count:
      ...     _ = jax.jit(lambda x: x * 3)(jnp.ones(7))
      >>> count.recompilations[-1].arguments
      'float32[7]'
    """
    if action not in ("raise", "warn", "count"):
        raise ValueError(f'action must be "raise", "warn" or "count", not {action!r}')
    with _explaining(), _counting(_Guard(RecompileCount(), action, None)) as count:
        yield count
    if action == "raise" and count.recompilations:
        raise RecompileError(_explain(count.recompilations))


@contextlib.contextmanager
def counting_in_thread() -> Iterator[RecompileCount]:
    """Counts what this thread compiles, while others may compile as well.

    It asks for no explanations: `arguments` and `difference` are empty unless `no_recompiles` is active too.

    Yields:
      A `RecompileCount` that goes on counting inside the region.

    Example:
      >>> lowered = jax.jit(lambda x: x * 5).lower(jax.ShapeDtypeStruct((7,), "float32"))
      >>> with counting_in_thread() as count:
      ...     _ = lowered.compile()
      >>> count.functions
      ['<lambda>']
    """
    with _counting(_Guard(RecompileCount(), "count", threading.get_ident())) as count:
        yield count


def dispatched(bucket: AnyBucket) -> None:
    """Notes the bucket whose step is dispatched now; what is compiled from now on is reported with it."""
    global _last_bucket
    _last_bucket = bucket


_last_bucket: AnyBucket | None = None


@dataclasses.dataclass(eq=False)
class _Guard:
    count: RecompileCount
    action: str
    thread: int | None  # None: all threads, since a data thread that compiles delays the step as well


_guards: list[_Guard] = []
_lock = threading.RLock()  # reentrant: collecting garbage may run code that compiles


class _Notes(threading.local):
    """What a thread has told of a program before the event that it is compiled.

    Attributes:
      cache_hit: whether the program that the thread is busy with came from the persistent cache.
      differences: by function, why it was traced; in the order of tracing.
      lowerings: by function, types and difference of the program that was lowered and not yet compiled; None where
        there are several, since it is not told which one is compiled.
    """

    def __init__(self) -> None:
        self.cache_hit = False
        self.differences: dict[str, str] = {}
        self.lowerings: dict[str, tuple[str, str] | None] = {}

    def traced(self, function: str, difference: str) -> None:
        self.differences.pop(function, None)
        self.differences[function] = difference

    def lowered(self, function: str, arguments: str) -> None:
        difference = self.differences.get(function, "")
        if difference:
            traced = list(self.differences)
            for part in traced[traced.index(function) :]:  # what came after it was traced as a part of it
                del self.differences[part]
        self.lowerings[function] = None if function in self.lowerings else (arguments, difference)

    def compiled(self, function: str) -> tuple[str, str]:
        return self.lowerings.pop(function, None) or ("", "")


_notes = _Notes()


class _WhileUsed:
    """A context that is entered with its first user and left with its last."""

    def __init__(self, make_context: Callable[[], contextlib.AbstractContextManager[None]]):
        self._make_context = make_context
        self._num_users = 0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with _lock:
            if not self._num_users:
                self._context = self._make_context()
                self._context.__enter__()
            self._num_users += 1
        try:
            yield
        finally:
            with _lock:
                self._num_users -= 1
                if not self._num_users:
                    self._context.__exit__(None, None, None)


@contextlib.contextmanager
def _listeners() -> Iterator[None]:
    global _notes
    _notes = _Notes()  # a thread may have been in the middle of a program when the last guard left
    jax.monitoring.register_event_duration_secs_listener(_on_duration)
    jax.monitoring.register_event_listener(_on_event)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(_on_duration)
        jax.monitoring.unregister_event_listener(_on_event)


@contextlib.contextmanager
def _explanations() -> Iterator[None]:
    explained_before = getattr(jax.config, _EXPLAIN)
    lowering_log = logging.getLogger(_LOWERING_LOG)
    level_before = lowering_log.level

    def hear(record: logging.LogRecord) -> bool:
        with contextlib.suppress(Exception):  # the log is no contract, and must not break what is compiled
            _note_record(record)
        if record.name == _LOWERING_LOG:
            parent = lowering_log.parent
            return record.levelno >= (level_before or (parent.getEffectiveLevel() if parent else logging.WARNING))
        if explained_before or not isinstance(record.msg, str):
            return True
        if record.msg.startswith(_CACHE_MESSAGES):
            record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
            return logging.getLogger(record.name).isEnabledFor(logging.DEBUG)
        return not record.msg.startswith(_TRACING_MESSAGE)

    loggers = [lowering_log, *map(logging.getLogger, (_TRACING_LOG, *_CACHE_LOGS))]
    for logger in loggers:
        logger.addFilter(hear)
    if not lowering_log.isEnabledFor(logging.DEBUG):
        lowering_log.setLevel(logging.DEBUG)
    if not explained_before:
        jax.config.update(_EXPLAIN, True)
    try:
        yield
    finally:
        if not explained_before:
            jax.config.update(_EXPLAIN, False)
        lowering_log.setLevel(level_before)
        for logger in loggers:
            logger.removeFilter(hear)


_listening = _WhileUsed(_listeners)
_explaining = _WhileUsed(_explanations)


@contextlib.contextmanager
def _counting(guard: _Guard) -> Iterator[RecompileCount]:
    with _listening():
        with _lock:
            _guards.append(guard)
        try:
            yield guard.count
        finally:
            with _lock:
                _guards.remove(guard)


def _on_event(event: str, **details: Any) -> None:
    if event == _CACHE_HIT_EVENT:
        _notes.cache_hit = True


def _on_duration(event: str, duration_secs: float, **details: Any) -> None:
    if event != _COMPILE_EVENT:
        return
    function = _plain_name(str(details.get("fun_name", "an unnamed function")))
    cache_hit, _notes.cache_hit = _notes.cache_hit, False
    bucket = None if _last_bucket is None else str(_last_bucket)
    thread = threading.current_thread()
    recompilation = Recompilation(
        function, *_notes.compiled(function), bucket, cache_hit, thread.name, float(duration_secs)
    )
    with _lock:
        guards = [guard for guard in _guards if guard.thread in (None, thread.ident)]
        for guard in guards:
            guard.count.recompilations.append(recompilation)
    actions = {guard.action for guard in guards}
    if "warn" in actions:
        warnings.warn(_explain([recompilation]), stacklevel=_outer_stacklevel())
    if "raise" in actions:
        raise RecompileError(_explain([recompilation]))


def _outer_stacklevel() -> int:
    """The stack level, seen from the caller, of the nearest code that belongs neither to JAX nor to this module."""
    inner = (os.path.dirname(jax.__file__) + os.sep, __file__)
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inner):
        frame, level = frame.f_back, level + 1
    return level


def _explain(recompilations: list[Recompilation]) -> str:
    first, *others = recompilations
    text = f"{first.function!r} was compiled inside no_recompiles()"
    if first.arguments:
        text += f" for {first.arguments}"
    text += f": {first.difference or 'its shapes, dtypes or shardings were not seen before'}"
    if first.cache_hit:
        text += "; the executable came from the persistent cache"
    if first.bucket is not None:
        text += f"; the bucket dispatched last was {first.bucket}"
    if first.thread != threading.main_thread().name:
        text += f"; in thread {first.thread}"
    if others:
        names = dict.fromkeys(other.function for other in others)
        text += f". Compiled after it: {len(others)} more, of {_listed(names)}"
    return text


def _listed(items: Iterable[str], separator: str = ", ") -> str:
    items = list(items)
    more = [f"and {len(items) - _MAX_LISTED} more"] if len(items) > _MAX_LISTED else []
    return separator.join(items[:_MAX_LISTED] + more)


def _plain_name(name: str) -> str:
    """`cumsum` of `jit(cumsum)`."""
    match = re.fullmatch(r"jit\((.*)\)", name)
    return match[1] if match else name


def _note_record(record: logging.LogRecord) -> None:
    if record.name == _LOWERING_LOG and str(record.msg).startswith("Compiling"):
        match record.args:
            case (str(name), [*avals], *_):
                _notes.lowered(_plain_name(name), _types(avals))
    elif record.name == _TRACING_LOG and str(record.msg).startswith(_TRACING_MESSAGE):
        _note_explanation(record.getMessage().splitlines()[1:])


def _types(avals: list[Any]) -> str:
    types = Counter(
        f"{aval.dtype}[{','.join(map(str, aval.shape))}]" if hasattr(aval, "shape") else str(aval) for aval in avals
    )
    return ", ".join(f"{number} × {name}" if number > 1 else name for name, number in types.items())


def _note_explanation(lines: list[str]) -> None:
    """Notes what follows the headline: the function, then that it is new, or how its closest earlier call differs."""
    if lines[0].strip().startswith("never seen function"):
        function = lines[1].split(" id=")[0].strip()
        again = any("another function defined on the same line" in line for line in lines)
        _notes.traced(function, "the function is new" + ", though another of that line was seen before" * again)
    elif match := re.fullmatch(r"\s*for (.+?)(?: defined at .*)?", lines[0]):
        rest = [line.strip() for line in lines[2:]]
        leaves = [line.removeprefix("* ") for line in rest if line.startswith("* ")]
        _notes.traced(match[1], _listed(map(_short_difference, leaves or rest), "; "))


def _short_difference(line: str) -> str:
    """`x: now f32[2,5], before f32[2,4]` of `at x, now f32[2,5] and before f32[2,4]`; other lines as they are."""
    line = re.sub(r"https?://\S*$", "", line)  # a hint to the documentation, without a line of its own
    match = re.fullmatch(r"at (?:input path )?(.+?), now (.+?) and before (.+)", line)
    text = f"{match[1]}: now {match[2]}, before {match[3]}" if match else line
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 1] + "…"
