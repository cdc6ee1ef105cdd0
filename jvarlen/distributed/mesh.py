"""Device meshes, and the shardings of a step's arrays."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int64

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.pytree import is_key

if TYPE_CHECKING:
    from jvarlen.distributed.layout import Layout

__all__ = [
    "DATA_AXIS", "NO_MESH", "STAGE_AXIS", "LayoutLike", "Placement", "auto_axes", "axes_in", "check_shards_divide",
    "devices_of", "is_compile_only", "num_shards_of", "own_shards", "place", "placement_of", "replicate", "shards_on",
    "split_cpu", "split_hint", "with_auto_axes",
]  # fmt: skip

DATA_AXIS, STAGE_AXIS = "data", "stage"
NO_MESH = Mesh(np.empty((), object), ())  # for code that names its mesh and must not meet another one around it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """A layout on devices: where a step runs. `Layout.on` makes it."""

    layout: Layout
    """With the number of data shards."""
    mesh: Mesh
    """With Auto axes."""
    axes: Mapping[str, str] = dataclasses.field(hash=False)
    """The mesh's names of axes of the layout. Other axes of the mesh are left to the compiler."""

    @property
    def data_axis(self) -> str:
        """The mesh's name of the axis "data"."""
        return self.axes[DATA_AXIS]

    @property
    def program_mesh(self) -> Mesh:
        """The same devices, with the names that the layout gives its axes: for steps that name them themselves."""
        if all(own == name for name, own in self.axes.items()):
            return self.mesh
        names = {own: name for name, own in self.axes.items()}
        axis_names = tuple(names.get(own, f"{own} of the compiler") for own in self.mesh.axis_names)
        return Mesh(self.mesh.devices, axis_names, axis_types=self.mesh.axis_types)

    def batch_shardings(self, batch: Any) -> Any:
        """The `NamedSharding` of a step's arrays: microbatches over the data axis, scalars replicated.

        Args:
          batch: a pytree of arrays or shapes, whose leading axis M the data shards divide; ValueError otherwise.

        Returns:
          A pytree of `NamedSharding`.
        """

        def sharding(leaf: Any) -> NamedSharding:
            if not leaf.shape:
                return NamedSharding(self.mesh, PartitionSpec())
            check_shards_divide(leaf.shape[0], self.mesh, self.data_axis)
            return NamedSharding(self.mesh, PartitionSpec(self.data_axis))

        return jax.tree.map(sharding, batch)

    def own_microbatches(self, num_microbatches: int) -> Int64[np.ndarray, " m"]:
        """The microbatches of a step that are on devices of this process, ascending."""
        per_shard = num_microbatches // self.layout.data
        return (own_shards(self.mesh, self.data_axis)[:, None] * per_shard + np.arange(per_shard)).ravel()


LayoutLike: TypeAlias = "Layout | str | Placement | Mesh | None"
"""Where a step runs: a layout or its text, on `jax.devices()`; a placement; a mesh, for data parallelism over its only
axis, or over "data"; None: one device."""


def placement_of(layout: LayoutLike) -> Placement | None:
    """What an argument `layout=` stands for; None: one device."""
    if layout is None or isinstance(layout, Placement):
        return layout
    from jvarlen.distributed.layout import Layout

    if isinstance(layout, Mesh):
        if DATA_AXIS not in layout.axis_names and len(layout.axis_names) != 1:
            raise UserError(
                f"which axis of the mesh is for data, {' or '.join(map(repr, layout.axis_names))}? Layout().on(mesh, "
                'axes={"data": …}) tells'
            )
        axis = DATA_AXIS if DATA_AXIS in layout.axis_names else layout.axis_names[0]
        return Layout().on(layout, axes={DATA_AXIS: axis})
    if not isinstance(layout, Layout | str):
        raise UserError(
            f"layout must be a Layout, its text, a Placement, a Mesh or None, not a {type(layout).__name__}"
        )
    return (Layout.parse(layout) if isinstance(layout, str) else layout).on()


def shards_on(layout: LayoutLike) -> Placement:
    """What an argument `layout=` stands for, for work on data shards; one device makes one."""
    from jvarlen.distributed.layout import Layout

    return placement_of(layout) or Layout(data=1).on(devices_of(None))


def place(
    layout: Layout, where: Mesh | Sequence[jax.Device] | None = None, axes: Mapping[str, str] | None = None
) -> Placement:
    """A layout on devices or on a mesh, as `Layout.on` tells."""
    if isinstance(where, Mesh):
        return _place_on_mesh(layout, where, axes)
    if axes is not None:
        raise UserError(f"axes ({axes}) name those of a mesh, and the layout is to be placed on devices")
    devices = jax.devices() if where is None else list(where)
    if where is None and layout.data != -1:
        needed = layout.num_devices
        if len(devices) < needed:
            hint = split_hint(devices, needed)
            raise UserError(f"the layout {layout} takes {needed} devices, and there are {len(devices)}{hint}")
        devices = devices[:needed]
    layout = layout.for_devices(len(devices))
    # A mesh without further axes is all manual in `shard_map`, as callbacks of a loss need it.
    sizes_by_name = {DATA_AXIS: layout.data} if layout.is_data_parallel else layout.axis_sizes
    names, sizes = zip(*sizes_by_name.items(), strict=True)
    # Not by `jax.make_mesh`, which knows no place for axes shorter than those of most slices of TPUs.
    placed = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    mesh = Mesh(placed, names, axis_types=(AxisType.Auto,) * len(sizes))
    return Placement(layout=layout, mesh=mesh, axes={name: name for name in names})


def _place_on_mesh(layout: Layout, mesh: Mesh, axes: Mapping[str, str] | None) -> Placement:
    from jvarlen.distributed.layout import MESH_AXES

    if axes is None:
        axes = {name: name for name in MESH_AXES if name in mesh.axis_names}
        if not axes and len(mesh.axis_names) == 1:
            axes = {DATA_AXIS: mesh.axis_names[0]}
    if unknown := [name for name in axes if name not in MESH_AXES]:
        raise UserError(f"a layout has no axis {list_first(map(repr, unknown))}, but {', '.join(MESH_AXES)}")
    num_shards_of(mesh, axes.get(DATA_AXIS, DATA_AXIS))
    sizes = {name: num_shards_of(mesh, own) for name, own in axes.items()}
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


def split_hint(devices: Sequence[Any], needed: int) -> str:
    """How a CPU is made into so many devices; nothing for others."""
    if devices[0].platform != "cpu":
        return ""
    return f". A CPU is split before JAX is first used: jax.config.update('jax_num_cpu_devices', {needed})"


def axes_in(spec: Any) -> tuple[str, ...]:
    """The mesh axes of a `PartitionSpec`, or of the name or names of axes over which something is reduced."""
    entries = (spec,) if isinstance(spec, str) else spec
    return tuple(
        name for entry in entries if entry is not None for name in (entry if isinstance(entry, tuple) else (entry,))
    )


def auto_axes(mesh: Mesh) -> Mesh:
    """The same mesh with Auto axes: with Explicit ones, `shard_map` rejects arrays that were not placed by hand."""
    if all(axis_type == AxisType.Auto for axis_type in mesh.axis_types):
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def with_auto_axes(sharding: NamedSharding) -> NamedSharding:
    """The same sharding on a mesh with Auto axes."""
    if not isinstance(sharding.mesh, Mesh):
        return sharding
    return NamedSharding(auto_axes(sharding.mesh), sharding.spec, memory_kind=sharding.memory_kind)


def split_cpu(num_devices: int, *, again: bool = True) -> None:
    """Splits the CPU into JAX devices. It has no effect once JAX has used a device.

    There, some 30 programs with a collective that wait for their turn deadlock XLA's threads (JAX 0.10). The steps of
    `compile_buckets` don't pile up; in a loop over steps of `jax.jit`, read the loss now and then.

    Args:
      num_devices: at least 1.
      again: whether also where settings of JAX or XLA split it already.
    """
    if not again and (
        getattr(jax.config, "jax_num_cpu_devices", -1) >= 0 or "device_count" in os.environ.get("XLA_FLAGS", "")
    ):
        return
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", num_devices)


def devices_of(mesh: Mesh | None) -> list[jax.Device]:
    """The devices of a mesh in its order, those of other processes included.

    Args:
      mesh: the mesh; None for the default device.

    Returns:
      The devices, in the order of the mesh.
    """
    if mesh is not None:
        return mesh.devices.flatten().tolist()
    default = getattr(jax.config, "jax_default_device", None)  # a device, a platform or None
    return [default] if isinstance(default, jax.Device) else jax.local_devices(backend=default)[:1]


def is_compile_only(device: jax.Device) -> bool:
    """Whether a device is not here, and only compiled for."""
    return type(device.client).__name__ == "CompileOnlyPyClient"


def num_shards_of(mesh: Mesh, axis_name: str | tuple[str, ...]) -> int:
    """p, the number of devices along a mesh axis, or along several; raises ValueError if there is no such axis."""
    names = axes_in(axis_name)
    if missing := [name for name in names if name not in mesh.shape]:
        raise UserError(f"the mesh has axes {', '.join(mesh.axis_names)}, but no {missing[0]!r}")
    return math.prod(mesh.shape[name] for name in names)


def check_shards_divide(num_microbatches: int, mesh: Mesh, axis_name: str | tuple[str, ...] = DATA_AXIS) -> None:
    """Raises ValueError if the microbatches of a step do not divide evenly over a mesh axis, or several."""
    num_shards = num_shards_of(mesh, axis_name)
    if num_microbatches % num_shards:
        raise UserError(
            f"{num_microbatches} microbatches a step do not spread over {num_shards} shards of mesh axis "
            f"{' and '.join(map(repr, axes_in(axis_name)))}: the shards must divide num_microbatches"
        )


def own_shards(mesh: Mesh, axis_name: str) -> Int64[np.ndarray, " q"]:
    """The shards whose devices belong to this process, ascending; raises ValueError if several processes share one."""
    num_shards = num_shards_of(mesh, axis_name)
    devices = np.moveaxis(mesh.devices, mesh.axis_names.index(axis_name), 0).reshape(num_shards, -1)
    owners = np.array([[device.process_index for device in shard] for shard in devices])
    if (owners != owners[:, :1]).any():
        raise UserError(f"devices of several processes share a shard of mesh axis {axis_name!r}: {owners.tolist()}")
    return np.flatnonzero(owners[:, 0] == jax.process_index())


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Arrays, whole on every device of a mesh, of which each process passes the same. They may share memory."""
    whole = NamedSharding(auto_axes(mesh), PartitionSpec())

    def on_all_devices(leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(whole, leaf.ndim):
            return leaf
        if is_key(leaf):
            data = on_all_devices(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        array = np.asarray(leaf)
        return jax.make_array_from_callback(array.shape, whole, lambda index: array[index])

    return jax.tree.map(on_all_devices, tree)
