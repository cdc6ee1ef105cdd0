"""What a traced function does: its primitives, products of matrices, collectives, and the parts of its scans."""

from __future__ import annotations

import collections
import math
from collections.abc import Collection, Sequence
from typing import Any, cast

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

__all__ = ["OperationCounts", "count_operations", "draws_by_itself", "primitives_in", "scan_parts"]

OperationCounts = collections.Counter
"""Operations of products under `"flops"`; of collectives, how often under (kind, `"times"`), and (kind, `"bytes"`)."""

_KINDS = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "psum2": "all_reduce",
    "pmax": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "psum_scatter": "reduce_scatter",
    "ppermute": "send",
}
_ATTENTION = {"attention_forward": 2, "attention_backward": 5}  # products of all queries and keys, by name


def primitives_in(jaxpr: Jaxpr) -> set[str]:
    """The names of all primitives, those of inner functions too."""
    names = {equation.primitive.name for equation in jaxpr.eqns}
    return names.union(*(primitives_in(inner) for equation in jaxpr.eqns for inner in _inner(equation)))


def draws_by_itself(jaxpr: Jaxpr, are_given: Sequence[bool]) -> list[tuple[int, ...]]:
    """The shapes of random numbers whose key follows from none of the given arguments."""
    given = {variable for variable, is_given in zip(jaxpr.invars, are_given, strict=True) if is_given}
    shapes: list[tuple[int, ...]] = []
    for equation in jaxpr.eqns:
        takes = [not hasattr(atom, "val") and atom in given for atom in equation.invars]
        if equation.primitive.name == "random_bits" and not any(takes):
            shapes.append(cast(Any, equation.outvars[0].aval).shape)
        for inner in _inner(equation):
            of_last = [True] * len(inner.invars) + takes  # the first may be of the operation, such as which branch
            shapes += draws_by_itself(inner, of_last[len(of_last) - len(inner.invars) :])
        if any(takes):
            given.update(equation.outvars)
    return shapes


def count_operations(jaxpr: Jaxpr, axis_names: Collection[str], times: float = 1) -> OperationCounts:
    """Products, convolutions, collectives over some mesh axes; of scans all turns count, of branches the largest.

    Attention counts as of full rows of one sample, whatever computes it: half of the pairs where it is causal.
    """
    counts: Any = OperationCounts()
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        taken, returned = (cast(Any, [each.aval for each in those]) for those in (equation.invars, equation.outvars))
        if name == "dot_general":
            ((contracted, _), _), shape = params["dimension_numbers"], taken[0].shape
            counts["flops"] += times * 2 * math.prod(returned[0].shape) * math.prod(shape[dim] for dim in contracted)
        elif name == "conv_general_dilated":
            kernel = taken[1].shape
            per_output = math.prod(kernel) // kernel[params["dimension_numbers"].rhs_spec[0]]
            counts["flops"] += times * 2 * math.prod(returned[0].shape) * per_output
        elif name in _KINDS and _axes_of(params) & {*axis_names}:
            arrays = taken if _KINDS[name] == "reduce_scatter" else returned
            counts[_KINDS[name], "times"] += times * len(arrays)
            counts[_KINDS[name], "bytes"] += times * sum(each.size * each.dtype.itemsize for each in arrays)
        called = str(params.get("name", ""))
        products = _ATTENTION.get(called.removeprefix("causal_"), 0)
        if products and "dot_general" in primitives_in(params["jaxpr"].jaxpr):  # not what remat leaves of it
            num_pairs = math.prod(taken[0].shape) * taken[1].shape[-3] / (2 if called.startswith("causal_") else 1)
            counts["flops"] += times * products * 2 * num_pairs
            continue
        turns = params["length"] if name == "scan" else 1
        inner = [count_operations(each, axis_names, times * turns) for each in _inner(equation)]
        if name == "cond":
            inner = sorted(inner, key=lambda counts: counts["flops"])[-1:]
        for each in inner:
            counts.update(each)
    return counts


def scan_parts(equation: Any) -> tuple[int, int]:
    """How many arrays a scan keeps fixed, and how many it carries; its other arguments are sliced."""
    # Told by shapes, as versions of JAX name them differently: what is sliced or stacked has one axis more outside.
    body = equation.params["jaxpr"].jaxpr
    num_sliced, num_stacked = (
        sum(whole.aval.shape != part.aval.shape for whole, part in zip(outside, inside, strict=True))
        for outside, inside in ((equation.invars, body.invars), (equation.outvars, body.outvars))
    )
    num_carry = len(equation.outvars) - num_stacked
    return len(equation.invars) - num_carry - num_sliced, num_carry


def _axes_of(params: dict[str, Any]) -> set[Any]:
    names = params.get("axes", params.get("axis_name"))
    return {*names} if isinstance(names, tuple | list) else {names}


def _inner(equation: JaxprEqn) -> list[Jaxpr]:
    """The functions that an equation calls."""
    values = [
        each
        for value in equation.params.values()
        for each in (value if isinstance(value, tuple | list) else (value,))
        if isinstance(each, ClosedJaxpr | Jaxpr)
    ]
    return [each.jaxpr if isinstance(each, ClosedJaxpr) else each for each in values]
