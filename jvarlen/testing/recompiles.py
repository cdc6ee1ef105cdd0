"""Checks that a function compiles nothing once it has seen its shapes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.pytree import describe, leaves_by_name, zeros_of
from jvarlen.compiling.compiled_buckets import CompiledBuckets
from jvarlen.compiling.recompiles import no_recompiles

__all__ = ["assert_no_recompiles"]


def assert_no_recompiles(fn: Callable[..., Any], shapes: Iterable[Any], *, warm_up: bool = True) -> None:
    """Asserts that a function compiles nothing once it has seen its shapes, nor in between.

    It is called with every set of arguments, and then with every set again. Each call gets copies, which it may donate.
    For a whole loop of loader and step, pass a function without arguments, and `[()]` for its shapes.

    Args:
      fn: any function, jitted or not, or a result of `compile_buckets`.
      shapes: the arguments of each call: a plain tuple of them, or a single argument of another type. They are pytrees
        of arrays, or of `jax.ShapeDtypeStruct`, for which zeros are passed. For compiled buckets `[(state, spec) for
        spec in compiled.specs.values()]`.
      warm_up: whether the first call with each set may compile. Compiled buckets never may.

    Raises:
      AssertionError: something was compiled, or read from the persistent cache; the message names the call, the
        arguments and the programs.
      ValueError: there are no shapes.

    Example:
      >>> import numpy as np
      >>> halve = jax.jit(lambda x: x / 2)
      >>> shapes = [jax.ShapeDtypeStruct((n,), np.float32) for n in (3, 4)]
      >>> assert_no_recompiles(halve, shapes)
      >>> assert_no_recompiles(lambda x: jax.jit(lambda y: y / 2)(x), shapes)
      Traceback (most recent call last):
      AssertionError: ...
    """
    argument_sets = [args if type(args) is tuple else (args,) for args in shapes]
    if not argument_sets:
        raise UserError("shapes are empty: at least one set of arguments is needed")
    may_compile = warm_up and not isinstance(fn, CompiledBuckets)
    lines = []
    for time, (i, args) in itertools.product(("first", "second"), enumerate(argument_sets)):
        copies = jax.tree.map(_copied, args)
        with no_recompiles("count") as count:
            jax.block_until_ready(fn(*copies))
        if count.recompilations and not (may_compile and time == "first"):
            programs = list_first(count.functions, "; ")
            lines.append(f"  the {time} call with {_telling_leaves(argument_sets, i)}: {programs}")
    if lines:
        raise AssertionError("compiled where nothing should have been:\n" + list_first(lines, "\n"))


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return zeros_of(leaf)
    return leaf.copy() if isinstance(leaf, jax.Array) else leaf


def _telling_leaves(argument_sets: list[tuple[Any, ...]], i: int) -> str:
    """The leaves of arguments that differ from those of other calls; if there are none, the first leaves."""
    leaves = [[f"{name} {describe(leaf)}" for name, leaf in leaves_by_name(args).items()] for args in argument_sets]
    common = set.intersection(*map(set, leaves))
    return f"arguments {i} ({list_first([leaf for leaf in leaves[i] if leaf not in common] or leaves[i], ', ')})"
