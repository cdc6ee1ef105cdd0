"""What a compiled step is called with: which executable takes it, what it may overwrite, and how it differs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.pytree import describe, have_same_containers, leaves_by_name
from jvarlen.planning.buckets import AnyBucket

__all__ = [
    "UnplannedShapeError",
    "canonical",
    "check_deleted",
    "explain_unplanned",
    "explain_unplanned_state",
    "identity",
    "signature",
    "wait_for",
    "without_aliases",
]

_shape_and_dtype = attrgetter("shape", "dtype")


class UnplannedShapeError(UserError):
    """No executable was compiled for the structure, shape, dtype or sharding of a batch or a state."""


def signature(batch: Any) -> Hashable:
    """What decides which executable a batch belongs to: its containers, and the shape and dtype of every leaf."""
    leaves, structure = jax.tree.flatten(batch)
    return structure, *map(_shape_and_dtype, leaves)


def canonical(batch: Any) -> Any:
    """The batch with counts on the host in the types that they have on a device, such as float32 for float64."""

    def cast(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray | np.generic) or leaf.ndim:
            return leaf
        return np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))

    return jax.tree.map(cast, batch)


def without_aliases(state: Any) -> Any:
    """The state with copies of arrays that it holds twice; itself if there are none."""
    # On several devices, donating an array and using it as well ends the process.
    seen: set[Any] = set()
    copies = 0

    def own(leaf: Any) -> Any:
        nonlocal copies
        buffers = _buffers(leaf)
        if seen.isdisjoint(buffers):
            seen.update(buffers)
            return leaf
        copies += 1
        return _copy(leaf)

    unaliased = jax.tree.map(own, state)
    return unaliased if copies else state


def identity(state: Any) -> tuple[int, ...]:
    """Ids of a state and of what it directly holds, which tell it from other states without keeping it alive."""
    if isinstance(state, tuple | list):
        return id(state), *map(id, state)
    inside = state if isinstance(state, Mapping) else getattr(state, "__dict__", {})
    return id(state), *map(id, inside.values())


def check_deleted(state: Any, batch: Any, error: Exception | None = None) -> None:
    """Raises an error that names the arrays that were deleted, if there are any."""
    if not any(map(_is_deleted, jax.tree.leaves((state, batch)))):
        return
    gone = [
        f"{name}{path}"
        for name, tree in (("state", state), ("batch", batch))
        for path, leaf in leaves_by_name(tree).items()
        if _is_deleted(leaf)
    ]
    raise UserError(
        f"{list_first(gone)} of the arguments {'was' if len(gone) == 1 else 'were'} donated: a step wrote its results "
        "there. Use the state that the step returned, or compile_buckets(…, donate=False)"
    ) from error


def wait_for(arrays: Any) -> None:
    """Waits until arrays are computed; a pytree, of which some leaves may have been donated since."""
    jax.block_until_ready([leaf for leaf in jax.tree.leaves(arrays) if not _is_deleted(leaf)])


def _buffers(leaf: Any) -> list[Any]:
    """A key by which arrays that share memory are found."""
    if not isinstance(leaf, jax.Array) or leaf.size == 0 or leaf.is_deleted():
        return []
    return [(shard.device.id, shard.data.unsafe_buffer_pointer()) for shard in leaf.addressable_shards]


def _copy(leaf: jax.Array) -> jax.Array:
    """A copy on the array's own devices, with the same freedom to move; nothing is compiled for it."""
    if not leaf.committed:
        return jax.device_put(leaf, may_alias=False)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return jax.device_put(leaf, leaf.sharding, may_alias=False)
    shards = [jax.device_put(shard.data, shard.device, may_alias=False) for shard in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


def explain_unplanned(batch: Any, specs: Mapping[AnyBucket, Any], device: jax.Device | None = None) -> str | None:
    """Every leaf that differs from the bucket whose axes are nearest, by ratio; None if the batch is as planned."""
    # Leaves without a planned sharding belong on the device; None: placement is not looked at.
    given = leaves_by_name(batch)

    def distance(bucket: AnyBucket) -> float:
        planned = leaves_by_name(specs[bucket])
        return sum(_distance(planned.get(name), given.get(name)) for name in planned | given)

    nearest = min(specs, key=distance)
    difference = _difference(batch, specs[nearest], device)
    if difference is None:
        return None
    buckets = ", ".join(map(str, sorted(specs, key=lambda bucket: bucket.lengths)))
    return f"no bucket was compiled for this batch. Nearest is {nearest}: {difference}. Buckets: {buckets}"


def explain_unplanned_state(state: Any, spec: Any, device: jax.Device | None = None) -> str | None:
    """Every leaf of the state that differs from what was compiled for; None where nothing does."""
    difference = _difference(state, spec, device)
    return difference and f"the state is not the one that the step was compiled for: {difference}"


def _distance(planned: Any, given: Any) -> float:
    """How far two leaves' shapes lie apart; the same for all leaves that cannot be compared."""
    planned_shape, given_shape = np.shape(planned), np.shape(given)
    if planned is None or given is None or len(planned_shape) != len(given_shape):
        return 1.0
    return sum(abs(math.log(max(a, 1) / max(b, 1))) for a, b in zip(planned_shape, given_shape, strict=True))


def _difference(given: Any, planned: Any, device: jax.Device | None) -> str | None:
    """The leaves whose shape, dtype or sharding differs, or that only containers do; None where nothing does."""
    given_leaves, planned_leaves = leaves_by_name(given), leaves_by_name(planned)
    differing = []
    for name in {**planned_leaves, **given_leaves}:
        leaf: Any = given_leaves.get(name)
        wanted = planned_leaves.get(name)
        texts = describe(leaf), describe(wanted)
        if texts[0] == texts[1]:
            if not getattr(leaf, "committed", False):  # it goes wherever it is wanted
                continue
            place: Any = getattr(wanted, "sharding", None) or (device and SingleDeviceSharding(device))
            if place is None or leaf.sharding.is_equivalent_to(place, leaf.ndim):
                continue
            texts = f"{texts[0]} {_place(leaf.sharding)}", f"{texts[1]} {_place(place)}"
        differing.append(f"{name or 'it'} is {texts[0]}, planned was {texts[1]}")
    if differing:
        return "; ".join(differing)
    return None if have_same_containers(given, planned) else "the containers of the leaves differ"


def _place(sharding: Any) -> str:
    devices = sorted(device.id for device in sharding.device_set)
    spec = getattr(sharding, "spec", None)
    text = f"on device{'s' * (len(devices) > 1)} {', '.join(map(str, devices))}"
    return f"{text} as {tuple(spec)}" if spec else text
