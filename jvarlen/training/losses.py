"""What a loss may take and return, and one signature for all losses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.jaxprs import scan_parts
from jvarlen._common.pytree import describe, have_same_containers, leaves_by_name
from jvarlen.training.train_state import TrainState

__all__ = ["LossFn", "LossOutputs", "bind_loss", "takes_argument", "which_are_reduced"]

LossFn = Callable[..., tuple[Any, ...]]

_REDUCTIONS = {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}


class LossOutputs(NamedTuple):
    """The outputs of a loss besides Σ loss: Σ weight, further sums, and the next `extra`, None if it takes none."""

    weight_sum: jax.Array
    sums: Mapping[str, Any]
    extra: Any


def takes_argument(loss_fn: LossFn, name: str) -> bool:
    """Whether a loss function has a parameter of this name."""
    return name in inspect.signature(loss_fn).parameters


def bind_loss(loss_fn: LossFn, state: TrainState) -> Callable[[Any, Any, Any], tuple[jax.Array, LossOutputs]]:
    """The loss as `loss(params, microbatch, key) -> (loss_sum, LossOutputs)`, with `extra` of the state."""
    parameters = inspect.signature(loss_fn).parameters
    name = getattr(loss_fn, "__name__", "loss_fn")
    for argument, how in (("key", "seed=0"), ("extra", "extra=…")):
        is_needed = argument in parameters and parameters[argument].default is inspect.Parameter.empty
        if is_needed and getattr(state, argument) is None:
            raise UserError(f"{name} takes {argument}: step.init(params, {how}) gives the state one")
    takes_key = "key" in parameters and state.key is not None
    takes_extra = "extra" in parameters and state.extra is not None

    def loss(params: Any, microbatch: Any, key: Any) -> tuple[jax.Array, LossOutputs]:
        # Made again, as it may change them in place; NNX's variables it may only under the trace that made them.
        microbatch, extra = jax.tree.map(lambda leaf: leaf, (microbatch, state.extra))
        arguments = ({"key": key} if takes_key else {}) | ({"extra": extra} if takes_extra else {})
        returned = loss_fn(params, microbatch, **arguments)
        wanted = "(loss_sum, weight_sum[, sums]" + (", extra)" if takes_extra else ")")
        if not isinstance(returned, tuple) or len(returned) not in (2 + takes_extra, 3 + takes_extra):
            got = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
            raise UserError(f"{name} must return {wanted}, not {got}")
        loss_sum, weight_sum, *rest = returned
        next_extra = _checked_extra(name, rest.pop(), state.extra) if takes_extra else None
        sums = rest[0] if rest else {}
        if not isinstance(sums, Mapping):
            raise UserError(f"{name} must return {wanted}, sums a dict of arrays, not a {type(sums).__name__}")
        loss_sum, weight_sum = jnp.asarray(loss_sum), jnp.asarray(weight_sum)
        for what, value in (("loss_sum", loss_sum), ("weight_sum", weight_sum)):
            if value.shape:
                raise UserError(f"{name} must return a scalar {what}, not {describe(value)}: sum over the rows")
        return loss_sum, LossOutputs(weight_sum, jax.tree.map(jnp.asarray, dict(sums)), next_extra)

    return loss


def _checked_extra(name: str, returned: Any, given: Any) -> Any:
    one, other = leaves_by_name(given), leaves_by_name(returned)
    described = {leaf: (describe(one.get(leaf)), describe(other.get(leaf))) for leaf in one | other}
    differing = [f"{leaf or 'it'}: {old} -> {new}" for leaf, (old, new) in described.items() if old != new]
    if differing or not have_same_containers(given, returned):
        listed = list_first(differing, "; ") or "its containers differ"
        raise UserError(f"{name} must return extra, last, as it takes it: {listed}")
    return returned


def which_are_reduced(closed: ClosedJaxpr, axis_name: str) -> list[bool]:
    """Which outputs of a traced function are the same on all shards because it reduces or gathers them itself."""
    same, reduced, differs = 0, 1, 2  # of several, the largest is what becomes of them

    def walk(jaxpr: Jaxpr, kinds: list[int]) -> list[int]:
        kind_of = dict(zip(jaxpr.invars, kinds, strict=True))

        def kind(atom: Any) -> int:
            return same if hasattr(atom, "val") else kind_of.get(atom, same)

        for eqn in jaxpr.eqns:
            kind_of.update(zip(eqn.outvars, made_by(eqn, [kind(atom) for atom in eqn.invars]), strict=True))
        return [kind(atom) for atom in jaxpr.outvars]

    def made_by(eqn: JaxprEqn, given: list[int]) -> list[int]:
        axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        if eqn.primitive.name in _REDUCTIONS and axis_name in (axes if isinstance(axes, tuple) else (axes,)):
            return [reduced] * len(eqn.outvars)
        if eqn.primitive.name == "axis_index":
            return [differs]
        if eqn.primitive.name == "scan":
            num_fixed, num_carry = scan_parts(eqn)
            fixed, carry, xs = given[:num_fixed], given[num_fixed:][:num_carry], given[num_fixed + num_carry :]
            while True:
                made = walk(eqn.params["jaxpr"].jaxpr, fixed + carry + xs)
                if all(old >= new for old, new in zip(carry, made[:num_carry], strict=True)):
                    return carry + made[num_carry:]
                carry = list(map(max, carry, made[:num_carry]))
        if eqn.primitive.name == "cond":
            branches = [walk(branch.jaxpr, given[1:]) for branch in eqn.params["branches"]]
            return [max(given[0], *kinds) for kinds in zip(*branches, strict=True)]
        called = [value for value in eqn.params.values() if isinstance(value, ClosedJaxpr | Jaxpr)]
        if called and eqn.primitive.name != "while":
            inner: Any = getattr(called[0], "jaxpr", called[0])
            if (len(inner.invars), len(inner.outvars)) == (len(given), len(eqn.outvars)):
                return walk(inner, given)
        return [max(given, default=same)] * len(eqn.outvars)

    # Arguments differ between shards, and what the function closes over does not.
    return [kind == reduced for kind in walk(closed.jaxpr, [differs] * len(closed.jaxpr.invars))]
