"""A layout on devices, and the shardings of a step's arrays there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int64

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.keywords import check_keywords
from jvarlen._common.types import Array, Batch, PyTree
from jvarlen.distributed import mesh as meshes
from jvarlen.distributed.layout import MESH_AXES, Layout
from jvarlen.distributed.mesh import DATA_AXIS, auto_axes, devices_of, local_shards, num_shards_of, split_hint

__all__ = ["LayoutLike", "Placement", "place", "placement_of", "shards_on"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """A layout on devices: where a step runs. `place` makes it."""

    layout: Layout
    """With the number of data shards."""
    mesh: Mesh
    """With Auto axes."""
    axes: Mapping[str, str] = dataclasses.field(hash=False)
    """The mesh's name of each axis of the layout. Other axes of the mesh are left to the compiler."""

    @property
    def data_axis(self) -> str:
        """The mesh's name of the axis "data"."""
        return self.axes[DATA_AXIS]

    @property
    def program_mesh(self) -> Mesh:
        """The same devices, with the names that the layout gives its axes: for steps that name them themselves."""
        if all(mesh_axis == axis for axis, mesh_axis in self.axes.items()):
            return self.mesh
        axis_of = {mesh_axis: axis for axis, mesh_axis in self.axes.items()}
        axis_names = tuple(axis_of.get(name, f"{name} of the compiler") for name in self.mesh.axis_names)
        return Mesh(self.mesh.devices, axis_names, axis_types=self.mesh.axis_types)

    def batch_shardings(self, batch: Batch) -> PyTree:
        """The `NamedSharding` of a step's arrays: microbatches over the data axis, scalars replicated.

        Args:
          batch: a pytree of arrays or shapes, whose leading axis M the data shards divide; ValueError otherwise.

        Returns:
          A pytree of `NamedSharding`.
        """

        def sharding(leaf: Array) -> NamedSharding:
            if not leaf.shape:
                return NamedSharding(self.mesh, PartitionSpec())
            meshes.check_shards_divide(leaf.shape[0], self.mesh, self.data_axis)
            return NamedSharding(self.mesh, PartitionSpec(self.data_axis))

        return jax.tree.map(sharding, batch)

    @property
    def local_shards(self) -> Int64[np.ndarray, " q"]:
        """The data shards, each `num_microbatches / layout.data` microbatches, of this process, ascending."""
        return local_shards(self.mesh, self.data_axis)

    def local_microbatches(self, num_microbatches: int) -> Int64[np.ndarray, " m"]:
        """The microbatches of a step that are on devices of this process, ascending."""
        per_shard = num_microbatches // self.layout.data
        return (self.local_shards[:, None] * per_shard + np.arange(per_shard)).ravel()


LayoutLike: TypeAlias = Layout | str | Placement | Mesh | None
"""Where a step runs: a layout or its text, on `jax.devices()`; a placement; a mesh, for data parallelism over its only
axis, or over "data"; None: one device."""


def placement_of(layout: LayoutLike) -> Placement | None:
    """The placement for an argument `layout=`; None for one device."""
    if layout is None or isinstance(layout, Placement):
        return layout
    if isinstance(layout, Mesh):
        if DATA_AXIS not in layout.axis_names and len(layout.axis_names) != 1:
            raise UserError(
                f"which axis of the mesh is for data, {' or '.join(map(repr, layout.axis_names))}? Say it by "
                'jvarlen.place(Layout(), mesh, axes={"data": …})'
            )
        axis = DATA_AXIS if DATA_AXIS in layout.axis_names else layout.axis_names[0]
        return place(Layout(), layout, axes={DATA_AXIS: axis})
    if not isinstance(layout, Layout | str):
        raise UserError(
            f"layout must be a Layout, its text, a Placement, a Mesh or None, not a {type(layout).__name__}"
        )
    return place(layout)


def shards_on(layout: LayoutLike) -> Placement:
    """The placement for an argument `layout=` where work needs data shards; one device is one shard."""
    return placement_of(layout) or place(Layout(data=1), devices_of(None))


@check_keywords
def place(
    layout: Layout | str, devices: Mesh | Sequence[jax.Device] | None = None, *, axes: Mapping[str, str] | None = None
) -> Placement:
    """A layout on chosen devices.

    Args:
      layout: the layout, or its text.
      devices: as many as the layout takes, or an existing mesh. None takes the first of `jax.devices()`, or all if the
        number of data shards is open.
      axes: for an existing mesh, its names for axes of the layout, such as `{"data": "dp"}`; the others are left to the
        compiler. None keeps the names of the layout; a single axis is for data.

    Returns:
      `Placement`, whose layout has a number of data shards.

    Raises:
      ValueError: another number of devices; a mesh whose axes have other sizes than the layout, or lacks one.

    Example:
      >>> placement = place("data", jax.devices()[:1])
      >>> str(placement.layout), dict(placement.mesh.shape)["data"]
      ('data1', 1)
    """
    if isinstance(layout, str):
        layout = Layout.parse(layout)
    if isinstance(devices, Mesh):
        return _place_on_mesh(layout, devices, axes)
    if axes is not None:
        raise UserError(f"axes ({axes}) name axes of a mesh, and the layout is to be placed on devices")
    chosen = list(jax.devices() if devices is None else devices)
    if devices is None and layout.data != -1:
        needed = layout.num_devices
        if len(chosen) < needed:
            hint = split_hint(chosen, needed)
            raise UserError(f"the layout {layout} takes {needed} devices, and there are {len(chosen)}{hint}")
        chosen = chosen[:needed]
    layout = layout.for_devices(len(chosen))
    # A mesh without further axes is all manual in `shard_map`, as callbacks of a loss need it.
    size_of = {DATA_AXIS: layout.data} if layout.is_data_parallel else layout.axis_sizes
    # `jax.make_mesh` cannot place axes that are shorter than those of most slices of TPUs.
    grid = mesh_utils.create_device_mesh(tuple(size_of.values()), chosen, allow_split_physical_axes=True)
    mesh = Mesh(grid, tuple(size_of), axis_types=(AxisType.Auto,) * len(size_of))
    return Placement(layout=layout, mesh=mesh, axes={name: name for name in size_of})


def _place_on_mesh(layout: Layout, mesh: Mesh, axes: Mapping[str, str] | None) -> Placement:
    if axes is None:
        axes = {name: name for name in MESH_AXES if name in mesh.axis_names}
        if not axes and len(mesh.axis_names) == 1:
            axes = {DATA_AXIS: mesh.axis_names[0]}
    if unknown := [name for name in axes if name not in MESH_AXES]:
        raise UserError(f"a layout has no axis {list_first(map(repr, unknown))}, but {', '.join(MESH_AXES)}")
    num_shards_of(mesh, axes.get(DATA_AXIS, DATA_AXIS))
    sizes = {name: num_shards_of(mesh, mesh_axis) for name, mesh_axis in axes.items()}
    if layout.data == -1:
        layout = dataclasses.replace(layout, data=sizes[DATA_AXIS])
    differing = [
        f"{axes.get(name, name)!r} {sizes.get(name, 1)} where the layout has {size}"
        for name, size in layout.axis_sizes.items()
        if sizes.get(name, 1) != size
    ]
    if differing:
        raise UserError(f"the mesh is not that of the layout {layout}: it has {', '.join(differing)}")
    return Placement(layout=layout, mesh=auto_axes(mesh), axes=dict(axes))
