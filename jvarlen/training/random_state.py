"""Random state in `extra`: each microbatch of a step has keys of its own, whatever the split of the step."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.pytree import is_key
from jvarlen._common.types import Array, Extra, Key, KeyPath, PyTree

__all__ = ["MicrobatchKeys", "has_keys", "keys_of_microbatches"]


class MicrobatchKeys(NamedTuple):
    """The random keys of a microbatch, or of all of them, with a leading axis."""

    key: Key  # for a loss that takes one
    in_extra: list[Array]  # in place of the keys in `extra`

    def put_in(self, extra: Extra) -> PyTree:
        """`extra` with the keys of this microbatch."""
        leaves, structure = jax.tree.flatten(extra)
        keys = iter(self.in_extra)
        return jax.tree.unflatten(structure, [next(keys) if is_key(leaf) else leaf for leaf in leaves])


def has_keys(extra: Extra) -> bool:
    """Whether leaves of `extra` are random keys; raises ValueError for keys without a type."""
    leaves = jax.tree.leaves_with_path(extra)
    untyped = [
        jax.tree_util.keystr(path)
        for path, leaf in leaves
        if getattr(leaf, "dtype", None) == np.uint32
        and np.shape(leaf)[-1:] in ((2,), (4,))  # of threefry, of rbg
        and _name_of(path) != "count"  # of uses of a key, as NNX has them
    ]
    if untyped:
        raise UserError(
            f"extra holds {list_first(untyped)}, of the form of an old-style random key, which all microbatches of a "
            "step would share: make it a typed one (jax.random.key, jax.random.wrap_key_data), or take it out and let "
            "the loss take a key, loss_fn(params, microbatch, key). If it is no key, give it a type other than uint32"
        )
    return any(is_key(leaf) for _, leaf in leaves)


def _name_of(path: KeyPath) -> str:
    """The last name of a path, which of a variable of NNX is followed by "value"."""
    names = [jax.tree_util.keystr((key,), simple=True) for key in path]
    return next((name for name in reversed(names) if name != "value"), "")


def keys_of_microbatches(extra: Extra, step: Array, num_microbatches: int, keys: Key) -> PyTree:
    """The keys of all microbatches; only those of the loss, `keys`, if there are none in `extra`."""
    if not has_keys(extra):
        return keys
    if step is None:
        raise UserError("extra holds random keys, and the state counts no steps: step.init(params, extra=…) makes one")

    def of_each(key: Key) -> PyTree:
        def fold(key: Key, index: Array) -> PyTree:
            return jax.random.fold_in(jax.random.fold_in(key, step), index)

        for _ in key.shape:
            fold = jax.vmap(fold, (0, None))
        return jax.vmap(fold, (None, 0))(key, jnp.arange(num_microbatches))

    return MicrobatchKeys(keys, [of_each(leaf) for leaf in jax.tree.leaves(extra) if is_key(leaf)])
