"""Best effort: reads JAX's log for the argument types of a program and the reason it was traced.

The wording of that log may change at any time. Lines that are not understood are skipped.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax

from jvarlen.compiling.recompiles import plain_name

__all__ = ["explaining", "told_of"]

# Private loggers of JAX: what is public, `jax.monitoring`, tells neither the types of a program nor why it was traced.
_LOWERING_LOG = "jax._src.interpreters.pxla"
_TRACING_LOG = "jax._src.interpreters.partial_eval"
_CACHE_LOGS = ("jax._src.compiler", "jax._src.compilation_cache")
_EXPLAIN = "jax_explain_cache_misses"
_TRACING_MESSAGE = "TRACING CACHE MISS"
# What the loggers of the persistent cache say where cache misses are explained.
_CACHE_MESSAGES = ("PERSISTENT COMPILATION CACHE MISS", "Not writing persistent cache", "Writing %s to persistent")
_MAX_LISTED = 6  # differing leaves that are named before the others are only counted
_MAX_CHARS = 200  # of one leaf: the static part of a pytree can be a whole model


class _Notes(threading.local):
    """What a thread has told of a program before the event that it is compiled."""

    def __init__(self) -> None:
        self.differences: dict[str, str] = {}  # by function, why it was traced
        # By function, types and difference of the program that was lowered and not yet compiled; None where there are
        # several, since it is not told which one is compiled.
        self.lowerings: dict[str, tuple[str, str] | None] = {}

    def lowered(self, function: str, arguments: str) -> None:
        difference = self.differences.get(function, "")
        self.differences.clear()  # the others were traced as its parts
        self.lowerings[function] = None if function in self.lowerings else (arguments, difference)


_notes = _Notes()
_lock = threading.Lock()
_num_explaining = 0
_explanations = contextlib.ExitStack()


def told_of(function: str) -> tuple[str, str]:
    """Types and difference of a program that this thread has compiled just now; empty where they were not told."""
    return _notes.lowerings.pop(function, None) or ("", "")


@contextlib.contextmanager
def explaining() -> Iterator[None]:
    """A block in which JAX explains what it traces and lowers; that is not printed unless it was switched on before."""
    global _num_explaining
    with _lock:
        _num_explaining += 1
        if _num_explaining == 1:
            _switch_on(_explanations)
    try:
        yield
    finally:
        with _lock:
            _num_explaining -= 1
            if not _num_explaining:
                _explanations.close()


def _switch_on(explanations: contextlib.ExitStack) -> None:
    global _notes
    _notes = _Notes()  # a thread may have been in the middle of a program when the block before ended
    explained_before = getattr(jax.config, _EXPLAIN)
    lowering_log = logging.getLogger(_LOWERING_LOG)
    level_before = lowering_log.level

    def hear(record: logging.LogRecord) -> bool:
        with contextlib.suppress(Exception):  # the log is no contract, and must not break what is compiled
            _note_record(record)
        if record.name == _LOWERING_LOG:
            parent = lowering_log.parent
            return record.levelno >= (level_before or (parent.getEffectiveLevel() if parent else logging.WARNING))
        return explained_before or not str(record.msg).startswith((_TRACING_MESSAGE, *_CACHE_MESSAGES))

    for logger in (lowering_log, *map(logging.getLogger, (_TRACING_LOG, *_CACHE_LOGS))):
        logger.addFilter(hear)
        explanations.callback(logger.removeFilter, hear)
    explanations.callback(lowering_log.setLevel, level_before)
    explanations.callback(jax.config.update, _EXPLAIN, explained_before)
    if not lowering_log.isEnabledFor(logging.DEBUG):
        lowering_log.setLevel(logging.DEBUG)
    jax.config.update(_EXPLAIN, True)


def _note_record(record: logging.LogRecord) -> None:
    if record.name == _LOWERING_LOG and str(record.msg).startswith("Compiling"):
        match record.args:
            case (str(name), [*avals], *_):
                _notes.lowered(plain_name(name), _types(avals))
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
        _notes.differences[function] = "the function is new" + ", though another of that line was seen before" * again
    elif match := re.fullmatch(r"\s*for (.+?)(?: defined at .*)?", lines[0]):
        rest = [line.strip() for line in lines[2:]]
        leaves = [line.removeprefix("* ") for line in rest if line.startswith("* ")]
        differences = [_short_difference(line) for line in leaves or rest]
        more = [f"and {len(differences) - _MAX_LISTED} more"] if len(differences) > _MAX_LISTED else []
        _notes.differences[match[1]] = "; ".join(differences[:_MAX_LISTED] + more)


def _short_difference(line: str) -> str:
    """`x: now f32[2,5], before f32[2,4]` of `at x, now f32[2,5] and before f32[2,4]`; other lines as they are."""
    line = re.sub(r"https?://\S*$", "", line)  # a hint to the documentation, without a line of its own
    match = re.fullmatch(r"at (?:input path )?(.+?), now (.+?) and before (.+)", line)
    text = f"{match[1]}: now {match[2]}, before {match[3]}" if match else line
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 1] + "…"
