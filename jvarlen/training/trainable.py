"""Which parameters are trained. Gradients, and what an optimizer sees, have None in place of the others."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.pytree import describe, is_key, leaves_by_name

__all__ = ["Trainable", "TrainedOf", "match_names", "merge_trained", "names_of", "select_trained", "where_trained"]

Trainable = str | Sequence[str] | None
TrainedOf = Callable[[Any], Any]  # of parameters those that are trained, and None in place of the others

_OVERWRITTEN = ("_overwrite_with_gradient", "fp8_metas")  # collections of Flax and Transformer Engine


def select_trained(params: Any, trainable: Trainable = None) -> Any:
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
    if trainable is None:
        return trained
    names, (leaves, structure) = names_of(trained), jax.tree.flatten(trained)
    if not trainable:
        raise UserError(f"trainable, which is empty, matches no parameter that can be trained: {_named(names)}")
    chosen = match_names(names, trainable, "trainable", "parameter that can be trained")
    kept = [leaf if name in chosen else None for name, leaf in zip(names, leaves, strict=True)]
    return jax.tree.unflatten(structure, kept)


def names_of(tree: Any) -> list[str]:
    """The names of parameters, such as `layers.0.mlp.up.kernel`; of NNX's variables without their field."""

    def name_of(path: Any) -> str:
        is_field = bool(path) and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value"
        return jax.tree_util.keystr(path[:-1] if is_field else path, simple=True, separator=".")

    return [name_of(path) for path, _ in jax.tree.leaves_with_path(tree)]


def match_names(names: Sequence[str], patterns: str | Sequence[str], what: str, kind: str = "parameter") -> set[str]:
    """The names that one of the patterns matches; raises ValueError for patterns of `what` that match none."""
    patterns = [patterns] if isinstance(patterns, str) else patterns
    matched = {pattern: [name for name in names if fnmatch.fnmatchcase(name, pattern)] for pattern in patterns}
    if unmatched := [repr(pattern) for pattern, found in matched.items() if not found]:
        raise UserError(f"{list_first(unmatched)} of {what} matches no {kind}: {_named(names)}")
    return {name for found in matched.values() for name in found}


def _named(names: Sequence[str]) -> str:
    return f"they are named {list_first(names)}"


def where_trained(trained: Any, tree: Any) -> Any:
    """A tree like the parameters, with None where these are not trained."""
    return jax.tree.map(lambda leaf, other: None if leaf is None else other, trained, tree, is_leaf=_is_none)


def merge_trained(trained: Any, params: Any) -> Any:
    """All parameters, those that are trained from a tree of their own."""
    return jax.tree.map(lambda leaf, other: other if leaf is None else leaf, trained, params, is_leaf=_is_none)


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", None) or jax.dtypes.result_type(leaf), jnp.inexact)


def _is_none(leaf: Any) -> bool:
    return leaf is None
