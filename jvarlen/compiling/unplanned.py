"""How the arguments of a step differ from what was planned, and a batch padded to a bucket that was."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jvarlen._common.pytree import describe, have_same_containers, leaves_by_name
from jvarlen.batches.batches import mark_padding_rows
from jvarlen.planning.buckets import AnyBucket

__all__ = ["explain_unplanned", "explain_unplanned_state", "nearest_larger", "pad_to_spec"]


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


def nearest_larger(batch: Any, specs: Mapping[AnyBucket, Any]) -> AnyBucket | None:
    """The smallest bucket whose batches have the structure and dtypes of this one and hold all its axes; or None."""

    def holds(bucket: AnyBucket) -> bool:
        spec = specs[bucket]
        return have_same_containers(batch, spec) and all(map(_fits, jax.tree.leaves(batch), jax.tree.leaves(spec)))

    return min(filter(holds, specs), key=lambda bucket: (bucket.padded_tokens, bucket.lengths), default=None)


def pad_to_spec(batch: Any, spec: Any) -> Any:
    """The batch padded with zeros to the shapes of a bucket, on the host, where nothing compiles."""

    def padded(leaf: Any, planned: jax.ShapeDtypeStruct) -> Any:
        missing = [(0, limit - size) for size, limit in zip(leaf.shape, planned.shape, strict=True)]
        return np.pad(np.asarray(leaf), missing) if missing else leaf

    def placed(array: Any, planned: jax.ShapeDtypeStruct) -> Any:
        return array if planned.sharding is None else jax.device_put(array, planned.sharding)

    return jax.tree.map(placed, mark_padding_rows(jax.tree.map(padded, batch, spec)), spec)


def _fits(leaf: Any, planned: jax.ShapeDtypeStruct) -> bool:
    return (
        getattr(leaf, "dtype", None) == planned.dtype
        and leaf.ndim == len(planned.shape)
        and all(size <= limit for size, limit in zip(leaf.shape, planned.shape, strict=True))
    )


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
