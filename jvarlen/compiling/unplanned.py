"""How a batch or a state differs from those that a step was compiled for, and arrays that a step must not get."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import cast

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.pytree import describe, explain_containers, leaves_by_name
from jvarlen._common.types import Array, Batch, PyTree, Shapes
from jvarlen.planning.buckets import AnyBucket

__all__ = ["UnplannedShapeError", "check_deleted", "explain_batch", "explain_state", "is_deleted", "without_aliases"]


class UnplannedShapeError(UserError):
    """No executable was compiled for the structure, shape, dtype or sharding of a batch or a state."""


def explain_batch(batch: Batch, specs: Mapping[AnyBucket, Shapes], device: jax.Device | None = None) -> str | None:
    """Every leaf that differs from the bucket whose axes are nearest, by ratio; None if the batch is as planned."""
    # Leaves without a planned sharding belong on the device; with None, placement does not count.
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


def explain_state(state: PyTree, spec: Shapes, device: jax.Device | None = None) -> str | None:
    """Every leaf of the state that differs from what was compiled for; None where nothing does."""
    difference = _difference(state, spec, device)
    return difference and f"the state is not the one that the step was compiled for: {difference}"


def _distance(planned: Array, given: Array) -> float:
    """How far apart two leaves' shapes are; the same for all leaves that cannot be compared."""
    planned_shape, given_shape = np.shape(planned), np.shape(given)
    if planned is None or given is None or len(planned_shape) != len(given_shape):
        return 1.0
    return sum(abs(math.log(max(a, 1) / max(b, 1))) for a, b in zip(planned_shape, given_shape, strict=True))


def _difference(given: PyTree, planned: Shapes, device: jax.Device | None) -> str | None:
    """The leaves whose shape, dtype or sharding differs, or that only containers do; None where nothing does."""
    given_leaves, planned_leaves = leaves_by_name(given), leaves_by_name(planned)
    differing = []
    for name in {**planned_leaves, **given_leaves}:
        leaf: Array = given_leaves.get(name)
        wanted = planned_leaves.get(name)
        texts = describe(leaf), describe(wanted)
        if texts[0] == texts[1]:
            if not getattr(leaf, "committed", False):  # it goes wherever it is wanted
                continue
            sharding = getattr(wanted, "sharding", None) or (device and SingleDeviceSharding(device))
            if sharding is None or leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
                continue
            texts = f"{texts[0]} {_devices_text(leaf.sharding)}", f"{texts[1]} {_devices_text(sharding)}"
        differing.append(f"{name or 'it'} is {texts[0]}, planned was {texts[1]}")
    if differing:
        return "; ".join(differing)
    containers = explain_containers(given, planned)
    return containers and f"the containers differ: {containers}"


def _devices_text(sharding: Sharding) -> str:
    devices = sorted(device.id for device in cast("set[jax.Device]", sharding.device_set))
    text = f"on device{'s' * (len(devices) > 1)} {', '.join(map(str, devices))}"
    return f"{text} as {tuple(sharding.spec)}" if isinstance(sharding, NamedSharding) and sharding.spec else text


def without_aliases(state: PyTree, batch_leaves: Iterable[Array]) -> PyTree:
    """The state with copies of arrays that it holds twice, or that the batch holds too."""
    seen = {buffer for leaf in batch_leaves for buffer in _buffers(leaf)}

    def copy_if_seen(leaf: Array) -> Array:
        buffers = _buffers(leaf)
        if seen.isdisjoint(buffers):
            seen.update(buffers)
            return leaf
        # On the array's devices, with the same freedom to move; nothing is compiled for it.
        return jax.device_put(leaf, leaf.sharding if leaf.committed else None, may_alias=False)

    return jax.tree.map(copy_if_seen, state)


def check_deleted(state: PyTree, batch: Batch, error: Exception | None = None) -> None:
    """Raises an error that names the arrays that were deleted, if there are any."""
    if not any(map(is_deleted, jax.tree.leaves((state, batch)))):
        return
    gone = [
        f"{name}{path}"
        for name, tree in (("state", state), ("batch", batch))
        for path, leaf in leaves_by_name(tree).items()
        if is_deleted(leaf)
    ]
    raise UserError(
        f"{list_first(gone)} of the arguments {'was' if len(gone) == 1 else 'were'} donated: a step wrote its results "
        "there. Use the state that the step returned, or compile_buckets(…, donate=False)"
    ) from error


def _buffers(leaf: Array) -> list[tuple[int, int]]:
    """The device and the address of each part: arrays that share memory share some of these."""
    if not isinstance(leaf, jax.Array) or leaf.size == 0 or leaf.is_deleted():
        return []
    return [(shard.device.id, shard.data.unsafe_buffer_pointer()) for shard in leaf.addressable_shards]


def is_deleted(leaf: Array) -> bool:
    """Whether an array was donated; values on the host never are."""
    return isinstance(leaf, jax.Array) and leaf.is_deleted()
