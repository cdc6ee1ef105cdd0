"""The operations of a traced function: its primitives, products of matrices, collectives, and parts of scans."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from jvarlen._common.types import PyTree

__all__ = [
    "OperationCounts", "count_operations", "has_unknown_turns", "is_attention", "primitives_in", "scan_parts",
    "with_zeros",
]  # fmt: skip

OperationCounts = collections.Counter
"""What a function does: operations of products under `"flops"`, of which `"attention"`; `"bytes"` of elementwise work;
`"kernels"`; of collectives, how often under (kind, `"times"`), and (kind, `"bytes"`)."""

_KINDS = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "psum2": "all_reduce",
    "pmax": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "all_to_all": "all_gather",  # a device sends as many bytes
    "reduce_scatter": "reduce_scatter",
    "psum_scatter": "reduce_scatter",
    "ppermute": "send",
}
_PRODUCTS = {"dot_general", "conv_general_dilated"}
_ATTENTION = {"attention_forward": 2, "attention_backward": 5}  # products of all queries and keys, by name


def primitives_in(jaxpr: Jaxpr) -> set[str]:
    """The names of all primitives, those of inner functions too."""
    names = {equation.primitive.name for equation in jaxpr.eqns}
    return names.union(*(primitives_in(inner) for equation in jaxpr.eqns for inner in _inner(equation)))


def count_operations(jaxpr: Jaxpr, axis_names: Collection[str], times: int = 1) -> OperationCounts:
    """Products, convolutions, collectives over some mesh axes; of scans all turns count, of branches the largest.

    Attention always counts as in full rows of one sample: half of the pairs if it is causal. Between products, kernels
    fuse what is elementwise: they read or write once what products take and give, and what is reduced. These kernels
    are as many as products.
    """
    counts: Any = OperationCounts()
    counts["bytes"] += times * _fused_bytes(jaxpr)
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        taken, returned = (cast(Any, [each.aval for each in those]) for those in (equation.invars, equation.outvars))
        if name == "dot_general":
            ((contracted, _), _), shape = params["dimension_numbers"], taken[0].shape
            counts["flops"] += times * 2 * math.prod(returned[0].shape) * math.prod(shape[dim] for dim in contracted)
            counts["kernels"] += 2 * times
        elif name == "conv_general_dilated":
            kernel = taken[1].shape
            per_output = math.prod(kernel) // kernel[params["dimension_numbers"].rhs_spec[0]]
            counts["flops"] += times * 2 * math.prod(returned[0].shape) * per_output
        elif name in _KINDS and _axes_of(params) & {*axis_names}:
            arrays = taken if _KINDS[name] == "reduce_scatter" else returned
            counts[_KINDS[name], "times"] += times * len(arrays)
            counts[_KINDS[name], "bytes"] += times * sum(each.size * each.dtype.itemsize for each in arrays)
        if is_attention(equation) and "dot_general" in primitives_in(params["jaxpr"].jaxpr):  # not what remat leaves
            products = _ATTENTION[params["name"].removeprefix("causal_")]
            is_causal = params["name"].startswith("causal_")
            queries, keys, *_ = (each.shape for each in taken if len(each.shape) >= 4)  # beside them are integers
            num_pairs = math.prod(queries) * keys[-3] / (2 if is_causal else 1)
            counts["flops"] += times * products * 2 * num_pairs
            counts["attention"] += times * products * 2 * num_pairs
            counts["kernels"] += 2 * times
            continue
        inner = [count_operations(each, axis_names, times * _turns(equation)) for each in _inner(equation)]
        if name == "cond":
            inner = sorted(inner, key=lambda counts: counts["flops"])[-1:]
        for each in inner:
            counts.update(each)
    return counts


def _fused_bytes(jaxpr: Jaxpr) -> int:
    """Bytes of the arrays of a function, without those that it calls, which no fusion keeps out of memory."""
    kept: set[Any] = set()
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in _PRODUCTS or is_attention(equation):
            kept.update(equation.invars, equation.outvars)
        elif name.startswith(("reduce_", "cum", "arg")):
            kept.update(equation.invars)
    return sum(each.aval.size * each.aval.dtype.itemsize for each in kept if not isinstance(each, Literal))


def _turns(equation: JaxprEqn) -> int:
    """The turns of a scan or of the grid of a kernel."""
    match equation.primitive.name:
        case "scan":
            return equation.params["length"]
        case "pallas_call":
            return math.prod(equation.params["grid_mapping"].grid)
    return 1


def is_attention(equation: JaxprEqn) -> bool:
    """Whether it calls attention, or its derivative, by the name under which its operations are counted."""
    return str(equation.params.get("name", "")).removeprefix("causal_") in _ATTENTION


def has_unknown_turns(jaxpr: Jaxpr) -> bool:
    """Whether products are in a loop whose turns follow from values, so that they cannot be counted."""
    for equation in jaxpr.eqns:
        inner = [] if is_attention(equation) else _inner(equation)
        is_loop = equation.primitive.name == "while"
        if any((is_loop and "dot_general" in primitives_in(each)) or has_unknown_turns(each) for each in inner):
            return True
    return False


def scan_parts(equation: Any) -> tuple[int, int]:
    """How many arrays a scan keeps fixed, and how many it carries; its other arguments are sliced."""
    # By shapes, as versions of JAX name them differently: sliced or stacked arrays have one axis more outside.
    body = equation.params["jaxpr"].jaxpr
    num_sliced, num_stacked = (
        sum(whole.aval.shape != part.aval.shape for whole, part in zip(outside, inside, strict=True))
        for outside, inside in ((equation.invars, body.invars), (equation.outvars, body.outvars))
    )
    num_carry = len(equation.outvars) - num_stacked
    return len(equation.invars) - num_carry - num_sliced, num_carry


def with_zeros(function: Callable[[PyTree], PyTree], zeros: Sequence[jax.Array]) -> Callable[[PyTree], PyTree]:
    """The same function, whose arrays of zeros are made of these scalars, by dtype, instead of constants."""
    # A compiler may make a constant array long before it is used. One that is made of an argument waits for that.

    def run(given: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(lambda given, _: function(given), return_shape=True)(given, zeros)
        num_given = len(jax.tree.leaves(given))
        zero_of = {zero.aval.dtype: zero for zero in cast("Any", closed.jaxpr.invars[num_given:])}

        def replace(equation: JaxprEqn) -> JaxprEqn:
            if equation.primitive.name != "broadcast_in_dim":
                return equation
            value, *others = equation.invars
            zero = zero_of.get(cast("Any", equation.outvars[0].aval).dtype)
            if zero is None or not isinstance(value, Literal) or value.val != 0:
                return equation
            return equation.replace(invars=[zero, *others])

        jaxpr = closed.jaxpr.replace(eqns=[replace(equation) for equation in closed.jaxpr.eqns])
        outputs = jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))(*jax.tree.leaves((given, zeros)))
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return run


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
