"""The collectives of data parallelism, in messages that can be counted. They run in `jax.shard_map`.

Letters: N devices along the mesh axis, d this device, X elements of an array, c elements of a chunk.

An array in chunks is flattened, padded with zeros to N·c elements, c = ⌈X/N⌉, and cut into N rows; chunk i belongs to
device i. Every message of the algorithms `"ring"`, `"tree"` and `"star"` is one `ppermute`, a `collective-permute` of
the compiled program. All are linear and have gradients.

With the default `check_vma=True` of `shard_map`, JAX knows that results are the same on every device only for
`all_reduce` by `"xla"`. Return the others with the axis in `out_specs`, or set `check_vma=False`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from jvarlen._common.checks import UserError, is_integer
from jvarlen.experimental.collectives.wire import check_algorithm, tree_rounds

__all__ = ["all_gather", "all_reduce", "broadcast", "gather", "reduce", "reduce_scatter", "scatter"]


def broadcast(
    x: Shaped[Array, "*shape"], axis_name: str, root: int = 0, *, algorithm: str = "tree"
) -> Shaped[Array, "*shape"]:
    """The array of the root, on every device.

    Args:
      x: of the same shape and dtype on all devices; only the root's values matter.
      axis_name: the mesh axis.
      root: a device of the axis, 0 to N − 1.
      algorithm: `"tree"` takes ⌈log₂ N⌉ rounds; with `"star"` the root sends to all others in turn.

    Returns:
      An array like `x`.

    Raises:
      ValueError: an unknown algorithm, or a root that is not on the axis.
    """
    num_devices, d = _checked_axis("broadcast", axis_name, root, algorithm)
    for pairs in _rounds_from(root, num_devices, algorithm):
        received = lax.ppermute(x, axis_name, pairs)
        x = jnp.where(_is_one_of(d, [target for _, target in pairs]), received, x)
    return x


def reduce(
    x: Shaped[Array, "*shape"], axis_name: str, root: int = 0, *, algorithm: str = "tree"
) -> Shaped[Array, "*shape"]:
    """The sum over all devices, on the root.

    Args:
      x: numbers, of the same shape and dtype on all devices.
      axis_name: the mesh axis.
      root: a device of the axis, 0 to N − 1.
      algorithm: `"tree"` takes ⌈log₂ N⌉ rounds; with `"star"` the root receives from all others in turn.

    Returns:
      An array like `x`: the sum on the root, zeros on all others.

    Raises:
      ValueError: an unknown algorithm, a root that is not on the axis, or booleans.
    """
    num_devices, d = _checked_axis("reduce", axis_name, root, algorithm)
    _check_numbers("reduce", x)
    total = x
    for pairs in reversed(_rounds_from(root, num_devices, algorithm)):
        # Those of the star send what they have; in the tree, partial sums. Devices that receive nothing add zeros.
        total = total + lax.ppermute(total, axis_name, [(target, source) for source, target in pairs])
    return jnp.where(d == root, total, jnp.zeros_like(total))


def scatter(x: Shaped[Array, "*shape"], axis_name: str, root: int = 0) -> Shaped[Array, " c"]:
    """Chunk d of the root's array.

    Args:
      x: of the same shape and dtype on all devices; only the root's values matter.
      axis_name: the mesh axis.
      root: a device of the axis, 0 to N − 1. It sends to all others in turn.

    Returns:
      An array of x's dtype: elements d·c to (d+1)·c − 1 of the flat array, c = ⌈X/N⌉. After its end there are zeros.

    Raises:
      ValueError: a root that is not on the axis.
    """
    num_devices, d = _checked_axis("scatter", axis_name, root, "star")
    chunks_Nxc = _to_chunks(x, num_devices)
    own = chunks_Nxc[root]
    for ((_, target),) in _rounds_from(root, num_devices, "star"):
        own = jnp.where(d == target, lax.ppermute(chunks_Nxc[target], axis_name, [(root, target)]), own)
    return own


def gather(x: Shaped[Array, "*shape"], axis_name: str, root: int = 0) -> Shaped[Array, " N *shape"]:
    """The arrays of all devices, on the root.

    Args:
      x: of the same shape and dtype on all devices.
      axis_name: the mesh axis.
      root: a device of the axis, 0 to N − 1. It receives from all others in turn.

    Returns:
      An array with a new leading axis: on the root, row i is the array of device i; zeros on all others. The first X
      elements of gathered chunks are the scattered array: `gather(scatter(x, …), …).reshape(-1)[:x.size]`.

    Raises:
      ValueError: a root that is not on the axis.
    """
    num_devices, d = _checked_axis("gather", axis_name, root, "star")
    rows = {source: lax.ppermute(x, axis_name, [(source, root)]) for source in range(num_devices) if source != root}
    rows[root] = jnp.where(d == root, x, jnp.zeros_like(x))
    return jnp.stack([rows[i] for i in range(num_devices)])


def all_gather(x: Shaped[Array, "*shape"], axis_name: str, *, algorithm: str = "xla") -> Shaped[Array, " N *shape"]:
    """The arrays of all devices, on every device.

    Args:
      x: of the same shape and dtype on all devices.
      axis_name: the mesh axis.
      algorithm: `"xla"` is `lax.all_gather`; `"ring"` passes arrays on to the next device, N − 1 times.

    Returns:
      An array with a new leading axis; row i is the array of device i.

    Raises:
      ValueError: an unknown algorithm.
    """
    num_devices, d = _checked_axis("all_gather", axis_name, 0, algorithm)
    if algorithm == "xla":
        return lax.all_gather(x, axis_name)
    rows = [x]  # row j is of device d − j
    for _ in range(num_devices - 1):
        rows.append(lax.ppermute(rows[-1], axis_name, _to_next(num_devices)))
    return jnp.stack(rows)[(d - jnp.arange(num_devices)) % num_devices]


def reduce_scatter(x: Shaped[Array, "*shape"], axis_name: str, *, algorithm: str = "xla") -> Shaped[Array, " c"]:
    """Chunk d of the sum over all devices.

    Args:
      x: numbers, of the same shape and dtype on all devices.
      axis_name: the mesh axis.
      algorithm: `"xla"` is `lax.psum_scatter`; `"ring"` passes sums of chunks on to the next device, N − 1 times.

    Returns:
      An array of x's dtype: elements d·c to (d+1)·c − 1 of the flat sum, c = ⌈X/N⌉. After its end there are zeros.

    Raises:
      ValueError: an unknown algorithm, or booleans.
    """
    num_devices, d = _checked_axis("reduce_scatter", axis_name, 0, algorithm)
    _check_numbers("reduce_scatter", x)
    chunks_Nxc = _to_chunks(x, num_devices)
    if algorithm == "xla":
        return lax.psum_scatter(chunks_Nxc, axis_name)

    def chunk_before(steps: int) -> jax.Array:
        return lax.dynamic_index_in_dim(chunks_Nxc, (d - steps) % num_devices, keepdims=False)

    # The sum of chunk i starts on device i + 1, and is complete when it comes round to device i.
    total = chunk_before(1)
    for step in range(2, num_devices + 1):
        total = lax.ppermute(total, axis_name, _to_next(num_devices)) + chunk_before(step)
    return total


def all_reduce(x: Shaped[Array, "*shape"], axis_name: str, algorithm: str = "xla") -> Shaped[Array, "*shape"]:
    """The sum over all devices, on every device.

    Integers wrap around, as everywhere in JAX, and are the same bit for bit by every algorithm. Floats differ by the
    order of the additions, but not between devices.

    Args:
      x: numbers, of the same shape and dtype on all devices.
      axis_name: the mesh axis.
      algorithm: `"xla"` is `lax.psum`. `"ring"` is a reduce-scatter and an all-gather round the ring: 2(N − 1) rounds
        of c elements. `"tree"` reduces to device 0 and broadcasts: 2⌈log₂ N⌉ rounds of X elements. `"star"` is a
        parameter server: device 0 receives from all others in turn, then sends to all. `"rs_ag"` is
        `lax.psum_scatter` and `lax.all_gather`.

    Returns:
      An array like `x`.

    Raises:
      ValueError: an unknown algorithm, or booleans.

    Example:
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
      >>> axis = jax.sharding.PartitionSpec("data")
      >>> summed = jax.shard_map(lambda x: all_reduce(x, "data", "ring"), mesh=mesh, in_specs=axis, out_specs=axis)
      >>> summed(jnp.arange(3)).tolist()
      [0, 1, 2]
    """
    check_algorithm("all_reduce", algorithm)
    _check_numbers("all_reduce", x)
    if algorithm == "xla":
        return lax.psum(x, axis_name)
    if algorithm in ("tree", "star"):
        return broadcast(reduce(x, axis_name, algorithm=algorithm), axis_name, algorithm=algorithm)
    halves = "ring" if algorithm == "ring" else "xla"
    chunks_Nxc = all_gather(reduce_scatter(x, axis_name, algorithm=halves), axis_name, algorithm=halves)
    return chunks_Nxc.reshape(-1)[: x.size].reshape(x.shape)


def _checked_axis(kind: str, axis_name: str, root: int, algorithm: str) -> tuple[int, jax.Array]:
    """N and d."""
    check_algorithm(kind, algorithm)
    num_devices = lax.axis_size(axis_name)
    if not is_integer(root) or not 0 <= root < num_devices:
        raise UserError(f"root must be a device of axis {axis_name!r}, 0 to {num_devices - 1}, not {root!r}")
    return num_devices, lax.axis_index(axis_name)


def _check_numbers(kind: str, x: jax.Array) -> None:
    if x.dtype == bool:
        raise UserError(f"{kind} sums numbers, not booleans (shape {x.shape}): cast them to an integer type")


def _rounds_from(root: int, num_devices: int, algorithm: str) -> list[list[tuple[int, int]]]:
    """Pairs of source and target of each round, away from the root."""
    rounds = tree_rounds(num_devices) if algorithm == "tree" else [[(0, i)] for i in range(1, num_devices)]
    return [[((root + a) % num_devices, (root + b) % num_devices) for a, b in pairs] for pairs in rounds]


def _is_one_of(d: jax.Array, devices: list[int]) -> jax.Array:
    return (d == jnp.array(devices)).any()


def _to_next(num_devices: int) -> list[tuple[int, int]]:
    return [(i, (i + 1) % num_devices) for i in range(num_devices)]


def _to_chunks(x: jax.Array, num_devices: int) -> jax.Array:
    flat = x.reshape(-1)
    size = -(-flat.size // num_devices)
    return jnp.pad(flat, (0, size * num_devices - flat.size)).reshape(num_devices, size)
