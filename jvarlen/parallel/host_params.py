"""Parameters on the host, of which only the slices that a layout places are read, such as from mapped files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jvarlen.parallel.layers import OwnLeaf, is_own_leaf

__all__ = ["place_slices"]


def place_slices(params: Any, own: Any, on_layout: Any, shardings: Any) -> Any:
    """Whole parameters, as a layout has them: stacked as `own` says (None: not at all), and padded to its shapes."""
    # `on_layout` and `shardings`: shapes and shardings of the layout. A slice is read once, and copied.
    places = [OwnLeaf(place, None) for place in range(len(jax.tree.leaves(params)))]
    if own is not None:
        places = jax.tree.leaves(own, is_leaf=is_own_leaf)
    arrays: dict[int, dict[int | None, Any]] = {}
    for leaf, at in zip(jax.tree.leaves(params), places, strict=True):
        arrays.setdefault(at.place, {})[at.layer] = leaf

    def place(of_layers: dict[int | None, Any], shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.Array:
        read: dict[tuple[Any, ...], np.ndarray] = {}

        def slice_at(index: Any) -> np.ndarray:
            key = tuple((part.start, part.stop) for part in index)
            if key not in read:
                read[key] = _read(of_layers, index, shape.shape)
            return read[key]

        return jax.make_array_from_callback(shape.shape, sharding, slice_at)

    structure = jax.tree.structure(on_layout)
    shapes, lie = jax.tree.leaves(on_layout), jax.tree.leaves(shardings)
    return jax.tree.unflatten(structure, map(place, [arrays[i] for i in range(len(arrays))], shapes, lie))


def _read(of_layers: dict[int | None, Any], index: tuple[slice, ...], shape: Sequence[int]) -> np.ndarray:
    """A slice of an array of the layout, made of that of one array, or of each layer; zeros after its end."""

    def part_of(array: Any, index: tuple[slice, ...]) -> np.ndarray:
        # NumPy arrays stay what they are: `np.asarray` reads what a class of its own would.
        return (array if isinstance(array, np.ndarray) else np.asarray(array))[index]

    if None in of_layers:
        found = np.array(part_of(of_layers[None], index), order="C")
    else:
        found = np.stack([part_of(of_layers[i], index[1:]) for i in range(len(of_layers))[index[0]]])
    sizes = [len(range(*part.indices(size))) for part, size in zip(index, shape, strict=True)]
    if found.shape == (*sizes,):
        return found
    return np.pad(found, [(0, size - there) for size, there in zip(sizes, found.shape, strict=True)])
