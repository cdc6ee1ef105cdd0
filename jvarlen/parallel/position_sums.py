"""Whether a loss that gets some positions of its rows is a sum over positions, seen in its traced operations."""

# Rows that are spread or sliced add up the losses of their parts: a mean, a product of sums or a maximum over positions
# would be another number. What can't be told is taken for a sum. Letters: S positions of a part.

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jvarlen._common.checks import UserError

__all__ = ["check_sums_over_positions"]

_LINEAR = {"neg", "convert_element_type", "copy", "real", "reduce_precision", "broadcast_in_dim", "reshape", "squeeze"}
_MOVING = {"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "rev"}
_REDUCING = {"reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"}
_CALLS = {"jit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint"}
_CHUNKED = "_sum_of_losses"  # the sum over positions that `chunked_cross_entropy` calls


class _Kind(NamedTuple):
    """What a value is; `axis` is that of the positions."""

    name: str  # fixed, whole (the same for all parts), each (of a position), sum (over them), mixed, unknown
    axis: int | None = None


_FIXED, _WHOLE, _SUM, _MIXED, _UNKNOWN = map(_Kind, ("fixed", "whole", "sum", "mixed", "unknown"))


def check_sums_over_positions(
    loss: Callable[..., tuple[Any, ...]],
    loss_of_rows: Callable[..., tuple[Any, ...]],
    ends: Any,
    x: Any,
    microbatch: Any,
    seq_length: int,
) -> None:
    """Raises ValueError for a loss of some positions, `loss(ends, x, microbatch)`, that is no sum over them."""
    outputs, factors = _kinds_of(loss, ends, x, microbatch)
    names = ["loss_sum", "weight_sum"] + ["one of the sums"] * (len(outputs) - 2)
    wrong = [name for name, kind in zip(names, outputs, strict=True) if kind in (_MIXED, _WHOLE)]
    rows = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((len(leaf), seq_length, *leaf.shape[2:]), leaf.dtype), x)
    if not wrong and factors and _kinds_of(loss_of_rows, ends, rows, microbatch)[1] != factors:
        wrong = ["what divides a sum, such as the number of positions in a mean,"]  # it is another for whole rows
    if wrong:
        raise UserError(
            f"{' and '.join(wrong)} of the model's loss is no sum over positions, and rows go in parts, whose losses "
            "are added: return the sum of the losses of axes.positions, and of their weights"
        )


def _kinds_of(loss: Callable[..., Any], ends: Any, x: Any, microbatch: Any) -> tuple[list[_Kind], list[Any]]:
    """What the outputs of a loss are, and the constants that multiply or divide sums."""
    traced = jax.make_jaxpr(loss)(ends, x, microbatch)
    num_x, num_others = len(jax.tree.leaves(x)), len(jax.tree.leaves(microbatch))
    kinds = [_WHOLE] * (len(traced.jaxpr.invars) - num_x - num_others)
    kinds += [_Kind("each", 1)] * num_x + [_WHOLE] * num_others
    factors: list[Any] = []
    num_positions = jax.tree.leaves(x)[0].shape[1]
    consts = [_FIXED if np.ndim(const) == 0 else _UNKNOWN for const in traced.consts]
    return _walk(traced.jaxpr, consts, kinds, num_positions, factors), factors


def _walk(jaxpr: Jaxpr, consts: list[_Kind], given: list[_Kind], num_positions: int, factors: list[Any]) -> list[_Kind]:
    kinds = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *given], strict=True))

    def kind_of(atom: Any) -> _Kind:
        return _FIXED if isinstance(atom, Literal) else kinds[atom]

    for equation in jaxpr.eqns:
        taken = [kind_of(atom) for atom in equation.invars]
        inner: Any = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if equation.params.get("name") == _CHUNKED and taken[0].name in ("each", "unknown"):
            made = [_SUM]
        elif equation.primitive.name in _CALLS and len(getattr(inner, "jaxpr", inner).invars) == len(taken):
            closed = getattr(inner, "jaxpr", inner)
            of_consts = [_UNKNOWN] * len(closed.constvars)
            made = _walk(closed, of_consts, taken, num_positions, factors)
        else:
            made = [_made_by(equation, taken, num_positions, factors)] * len(equation.outvars)
        kinds.update(zip(equation.outvars, made, strict=True))
    return [kind_of(atom) for atom in jaxpr.outvars]


def _made_by(equation: JaxprEqn, taken: list[_Kind], num_positions: int, factors: list[Any]) -> _Kind:
    """What an operation makes of what it takes."""
    name, params = equation.primitive.name, equation.params
    avals: Any = [atom.aval for atom in (*equation.invars, *equation.outvars[:1])]
    *given, out = [aval.shape for aval in avals]
    names = {kind.name for kind in taken}
    if "mixed" in names:
        return _MIXED
    if name == "gather" and (taken[0].axis or taken[1].axis) is not None:
        followed, shape = (taken[0], given[0]) if taken[0].axis is not None else (taken[1], given[1])
        until = (followed.axis or 0) + 1
        return followed if out[:until] == shape[:until] else _UNKNOWN
    has_unknown = "unknown" in names and not (name == "gather" and taken[0] == _WHOLE)  # rows of a batch, at positions
    if has_unknown or not taken:
        return _UNKNOWN if has_unknown or num_positions in out else _FIXED
    if names <= {"fixed", "whole", "unknown"}:
        of_batch = given[:1] if name == "gather" else given
        if "whole" in names and num_positions in out and not any(num_positions in shape for shape in of_batch):
            return _Kind("each", out.index(num_positions)) if out.count(num_positions) == 1 else _UNKNOWN
        return _UNKNOWN if "unknown" in names else _WHOLE if "whole" in names else _FIXED
    if name == "dot_general":
        return _product(params["dimension_numbers"], taken, [len(shape) for shape in given])
    if "sum" in names:
        return _of_sums(equation, taken, factors)
    axes = {kind.axis for kind in taken if kind.name == "each"}
    if len(axes) > 1:
        return _UNKNOWN
    axis: Any = axes.pop()
    if name == "reduce_sum" or name in _REDUCING:
        if axis in params["axes"]:
            return _SUM if name == "reduce_sum" else _MIXED
        return _Kind("each", axis - sum(each < axis for each in params["axes"]))
    if name in _MOVING:
        return _MIXED if axis in (params.get("axis"), *params.get("dimensions", ())) else taken[0]
    if name == "slice":
        return taken[0] if out[axis] == given[0][axis] else _MIXED
    if name == "broadcast_in_dim":
        return _Kind("each", params["broadcast_dimensions"][axis])
    if name == "transpose":
        return _Kind("each", params["permutation"].index(axis))
    if name in ("reshape", "squeeze"):
        before = int(np.prod(given[0][:axis]))
        found = [i for i in range(len(out)) if out[i] == num_positions and int(np.prod(out[:i])) == before]
        return _Kind("each", found[0]) if len(found) == 1 else _UNKNOWN
    is_elementwise = len(equation.outvars) == 1 and all(_broadcasts(shape, out) for shape in given)
    return _Kind("each", axis) if is_elementwise and name not in ("sort", "fft") else _UNKNOWN


def _broadcasts(shape: tuple[int, ...], out: tuple[int, ...]) -> bool:
    return not shape or (len(shape) == len(out) and all(size in (1, of) for size, of in zip(shape, out, strict=True)))


def _of_sums(equation: JaxprEqn, taken: list[_Kind], factors: list[Any]) -> _Kind:
    """What an operation makes of sums over positions: linear ones are sums."""
    name = equation.primitive.name
    avals: Any = [atom.aval for atom in (*equation.invars, *equation.outvars)]
    if name in _LINEAR or name in ("reduce_sum", "transpose") or name.startswith("psum"):
        return _SUM
    if name in ("add", "sub", "add_any"):
        return _SUM if all(kind == _SUM for kind in taken) or _is_zero(equation) else _MIXED
    if name == "select_n":
        return _MIXED if taken[0].name in ("sum", "each") else _SUM
    if name == "mul" and taken.count(_SUM) == 1 and not any(kind.name == "each" for kind in taken):
        factors += [np.asarray(atom.val).tolist() for atom in equation.invars if isinstance(atom, Literal)]
        return _SUM
    if name == "div" and taken[1] in (_FIXED, _WHOLE):
        factors += [np.asarray(atom.val).tolist() for atom in equation.invars[1:] if isinstance(atom, Literal)]
        return _SUM
    is_elementwise = len(equation.outvars) == 1 and all(_broadcasts(aval.shape, avals[-1].shape) for aval in avals)
    return _MIXED if is_elementwise and name not in ("scan", "while", "cond") else _UNKNOWN


def _is_zero(equation: JaxprEqn) -> bool:
    return any(isinstance(atom, Literal) and not np.any(atom.val) for atom in equation.invars)


def _product(dimension_numbers: Any, taken: list[_Kind], ndims: list[int]) -> _Kind:
    axes: Any = [kind.axis for kind in taken]
    contracted, batch = dimension_numbers
    if _SUM in taken:
        return _SUM if all(kind in (_SUM, _WHOLE, _FIXED) for kind in taken) and taken.count(_SUM) == 1 else _MIXED
    sides = [side for side in (0, 1) if axes[side] is not None]
    if all(axes[side] in contracted[side] for side in sides):
        places = {list(contracted[side]).index(axes[side]) for side in sides}
        return _SUM if len(places) == 1 else _UNKNOWN
    if all(axes[side] in batch[side] for side in sides):
        places = {list(batch[side]).index(axes[side]) for side in sides}
        return _Kind("each", places.pop()) if len(places) == 1 else _UNKNOWN
    if len(sides) > 1:
        return _UNKNOWN
    (side,) = sides
    free = [[i for i in range(ndims[s]) if i not in (*contracted[s], *batch[s])] for s in (0, 1)]
    return _Kind("each", len(batch[0]) + (len(free[0]) if side else 0) + free[side].index(axes[side]))
