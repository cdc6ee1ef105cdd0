"""Random state in `extra`: each microbatch of a step has keys of its own, whatever the split of the step."""

from __future__ import annotations

import sys
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.pytree import is_key

__all__ = ["MicrobatchKeys", "keys_of_microbatches", "kinds_of"]

Kind = Literal["key", "count"] | None


class MicrobatchKeys(NamedTuple):
    """The random keys of a microbatch, or of all of them, with a leading axis."""

    key: Any  # for a loss that takes one
    in_extra: list[Any]  # in place of the keys in `extra`
    is_first: Any  # bool, whether it is the first of the step, whose calls advance the counters

    def put_in(self, extra: Any) -> Any:
        """`extra` with the keys of this microbatch."""
        leaves, structure = jax.tree.flatten(extra)
        keys = iter(self.in_extra)
        return jax.tree.unflatten(structure, [next(keys) if is_key(leaf) else leaf for leaf in leaves])


def kinds_of(extra: Any) -> list[Kind]:
    """Which leaves of `extra` are random keys, or count the uses of one; raises ValueError for keys without a type."""
    leaves = dict(jax.tree.leaves_with_path(extra))
    if not leaves:
        return []
    nnx = sys.modules.get("flax.nnx")  # whose variables say it, if there are any
    is_random = (lambda node: isinstance(node, nnx.RngState)) if nnx else (lambda node: False)
    nodes = [path for path, node in jax.tree.leaves_with_path(extra, is_leaf=is_random) if is_random(node)]
    # Pure dicts of NNX have no variables: a uint32 `count` beside a `key`.
    key, count = map(jax.tree_util.DictKey, ("key", "count"))
    plain = {(*path[:-1], count) for path, leaf in leaves.items() if is_key(leaf) and path[-1:] == (key,)}
    kinds: list[Kind] = []
    untyped = []
    for path, leaf in leaves.items():
        is_uint32 = getattr(leaf, "dtype", None) == np.uint32
        is_counter = is_uint32 and (path in plain or any(path[: len(node)] == node for node in nodes))
        is_raw = is_uint32 and np.shape(leaf)[-1:] in ((2,), (4,))  # of threefry, of rbg
        if is_key(leaf):
            kinds.append("key")
        elif is_counter and not (is_raw and _named_key(path)):
            kinds.append("count")
        else:
            kinds.append(None)
            untyped += [jax.tree_util.keystr(path)] * is_raw
    if untyped:
        raise UserError(
            f"extra holds {list_first(untyped)}, of the form of an old-style random key, which all microbatches of a "
            "step would share: make it a typed one (jax.random.key, jax.random.wrap_key_data), or take it out and let "
            "the loss take a key, loss_fn(params, microbatch, key). If it is no key, give it a type other than uint32"
        )
    return kinds


def keys_of_microbatches(extra: Any, step: Any, num_microbatches: int, keys: Any) -> Any:
    """The keys of all microbatches; only those of the loss, `keys`, if there are none in `extra`."""
    if extra is None or "key" not in kinds_of(extra):
        return keys
    if step is None:
        raise UserError("extra holds random keys, and the state counts no steps: step.init(params, extra=…) makes one")
    indices = jnp.arange(num_microbatches)

    def of_each(key: Any) -> Any:
        def fold(key: Any, index: Any) -> Any:
            return jax.random.fold_in(jax.random.fold_in(key, step), index)

        for _ in key.shape:
            fold = jax.vmap(fold, (0, None))
        return jax.vmap(fold, (None, 0))(key, indices)

    in_extra = [of_each(leaf) for leaf in jax.tree.leaves(extra) if is_key(leaf)]
    return MicrobatchKeys(keys, in_extra, indices == 0)


def _named_key(path: tuple[Any, ...]) -> bool:
    return "key" in jax.tree_util.keystr(path[-2:])
