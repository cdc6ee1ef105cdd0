"""Parameters on the host, of which only the slices that a layout places are read, such as from mapped files."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jvarlen.parallel.layers import LayeredParams, OwnLeaf, is_own_leaf
from jvarlen.parallel.tensor_params import TensorSpec, map_splits, swap_blocks

__all__ = ["place_slices"]


@dataclasses.dataclass(frozen=True, eq=False)
class _Source:
    """The host arrays that an array of a layout is made of: one, or one for each layer."""

    arrays: tuple[Any, ...]
    is_stacked: bool = False
    dim: int | None = None  # of these arrays, along the tensor axis
    num_blocks: int = 1  # as of `TensorSpec`

    def read(self, index: tuple[slice, ...], size: int, num_devices: int) -> np.ndarray:
        """A slice of the array of the layout, which has `size` values along the split dimension."""
        arrays, index = (self.arrays[index[0]], index[1:]) if self.is_stacked else (self.arrays, index)
        missing = 0
        if self.dim is not None:
            start, stop, _ = index[self.dim].indices(size)
            there = np.shape(arrays[0])[self.dim]
            missing = stop - max(start, min(stop, there))  # zeros after the values of a vocabulary
            of_dim: Any = slice(start, min(stop, there))
            if self.num_blocks > 1:
                of_dim = swap_blocks(np.arange(size), 0, self.num_blocks, num_devices)[start:stop]
            index = (*index[: self.dim], of_dim, *index[self.dim + 1 :])
        # NumPy arrays stay what they are: `np.asarray` reads what a class of its own would.
        slices = [(each if isinstance(each, np.ndarray) else np.asarray(each))[index] for each in arrays]
        if missing:
            slices = [np.pad(each, [(0, missing * (i == self.dim)) for i in range(each.ndim)]) for each in slices]
        return np.stack(slices) if self.is_stacked else np.array(slices[0], order="C")


def place_slices(
    params: Any, own: Any, on_layout: Any, shardings: Any, specs: LayeredParams | None, num_devices: int
) -> Any:
    """Whole parameters, as a layout has them: stacked as `own` says (None: not at all), split as by `split_params`."""
    # `on_layout` and `shardings`: shapes and shardings of the layout. A slice is read once, and copied.
    places = [OwnLeaf(place, None) for place in range(len(jax.tree.leaves(params)))]
    if own is not None:
        places = jax.tree.leaves(own, is_leaf=is_own_leaf)
    arrays: dict[int, dict[int | None, Any]] = {}
    for leaf, at in zip(jax.tree.leaves(params), places, strict=True):
        arrays.setdefault(at.place, {})[at.layer] = leaf
    leaves = [
        _Source((of_layers[None],))
        if None in of_layers
        else _Source(tuple(of_layers[layer] for layer in range(len(of_layers))), is_stacked=True)
        for _, of_layers in sorted(arrays.items())
    ]
    sources = jax.tree.unflatten(jax.tree.structure(on_layout), leaves)
    if specs is not None:

        def split(spec: TensorSpec, source: _Source, dim: int) -> _Source:
            return dataclasses.replace(source, dim=dim - source.is_stacked, num_blocks=spec.num_blocks)

        sources = map_splits(split, specs, sources)

    def place(source: _Source, shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.Array:
        read: dict[tuple[Any, ...], np.ndarray] = {}
        size = 0 if source.dim is None else shape.shape[source.dim + source.is_stacked]

        def slice_at(index: Any) -> np.ndarray:
            key = tuple((part.start, part.stop) for part in index)
            if key not in read:
                read[key] = source.read(index, size, num_devices)
            return read[key]

        return jax.make_array_from_callback(shape.shape, sharding, slice_at)

    return jax.tree.map(place, sources, on_layout, shardings)
