"""Gradients reduced in buckets, each as soon as its last gradient exists, so that reducing overlaps with computing.

The rule is that of PyTorch's DistributedDataParallel (Li et al. 2020, https://arxiv.org/abs/2006.15704).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, Var

from jvarlen._common.checks import UserError
from jvarlen._common.types import Grads, PyTree
from jvarlen.distributed.layout import ReduceDtype

__all__ = [
    "BUCKET_BYTES", "FIRST_BUCKET_BYTES", "assign_grad_buckets", "order_of_grads", "reduce_in_buckets",
    "reduce_scatter",
]  # fmt: skip

BUCKET_BYTES, FIRST_BUCKET_BYTES = 25 * 2**20, 2**20


def assign_grad_buckets(
    params: PyTree, cap: int = BUCKET_BYTES, first_cap: int = FIRST_BUCKET_BYTES, *, order: Sequence[int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Which gradients are reduced together.

    Gradients fill buckets, one for each dtype, in the order in which the backward pass gives them. The first bucket
    of a dtype has `first_cap`, so that communication begins early.

    Args:
      params: a pytree of arrays, or of anything with `size` and `dtype`: parameters or gradients.
      cap: bytes at which a bucket is full; the gradient that reaches them belongs to it.
      first_cap: the same for the first bucket.
      order: indices in `jax.tree.leaves(params)` in the order in which gradients come; leaves that are not in it are
        in no bucket. None takes all, from the last leaf to the first.

    Returns:
      Indices in `jax.tree.leaves(params)`, by bucket, in the order in which buckets are full. Buckets that never are
      come last, in the order of their first gradients.

    Raises:
      ValueError: a cap below 1.

    Example:
      >>> assign_grad_buckets([np.zeros(100), np.zeros(30), np.zeros(10), np.zeros(5)], cap=800, first_cap=100)
      ((3, 2), (1, 0))
    """
    if small := [f"{name}={value}" for name, value in (("cap", cap), ("first_cap", first_cap)) if value < 1]:
        raise UserError(f"a gradient bucket holds at least 1 byte, and not {', '.join(small)}")
    leaves = jax.tree.leaves(params)
    full: list[tuple[int, ...]] = []
    filling: dict[np.dtype, list[int]] = {}
    num_bytes: dict[np.dtype, int] = {}
    caps: dict[np.dtype, int] = {}
    for i in reversed(range(len(leaves))) if order is None else order:
        dtype = np.dtype(leaves[i].dtype)
        filling.setdefault(dtype, []).append(i)
        num_bytes[dtype] = num_bytes.get(dtype, 0) + leaves[i].size * dtype.itemsize
        if num_bytes[dtype] >= caps.get(dtype, first_cap):
            full.append(tuple(filling.pop(dtype)))
            num_bytes[dtype], caps[dtype] = 0, cap
    return (*full, *map(tuple, filling.values()))


def order_of_grads(traced: ClosedJaxpr, outputs: Sequence[int]) -> tuple[int, ...]:
    """The order in which a traced function computes gradients, which these outputs are; constant zeros are left out."""
    jaxpr, results = traced.jaxpr, [traced.jaxpr.outvars[output] for output in outputs]
    if len(jaxpr.eqns) == 1 and jaxpr.eqns[0].primitive.name == "jit":  # JAX 0.11 inlines calls when it lowers them
        (call,) = jaxpr.eqns
        jaxpr = call.params["jaxpr"].jaxpr
        inner = dict(zip(call.outvars, jaxpr.outvars, strict=True))
        results = [result if isinstance(result, Literal) else inner.get(result, result) for result in results]
    made_by = dict.fromkeys((*jaxpr.invars, *jaxpr.constvars), -1)  # number of the equation; nothing of constants alone
    for number, equation in enumerate(jaxpr.eqns):
        if any(isinstance(variable, Var) and variable in made_by for variable in equation.invars):
            made_by |= dict.fromkeys(equation.outvars, number)
    known = [i for i, result in enumerate(results) if not isinstance(result, Literal) and result in made_by]
    return tuple(sorted(known, key=lambda i: (made_by[results[i]], -i)))


def reduce_in_buckets(
    grads: Grads,
    buckets: Sequence[Sequence[int]],
    axis_name: str | tuple[str, ...],
    dims: Sequence[int | None] = (),
    sent: ReduceDtype = "float32",
) -> Grads:
    """Sums gradients over mesh axes, with one collective a bucket of one dtype; those in no bucket stay as they are."""
    # `dims`: along which dimension each device keeps its shard of the sum; None, for all of a bucket: the whole sum.
    leaves, structure = jax.tree.flatten(grads)
    for bucket in buckets:
        members = [leaves[i] for i in bucket]
        if dims and dims[bucket[0]] is not None:
            reduced = _sum_to_shards(members, [dims[i] for i in bucket], axis_name, sent)
        else:
            reduced = _sum(members, axis_name, sent)
        for i, part in zip(bucket, reduced, strict=True):
            leaves[i] = part
    return jax.tree.unflatten(structure, leaves)


def reduce_scatter(array: jax.Array, axis_name: str | tuple[str, ...], sent: ReduceDtype, dim: int = 0) -> jax.Array:
    """Sums over mesh axes, in float32 at least; returns this device's shard along a dimension that they divide."""
    wide, num_shards = jnp.promote_types(array.dtype, jnp.float32), jax.lax.axis_size(axis_name)
    # A collective along another dimension than the first would have XLA transpose all layers that it takes one of.
    parts = jnp.moveaxis(array.reshape(*array.shape[:dim], num_shards, -1, *array.shape[dim + 1 :]), dim, 0)
    if sent == "float32":
        return jax.lax.psum_scatter(parts.astype(wide).reshape(-1, *parts.shape[2:]), axis_name, tiled=True)
    if jnp.iscomplexobj(array):
        return _reduce_as_reals(lambda reals: reduce_scatter(reals, axis_name, sent, dim), array)
    # The receiving device adds in the wide type: a reduction by the backend would add in the narrow one.
    received = _send_as_bits(lambda bits: jax.lax.all_to_all(bits, axis_name, 0, 0), parts.astype(sent))
    return jnp.sum(received, axis=0, dtype=wide)


def _reduce_as_reals(reduce: Callable[[jax.Array], jax.Array], array: jax.Array) -> jax.Array:
    """Reduces a complex array as a real one with the two parts along a last axis."""
    if not jnp.iscomplexobj(array):
        return reduce(array)
    reals = reduce(jnp.stack([array.real, array.imag], axis=-1))
    return jax.lax.complex(reals[..., 0], reals[..., 1])


def _send_as_bits(collective: Callable[[jax.Array], jax.Array], array: jax.Array) -> jax.Array:
    """A collective of 16-bit floats, sent as integers: some backends would send them as float32."""
    return jax.lax.bitcast_convert_type(collective(jax.lax.bitcast_convert_type(array, jnp.uint16)), array.dtype)


def _sum(members: Sequence[jax.Array], axis_name: str | tuple[str, ...], sent: ReduceDtype) -> list[jax.Array]:
    """Sums arrays by one collective, or by two in bfloat16."""
    row = jnp.concatenate([member.ravel() for member in members])
    if sent == "float32":
        row = jax.lax.psum(row, axis_name)
    else:

        def over_axis(row: jax.Array) -> jax.Array:
            shard = reduce_scatter(_pad_to_shards(row, jax.lax.axis_size(axis_name)), axis_name, sent)
            whole = _send_as_bits(lambda bits: jax.lax.all_gather(bits, axis_name, tiled=True), shard.astype(sent))
            return whole[: len(row)].astype(row.dtype)

        row = _reduce_as_reals(over_axis, row)
    parts = _split(row, [member.size for member in members])
    return [part.reshape(member.shape) for part, member in zip(parts, members, strict=True)]


def _sum_to_shards(
    members: Sequence[jax.Array], along: Sequence[int | None], axis_name: str | tuple[str, ...], sent: ReduceDtype
) -> list[jax.Array]:
    """Sums arrays by one collective; returns this device's shards, each along its dimension."""
    num_shards = jax.lax.axis_size(axis_name)
    pairs = [(member, dim) for member, dim in zip(members, along, strict=True) if dim is not None]
    moved = [_pad_to_shards(jnp.moveaxis(member, dim, 0), num_shards) for member, dim in pairs]
    if len(moved) == 1:  # as it is: compilers for TPUs make all-reduces of scatters of one row a shard
        shards = [reduce_scatter(moved[0], axis_name, sent)]
    else:
        rows = jnp.concatenate([member.reshape(num_shards, -1) for member in moved], axis=-1)
        row = reduce_scatter(rows, axis_name, sent)[0]
        parts = _split(row, [member.size // num_shards for member in moved])
        shards = [
            part.reshape(member.shape[0] // num_shards, *member.shape[1:])
            for part, member in zip(parts, moved, strict=True)
        ]
    return [jnp.moveaxis(shard, 0, dim) for shard, (_, dim) in zip(shards, pairs, strict=True)]


def _pad_to_shards(array: jax.Array, num_shards: int) -> jax.Array:
    """An array with zeros, so that the shards divide its first dimension."""
    missing = -array.shape[0] % num_shards
    return jnp.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1)) if missing else array


def _split(row: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    return jnp.split(row, np.cumsum(sizes)[:-1].tolist())
