"""The command of this package: sorts a `.npy` of lengths or other keys on all devices, and writes their order.

Letters: N keys, p devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jvarlen._common.checks import UserError
from jvarlen._common.files import check_outputs, load_array
from jvarlen._common.options import POSITIONAL
from jvarlen._common.terminal import say
from jvarlen.distributed.launch import DeviceConfig, launch
from jvarlen.distributed.placement import Placement
from jvarlen.distributed.processes import gather_arrays, is_main_process, together
from jvarlen.experimental.ordered_file.balance import (
    ExchangeVolume,
    ShardBalance,
    balance_table,
    exchange_volume,
    shard_balance,
)
from jvarlen.experimental.ordered_file.write import write_ordered
from jvarlen.sorting.sample_sort import sample_sort
from jvarlen.sorting.shard_sort import has_ragged
from jvarlen.sorting.sharded_rows import shard_local_rows

__all__ = ["SortCommand", "SortedFile", "sort_file"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SortCommand(DeviceConfig):
    """Sort a file of lengths or other keys on several devices, and write the order of the samples."""

    lengths: Path = dataclasses.field(metadata=POSITIONAL)
    """A .npy file of integers or floats, one a sample."""
    out: Path = Path("order.npy")
    """Where to write the ids of the samples, sorted by key, ties by id."""
    progress: bool = True
    """Show progress bars."""

    def run(self) -> None:
        """Sorts, writes the order, and prints how evenly it was spread over the devices."""
        check_outputs({"out": self.out}, self.lengths)
        sorted_file = sort_file(self.lengths, self.out, launch(self), progress=self.progress)
        if is_main_process():
            volume = sorted_file.volume
            sent = "what each sent depends on the keys"
            if volume is not None:
                sent = f"each sent {volume.messages:,} messages, {volume.num_bytes / 1e6:,.1f} MB"
            say(
                balance_table({"exact": sorted_file.balance}),
                f"{sorted_file.num_rows:,} keys on {sorted_file.num_shards} devices: {sorted_file.seconds:.2f} s with "
                f"compilation; {sent}",
                self.out,
            )


class SortedFile(NamedTuple):
    """How long sorting a file took, and how evenly the result was spread over the devices.

    Attributes:
      num_rows: N.
      num_shards: p.
      seconds: of compiling and sorting.
      volume: what each device sent to others; None for a ragged exchange, where it depends on the keys.
      balance: how even the result is.
    """

    num_rows: int
    num_shards: int
    seconds: float
    volume: ExchangeVolume | None
    balance: ShardBalance


def sort_file(path: Path, out: Path, placement: Placement, *, progress: bool = True) -> SortedFile:
    """Writes the ids of the samples, sorted by key, ties by id: an order for `make_plan(order=)`.

    Every process reads and sorts its part of the file. Keys that do not fit 32 bits are sorted as 64-bit keys.

    Args:
      path: a `.npy` file of integers or floats[N], lengths or any difficulty.
      out: the `.npy` file for the order, int64[N]; its directory must exist.
      placement: where to sort.
      progress: whether to show a progress bar while writing.

    Returns:
      `SortedFile`.

    Raises:
      FileNotFoundError: there is no such file or directory.
      ValueError: the file does not hold integers or floats with one axis and at most 64 bits, or `sample_sort` rejects
        it.
      RuntimeError: another process raised such an error, or has died.
    """
    with together("read the keys"):
        keys = load_array(path, "lengths")
        if keys.ndim != 1 or keys.dtype.kind not in "iuf" or keys.dtype.itemsize > 8:
            given = f"{keys.dtype}{list(keys.shape)}"
            raise UserError(f"{path} must hold integers or floats of one axis and at most 64 bits, not {given}")
        if not out.parent.is_dir():
            raise FileNotFoundError(f"there is no directory {out.parent} to write {out.name} to")
        parts = np.linspace(0, len(keys), jax.process_count() + 1).astype(np.int64)
        own = np.asarray(keys[slice(*parts[jax.process_index() :][:2])])
        native = own.dtype.newbyteorder("=")
        own = _shorten(own.astype(native, copy=False))
    is_short = bool(gather_arrays(np.array([own.dtype.itemsize < 8])).all())
    own = own if is_short else own.astype(native)
    num_shards = placement.layout.data
    with contextlib.nullcontext() if is_short else jax.enable_x64(True):
        placed, sizes = shard_local_rows(own, placement)
        start = time.perf_counter()
        result = jax.block_until_ready(sample_sort(placed, placement, shard_sizes=sizes))
        seconds = time.perf_counter() - start
        write_ordered(out, result[1], len(keys), progress=progress)
    is_ragged = num_shards > 1 and has_ragged(placement.mesh)
    volume = None if is_ragged else exchange_volume(len(keys), num_shards, dtype=own.dtype)
    return SortedFile(len(keys), num_shards, seconds, volume, shard_balance(result[0], result[1], num_shards))


def _shorten(keys: np.ndarray) -> np.ndarray:
    """The keys in 32 bits if these hold them exactly."""
    if keys.dtype.itemsize < 8:
        return keys
    with np.errstate(over="ignore"):
        short = keys.astype(f"{keys.dtype.kind}4")
    return short if np.array_equal(short, keys, equal_nan=keys.dtype.kind == "f") else keys
