"""Writes a sorted array that is spread over devices to one `.npy` file.

Letters: N samples, p shards (devices along one axis), n places a shard, d a shard.

One all-to-all first turns the shards into *blocks* of consecutive ranks. Where all processes see one disk, each then
writes its blocks, which are byte ranges of the same file. Where they do not, process 0 receives one piece after the
other. Either way the file gets its name only when all of it is on disk.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped, UInt
from tqdm import tqdm

from jvarlen._common.checks import UserError, check_choices, is_integer, list_offenders
from jvarlen._common.files import check_place, move_into_place, take_space
from jvarlen._common.interrupts import raise_if_interrupted, remembered_interrupts
from jvarlen._common.terminal import progress_bar
from jvarlen.distributed.processes import agree, gather_texts, is_main_process, together
from jvarlen.sorting.sample_sort import Result

__all__ = ["write_ordered"]

_SHARDED = PartitionSpec("shard")
_WRITE = "write in order"  # a step of all processes
_PIECE = 2**20  # ranks that are converted, or sent to process 0, at a time


def write_ordered(
    path: str | Path,
    ordered: npt.ArrayLike | jax.Array,
    num_samples: int | np.integer,
    *,
    result: Result = "interleaved",
    dtype: npt.DTypeLike = np.int64,
    shared_disk: bool | None = None,
    progress: bool = True,
) -> None:
    """Writes the result of `sample_sort` to one `.npy` file, in which element r is that of rank r.

    All processes call it, also those without a part of the array, and leave it together: with the file in place, or
    each with an error.

    The file appears under its name complete, or not at all; an existing file stays until then. A failure removes the
    part that was written; only if process 0 is killed can a hidden `.NAME.….part` stay.

    `np.load(path, mmap_mode="r")` reads it without loading all of it into memory.

    Args:
      path: the file; its directory must exist. If the disk is not shared, that of process 0 counts.
      ordered: integers or floats[p·n] in the order of `result`, sharded over p devices of one or several processes. If
        other mesh axes replicate it, each shard is written once. p is taken from the sharding, so the array must be
        placed as it was returned. An array in a single place (NumPy, one device without a mesh, or a full copy on each)
        has no p: it must be in the order of its ranks, with `result="block"`. If each process has all of it, process 0
        writes.
      num_samples: N ≤ p·n; ranks from N on are not written.
      result: `"interleaved"`: shard d, slot i holds rank i·p + d. `"block"`: rank and position are the same.
      dtype: integers or floats, the type of the file; it must hold each value exactly.
      shared_disk: whether all processes that hold shards see the directory of process 0. None: find out.
      progress: whether process 0 shows a progress bar.

    Raises:
      ValueError: arguments that are not as described, or that differ between processes; `"interleaved"` for an array in
        a single place; values that do not fit are listed by rank; `shared_disk=True` where it is not.
      OSError: the file cannot be written.
      KeyboardInterrupt: Ctrl-C, deferred until the processes can stop together; the others raise RuntimeError. If it
        comes while the file gets its name, all raise and the new file stays. If it comes even later, in the last
        exchange, only this process raises, as right after the call.
      RuntimeError: other processes failed, which are listed with their errors, or one has died.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     write_ordered(f"{directory}/order.npy", [2, 0, 1, -1], 3, result="block", progress=False)
      ...     np.load(f"{directory}/order.npy")
      array([2, 0, 1])
    """
    path = Path(path)
    with together("begin to write in order"):
        raise_if_interrupted()
        array = ordered if isinstance(ordered, jax.Array) else np.asarray(ordered)
        _check(array, num_samples, result, dtype)
    asked = f"{path.name}: {num_samples} of {array.dtype}{list(array.shape)}, {result}, as {np.dtype(dtype)}"
    agree("what to write", f"{asked}, shared_disk={shared_disk}")
    token = gather_texts("the name of the part", secrets.token_hex(8))[0]
    # A name that nobody has looked for before: a network disk may remember what was not there.
    part = _Part(path.with_name(f".{path.name}.{token}.part"), int(num_samples), np.dtype(dtype))
    with remembered_interrupts():
        try:
            _fill(part, path, array, result, shared_disk, progress)
            with together(f"give {path.name} its name"):
                if is_main_process():  # the only one that can still fail
                    raise_if_interrupted()
                    move_into_place(part.path, path)
            with together(f"return, with {path.name} in place"):  # no: Ctrl-C while one waited for that
                raise_if_interrupted()
        except BaseException:
            # On all processes, as process 0 may be the one that died.
            with contextlib.suppress(OSError):
                part.path.unlink(missing_ok=True)
            raise
        raise_if_interrupted()


def _check(array: jax.Array | np.ndarray, num_samples: int | np.integer, result: Result, dtype: npt.DTypeLike) -> None:
    check_choices(result=(result, Result))
    try:
        kind = np.dtype(dtype).kind
    except (TypeError, ValueError, SyntaxError) as error:
        raise UserError(f"dtype must be integers or floats, not {dtype!r}") from error
    if kind not in "iuf":
        raise UserError(f"dtype must be integers or floats, not {np.dtype(dtype)}")
    is_number = jnp.issubdtype(array.dtype, jnp.integer) or jnp.issubdtype(array.dtype, jnp.floating)
    if not is_number or array.ndim != 1:
        raise UserError(f"ordered must be integers or floats of one axis, not {array.dtype}{list(array.shape)}")
    if not is_integer(num_samples) or not 0 <= num_samples <= len(array):
        raise UserError(f"num_samples must be an integer from 0 to {len(array)}, not {num_samples!r}")
    place = _single_place(array)
    if place and result == "interleaved":
        raise UserError(
            f'result="interleaved" needs ordered sharded over its devices as it was returned, not {place}: pass '
            'result="block" for an array in the order of its ranks, or else the sharded array itself'
        )


def _single_place(array: jax.Array | np.ndarray) -> str:
    """Where an array is whole, so that its number of shards is unknown; empty for a sharded array."""
    if isinstance(array, np.ndarray):
        return "an array of NumPy"
    spec = array.sharding.spec if isinstance(array.sharding, NamedSharding) else ()
    if not array.is_fully_replicated or any(spec):  # an axis of one device is still an axis: p = 1
        return ""
    num_devices = len(array.sharding.device_set)
    return "an array on a single device" if num_devices == 1 else f"a full copy on each of {num_devices} devices"


@contextlib.contextmanager
def _step(name: str) -> Iterator[None]:
    """A block that succeeds on all processes, or raises on all; here they stop after Ctrl-C on one of them."""
    with together(name):
        raise_if_interrupted()
        yield
        raise_if_interrupted()


class _Part(NamedTuple):
    """The file while it is written; it has room for all samples from the start."""

    path: Path
    num_samples: int
    dtype: np.dtype

    @property
    def header(self) -> bytes:
        file = io.BytesIO()
        fields = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False}
        np.lib.format.write_array_header_1_0(file, fields | {"shape": (self.num_samples,)})
        return file.getvalue()

    def create(self) -> None:
        """Writes the header, and takes the space for the samples, so that a full disk shows here."""
        size = len(self.header) + self.num_samples * self.dtype.itemsize
        with self.path.open("x+b", buffering=0) as file:
            file.write(self.header)
            take_space(file, size)
            os.fsync(file.fileno())

    def write(self, first_rank: int, values: Shaped[np.ndarray, " m"]) -> None:
        """Writes the values of consecutive ranks in their place; they are on disk when it returns."""
        converted = _exactly(values, self.dtype, first_rank)
        # Two processes may write to one page of a network disk. The NFS client of Linux sends the bytes that were
        # written, and not a page with what it believes of the others, where a file is written only and synchronously.
        descriptor = os.open(self.path, os.O_WRONLY | os.O_DSYNC)
        with os.fdopen(descriptor, "wb") as file:
            file.seek(len(self.header) + first_rank * self.dtype.itemsize)
            file.write(converted.data)


def _exactly(values: Shaped[np.ndarray, " m"], dtype: np.dtype, first_rank: int) -> Shaped[np.ndarray, " m"]:
    """The values in another type; raises ValueError that lists those that it cannot hold."""
    with np.errstate(over="ignore", invalid="ignore"):
        converted = values.astype(dtype)
        # Both ways: an unsigned number comes back from a signed one, and a float equals the integer it was rounded to.
        differs = (converted != values) | (converted.astype(values.dtype) != values)
    differs &= ~((values != values) & (converted != converted))  # NaN stays NaN
    if differs.any():
        ranks = np.flatnonzero(differs)
        offenders = list_offenders(ranks + first_rank, values[ranks])
        raise UserError(f"{values.dtype} values do not fit {dtype} exactly, id being the rank: {offenders}")
    return converted


def _fill(
    part: _Part,
    path: Path,
    array: jax.Array | np.ndarray,
    result: Result,
    shared_disk: bool | None,
    progress: bool,
) -> None:
    """Makes the part, and writes all samples to it."""
    piece_size = min(_PIECE, len(array))
    blocks = _to_blocks(array) if result == "interleaved" else array
    with _step(f"make room for {path.name}"):
        jax.block_until_ready(blocks)
        if is_main_process():
            check_place(path)
            part.create()
    own = _own_blocks(blocks)
    if isinstance(blocks, np.ndarray) or _is_shared(part, bool(own), shared_disk):
        _write_own(part, own, progress)
    else:
        _write_gathered(part, blocks, piece_size, progress)


def _own_blocks(blocks: jax.Array | np.ndarray) -> list[tuple[int, jax.Array | np.ndarray]]:
    """What this process writes where the disk is shared: the first rank and the values of each block."""
    has_all = isinstance(blocks, np.ndarray) or blocks.is_fully_addressable
    if all(gather_texts("who has all", "this one" if has_all else "")) and jax.process_index():
        return []  # process 0 has the same
    if isinstance(blocks, np.ndarray):
        return [(0, blocks)]
    return [(shard.index[0].start or 0, shard.data) for shard in blocks.addressable_shards if shard.replica_id == 0]


def _is_shared(part: _Part, has_blocks: bool, shared_disk: bool | None) -> bool:
    """Whether all processes with something to write see the part; the same on all processes."""
    if shared_disk is False:
        return False
    sees = not has_blocks or os.path.exists(part.path)  # not Path.exists, which raises where it may not look
    blind_at = gather_texts("the disk", "" if sees else str(part.path.parent))
    blind = [f"process {process}: {directory}" for process, directory in enumerate(blind_at) if directory]
    if shared_disk and blind:
        raise UserError(f"shared_disk is True, but these do not see what process 0 writes: {', '.join(blind)}")
    return not blind


def _write_own(part: _Part, own: list[tuple[int, jax.Array | np.ndarray]], progress: bool) -> None:
    """Every process writes its own blocks."""
    sizes = [min(max(0, part.num_samples - first_rank), block.size) for first_rank, block in own]
    with _step(_WRITE), _bar(sum(sizes), progress) as bar:
        for (first_rank, block), size in zip(own, sizes, strict=True):
            values = np.asarray(block)
            for start in range(0, size, _PIECE):
                raise_if_interrupted()
                piece = values[start : min(start + _PIECE, size)]
                part.write(first_rank + start, piece)
                bar.update(len(piece))


def _write_gathered(part: _Part, blocks: jax.Array, piece_size: int, progress: bool) -> None:
    """Process 0 writes what the others send it."""
    with _step("reach process 0"):
        if is_main_process() and not blocks.addressable_shards:
            raise UserError("process 0 has no device, and shares no disk with the processes that do")
    with _bar(part.num_samples, progress) as bar:
        for first_rank in range(0, part.num_samples, max(1, piece_size)):
            piece = _gather(blocks, first_rank, piece_size)[: part.num_samples - first_rank]
            with _step(_WRITE):
                if is_main_process():
                    part.write(first_rank, piece)
                    bar.update(len(piece))


def _bar(num_samples: int, progress: bool) -> tqdm:
    shown = progress and is_main_process()
    return progress_bar(total=num_samples, desc="ordered file", unit="sample", unit_scale=True, progress=shown)


def _on_shard_mesh(ordered: jax.Array) -> tuple[jax.Array, Mesh]:
    """The array, without moving it, on a mesh with the axes "shard", in the order of its parts, and "replica"."""
    indices = ordered.sharding.devices_indices_map(ordered.shape)
    starts = {device: index[0].start or 0 for device, index in indices.items()}
    devices = sorted(starts, key=lambda device: starts[device])
    mesh = Mesh(np.array(devices).reshape(len(set(starts.values())), -1), ("shard", "replica"))
    parts = [shard.data for shard in ordered.addressable_shards]
    return jax.make_array_from_single_device_arrays(ordered.shape, NamedSharding(mesh, _SHARDED), parts), mesh


def _to_blocks(ordered: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    """Turns interleaved shards into blocks, [p·n'] in the order of ranks; n' is n rounded up to a multiple of p."""
    if isinstance(ordered, np.ndarray) or not len(ordered) or not ordered.addressable_shards:
        return ordered
    ordered, mesh = _on_shard_mesh(ordered)
    with jax.set_mesh(mesh), jax.enable_x64(True):  # else 64-bit values would be cut
        return _exchange(ordered, mesh)


@functools.partial(jax.jit, static_argnames="mesh")
def _exchange(ordered: Shaped[Array, " pn"], mesh: Mesh) -> Shaped[Array, " pn_padded"]:
    num_shards = mesh.shape["shard"]

    def exchange(shard: jax.Array) -> jax.Array:
        # Slots [j·n'/p, (j+1)·n'/p) of all shards hold the ranks [j·n', (j+1)·n').
        for_shard_pxs = jnp.pad(shard, (0, -len(shard) % num_shards)).reshape(num_shards, -1)
        return lax.all_to_all(for_shard_pxs, "shard", split_axis=0, concat_axis=0).T.ravel()

    return jax.shard_map(exchange, mesh=mesh, in_specs=_SHARDED, out_specs=_SHARDED)(ordered)


def _gather(blocks: jax.Array, first_rank: int, size: int) -> Shaped[np.ndarray, " size"]:
    """The given number of consecutive ranks, on each process that has shards; past the last one, zeros."""
    if not blocks.addressable_shards:
        return np.zeros(0, blocks.dtype)
    blocks, mesh = _on_shard_mesh(blocks)
    with jax.set_mesh(mesh), jax.enable_x64(True):
        gathered = _sum_parts(blocks, np.int64(first_rank), size, mesh)
    bits = np.asarray(gathered.addressable_data(0))
    return bits.astype(f"u{blocks.dtype.itemsize}").view(blocks.dtype)


@functools.partial(jax.jit, static_argnames=("size", "mesh"))
def _sum_parts(
    blocks: Shaped[Array, " pn"], first_rank: Shaped[Array, ""], size: int, mesh: Mesh
) -> UInt[Array, " size"]:
    """Bits of consecutive ranks: each shard adds what it has of them."""
    num_bytes = blocks.dtype.itemsize

    def part(block: jax.Array, first_rank: jax.Array) -> jax.Array:
        place = first_rank - lax.axis_index("shard").astype(jnp.int64) * len(block) + jnp.arange(size)
        # As unsigned integers, since a sum of floats forgets the sign of zero; 32 bits, as not all backends add fewer.
        bits = lax.bitcast_convert_type(block.at[place].get(mode="clip"), f"uint{num_bytes * 8}")
        is_here = (place >= 0) & (place < len(block))
        return lax.psum(jnp.where(is_here, bits, 0).astype(f"uint{max(32, num_bytes * 8)}"), "shard")

    return jax.shard_map(part, mesh=mesh, in_specs=(_SHARDED, PartitionSpec()), out_specs=PartitionSpec())(
        blocks, first_rank
    )
