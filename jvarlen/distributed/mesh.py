"""Device meshes: their axes and their devices."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int64

from jvarlen._common.checks import UserError
from jvarlen._common.pytree import is_key
from jvarlen._common.types import Array, PyTree

__all__ = [
    "DATA_AXIS", "NO_MESH", "STAGE_AXIS", "auto_axes", "axes_in", "check_shards_divide", "devices_of",
    "is_compile_only", "local_shards", "num_shards_of", "replicate", "split_cpu", "split_hint", "with_auto_axes",
]  # fmt: skip

DATA_AXIS, STAGE_AXIS = "data", "stage"
NO_MESH = Mesh(np.empty((), object), ())  # for code that names its mesh and must not meet another one around it


def split_hint(devices: Sequence[jax.Device], needed: int) -> str:
    """How to split a CPU into this many devices; nothing for other platforms."""
    if devices[0].platform != "cpu":
        return ""
    return f". A CPU is split before JAX is first used: jax.config.update('jax_num_cpu_devices', {needed})"


def axes_in(spec: PartitionSpec | Iterable[str | tuple[str, ...] | None] | str) -> tuple[str, ...]:
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
    """Splits the CPU into `num_devices` JAX devices. It has no effect once JAX has used a device.

    On the parts of a CPU, some 30 waiting programs with a collective deadlock XLA's threads (JAX 0.10). The steps of
    `compile_buckets` don't pile up; in a loop over steps of `jax.jit`, read the loss now and then.

    Args:
      num_devices: at least 1.
      again: whether to split it even if settings of JAX or XLA split it already.
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
    """The number of devices along a mesh axis, or along several; raises ValueError for an unknown axis."""
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


def local_shards(mesh: Mesh, axis_name: str) -> Int64[np.ndarray, " q"]:
    """The shards whose devices belong to this process, ascending; raises ValueError if several processes share one."""
    num_shards = num_shards_of(mesh, axis_name)
    devices = np.moveaxis(mesh.devices, mesh.axis_names.index(axis_name), 0).reshape(num_shards, -1)
    owners = np.array([[device.process_index for device in shard] for shard in devices])
    if (owners != owners[:, :1]).any():
        raise UserError(f"devices of several processes share a shard of mesh axis {axis_name!r}: {owners.tolist()}")
    return np.flatnonzero(owners[:, 0] == jax.process_index())


def replicate(tree: PyTree, mesh: Mesh) -> PyTree:
    """Arrays, whole on every device of a mesh. Every process passes the same ones. They may share memory."""
    whole = NamedSharding(auto_axes(mesh), PartitionSpec())

    def on_all_devices(leaf: Array) -> jax.Array:
        if isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(whole, leaf.ndim):
            return leaf
        if is_key(leaf):
            data = on_all_devices(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        array = np.asarray(leaf)
        return jax.make_array_from_callback(array.shape, whole, lambda index: array[index])

    return jax.tree.map(on_all_devices, tree)
