"""When the arrays of a traced function are alive, as a compiler would run it: in the order of its equations, fused.

Elementwise results are computed where they are used unless a product, or several expensive users, take them. A loop is
run once: what it carries and stacks is alive around it. Letters: N arrays, P points in time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jaxtyping import Float64, Int64

from jvarlen._common.jaxprs import scan_parts

__all__ = ["Lifetimes", "lifetimes_of"]

_VIEWS = {"reshape", "squeeze", "expand_dims", "stop_gradient", "name", "copy", "optimization_barrier"}
_EXPENSIVE = {"exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh", "pow", "rsqrt", "sqrt", "sin", "cos", "erf"}
_REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin"}
_ALONE = {
    "dot_general", "conv_general_dilated", "scatter", "scatter-add", "sort", "cumsum", "cumlogsumexp",
    "all_gather", "psum", "psum_invariant", "reduce_scatter", "ppermute", "all_to_all", "pmax", "pmin",
    "custom_call", "ffi_call", "random_bits", "threefry2x32", "top_k",
}  # fmt: skip
_STORED = {*_ALONE, *_REDUCTIONS, "begin", "empty", "join", "hold", "end"}
_IN_PLACE = {"begin", "end", "scatter", "scatter-add"}


class Lifetimes(NamedTuple):
    """Arrays of a traced function that are neither its arguments nor computed inside others.

    Attributes:
      begin: int64[N], the point from which an array is alive.
      end: int64[N], the point from which it no longer is; P for results.
      num_bytes: float64[N].
      num_points: P.
    """

    begin: Int64[np.ndarray, " N"]
    end: Int64[np.ndarray, " N"]
    num_bytes: Float64[np.ndarray, " N"]
    num_points: int

    def peak(self, num_bytes: Float64[np.ndarray, "... N"] | None = None) -> Float64[np.ndarray, ...]:
        """Bytes at the fullest point, of these sizes or others of the same arrays."""
        sizes = self.num_bytes if num_bytes is None else num_bytes
        changes = np.zeros((*sizes.shape[:-1], self.num_points + 1))
        np.add.at(np.moveaxis(changes, -1, 0), self.begin, np.moveaxis(sizes, -1, 0))
        np.subtract.at(np.moveaxis(changes, -1, 0), self.end, np.moveaxis(sizes, -1, 0))
        return np.cumsum(changes, axis=-1)[..., : self.num_points].max(axis=-1, initial=0)


def lifetimes_of(closed: ClosedJaxpr) -> Lifetimes:
    """Those of the arrays of a traced function.

    Example:
      >>> import jax
      >>> traced = jax.make_jaxpr(lambda x: (x @ x + 1) @ x)(jax.ShapeDtypeStruct((8, 8), np.float32))
      >>> float(lifetimes_of(traced).peak())  # two products, the sum in place
      512.0
    """
    flat = _Flat()
    arguments: list[int | None] = [flat.value(var) for var in [*closed.jaxpr.constvars, *closed.jaxpr.invars]]
    results = flat.run(closed.jaxpr, arguments)
    return flat.lifetimes(results)


class _Flat:
    """A function as a list of steps, without calls."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.ranks: list[int] = []
        self.steps: list[tuple[str, list[int], list[int]]] = []  # what, takes, gives
        self.loops: list[tuple[Any, Any]] = []  # what is carried in a loop, and then

    def value(self, var: Any) -> int:
        aval = var.aval
        self.sizes.append(int(np.prod(aval.shape)) * _itemsize(aval.dtype) if hasattr(aval, "shape") else 0)
        self.ranks.append(len(getattr(var.aval, "shape", ())))
        return len(self.sizes) - 1

    def run(self, jaxpr: Jaxpr, arguments: list[int | None]) -> list[int | None]:
        """Adds the steps of a function, and returns its results; None: a constant."""
        known: dict[Any, int | None] = dict(zip([*jaxpr.constvars, *jaxpr.invars], arguments, strict=True))
        for eqn in jaxpr.eqns:
            takes = [None if isinstance(var, Literal) else known[var] for var in eqn.invars]
            gives = self._run_equation(eqn, takes)
            known |= dict(zip(eqn.outvars, gives, strict=True))
        return [None if isinstance(var, Literal) else known[var] for var in jaxpr.outvars]

    def _run_equation(self, eqn: Any, takes: list[int | None]) -> list[int | None]:
        name, params = eqn.primitive.name, eqn.params
        if name == "scan":
            return self._run_scan(eqn, takes)
        if name == "while":
            return self._run_while(eqn, takes)
        gives: list[int | None]
        if name == "cond":
            return self._run_branches(eqn, takes)
        inner = next((params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params), None)
        if inner is not None:
            if isinstance(inner, ClosedJaxpr):
                return self.run(inner.jaxpr, [*_consts(inner), *takes])
            return self.run(inner, [*[None] * len(inner.constvars), *takes])
        gives = [self.value(var) for var in eqn.outvars]
        self._add(name, takes, gives)
        return gives

    def _run_branches(self, eqn: Any, takes: list[int | None]) -> list[int | None]:
        """Branches one after the other. Their results are in the places of the whole's."""
        gives: list[int | None] = [self.value(var) for var in eqn.outvars]
        self._add("hold", takes[1:], [])
        for branch in eqn.params["branches"]:
            results = self.run(branch.jaxpr, [*_consts(branch), *takes[1:]])
            for own, place in zip(results, gives, strict=True):
                if own is not None:
                    self._add("join", [own, place], [])
        for place in gives:
            self._add("end", [], [place])
        return gives

    def _run_scan(self, eqn: Any, takes: list[int | None]) -> list[int | None]:
        params = eqn.params
        body, (num_consts, num_carry) = params["jaxpr"], scan_parts(eqn)
        begin = num_consts + num_carry
        consts, init, stacked = takes[:num_consts], takes[num_consts:begin], takes[begin:]
        is_loop = params["length"] > 1
        gives: list[int | None] = [self.value(var) for var in eqn.outvars]
        slices: list[int | None] = [self.value(var) for var in body.jaxpr.invars[begin:]]
        if not is_loop:
            self._each("reshape", stacked, slices)
            results = self.run(body.jaxpr, [*_consts(body), *consts, *init, *slices])
            self._each("reshape", results, gives)
            return gives
        carried: list[int | None] = [self.value(var) for var in body.jaxpr.invars[num_consts:begin]]
        self._each("begin", init, carried)
        for whole in gives[num_carry:]:
            self._add("empty", [], [whole])
        self._each("slice", stacked, slices)
        results = self.run(body.jaxpr, [*_consts(body), *consts, *carried, *slices])
        for own, place in zip(results[num_carry:], gives[num_carry:], strict=True):
            if own is not None:
                self._add("write", [own, place], [])
        self._add("hold", [*consts, *stacked], [])
        self._ends(results[:num_carry], carried, gives)
        return gives

    def _run_while(self, eqn: Any, takes: list[int | None]) -> list[int | None]:
        params = eqn.params
        num_test, num_consts = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        body = params["body_jaxpr"]
        gives: list[int | None] = [self.value(var) for var in eqn.outvars]
        carried: list[int | None] = [self.value(var) for var in eqn.outvars]
        self._each("begin", takes[num_consts:], carried)
        results = self.run(body.jaxpr, [*_consts(body), *takes[num_test:num_consts], *carried])
        self._add("hold", takes[:num_consts], [])
        self._ends(results, carried, gives)
        return gives

    def _ends(self, results: list[int | None], carried: list[int | None], gives: list[int | None]) -> None:
        """What a loop leaves: what its last turn carries, in its place."""
        for own, at_begin, place in zip(results, carried, gives, strict=False):
            self._add("end", [own], [place])
            self.loops.append((at_begin, place))

    def _each(self, what: str, takes: list[int | None], gives: list[int | None]) -> None:
        for taken, given in zip(takes, gives, strict=False):
            self._add(what, [taken], [given])

    def _add(self, what: str, takes: list[int | None], gives: list[int | None]) -> None:
        self.steps.append((what, [v for v in takes if v is not None], [v for v in gives if v is not None]))

    def lifetimes(self, results: list[int | None]) -> Lifetimes:
        """Of all values that are stored."""
        steps = self._needed(results)
        num_points = len(steps)
        users: list[list[int]] = [[] for _ in self.sizes]
        for i, (_, takes, _) in enumerate(steps):
            for v in {*takes}:
                users[v].append(i)
        wanted = {v for v in results if v is not None}
        begin = np.full(len(self.sizes), num_points)
        last = np.full(len(self.sizes), -1)  # the last step that needs it
        stored = np.zeros(len(self.sizes), bool)
        demanded = np.zeros(len(self.sizes), bool)  # by what takes it, through views
        for i in reversed(range(num_points)):
            what, _, gives = steps[i]
            for v in gives:
                takers = [steps[j] for j in users[v]]
                begin[v] = i
                inside = [last[w] for _, _, given in takers for w in given if not stored[w]]
                read = [j for j in users[v] if steps[j][0] != "write"]  # which is at once
                last[v] = num_points if v in wanted else max([i, *read, *inside])
                demanded[v] = v in wanted or any(self._demands(taker, demanded) for taker in takers)
                if what in _STORED:
                    stored[v] = True
                elif not self._is_view(steps[i]):
                    stored[v] = demanded[v] or (what in _EXPENSIVE and len(takers) > 1)
        end = last + 1
        for i, (what, takes, gives) in enumerate(steps):  # a result takes the place of an argument that ends
            if what in _STORED - _IN_PLACE:
                continue
            free = [v for v in {*takes} if stored[v] and end[v] == i + 1]
            for v in gives:
                same = next((w for w in free if self.sizes[w] == self.sizes[v]), None) if stored[v] else None
                if same is not None:
                    end[same] = i
                    free.remove(same)
        chosen = np.flatnonzero(stored)
        return Lifetimes(
            begin[chosen], np.minimum(end[chosen], num_points), np.array(self.sizes, np.float64)[chosen], num_points
        )

    def _is_view(self, step: tuple[str, list[int], list[int]]) -> bool:
        what, takes, _ = step
        return what in _VIEWS or (what == "transpose" and self.ranks[takes[0]] <= 2)

    def _demands(self, step: tuple[str, list[int], list[int]], demanded: np.ndarray) -> bool:
        """Whether a step takes stored arrays."""
        what, _, gives = step
        if what in _REDUCTIONS or what == "write":
            return False
        return bool(demanded[gives].any()) if self._is_view(step) else what in _STORED

    def _needed(self, results: list[int | None]) -> list[tuple[str, list[int], list[int]]]:
        """The steps that the results need."""
        needed = {v for v in results if v is not None}
        while True:
            before = len(needed)
            chosen = []
            for what, takes, gives in reversed(self.steps):
                if what == "hold":
                    chosen.append((what, [v for v in takes if v in needed], gives))
                elif takes[-1] in needed if what in ("write", "join") else any(v in needed for v in gives):
                    needed.update(takes)
                    chosen.append((what, takes, gives))
            needed.update(then for carried, then in self.loops if carried in needed)
            if len(needed) == before:
                return chosen[::-1]


def _consts(closed: ClosedJaxpr) -> list[None]:
    return [None] * len(closed.jaxpr.constvars)


def _itemsize(dtype: Any) -> int:
    return int(getattr(dtype, "itemsize", 8))
