"""Unknown keywords of functions and classes that users call."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

__all__ = ["check_keywords"]

_T = TypeVar("_T", bound=Callable[..., Any])


def check_keywords(function: _T, also: Iterable[str] = ()) -> _T:
    """The same function or class; called with keywords that it doesn't have, it names the nearest and all that it has.

    `also` are keywords beside those of its signature.
    """
    if isinstance(function, type):
        made: Any = function
        made.__init__ = check_keywords(made.__init__, also)
        return function
    parameters = inspect.signature(function).parameters.values()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = (each.name for each in parameters if each.kind in by_name and each.name != "self")
    known = dict.fromkeys([*names, *also])

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        if unknown := [name for name in keywords if name not in known]:
            nearest = {name: difflib.get_close_matches(name, known, 1) for name in unknown}
            near = (name + "".join(f" (do you mean {n}?)" for n in close) for name, close in nearest.items())
            called = function.__qualname__.removesuffix(".__init__")
            raise TypeError(f"{called} has no keyword {', '.join(near)}; its keywords are {', '.join(known)}")
        return function(*args, **keywords)

    return call  # type: ignore[return-value]
