"""Explains how a batch differs from every planned bucket."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ref.loading.batch import Batch
from torch_ref.planning.buckets import Bucket

__all__ = ["Layout", "UnplannedShapeError", "explain_unplanned", "layout_of", "name_of"]

Layout = tuple[Any, ...]

_TENSORS = tuple(name for name in Batch._fields if name not in ("num_sequences", "num_microbatches"))


class UnplannedShapeError(ValueError):
    """A batch has a shape, dtype, device or memory layout that no bucket was compiled for."""


def layout_of(batch: Batch) -> Layout:
    """Return all that torch's guards look at in a microbatch, and whether all fields have as many microbatches."""
    values = [getattr(batch, name) for name in _TENSORS]
    leading = {value.shape[0] if value.ndim else 0 for value in values if isinstance(value, Tensor)}
    return (
        len(leading) == 1 and 0 not in leading,
        *(
            (value.shape[1:], value.stride()[1:], value.dtype, value.device, value.requires_grad)
            if isinstance(value, Tensor)
            else value is None
            for value in values
        ),
    )


def explain_unplanned(batch: object, specs: dict[Bucket, Batch]) -> str:
    """Name every field that differs from the bucket whose axes are nearest, by ratio."""
    names = ", ".join(map(name_of, specs))
    if type(batch) is not Batch:
        return f"no bucket was compiled for a {type(batch).__name__}: a torch_ref.Batch is needed. Buckets: {names}"
    shape = batch.tokens.shape if isinstance(batch.tokens, Tensor) else torch.Size()
    nearest = min(specs, key=lambda bucket: _distance(shape[-2:], bucket))
    num_microbatches = shape[0] if len(shape) == 3 and shape[0] else 1
    differing = []
    for name in _TENSORS:
        given, planned = getattr(batch, name), getattr(specs[nearest], name)
        wanted = None if planned is None else planned[0].expand(num_microbatches, *planned.shape[1:])
        if _describe(given) != _describe(wanted):
            differing.append(f"{name} is {_describe(given)}, planned was {_describe(wanted)}")
    return (
        f"no bucket was compiled for this batch. Nearest is {name_of(nearest)}: {'; '.join(differing)}. "
        f"Buckets: {names}"
    )


def _distance(shape: Sequence[int], bucket: Bucket) -> float:
    """Return how far apart rows and length are; the same for all buckets where they cannot be compared."""
    if len(shape) != len(bucket):
        return 0.0
    return sum(abs(math.log(max(given, 1) / planned)) for given, planned in zip(shape, bucket, strict=True))


def _describe(value: object) -> str:
    if value is None:
        return "absent"
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    text = f"{str(value.dtype).removeprefix('torch.')}[{','.join(map(str, value.shape))}] on {value.device}"
    if value.ndim > 1 and not value[:1].is_contiguous():
        text += f" with strides {list(value.stride())}"
    return f"{text} with gradient" if value.requires_grad else text


def name_of(bucket: Bucket) -> str:
    """Return a bucket's shape as text: rows x length."""
    return f"{bucket.rows} x {bucket.length}"
