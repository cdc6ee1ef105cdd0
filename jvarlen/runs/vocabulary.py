"""Which tables of the parameters a loss reads by arrays of its batch, such as an embedding by tokens.

JAX reads another row, or NaN, where an index is beyond a table, without an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr

from jvarlen._common.pytree import plain_names
from jvarlen.parallel.layers import StepLoss
from jvarlen.parallel.train import make_eval_step
from jvarlen.training.losses import LossFn
from jvarlen.training.train_state import new_state

__all__ = ["table_rows"]

# What gives values as they are; of a table, all of its rows.
_KEEPS_TABLES = {"convert_element_type", "copy", "optimization_barrier", "reduce_precision", "sharding_constraint"}
_KEEPS_VALUES = _KEEPS_TABLES | {"broadcast_in_dim", "reshape", "squeeze", "transpose", "pad"}
_CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint")


class _Kind(NamedTuple):
    """What an array is: a `"table"`, an `"index"` of a name, one with a number `"added"`, or `"derived"` from one."""

    what: str
    name: str = ""


def table_rows(loss_fn: LossFn | StepLoss, params: Any, extra: Any, batch: Any) -> dict[str, int]:
    """How many rows the tables have that arrays of a batch index as they are, the least of each, as far as can be seen.

    Nothing is computed. Indices that a loss clips, folds or replaces by their values are not seen, nor are one-hots.
    """
    try:
        state = jax.eval_shape(lambda: new_state(params, optax.identity(), extra=extra, seed=0))
        traced = jax.make_jaxpr(make_eval_step(loss_fn))(state, batch)
    except Exception:  # compiling the step tells what is wrong with it
        return {}
    kinds: list[_Kind | None] = [None] * len(jax.tree.leaves(state))
    for place in range(len(jax.tree.leaves(state.params))):  # the first of a state
        kinds[place] = _Kind("table")
    for name, leaf in zip(plain_names(batch), jax.tree.leaves(batch), strict=True):
        kinds.append(_Kind("index", name) if leaf.dtype.kind in "iu" else None)
    found: dict[str, int] = {}
    _walk(traced.jaxpr, kinds, found)
    return found


def _walk(jaxpr: Jaxpr, given: Sequence[_Kind | None], found: dict[str, int]) -> list[_Kind | None]:
    """The kinds of the results; adds the tables that are read."""
    kinds: dict[Any, _Kind] = {
        variable: kind for variable, kind in zip(jaxpr.invars, given, strict=True) if kind is not None
    }

    def kind_of(atom: Any) -> _Kind | None:
        return None if hasattr(atom, "val") else kinds.get(atom)

    for equation in jaxpr.eqns:
        name, taken = equation.primitive.name, [kind_of(atom) for atom in equation.invars]
        inner = _called(equation)
        made: list[_Kind | None]
        if inner is not None:
            pairs = zip(taken, equation.invars, inner.invars, strict=True)
            is_scan = name == "scan"
            passed = [
                None if kind == _Kind("table") and is_scan and outer.aval.shape != var.aval.shape else kind  # type: ignore[attr-defined]
                for kind, outer, var in pairs
            ]
            made = _walk(inner, passed, found)
            if is_scan:
                made = [_derived(taken)] * len(equation.outvars)
        else:
            if name == "gather":
                _note_gather(equation, taken, found)
            made = [_made_by(equation, taken)] * len(equation.outvars)
        kinds.update((var, kind) for var, kind in zip(equation.outvars, made, strict=True) if kind is not None)
    return [kind_of(atom) for atom in jaxpr.outvars]


def _called(equation: Any) -> Jaxpr | None:
    """The function that an equation calls with its own arguments, if it does."""
    if equation.primitive.name not in (*_CALLS, "scan"):
        return None
    for value in equation.params.values():
        body = value.jaxpr if isinstance(value, ClosedJaxpr) else value
        if isinstance(body, Jaxpr) and len(body.invars) == len(equation.invars):
            return body
    return None


def _made_by(equation: Any, taken: list[_Kind | None]) -> _Kind | None:
    """The kind of what a primitive makes."""
    name, first = equation.primitive.name, taken[0] if taken else None
    derived = _derived(taken)
    if first is not None and first.what == "table":
        return first if name in _KEEPS_TABLES else derived
    if derived is None:
        return None
    if name in _KEEPS_VALUES:
        return first
    index, added = _Kind("index", derived.name), _Kind("added", derived.name)
    if name == "slice" or (name == "concatenate" and index in taken):
        # A shift by a position has all values but one; fewer may be of another meaning, such as a first token.
        shapes = (equation.invars[0].aval.shape, equation.outvars[0].aval.shape)
        is_whole = name == "concatenate" or all(out >= size - 1 for size, out in zip(*shapes, strict=True))
        return first if name == "slice" and is_whole else index if is_whole else derived
    if name == "add" and index in taken and None in taken:
        return added
    if name == "select_n":
        predicate, *cases = taken
        if set(cases) == {index, added}:  # a negative index counts from the end
            return index
        if predicate is None and index in cases and set(cases) <= {index, None}:
            return index
    return derived


def _derived(taken: Sequence[_Kind | None]) -> _Kind | None:
    """What follows from an index, by whatever operation."""
    names = [kind.name for kind in taken if kind is not None and kind.name]
    return _Kind("derived", names[0]) if names else None


def _note_gather(equation: Any, taken: list[_Kind | None], found: dict[str, int]) -> None:
    table, index = taken[:2]
    numbers = equation.params["dimension_numbers"]
    if table != _Kind("table") or index is None or index.what != "index" or numbers.start_index_map[:1] != (0,):
        return
    if equation.params["slice_sizes"][0] == 1:
        rows = equation.invars[0].aval.shape[0]
        found[index.name] = min(rows, found.get(index.name, rows))
