"""Parameters to begin with, of which some come from another training."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.pytree import describe
from jvarlen.training.trainable import match_names, names_of

__all__ = ["take_params"]


def take_params(given: Any, params: Any, *, fresh: str | Sequence[str] = (), resized: str | Sequence[str] = ()) -> Any:
    """Parameters with arrays of another training in place of their own, such as those of a checkpoint.

    Args:
      given: pytree of arrays whose names are those of the parameters, such as a dict by names, of `read_params`, or the
        result of `from_hugging_face`. A name is a path, joined by dots: `layers.0.mlp.up.kernel`.
      params: pytree of arrays, the first parameters as if nothing were given; in its types arrays are taken. Or
        `jax.ShapeDtypeStruct` where nothing stays of an array, which is then taken in its own type.
      fresh: names, or patterns of them as for `fnmatch`, such as `"head.*"`, of what is not taken: it stays as it is in
        `params`. It may be missing from `given`, or be there alone.
      resized: likewise, of what may differ from `params` in the size of one dimension, such as that of a vocabulary.
        The slices that both have are taken, and the others stay as they are in `params`.

    Returns:
      A pytree like `params`. Arrays that are taken whole are those of `given`, not copied if their types are equal.

    Raises:
      ValueError: names that only one of both has, other shapes, or patterns that match no name. All are listed.

    Example:
      >>> params = {"embed": np.zeros((3, 2)), "head": np.zeros(2)}
      >>> take_params({"embed": np.ones((2, 2)), "head": np.ones(5)}, params, fresh="head", resized="embed")
      {'embed': array([[1., 1.],
             [1., 1.],
             [0., 0.]]), 'head': array([0., 0.])}
    """
    own, others = (dict(zip(names_of(tree), jax.tree.leaves(tree), strict=True)) for tree in (params, given))
    names = [*dict.fromkeys([*others, *own])]
    is_fresh, is_resized = match_names(names, fresh, "fresh"), match_names(names, resized, "resized")
    taken: dict[str, Any] = {}
    problems = []
    for name in names:
        leaf: Any = own.get(name)
        other: Any = others.get(name)
        if name in is_fresh:
            taken[name] = leaf
        elif (sizes := _shared(leaf, other)) == np.shape(leaf) == np.shape(other):
            is_same = isinstance(leaf, jax.ShapeDtypeStruct) or leaf.dtype == other.dtype
            taken[name] = other if is_same else other.astype(leaf.dtype)
        elif name in is_resized and sizes is not None:
            part = tuple(map(slice, sizes))
            taken[name] = np.array(leaf)
            taken[name][part] = np.asarray(other[part])
        else:
            problems.append(f"{name} {describe(other)}, here {describe(leaf)}")
    if problems:
        refused = UserError(f"the given parameters are others than these: {list_first(problems, '; ')}")
        refused.add_note("fresh= names what is not taken, and resized= what may have another size")
        raise refused
    return jax.tree.unflatten(jax.tree.structure(params), [taken[name] for name in own])


def _shared(leaf: Any, other: Any) -> tuple[int, ...] | None:
    """The shape of what two arrays both have, if they differ in one size at most."""
    one, another = getattr(leaf, "shape", None), getattr(other, "shape", None)
    if one is None or another is None or len(one) != len(another) or sum(map(operator.ne, one, another)) > 1:
        return None
    return tuple(map(min, one, another))
