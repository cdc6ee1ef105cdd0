"""Leaves: in goes a pytree, out come its leaves by name, and what each of them is, in words."""

from __future__ import annotations

from typing import Any

import jax

__all__ = ["describe", "have_same_containers", "leaves_by_name"]


def leaves_by_name(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by where they are, such as `.tokens`."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def describe(leaf: Any) -> str:
    """Dtype and shape of a leaf: `float32[2,3]`."""
    if leaf is None:
        return "absent"
    if not hasattr(leaf, "shape"):
        return f"a Python {type(leaf).__name__}"
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def have_same_containers(one: Any, other: Any) -> bool:
    """Whether two pytrees differ in their leaves alone."""
    structures: list[object] = [jax.tree.structure(tree) for tree in (one, other)]
    return structures[0] == structures[1]
