"""Which parameters are trained, and which come from another training.

Gradients, and what an optimizer sees, have None in place of those that are not trained.
"""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.pytree import describe, is_key, leaves_by_name
from jvarlen._common.terminal import show_line
from jvarlen._common.types import Array, Params, PyTree

__all__ = [
    "Trainable", "TrainedOf", "merge_trained", "names_of", "refuse_adapters", "refuse_float16", "select_trained",
    "take_params", "where_trained",
]  # fmt: skip

Trainable = str | Sequence[str] | None
TrainedOf = Callable[[Params], Params]  # of parameters those that are trained, and None in place of the others

_OVERWRITTEN = ("_overwrite_with_gradient", "fp8_metas")  # collections of Flax and Transformer Engine


def select_trained(params: Params, trainable: Trainable = None) -> PyTree:
    """The floats of parameters whose names match, of `trainable` as for `make_train_step`, and None for the others."""
    named = leaves_by_name(params)
    if overwritten := [name for name in named if any(collection in name for collection in _OVERWRITTEN)]:
        raise UserError(
            f"parameters {list_first(overwritten)} are overwritten with their gradients, as scales of fp8 are: of the "
            "values of microbatches and shards the largest would be right, and a step takes the mean. Leave out fp8"
        )
    if others := [f"{name} {describe(leaf)}" for name, leaf in named.items() if is_key(leaf)]:
        raise UserError(
            f"parameters must be numbers, not {list_first(others)}: what is not trained goes into the loss itself, or "
            "into extra"
        )
    trained = jax.tree.map(lambda leaf: leaf if _is_float(leaf) else None, params)
    if named and not jax.tree.leaves(trained):
        listed = list_first(f"{name or 'params'} {describe(leaf)}" for name, leaf in named.items())
        raise UserError(f"no parameter can be trained, for only floats have gradients, and these are {listed}")
    if trainable is None:
        return trained
    names, (leaves, structure) = names_of(trained), jax.tree.flatten(trained)
    if not trainable:
        raise UserError(f"trainable, which is empty, matches no parameter: they are named {list_first(names)}")
    chosen = _match_names(names, trainable, "trainable", "parameter that can be trained")
    kept = [leaf if name in chosen else None for name, leaf in zip(names, leaves, strict=True)]
    return jax.tree.unflatten(structure, kept)


def names_of(tree: PyTree) -> list[str]:
    """The names of parameters, such as `layers.0.mlp.up.kernel`; of NNX's variables without their field."""

    def name_of(path: Any) -> str:
        is_field = bool(path) and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value"
        return jax.tree_util.keystr(path[:-1] if is_field else path, simple=True, separator=".")

    return [name_of(path) for path, _ in jax.tree.leaves_with_path(tree)]


def _match_names(names: Sequence[str], patterns: str | Sequence[str], what: str, kind: str = "parameter") -> set[str]:
    """The names that one of the patterns matches; raises ValueError for patterns of `what` that match none."""
    patterns = [patterns] if isinstance(patterns, str) else patterns
    matched = {pattern: [name for name in names if fnmatch.fnmatchcase(name, pattern)] for pattern in patterns}
    if unmatched := [repr(pattern) for pattern, found in matched.items() if not found]:
        raise UserError(f"{list_first(unmatched)} of {what} matches no {kind}: they are named {list_first(names)}")
    return {name for found in matched.values() for name in found}


def refuse_adapters(params: Params) -> None:
    """Raises ValueError for adapters, where all parameters would be trained: a loss around another says nothing."""
    if found := [name for name in names_of(params) if name.endswith((".lora_a", ".lora_b"))]:
        raise UserError(
            f"the parameters have adapters, {list_first(found)}, and the loss does not say whether they alone are "
            "trained, as those of a decoder whose config has lora do: give make_train_step "
            'trainable="*.lora_[ab]", or "*" for all parameters'
        )


def refuse_float16(trained: Params) -> None:
    """Raises ValueError for trained parameters in float16: there is no loss scale, and their gradients would be 0."""
    named = zip(names_of(trained), jax.tree.leaves(trained), strict=True)
    if found := [name or "params" for name, leaf in named if jnp.result_type(leaf) == np.float16]:
        raise UserError(
            f"float16 is not trained, as its range loses small gradients: {list_first(found)}. Take bfloat16, "
            "leaf.astype(jnp.bfloat16), with jvarlen.with_float32_master, or float32; or leave them out of trainable"
        )


def where_trained(trained: Params, tree: PyTree) -> PyTree:
    """A tree like the parameters, with None where these are not trained."""
    return jax.tree.map(lambda leaf, other: None if leaf is None else other, trained, tree, is_leaf=_is_none)


def merge_trained(trained: Params, params: Params) -> PyTree:
    """All parameters, the trained ones from a separate tree."""
    return jax.tree.map(lambda leaf, other: other if leaf is None else leaf, trained, params, is_leaf=_is_none)


def _is_float(leaf: Array) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", None) or jax.dtypes.result_type(leaf), jnp.inexact)


def _is_none(leaf: Array) -> bool:
    return leaf is None


def take_params(
    given: PyTree,
    params: Params,
    *,
    fresh: str | Sequence[str] = (),
    resized: str | Sequence[str] = (),
    progress: bool = True,
) -> PyTree:
    """Replaces parameters by arrays of another training, such as those of a checkpoint.

    Args:
      given: pytree of arrays whose names are those of the parameters, such as a dict by names, of `read_params`, or the
        result of `from_hugging_face`. A name is a path, joined by dots: `layers.0.mlp.up.kernel`.
      params: pytree of arrays, the first parameters as if nothing were given; in its types arrays are taken, floats as
        floats and integers as integers. Or `jax.ShapeDtypeStruct` where nothing stays of an array, which then keeps the
        type that it has in `given`.
      fresh: names, or patterns of them as for `fnmatch`, such as `"head.*"`, of what is not taken: it stays as it is in
        `params`. It may be missing from `given`, or be there alone.
      resized: names or patterns of what may differ from `params` in the size of one dimension, such as a vocabulary.
        The slices that both have are taken, and the others stay as they are in `params`.
      progress: whether to show what was taken, whole or in part, what stayed fresh, and what was left unused.

    Returns:
      A pytree like `params`. Arrays that are taken whole are those of `given`, not copied if their types are equal.

    Raises:
      ValueError: names that only one of both has, other shapes or kinds of numbers, integers that do not fit, or
        patterns that match no name. All are listed.

    Example:
      >>> params = {"embed": np.zeros((3, 2)), "head": np.zeros(2)}
      >>> given = {"embed": np.ones((2, 2)), "head": np.ones(5)}
      >>> take_params(given, params, fresh="head", resized="embed", progress=False)
      {'embed': array([[1., 1.],
             [1., 1.],
             [0., 0.]]), 'head': array([0., 0.])}
    """
    own, others = (dict(zip(names_of(tree), jax.tree.leaves(tree), strict=True)) for tree in (params, given))
    names = [*dict.fromkeys([*others, *own])]
    is_fresh, is_resized = _match_names(names, fresh, "fresh"), _match_names(names, resized, "resized")
    taken: dict[str, Array] = {}
    problems, in_part = [], []
    for name in names:
        leaf: Array = own.get(name)
        other: PyTree = others.get(name)
        is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
        if name in is_fresh:
            taken[name] = leaf
        elif (sizes := _shared_shape(leaf, other)) == np.shape(leaf) == np.shape(other):
            taken[name] = other if is_shape or leaf.dtype == other.dtype else other.astype(leaf.dtype)
            problems += [] if is_shape else _too_large(name, other, leaf.dtype)
        elif name in is_resized and sizes is not None and not is_shape:
            part = tuple(map(slice, sizes))
            taken[name] = np.array(leaf)
            taken[name][part] = np.asarray(other[part])
            problems += _too_large(name, other[part], leaf.dtype)
            in_part.append(name)
        else:
            problems.append(f"{name} {describe(other)}, here {describe(leaf)}")
    if problems:
        refused = UserError(f"the given parameters are others than these: {list_first(problems, '; ')}")
        refused.add_note("fresh= names what is not taken, and resized= what may have another size")
        raise refused
    kept, unused = ([name for name in names if name in is_fresh and name in side] for side in (own, others))
    lines = [
        f"{len(own) - len(kept) - len(in_part)} of {len(own)} arrays are taken",
        *(f"{what}: {list_first(which)}" for what, which in (("in part", in_part), ("fresh", kept)) if which),
        *([f"unused: {list_first(unused)}"] if unused else []),
    ]
    show_line("parameters: " + "; ".join(lines), progress=progress)
    return jax.tree.unflatten(jax.tree.structure(params), [taken[name] for name in own])


def _shared_shape(leaf: Array, other: PyTree) -> tuple[int, ...] | None:
    """The shape of what two arrays of one kind of numbers both have, if they differ in one size at most."""
    one, another = getattr(leaf, "shape", None), getattr(other, "shape", None)
    if one is None or another is None or len(one) != len(another) or sum(map(operator.ne, one, another)) > 1:
        return None
    return tuple(map(min, one, another)) if _kind(leaf.dtype) == _kind(other.dtype) else None


def _too_large(name: str, array: Array, dtype: Any) -> list[str]:
    """The text of an error for integers that do not fit a dtype, if there are any."""
    if array.dtype == dtype or not jnp.issubdtype(dtype, np.integer) or not array.size:
        return []
    limits, found = jnp.iinfo(dtype), [int(array.min()), int(array.max())]
    wrong = [value for value in found if not limits.min <= value <= limits.max]
    return [f"{name} {describe(array)} holds {wrong[-1]}, which does not fit {dtype}"] if wrong else []


def _kind(dtype: Any) -> PyTree:
    """The kind of numbers of a dtype, within which one is cast to another."""
    kinds = np.bool_, np.integer, np.floating, np.complexfloating
    return next((kind for kind in kinds if jnp.issubdtype(dtype, kind)), dtype)
