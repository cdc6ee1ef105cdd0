"""The lifetimes of the arrays of a traced function in a compiled program: in the order of its equations, fused.

Elementwise results are computed where they are used unless a product, or several expensive users, take them. A loop is
run once: what it carries and stacks is alive around it. Letters: N arrays, P points in time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jaxtyping import Bool, Float64, Int64

from jvarlen._common.jaxprs import scan_parts

__all__ = ["Lifetimes", "lifetimes_of"]

_VIEWS = {"reshape", "squeeze", "expand_dims", "stop_gradient", "name", "copy", "optimization_barrier"}
_EXPENSIVE = {"exp", "exp2", "expm1", "log", "log1p", "tanh", "pow", "rsqrt", "sqrt", "sin", "cos", "erf"}
_REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin"}
_ALONE = {
    "dot_general", "conv_general_dilated", "scatter", "scatter-add", "sort", "cumsum", "cumlogsumexp",
    "all_gather", "psum", "psum_invariant", "reduce_scatter", "ppermute", "all_to_all", "pmax", "pmin",
    "custom_call", "ffi_call", "random_bits", "threefry2x32", "top_k",
}  # fmt: skip
_SUMS = {"add", "add_any"}
_ZEROS_OF_ZEROS = {*_SUMS, "broadcast_in_dim", "convert_element_type"}
_STORED = {*_ALONE, *_REDUCTIONS, "begin", "empty", "join", "hold", "end"}
_IN_PLACE = {"begin", "end", "scatter", "scatter-add"}


class Lifetimes(NamedTuple):
    """Arrays of a traced function that are neither its arguments nor computed inside others."""

    begin: Int64[np.ndarray, " N"]  # the point from which an array is alive
    end: Int64[np.ndarray, " N"]  # the point from which it no longer is; P for results
    num_bytes: Float64[np.ndarray, " N"]
    num_points: int  # P
    in_loop: Bool[np.ndarray, " N"]  # whether a loop carries, leaves or stacks an array

    def peak(self, num_bytes: Float64[np.ndarray, "... N"] | None = None) -> Float64[np.ndarray, ...]:
        """Bytes at the fullest point, of these sizes or others of the same arrays."""
        sizes = self.num_bytes if num_bytes is None else num_bytes
        changes = np.zeros((*sizes.shape[:-1], self.num_points + 1))
        np.add.at(np.moveaxis(changes, -1, 0), self.begin, np.moveaxis(sizes, -1, 0))
        np.subtract.at(np.moveaxis(changes, -1, 0), self.end, np.moveaxis(sizes, -1, 0))
        return np.cumsum(changes, axis=-1)[..., : self.num_points].max(axis=-1, initial=0)


def lifetimes_of(closed: ClosedJaxpr) -> Lifetimes:
    """The lifetimes of the arrays of a traced function."""
    flat = _Flat()
    constants = dict(zip(closed.jaxpr.constvars, flat.values(closed.jaxpr.constvars), strict=True))
    results = flat.run(closed.jaxpr, flat.values(closed.jaxpr.invars), constants)
    return flat.lifetimes(results)


_Values: TypeAlias = list[int | None]  # by number; None: a constant
_Step: TypeAlias = tuple[str, list[int], list[int]]  # what, takes, gives


class _Flat:
    """A function as a list of steps, without calls."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.ranks: list[int] = []
        self.steps: list[_Step] = []
        self.loops: list[tuple[int | None, int | None]] = []  # values that a loop carries, and those that it leaves
        self.stacks: _Values = []  # of loops
        self.begin = 0  # where compilers make constants: before the last loop, or where the running loop begins
        self.zeros: set[int | None] = set()

    def values(self, variables: Sequence[Var]) -> _Values:
        """New values of these types."""
        for var in variables:
            shape, dtype = getattr(var.aval, "shape", (0,)), getattr(var.aval, "dtype", None)
            self.sizes.append(math.prod(shape) * int(getattr(dtype, "itemsize", 8)))
            self.ranks.append(len(shape))
        return list(range(len(self.sizes) - len(variables), len(self.sizes)))

    def run(self, jaxpr: Jaxpr, arguments: _Values, constants: dict[Var, int | None] | None = None) -> _Values:
        """Adds the steps of a function, and returns its results."""
        known = dict.fromkeys(jaxpr.constvars) | (constants or {}) | dict(zip(jaxpr.invars, arguments, strict=True))
        for eqn in jaxpr.eqns:
            takes = [None if isinstance(var, Literal) else known[var] for var in eqn.invars]
            known |= dict(zip(eqn.outvars, self._run_equation(eqn, takes), strict=True))
        return [None if isinstance(var, Literal) else known[var] for var in jaxpr.outvars]

    def _run_equation(self, eqn: JaxprEqn, takes: _Values) -> _Values:
        name, params = eqn.primitive.name, eqn.params
        by_name = {"scan": self._run_scan, "while": self._run_while, "cond": self._run_branches}
        if name in by_name:
            return by_name[name](eqn, takes)
        inner = next((params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params), None)
        if inner is not None and name != "pallas_call":  # whose arrays are blocks, in a kernel
            return self.run(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner, takes)
        gives = self.values(eqn.outvars)
        is_zero = [
            not np.any(var.val) if isinstance(var, Literal) else value in self.zeros
            for var, value in zip(eqn.invars, takes, strict=True)
        ]
        if is_zero and all(is_zero) and name in _ZEROS_OF_ZEROS:
            self.zeros.update(gives)
        elif name in _SUMS and any(is_zero):  # is the other
            name, takes = "reshape", [takes[is_zero.index(False)]]
        self._add(name, takes, gives)
        return gives

    def _run_branches(self, eqn: JaxprEqn, takes: _Values) -> _Values:
        """Runs branches one after the other. Their results take the places of the equation's."""
        gives = self.values(eqn.outvars)
        self._add("hold", takes[1:], [])
        for branch in eqn.params["branches"]:
            for result, place in zip(self.run(branch.jaxpr, takes[1:]), gives, strict=True):
                if result is not None:
                    self._add("join", [result, place], [])
        for place in gives:
            self._add("end", [], [place])
        return gives

    def _run_scan(self, eqn: JaxprEqn, takes: _Values) -> _Values:
        body, (num_consts, num_carry) = eqn.params["jaxpr"].jaxpr, scan_parts(eqn)
        begin = num_consts + num_carry
        consts, init, stacked = takes[:num_consts], takes[num_consts:begin], takes[begin:]
        gives = self.values(eqn.outvars)
        slices = self.values(body.invars[begin:])
        if eqn.params["length"] <= 1:  # no loop
            self._each("reshape", stacked, slices)
            self._each("reshape", self.run(body, [*consts, *init, *slices]), gives)
            return gives
        carried = self.values(body.invars[num_consts:begin])
        self._each("begin", init, carried)
        for whole in gives[num_carry:]:
            self._add("empty", [], [whole])
            self.stacks.append(whole)
        self._each("slice", stacked, slices)
        results = self._run_body(body, [*consts, *carried, *slices])
        for result, place in zip(results[num_carry:], gives[num_carry:], strict=True):
            if result is not None:
                self._add("write", [result, place], [])
        self._add("hold", [*consts, *stacked], [])
        self._ends(results[:num_carry], carried, gives)
        return gives

    def _run_while(self, eqn: JaxprEqn, takes: _Values) -> _Values:
        num_test = eqn.params["cond_nconsts"]
        num_consts = num_test + eqn.params["body_nconsts"]
        gives, carried = self.values(eqn.outvars), self.values(eqn.outvars)
        self._each("begin", takes[num_consts:], carried)
        results = self._run_body(eqn.params["body_jaxpr"].jaxpr, [*takes[num_test:num_consts], *carried])
        self._add("hold", takes[:num_consts], [])
        self._ends(results, carried, gives)
        return gives

    def _run_body(self, body: Jaxpr, takes: _Values) -> _Values:
        begin, self.begin = len(self.steps), len(self.steps)
        results = self.run(body, takes)
        self.begin = begin
        return results

    def _ends(self, results: _Values, carried: _Values, gives: _Values) -> None:
        """The values that a loop leaves: those that its last turn carries, in their place."""
        for result, at_begin, place in zip(results, carried, gives, strict=False):
            self._add("end", [result], [place])
            self.loops.append((at_begin, place))

    def _each(self, what: str, takes: _Values, gives: _Values) -> None:
        for taken, given in zip(takes, gives, strict=False):
            self._add(what, [taken], [given])

    def _add(self, what: str, takes: _Values, gives: _Values) -> None:
        step = what, [v for v in takes if v is not None], [v for v in gives if v is not None]
        self.steps.insert(len(self.steps) if step[1] or what == "end" else self.begin, step)

    def lifetimes(self, results: _Values) -> Lifetimes:
        """The lifetimes of all values that are stored."""
        steps = self._needed_steps(results)
        num_points = len(steps)
        updated = {takes[0] for what, takes, _ in steps if what == "dynamic_update_slice"}
        made_by = {v: i for i, (_, _, gives) in enumerate(steps) for v in gives}
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
                if what == "dot_general" and len(takers) == 1 and takers[0][0] == "add":
                    # Added in place, as BLAS does, where it is added to an earlier array.
                    before = [w for w in takers[0][1] if made_by.get(w, i) < i and self.sizes[w] == self.sizes[v]]
                    stored[v] = all(steps[made_by[w]][0] not in _STORED for w in before)
                elif what == "dot_general" and (rounded := self._find_rounded(v, steps, users)) is not None:
                    self.sizes[v] = self.sizes[rounded]
                    stored[v] = not stored[rounded]
                elif what in _STORED or (what == "dynamic_slice" and steps[i][1][0] in updated):
                    stored[v] = True
                elif not self._is_view(steps[i]):
                    stored[v] = demanded[v] or (what in _EXPENSIVE and len(takers) > 1)
        for what, takes, gives in steps:  # what is added to a part of an array may be read as soon as it is there
            if what == "dynamic_slice" and takes[0] in updated:
                begin[gives] = begin[takes[0]]
        end = last + 1
        sources: list[set[int]] = [set() for _ in self.sizes]  # stored values that one is computed of, place by place
        for i, (what, takes, gives) in enumerate(steps):  # a result takes the place of an argument that ends
            if what in _STORED - _IN_PLACE:
                continue
            found = set[int]().union(*({v} if stored[v] else sources[v] for v in takes))
            free = sorted(v for v in found if end[v] == i + 1)
            for v in gives:
                sources[v] = found if what != "transpose" else set()
                same = next((w for w in free if self.sizes[w] == self.sizes[v]), None) if stored[v] else None
                if same is not None:
                    end[same] = i
                    free.remove(same)
        of_loops = {*self.stacks, *(value for each in self.loops for value in each)}
        in_loop = np.array([value in of_loops for value in range(len(stored))], bool)
        sizes, end = np.array(self.sizes, np.float64), np.minimum(end, num_points)
        return Lifetimes(begin[stored], end[stored], sizes[stored], num_points, in_loop[stored])

    def _find_rounded(self, product: int, steps: list[_Step], users: list[list[int]]) -> int | None:
        """The narrower value in whose type a product is stored, if it is only converted to that."""
        takers = [steps[i] for i in users[product]]
        while len(takers) == 1 and self._is_view(takers[0]):
            takers = [steps[i] for i in users[takers[0][2][0]]]
        if [taker[0] for taker in takers] != ["convert_element_type"]:
            return None
        [rounded] = takers[0][2]
        return rounded if self.sizes[rounded] < self.sizes[product] else None

    def _is_view(self, step: _Step) -> bool:
        what, takes, _ = step
        return what in _VIEWS or (what == "transpose" and self.ranks[takes[0]] <= 2)

    def _demands(self, step: _Step, demanded: np.ndarray) -> bool:
        """Whether a step takes stored arrays."""
        what, _, gives = step
        if what in _REDUCTIONS or what == "write":
            return False
        return bool(demanded[gives].any()) if self._is_view(step) else what in _STORED

    def _needed_steps(self, results: _Values) -> list[_Step]:
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
            needed.update(then for carried, then in self.loops if then is not None and carried in needed)
            if len(needed) == before:
                return chosen[::-1]
