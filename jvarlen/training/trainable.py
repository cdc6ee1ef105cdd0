"""Which parameters are trained. Gradients, and what an optimizer sees, have None in place of the others."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.pytree import describe, is_key, leaves_by_name

__all__ = ["Trainable", "TrainedOf", "merge_trained", "select_trained", "where_trained"]

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
    patterns = [trainable] if isinstance(trainable, str) else list(trainable)
    names = [_name_of(path) for path, _ in jax.tree.leaves_with_path(trained)]
    unmatched = [pattern for pattern in patterns if not any(fnmatch.fnmatchcase(name, pattern) for name in names)]
    if unmatched or not patterns:
        what = f"{list_first(map(repr, unmatched))} of trainable" if unmatched else "trainable, which is empty,"
        raise UserError(f"{what} matches no parameter that can be trained: they are named {list_first(names)}")

    def is_chosen(path: Any) -> bool:
        return any(fnmatch.fnmatchcase(_name_of(path), pattern) for pattern in patterns)

    return jax.tree.map_with_path(lambda path, leaf: leaf if is_chosen(path) else None, trained)


def where_trained(trained: Any, tree: Any) -> Any:
    """A tree like the parameters, with None where these are not trained."""
    return jax.tree.map(lambda leaf, other: None if leaf is None else other, trained, tree, is_leaf=_is_none)


def merge_trained(trained: Any, params: Any) -> Any:
    """All parameters, those that are trained from a tree of their own."""
    return jax.tree.map(lambda leaf, other: other if leaf is None else leaf, trained, params, is_leaf=_is_none)


def _name_of(path: Any) -> str:
    """Such as `layers.0.mlp.up.kernel`; of NNX's variables without their field."""
    is_field = bool(path) and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value"
    return jax.tree_util.keystr(path[:-1] if is_field else path, simple=True, separator=".")


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", None) or jax.dtypes.result_type(leaf), jnp.inexact)


def _is_none(leaf: Any) -> bool:
    return leaf is None
