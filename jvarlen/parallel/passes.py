"""A function and its derivative, cut into passes that run at different times: forward, backward, weight gradients."""

# The whole is traced once. Each equation belongs to the first pass that needs it. What later passes need of it is
# passed on as residuals. Only cheap or small equations run twice: views, and those that depend only on arguments that
# every pass has, such as casts of parameters, masks of the microbatch and random numbers of its key.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from jvarlen._common.jaxprs import is_attention
from jvarlen.distributed.layout import Remat

__all__ = ["Passes", "floats_of", "split_passes", "with_floats"]

_ALWAYS = -1
_VIEWS = {"broadcast_in_dim", "reshape", "squeeze", "transpose"}


class Passes(NamedTuple):
    """The passes of a function `y = function(params, x, *others)`."""

    # forward(params, x, *others) -> (y, residuals), a list of arrays.
    forward: Callable[..., tuple[Any, list[Any]]]
    # backward(params, residuals, of_y, *others) -> (of_x, of_params): gradients of the floats of x and of all
    # parameters, from those of the floats of y; or (of_x, handed), a list of arrays for weight gradients of their own.
    backward: Callable[..., tuple[list[Any], Any]]
    # weights(params, residuals, handed, *others) -> of_params, without any product of the backward pass.
    weights: Callable[..., Any] | None


def split_passes(
    function: Callable[..., Any],
    params: Any,
    x: Any,
    *others: Any,
    remat: Remat = "none",
    weights_apart: bool = False,
) -> Passes:
    """The passes of a function, which is traced here for arguments of these shapes; `others` go to every pass."""
    # With `remat="full"` residuals are arrays of x alone, from which each later pass runs the function again.

    def whole(always: tuple[Any, Any], x: Any, of_y: list[Any]) -> tuple[Any, list[Any], Any]:
        params, others = always

        def run(params: Any, floats: list[Any]) -> tuple[list[Any], Any]:
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
    run_pass = _cut(_without_calls(closed), given, wanted, runs_again=remat == "full")

    def forward(params: Any, x: Any, *others: Any) -> tuple[Any, list[Any]]:
        out = run_pass[0](*jax.tree.leaves(((params, others), x)))
        return jax.tree.unflatten(structures[0], out[: wanted[0]]), out[wanted[0] :]

    def backward(params: Any, residuals: list[Any], of_y: list[Any], *others: Any) -> tuple[Any, Any]:
        out = run_pass[1](*jax.tree.leaves(((params, others), of_y)), *residuals)
        of_x, rest = out[:num_of_x], out[num_of_x:]
        return of_x, rest if weights_apart else jax.tree.unflatten(structures[2], rest)

    def weights(params: Any, residuals: list[Any], handed: list[Any], *others: Any) -> Any:
        out = run_pass[2](*jax.tree.leaves((params, others)), *residuals, *handed)
        return jax.tree.unflatten(structures[2], out)

    return Passes(forward, backward, weights if weights_apart else None)


def floats_of(x: Any) -> list[Any]:
    """The arrays of x that have gradients."""
    return [leaf for leaf in jax.tree.leaves(x) if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def with_floats(x: Any, floats: Sequence[Any]) -> Any:
    """The same x with other arrays in place of those that have gradients."""
    leaves, structure = jax.tree.flatten(x)
    given = iter(floats)
    replaced = [next(given) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf for leaf in leaves]
    return jax.tree.unflatten(structure, replaced)


def _cut(
    closed: ClosedJaxpr, given: Sequence[int], wanted: Sequence[int], *, runs_again: bool
) -> list[Callable[..., list[Any]]]:
    """The passes of a traced function: each takes its arguments, then what each earlier pass has handed on."""
    # It returns its results, then what it hands on. `given` says how many arguments are there in every pass, only in
    # the first, and only in the second; `wanted` how many results each pass has.
    jaxpr = closed.jaxpr
    num_always, num_first = given[0], given[0] + given[1]
    arguments = [jaxpr.invars[num_always:num_first], jaxpr.invars[num_first:], []]
    given_in = dict.fromkeys([*jaxpr.constvars, *jaxpr.invars[:num_always]], _ALWAYS)
    given_in |= {var: number for number, each in enumerate(arguments) for var in each}
    known, possible = {**given_in}, []  # the first pass in which variables, and all arguments of equations, are known
    for eqn in jaxpr.eqns:
        possible.append(max((known[var] for var in eqn.invars if not isinstance(var, Literal)), default=_ALWAYS))
        known |= dict.fromkeys(eqn.outvars, possible[-1])
    maker = {var: i for i, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    made_in: dict[int, int] = {}
    handed: list[dict[Var, None]] = [{} for _ in wanted]
    chosen: list[set[int]] = [set() for _ in wanted]
    results = [[*jaxpr.outvars[end - num : end]] for num, end in zip(wanted, np.cumsum(wanted).tolist(), strict=True)]
    for number, needed in enumerate(results):
        with_effects = [i for i, eqn in enumerate(jaxpr.eqns) if eqn.effects and max(0, possible[i]) == number]
        made_in |= dict.fromkeys(with_effects, number)
        chosen[number].update(with_effects)
        pending = [*needed, *(var for i in with_effects for var in jaxpr.eqns[i].invars)]
        seen: set[Var] = set()
        while pending:
            var = pending.pop()
            if isinstance(var, Literal) or var in seen:
                continue
            seen.add(var)
            if var in given_in:
                if given_in[var] not in (_ALWAYS, number):
                    handed[given_in[var]][var] = None
                continue
            i, eqn = maker[var], jaxpr.eqns[maker[var]]
            is_anew = not eqn.effects and (runs_again or possible[i] == _ALWAYS or eqn.primitive.name in _VIEWS)
            if made_in.setdefault(i, number) == number or is_anew:
                chosen[number].add(i)
                pending += eqn.invars
            else:
                handed[made_in[i]][var] = None

    def pass_of(number: int) -> Callable[..., list[Any]]:
        received = [var for each in handed[:number] for var in each]
        part = jaxpr.replace(
            invars=[*jaxpr.invars[:num_always], *arguments[number], *received],
            outvars=[*results[number], *handed[number]],
            eqns=[jaxpr.eqns[i] for i in sorted(chosen[number])],
        )
        return jaxpr_as_fun(ClosedJaxpr(part, closed.consts))

    return [pass_of(number) for number in range(len(wanted))]


def _without_calls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same with the equations of jitted functions in place of their calls, which could not be cut.

    Attention is of one pass, and stays what `count_operations` knows by its name.
    """

    def always(eqn: JaxprEqn) -> Any:
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
