"""Signatures are checked while tests run, except where a test hands a function what it must refuse.

The first calls of each function in a process are checked: checking all takes a fifth of the time of tests.
"""

import functools
import itertools
import types
from collections.abc import Callable
from typing import Any

import beartype
import jaxtyping
import pytest

PACKAGES = (  # whose arrays have shapes that types tell
    "attention", "batches", "distributed", "loading", "models", "parallel", "reports", "sorting", "training",
)  # fmt: skip
CHECKED_CALLS = 100
check = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))  # an int is a float as well
_raises, _jaxtyped = pytest.raises, jaxtyping.jaxtyped


def install() -> None:
    """From now on, modules of the packages are imported with checks."""
    jaxtyping.jaxtyped = jaxtyped
    jaxtyping.install_import_hook([f"jvarlen.{package}" for package in PACKAGES], "tests.support.type_checks.check")
    pytest.raises = RaisesUnchecked


def jaxtyped(**options: Any) -> Callable[[Any], Any]:
    """As `jaxtyping.jaxtyped`, without functions in functions, which would be decorated at every call."""
    decorate = _jaxtyped(**options)

    def of(fn: Any) -> Any:
        if "<locals>" in fn.__qualname__:
            return fn
        return _first_calls(fn, decorate(fn)) if isinstance(fn, types.FunctionType) else decorate(fn)

    return of


def _first_calls(fn: Callable[..., Any], checked: Callable[..., Any]) -> Callable[..., Any]:
    calls = itertools.count()

    @functools.wraps(fn)
    def call(*args: Any, **options: Any) -> Any:
        return (checked if next(calls) < CHECKED_CALLS else fn)(*args, **options)

    call.__code__ = call.__code__.replace(co_filename=jaxtyping.__file__)  # no line of a user's code
    return call


class RaisesUnchecked:
    """As `pytest.raises`, for what functions refuse themselves."""

    def __init__(self, *expected: Any, **options: Any):
        self._raises = _raises(*expected, **options)

    def __enter__(self) -> pytest.ExceptionInfo:
        self._before = jaxtyping.config.jaxtyping_disable
        jaxtyping.config.update("jaxtyping_disable", True)
        return self._raises.__enter__()

    def __exit__(self, *error: Any) -> bool:
        jaxtyping.config.update("jaxtyping_disable", self._before)
        return self._raises.__exit__(*error)
