"""A function and its derivative, cut into passes that run at different times: forward, backward, weight gradients."""

# The whole is traced once. An equation that must not run twice belongs to the first pass that needs it; others run in
# every pass that needs them. What a pass hands on as residuals is a minimum cut of the traced graph: of all sets of
# arrays from which later passes can compute what they need, the one of least bytes. What depends only on arguments of
# every pass, such as casts of parameters, masks of the microbatch and random numbers of its key, is never handed on.

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from jvarlen._common.jaxprs import is_attention
from jvarlen._common.types import Array, Grads, Params, PyTree
from jvarlen.distributed.layout import Remat

__all__ = ["Passes", "floats_of", "split_passes", "with_floats"]

_ALWAYS = -1
_MOST = int(np.iinfo(np.int32).max)
_OF_ELEMENTS = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp complex conj
    convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag
    integer_pow is_finite le lgamma log log1p logistic lt max min mul name ne neg nextafter not or pow real
    reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt
    square sub tan tanh xor
"""
_OF_PLACES = """
    axis_index broadcast_in_dim concatenate dynamic_slice expand_dims iota pad pcast pvary reshape rev slice split
    squeeze transpose
"""
_CHEAP = {*_OF_ELEMENTS.split(), *_OF_PLACES.split()}  # XLA computes them inside of what reads them
_CHECKPOINTS = {"checkpoint", "remat", "remat2"}


class Passes(NamedTuple):
    """The passes of a function `y = function(params, x, *others)`."""

    # forward(params, x, *others) -> (y, residuals), a list of arrays.
    forward: Callable[..., tuple[PyTree, list[Array]]]
    # backward(params, residuals, of_y, *others) -> (of_x, of_params): gradients of the floats of x and of all
    # parameters, from those of the floats of y; or (of_x, handed), a list of arrays for the pass of weight gradients.
    backward: Callable[..., tuple[list[Array], PyTree]]
    # weights(params, residuals, handed, *others) -> of_params, without any product of the backward pass.
    weights: Callable[..., Grads] | None


def split_passes(
    function: Callable[..., Any],
    params: Params,
    x: PyTree,
    *others: PyTree,
    remat: Remat = "none",
    weights_apart: bool = False,
) -> Passes:
    """The passes of a function, which is traced here for arguments of these shapes; `others` go to every pass."""
    # With `remat="none"` only operations on elements, and views, run in several passes: no products, attention, sums,
    # loops, communication, or what is not known. With "selective" what must not run twice is what `checkpoint_name`
    # names, attention, and what a `jax.checkpoint` inside of the function keeps. With "full" residuals are arrays of x.

    def whole(always: tuple[Any, Any], x: PyTree, of_y: list[Array]) -> tuple[Any, list[Array], Any]:
        params, others = always

        def run(params: Params, floats: list[Array]) -> tuple[list[Array], PyTree]:
            y = function(params, with_floats(x, floats), *others)
            return floats_of(y), y

        _, pull, y = jax.vjp(run, params, floats_of(x), has_aux=True)
        of_params, of_x = pull(of_y)
        return y, of_x, of_params

    of_y = floats_of(jax.eval_shape(function, params, x, *others))
    arguments = (params, others), x, of_y
    closed, results = jax.make_jaxpr(whole, return_shape=True)(*arguments)
    given, wanted = ([len(jax.tree.leaves(each)) for each in parts] for parts in (arguments, results))
    structures = [jax.tree.structure(each) for each in results]
    num_of_x = wanted[1]
    if not weights_apart:
        wanted = [wanted[0], wanted[1] + wanted[2]]
    run_pass = _cut(_without_calls(closed), given, wanted, remat)

    def forward(params: Params, x: PyTree, *others: PyTree) -> tuple[PyTree, list[Array]]:
        out = run_pass[0](*jax.tree.leaves(((params, others), x)))
        return jax.tree.unflatten(structures[0], out[: wanted[0]]), out[wanted[0] :]

    def backward(params: Params, residuals: list[Array], of_y: list[Array], *others: PyTree) -> tuple[Any, Any]:
        out = run_pass[1](*jax.tree.leaves(((params, others), of_y)), *residuals)
        of_x, rest = out[:num_of_x], out[num_of_x:]
        return of_x, rest if weights_apart else jax.tree.unflatten(structures[2], rest)

    def weights(params: Params, residuals: list[Array], handed: list[Array], *others: PyTree) -> PyTree:
        out = run_pass[2](*jax.tree.leaves((params, others)), *residuals, *handed)
        return jax.tree.unflatten(structures[2], out)

    return Passes(forward, backward, weights if weights_apart else None)


def floats_of(x: PyTree) -> list[Array]:
    """The arrays of x that have gradients."""
    return [leaf for leaf in jax.tree.leaves(x) if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def with_floats(x: PyTree, floats: Sequence[Any]) -> PyTree:
    """The same x with other arrays in place of those that have gradients."""
    leaves, structure = jax.tree.flatten(x)
    given = iter(floats)
    replaced = [next(given) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf for leaf in leaves]
    return jax.tree.unflatten(structure, replaced)


class _Graph:
    """A traced function as a graph of equations, and which of its arguments and results belong to which pass.

    `given` says how many arguments are there in every pass, only in the first, and only in the second; `wanted` how
    many results each pass has.

    | name | meaning |
    |---|---|
    | always | arguments of every pass, and what is computed of these alone |
    | known in p | the first pass in which all arguments of an equation are there |
    | runs in p | the pass in which an equation runs; one that may run again runs in each later pass that needs it |
    | once | variables that must not be computed twice: arguments, and outputs of equations that run once |
    | handed on | what later passes get from a pass: a minimum cut between once and what they need |
    """

    def __init__(self, closed: ClosedJaxpr, given: Sequence[int], wanted: Sequence[int], remat: Remat):
        self.jaxpr, self.eqns, self.remat = closed.jaxpr, closed.jaxpr.eqns, remat
        invars, outvars = closed.jaxpr.invars, closed.jaxpr.outvars
        num_always, num_first = given[0], given[0] + given[1]
        self.always = [*closed.jaxpr.constvars, *invars[:num_always]]
        self.arguments: list[list[Var]] = [invars[num_always:num_first], invars[num_first:], []]
        ends = np.cumsum(wanted).tolist()
        self.results = [[*outvars[end - num : end]] for num, end in zip(wanted, ends, strict=True)]
        self.maker = {var: i for i, eqn in enumerate(self.eqns) for var in eqn.outvars}

    def equations_of(self, atoms: Sequence[Var | Literal], there: Collection[Var] = ()) -> set[int]:
        """The equations that compute these variables from those in `there`."""
        found: set[int] = set()
        pending = _variables(atoms)
        while pending:
            var = pending.pop()
            if var not in there and var in self.maker and self.maker[var] not in found:
                found.add(self.maker[var])
                pending += _variables(self.eqns[self.maker[var]].invars)
        return found

    @functools.cached_property
    def pass_of_argument(self) -> dict[Var, int]:
        """The pass of each argument."""
        passes = {var: number for number, each in enumerate(self.arguments) for var in each}
        return dict.fromkeys(self.always, _ALWAYS) | passes

    @functools.cached_property
    def known(self) -> dict[Var, int]:
        """The first pass in which each variable can be computed."""
        known = {**self.pass_of_argument}
        for eqn in self.eqns:
            known |= dict.fromkeys(eqn.outvars, _first_pass_of(eqn, known))
        return known

    @functools.cached_property
    def effects(self) -> list[list[int]]:
        """The equations with effects of each pass, which run whether anything needs them or not."""
        effects: list[list[int]] = [[] for _ in self.results]
        for i, eqn in enumerate(self.eqns):
            if _has_effects(eqn):
                effects[max(0, _first_pass_of(eqn, self.known))].append(i)
        return effects

    @functools.cached_property
    def required(self) -> list[list[Var | Literal]]:
        """The variables that each pass must compute: its results, and arguments of its equations with effects."""
        pairs = zip(self.results, self.effects, strict=True)
        return [[*each, *(var for i in eqns for var in self.eqns[i].invars)] for each, eqns in pairs]

    def chosen(self) -> set[Var]:
        """Variables that a checkpoint names or takes, and those that they are computed from cheaply."""
        chosen: set[Var] = set()
        for eqn in reversed(self.eqns):
            takes_kept = eqn.primitive.name in _CHECKPOINTS and _first_pass_of(eqn, self.known) > 0
            if (
                eqn.primitive.name == "name"
                or takes_kept
                or (eqn.primitive.name in _CHEAP and not chosen.isdisjoint(eqn.outvars))
            ):
                chosen.update(_variables(eqn.invars))
        return chosen

    def schedule(self) -> tuple[dict[int, int], dict[Var, int], set[Var]]:
        """The pass in which each equation runs, that in which each variable is there, and what must not run twice."""
        first_use: dict[int, int] = {}
        for number, each in enumerate(self.required):
            first_use = dict.fromkeys([*self.effects[number], *self.equations_of(each)], number) | first_use
        # What must not run twice waits for its first use; what depends on it follows.
        there, runs_in, chosen = {**self.pass_of_argument}, {}, self.chosen()
        once = {var for each in self.arguments for var in each}
        for i in sorted(first_use):
            eqn, number = self.eqns[i], _first_pass_of(self.eqns[i], there)
            if not _runs_again(eqn, number, self.remat, is_chosen=not chosen.isdisjoint(eqn.outvars)):
                number = first_use[i]
                once.update(eqn.outvars)
            runs_in[i] = number
            there |= dict.fromkeys(eqn.outvars, number)
        return runs_in, there, once


def _cut(
    closed: ClosedJaxpr, given: Sequence[int], wanted: Sequence[int], remat: Remat
) -> list[Callable[..., list[Array]]]:
    """The passes of a traced function: each takes its arguments, then what each earlier pass has handed on."""
    # It returns its results, then what it hands on.
    graph = _Graph(closed, given, wanted, remat)
    runs_in, known, once = graph.schedule()
    makers = {var: graph.eqns[i] for var, i in graph.maker.items()}
    always = {var for var, first in known.items() if first == _ALWAYS}
    passes: list[Callable[..., list[Array]]] = []
    received: list[Var] = []
    for number, results in enumerate(graph.results):
        later = [graph.eqns[i].invars for i, runs in runs_in.items() if runs > number] + graph.results[number + 1 :]
        needed = {var for each in later for var in _variables(each) if known[var] <= number}
        there = always | {*received}
        to_hand = _least_cut(needed - there, there, once, makers, remat)
        handed = [var for var in known if var in to_hand]
        run = {*graph.effects[number], *graph.equations_of([*graph.required[number], *handed], received)}
        part = closed.jaxpr.replace(
            invars=[*closed.jaxpr.invars[: given[0]], *graph.arguments[number], *received],
            outvars=[*results, *handed],
            eqns=[graph.eqns[i] for i in sorted(run)],
        )
        passes.append(jaxpr_as_fun(ClosedJaxpr(part, closed.consts)))
        received += handed
    return passes


def _least_cut(
    needed: Collection[Var], there: Collection[Var], once: Collection[Var], makers: Mapping[Var, JaxprEqn], remat: Remat
) -> set[Var]:
    """The variables of least bytes from which, and from what is there, these can be computed; of several the latest."""
    from scipy.sparse import csr_array  # here: importing it takes long
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    node: defaultdict[Hashable, int] = defaultdict(itertools.count().__next__)
    source, sink = node["source"], node["sink"]
    num_bytes: dict[tuple[int, int], int] = {}  # between the two nodes of a variable, by which it is cut
    uncut: dict[tuple[int, int], None] = {}
    seen, pending = set[Var](), [*needed]
    while pending:
        var = pending.pop()
        if var in seen or var in there:
            continue
        seen.add(var)
        if var in needed:
            uncut[node[var, "after"], sink] = None
        if var in once:
            uncut[source, node[var, "before"]] = None
        else:
            eqn = id(makers[var])
            uncut[node[eqn], node[var, "before"]] = None
            for each in _variables(makers[var].invars):
                if each not in there:
                    uncut[node[each, "after"], node[eqn]] = None
                    pending.append(each)
        if remat == "full" and var not in once:
            uncut[node[var, "before"], node[var, "after"]] = None
        else:
            aval = cast(Any, var.aval)
            num_bytes[node[var, "before"], node[var, "after"]] = aval.size * aval.dtype.itemsize
    unit = sum(num_bytes.values()) // (_MOST // 2) + 1
    capacities = [-(-each // unit) for each in num_bytes.values()] + [_MOST] * len(uncut)
    ends = np.array([*num_bytes, *uncut], np.int32).reshape(-1, 2)
    graph = csr_array((np.array(capacities, np.int32), tuple(ends.T)), shape=(len(node), len(node)))
    left = graph - maximum_flow(graph, source, sink).flow
    left.eliminate_zeros()
    # What still leads to the sink is the same for all flows that are maximal.
    after = {*breadth_first_order(left.T.tocsr(), sink, return_predecessors=False).tolist()}
    return {var for var in seen if node[var, "before"] not in after and node[var, "after"] in after}


def _variables(atoms: Sequence[Var | Literal]) -> list[Var]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def _first_pass_of(eqn: JaxprEqn, known: Mapping[Var, int]) -> int:
    """The first pass in which all arguments are known."""
    return max((known[var] for var in _variables(eqn.invars)), default=_ALWAYS)


def _has_effects(eqn: JaxprEqn) -> bool:
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def _runs_again(eqn: JaxprEqn, known_in: int, remat: Remat, *, is_chosen: bool) -> bool:
    """Whether an equation runs in every pass that needs it."""
    if _has_effects(eqn) or remat == "full":
        return not _has_effects(eqn)
    if eqn.primitive.name in _CHEAP:
        return True
    if known_in == _ALWAYS:  # communication is worth keeping
        return not eqn.effects
    return remat == "selective" and known_in == 0 and not is_chosen and not is_attention(eqn)


def _without_calls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Replaces calls, which cannot be cut, by the equations of the called functions, except attention."""

    def always(eqn: JaxprEqn) -> PyTree:
        kind = type(eqn.params["inline"])  # a bool; since JAX 0.11 an enumeration
        return True if kind is bool else kind["JAX_EARLY"]

    def is_call(eqn: JaxprEqn) -> bool:
        is_jitted = eqn.primitive.name in ("jit", "pjit") and not is_attention(eqn)
        return is_jitted and eqn.params["inline"] != always(eqn)

    while any(map(is_call, closed.jaxpr.eqns)):  # what is called may call in turn
        eqns = [
            eqn.replace(params=eqn.params | {"inline": always(eqn)}) if is_call(eqn) else eqn
            for eqn in closed.jaxpr.eqns
        ]
        inlined = ClosedJaxpr(closed.jaxpr.replace(eqns=eqns), closed.consts)
        closed = jax.make_jaxpr(jaxpr_as_fun(inlined))(*closed.in_avals)
    return closed
