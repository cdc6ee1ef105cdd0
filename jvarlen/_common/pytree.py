"""Names, shapes, copies and zeros of pytree leaves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.types import Array, PyTree

__all__ = [
    "check_arrays", "copy_arrays", "describe", "differences", "explain_containers", "has_host_arrays", "has_shapes",
    "have_same_containers", "is_key", "is_numeric", "key_of_words", "leaves_by_name", "plain_names", "program_key",
    "with_sharding", "words_of_key", "zeros_of",
]  # fmt: skip


def leaves_by_name(tree: PyTree) -> dict[str, Array]:
    """The leaves of a pytree by where they are, such as `.tokens`."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def plain_names(tree: PyTree) -> list[str]:
    """Where the leaves of a pytree are, without punctuation: `tokens` of a batch with attributes, and of a dict."""
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(tree)]


def check_arrays(tree: PyTree, what: str = "parameters") -> None:
    """Raises ValueError if leaves are not arrays of numbers, such as functions in a whole module of Equinox."""

    def is_array(leaf: Array) -> bool:
        if isinstance(dtype := getattr(leaf, "dtype", None), np.dtype):
            return is_numeric(dtype)
        return dtype is not None or isinstance(leaf, bool | int | float | complex)  # keys have another type of dtype

    if others := [f"{name} {describe(leaf)}" for name, leaf in leaves_by_name(tree).items() if not is_array(leaf)]:
        raise UserError(
            f"{what} must hold arrays of numbers alone, not {list_first(others)}: split a module into its arrays and "
            "the rest, as eqx.partition(module, eqx.is_inexact_array) or nnx.split(module, nnx.Param, ...) do"
        )


def describe(leaf: Array) -> str:
    """Dtype and shape of a leaf: `float32[2,3]`."""
    if leaf is None:
        return "absent"
    if not hasattr(leaf, "shape"):
        return f"a Python {type(leaf).__name__}"
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def differences(one: PyTree, other: PyTree) -> dict[str, str]:
    """Leaves that differ in dtype or shape between two pytrees, by where they are: `float32[2] -> absent`."""
    sides = leaves_by_name(one), leaves_by_name(other)
    described = {name: [describe(side.get(name)) for side in sides] for name in sides[0] | sides[1]}
    return {name: " -> ".join(both) for name, both in described.items() if both[0] != both[1]}


def explain_containers(given: PyTree, planned: PyTree) -> str | None:
    """The first container of a pytree that differs from the planned one; None where at most leaves differ."""
    one: PyTree = jax.tree.structure(given)
    other: PyTree = jax.tree.structure(planned)
    if one == other:
        return None
    while True:
        pairs = zip(one.children(), other.children(), strict=False)
        below = next((pair for pair in pairs if pair[0] != pair[1]), None)
        if below is None:
            break
        one, other = below
    names = [data[0].__name__ if (data := each.node_data()) else "a leaf" for each in (one, other)]
    if names[0] != names[1]:
        return f"{names[0]}, planned was {names[1]}"
    return f"what {names[0]} holds beside its leaves, such as functions, must be the same objects"


def have_same_containers(one: PyTree, other: PyTree) -> bool:
    """Whether two pytrees differ only in their leaves."""
    structures: list[object] = [jax.tree.structure(tree) for tree in (one, other)]
    return structures[0] == structures[1]


def is_key(leaf: Array) -> bool:
    """Whether a leaf, which may be a `jax.ShapeDtypeStruct`, holds typed random keys."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def words_of_key(key: Array) -> Array:
    """The words of typed random keys, or of a `jax.ShapeDtypeStruct` of such keys, their shape."""
    if not isinstance(key, jax.ShapeDtypeStruct):
        return jax.random.key_data(key)
    words = jax.eval_shape(jax.random.key_data, key)
    return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=key.sharding)


def key_of_words(words: Array, like: Array) -> Array:
    """Words as typed random keys, if `like`, which may be a `jax.ShapeDtypeStruct`, holds such."""
    if not is_key(like):
        return words
    found: list[object] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), like)
    return jax.random.wrap_key_data(words, impl=found[0])


def is_numeric(dtype: np.dtype) -> bool:
    """Whether a dtype is of numbers or bools, as text and objects are not."""
    return any(jnp.issubdtype(dtype, kind) for kind in (np.number, np.bool))


def zeros_of(spec: jax.ShapeDtypeStruct) -> Array:
    """Zeros for a `jax.ShapeDtypeStruct`: a NumPy array, or a JAX array for a sharding or typed keys."""
    if is_key(spec):
        return jnp.zeros(spec.shape, spec.dtype, device=spec.sharding)
    if spec.sharding is None:
        return np.zeros(spec.shape, spec.dtype)
    shape = spec.sharding.shard_shape(spec.shape)
    return jax.make_array_from_callback(spec.shape, spec.sharding, lambda _: np.zeros(shape, spec.dtype))


def has_shapes(tree: PyTree) -> bool:
    """Whether a tree holds shapes in place of arrays."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def has_host_arrays(tree: PyTree) -> bool:
    """Whether a tree holds NumPy arrays."""
    return any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(tree))


def with_sharding(sharding: jax.sharding.Sharding | None, leaf: Array) -> jax.ShapeDtypeStruct:
    """The shape of an array, with its sharding."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def copy_arrays(tree: PyTree) -> PyTree:
    """Copies of arrays on devices, which a step that donates its state may delete."""
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, tree)


def program_key(tree: PyTree) -> tuple[object, ...]:
    """Equal for arguments that the same programs take, with the settings of JAX that programs depend on."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = jax.tree.leaves(jax.eval_shape(lambda leaves: leaves, leaves))
    shardings = (getattr(leaf, "sharding", None) for leaf in leaves)
    settings = (getattr(jax.config, f"jax_{name}") for name in ("enable_x64", "default_matmul_precision"))
    return (structure, *arrays, *shardings, *settings)
