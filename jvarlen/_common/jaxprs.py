"""What a traced function does: its primitives, products of matrices, collectives, and the parts of its scans."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jaxtyping import Float64, Int

__all__ = [
    "OperationCounts", "count_operations", "flops_along", "is_attention", "primitives_in",
    "scan_parts",
]  # fmt: skip

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
_CALLS = ("jit", "pjit", "closed_call", "checkpoint", "remat", "remat2", "shard_map")
# What reads a table of integers and chooses a branch, of arrays with a leading axis of lanes.
_OF_INTEGERS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "clamp": lambda least, x, most: np.clip(x, least, most),
    "convert_element_type": np.asarray,
    # Of one row, or one number, of a table.
    "dynamic_slice": lambda table, row, *_: table[np.arange(len(row)), row],
    "eq": np.equal,
    "lt": np.less,
    "select_n": lambda which, *cases: np.choose(which, cases),
    "squeeze": np.asarray,
}


def primitives_in(jaxpr: Jaxpr) -> set[str]:
    """The names of all primitives, those of inner functions too."""
    names = {equation.primitive.name for equation in jaxpr.eqns}
    return names.union(*(primitives_in(inner) for equation in jaxpr.eqns for inner in _inner(equation)))


def count_operations(
    jaxpr: Jaxpr, axis_names: Collection[str], times: float = 1, known: _Known | None = None
) -> OperationCounts:
    """Products, convolutions, collectives over some mesh axes; of scans all turns count, of branches the largest.

    Attention counts as of full rows of one sample, whatever computes it: half of the pairs where it is causal.
    """
    counts: Any = OperationCounts()
    runs: Any = times if known is None else float(times) * np.bincount(known.devices, minlength=known.size)
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        taken, returned = (cast(Any, [each.aval for each in those]) for those in (equation.invars, equation.outvars))
        if name == "dot_general":
            ((contracted, _), _), shape = params["dimension_numbers"], taken[0].shape
            counts["flops"] += runs * 2 * math.prod(returned[0].shape) * math.prod(shape[dim] for dim in contracted)
        elif name == "conv_general_dilated":
            kernel = taken[1].shape
            per_output = math.prod(kernel) // kernel[params["dimension_numbers"].rhs_spec[0]]
            counts["flops"] += runs * 2 * math.prod(returned[0].shape) * per_output
        elif name in _KINDS and _axes_of(params) & {*axis_names}:
            arrays = taken if _KINDS[name] == "reduce_scatter" else returned
            counts[_KINDS[name], "times"] += runs * len(arrays)
            counts[_KINDS[name], "bytes"] += runs * sum(each.size * each.dtype.itemsize for each in arrays)
        if is_attention(equation) and "dot_general" in primitives_in(params["jaxpr"].jaxpr):  # not what remat leaves
            products = _ATTENTION[params["name"].removeprefix("causal_")]
            is_causal = params["name"].startswith("causal_")
            num_pairs = math.prod(taken[0].shape) * taken[1].shape[-3] / (2 if is_causal else 1)
            counts["flops"] += runs * products * 2 * num_pairs
            continue
        calls = (
            [(each, _turns(equation), None) for each in _inner(equation)] if known is None else known.calls(equation)
        )
        inner = [count_operations(each, axis_names, times * turns, of_each) for each, turns, of_each in calls]
        if name == "cond" and (known is None or equation.invars[0] not in known):
            inner = sorted(inner, key=lambda counts: np.max(counts["flops"]))[-1:]
        for each in inner:
            counts.update(each)
    return counts


def _turns(equation: JaxprEqn) -> int:
    """Of a scan or the grid of a kernel."""
    match equation.primitive.name:
        case "scan":
            return equation.params["length"]
        case "pallas_call":
            return math.prod(equation.params["grid_mapping"].grid)
    return 1


def is_attention(equation: JaxprEqn) -> bool:
    """Whether it calls attention, or its derivative, by the name under which its operations are counted."""
    return str(equation.params.get("name", "")).removeprefix("causal_") in _ATTENTION


def flops_along(closed: ClosedJaxpr, axis_name: str, size: int) -> Float64[np.ndarray, " size"]:
    """Operations of products on each device along a mesh axis, of branches in those that it takes.

    Which it takes must follow from constants, such as the table of a schedule, and from its index along the axis;
    otherwise the largest counts. NaN where loops turn by values.
    """
    known = _Known(axis_name, size, np.arange(size), {})
    known.values.update(zip(closed.jaxpr.constvars, map(known.given, closed.consts), strict=True))
    return np.zeros(size) + count_operations(closed.jaxpr, (), known=known)["flops"]


class _Known(NamedTuple):
    """Integers of a function that follow from constants and from the index of a device along a mesh axis.

    There is one of each for every lane: a turn of the loops around, on a device.
    """

    axis_name: str
    size: int
    devices: Int[np.ndarray, " lanes"]  # along the axis
    values: dict[Any, Int[np.ndarray, "lanes ..."]]  # by variable

    def __contains__(self, atom: Any) -> bool:
        return not hasattr(atom, "val") and atom in self.values

    def given(self, value: Any) -> np.ndarray:
        """A constant in every lane."""
        return np.broadcast_to(np.asarray(value), (len(self.devices), *np.shape(value)))

    def calls(self, equation: JaxprEqn) -> list[tuple[Jaxpr, float, _Known]]:
        """The functions that an equation calls, how often, and what is known in them; learns what it computes."""
        name, invars, inner = equation.primitive.name, equation.invars, _inner(equation)
        if name == "scan":
            return [self._of_scan(equation, inner[0])]
        if name == "while":
            return [self._of_while(equation)]
        if name == "cond":
            if invars[0] not in self:
                return [(each, 1, self._named(each, invars[1:])) for each in inner]
            taken = self.values[cast(Any, invars[0])].astype(int)
            chosen = ((each, self._in_lanes(np.flatnonzero(taken == i))) for i, each in enumerate(inner))
            return [(each, 1, of_each._named(each, invars[1:])) for each, of_each in chosen if len(of_each.devices)]
        if inner:
            given = invars if name in _CALLS else []
            return [(each, _turns(equation), self._named(each, given)) for each in inner]
        self._learn(equation)
        return []

    def _learn(self, equation: JaxprEqn) -> None:
        if equation.primitive.name == "axis_index" and equation.params["axis_name"] == self.axis_name:
            self.values[equation.outvars[0]] = self.devices
            return
        atoms, rule = cast(Any, equation.invars), _OF_INTEGERS.get(equation.primitive.name)
        if rule is not None and max(a.aval.ndim for a in atoms) < 3:
            given = [self.given(atom.val) if hasattr(atom, "val") else self.values.get(atom) for atom in atoms]
            if all(each is not None for each in given):
                [result] = cast(Any, equation.outvars)
                self.values[result] = rule(*given).reshape(len(self.devices), *result.aval.shape)

    def _of_scan(self, equation: JaxprEqn, body: Jaxpr) -> tuple[Jaxpr, int, _Known]:
        """Every turn becomes a lane where what a turn takes is known."""
        num_fixed, num_carry = scan_parts(equation)
        length, num_lanes, first = equation.params["length"], len(self.devices), num_fixed + num_carry
        sliced = {i: self.values[cast(Any, v)] for i, v in enumerate(equation.invars) if i >= first and v in self}
        fixed = self._named(body, equation.invars[:num_fixed])
        if not sliced:
            return body, length, fixed
        inside = fixed._in_lanes(np.repeat(np.arange(num_lanes), length))
        for i, value in sliced.items():
            rows = value[:, ::-1] if equation.params["reverse"] else value
            inside.values[body.invars[i]] = rows.reshape(num_lanes * length, *value.shape[2:])
        return body, 1, inside

    def _of_while(self, equation: JaxprEqn) -> tuple[Jaxpr, float, _Known]:
        """Every turn becomes a lane where the loop counts from one known number to another, as `fori_loop` does."""
        params: Any = equation.params
        condition, body = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr
        num_fixed = params["body_nconsts"]
        atoms = equation.invars[params["cond_nconsts"] + num_fixed :][:2]
        compared = [each.invars for each in condition.eqns if each.primitive.name == "lt"]
        counted = [each.outvars[0] for each in body.eqns if _adds_one(each, body.invars[num_fixed])]
        fixed = self._named(body, equation.invars[params["cond_nconsts"] :][:num_fixed])
        is_known = all(hasattr(atom, "val") or atom in self for atom in atoms)
        if not is_known or compared != [condition.invars[:2]] or body.outvars[:1] != counted[-1:]:
            return body, math.nan, fixed
        begins, ends = (self.given(atom.val) if hasattr(atom, "val") else self.values[atom] for atom in atoms)
        turns = np.maximum(ends - begins, 0)
        lanes = np.repeat(np.arange(len(turns)), turns)
        inside = fixed._in_lanes(lanes)
        before = np.cumsum(turns) - turns
        inside.values[body.invars[num_fixed]] = begins[lanes] + np.arange(len(lanes)) - before[lanes]
        return body, 1, inside

    def _named(self, inner: Jaxpr, atoms: Sequence[Any]) -> _Known:
        """What is known of the first arguments of a function."""
        pairs = zip(inner.invars, atoms, strict=False)
        return self._replace(values={name: self.values[atom] for name, atom in pairs if atom in self})

    def _in_lanes(self, lanes: np.ndarray) -> _Known:
        return self._replace(
            devices=self.devices[lanes], values={name: value[lanes] for name, value in self.values.items()}
        )


def _adds_one(equation: JaxprEqn, counter: Any) -> bool:
    atoms: Any = equation.invars
    return equation.primitive.name == "add" and atoms[0] is counter and getattr(atoms[1], "val", None) == 1


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
