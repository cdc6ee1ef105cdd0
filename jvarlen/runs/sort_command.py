"""`jvarlen sort`: the order of the samples of any file of lengths, sorted on several devices."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import tyro

from jvarlen._common.checks import UserError
from jvarlen.distributed.launch import DeviceConfig, launch
from jvarlen.distributed.processes import is_main_process
from jvarlen.sorting.balance import balance_table
from jvarlen.sorting.sort_file import sort_file

__all__ = ["SortCommand"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SortCommand(DeviceConfig):
    """Sort a file of lengths or other keys on several devices, and write the order of the samples."""

    lengths: tyro.conf.Positional[Path]
    """A .npy file of integers or floats, one a sample."""
    out: Path = Path("order.npy")
    """Where to write the ids of the samples, sorted by key, ties by id."""
    progress: bool = True
    """Show progress bars."""

    def run(self) -> None:
        """Sorts, writes the order, and prints how evenly it was spread over the devices."""
        if self.out.is_dir() or self.out.resolve() == self.lengths.resolve():
            raise UserError(f"out {self.out} must be a file, and another one than the lengths")
        sorted_file = sort_file(self.lengths, self.out, launch(self), progress=self.progress)
        if is_main_process():
            print(balance_table({"exact": sorted_file.exact, "each for itself": sorted_file.local}))
            volume = sorted_file.volume
            sent = "what each sent depends on the keys"
            if volume is not None:
                sent = f"each sent {volume.messages:,} messages, {volume.num_bytes / 1e6:,.1f} MB"
            print(
                f"{sorted_file.num_rows:,} keys on {sorted_file.num_shards} devices: {sorted_file.seconds:.2f} s with "
                f"compilation; {sent}"
            )
            print(self.out)
