"""What the compiler of other devices says of a step: a row for each bucket, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

from jvarlen._common.files import write_atomically
from jvarlen._common.text_table import text_table
from jvarlen.compiling.compile_row import CompileRow
from jvarlen.parallel.communication import CommunicationEstimate

__all__ = ["TargetReport", "TargetRow"]


@dataclasses.dataclass(frozen=True)
class TargetRow:
    """What the compiler of other devices says of the program of a bucket; bytes are those of one device.

    Attributes:
      program: the row of the compile report. Its `flops` are counted by this library, not by the compiler: those of
        all products of a step on one device, attention as of full rows of one sample. Loops are multiplied out; those
        whose turns depend on values count once. NaN with stages, whose devices take different branches.
      cpu_s: seconds of CPU time of compiling, of all threads.
      host_bytes: of temporaries in the memory of the host.
      limit_bytes: of memory; None where the device does not tell.
      communication: the collectives of a step; None where some are in a loop whose turns depend on values, or where
        there is no program.
      kernels: how often the program calls each kernel that XLA did not make, by name; in loops once.
      needed_bytes: what the program needs, where the compiler found no room for it and made none; else None. Then the
        other bytes are 0, and the limit is the compiler's own.
    """

    program: CompileRow
    cpu_s: float
    host_bytes: int
    limit_bytes: int | None
    communication: CommunicationEstimate | None
    kernels: Mapping[str, int]
    needed_bytes: int | None = None

    @property
    def total_bytes(self) -> int:
        """That a device holds during a step."""
        return self.program.total_bytes if self.needed_bytes is None else self.needed_bytes

    @property
    def fits(self) -> bool | None:
        """Whether that is within the limit; None where the device does not tell it."""
        if self.needed_bytes is not None:
            return False
        return None if self.limit_bytes is None else self.total_bytes <= self.limit_bytes


class TargetReport(tuple[TargetRow, ...]):
    """A row for each bucket, those with the most positions first; `str` is the table.

    Args:
      rows: of the buckets.
      target: what they are compiled for.
      layout: of the devices.
    """

    target: str
    layout: str

    def __new__(cls, rows: Iterable[TargetRow], target: str, layout: str) -> Self:
        """A tuple of the rows, with what they are for."""
        report = super().__new__(cls, rows)
        report.target, report.layout = target, layout
        return report

    @property
    def fits(self) -> bool | None:
        """Whether every bucket does; None where the devices do not tell their memory."""
        told = [row.fits for row in self]
        return False if False in told else None if None in told else True

    def __str__(self) -> str:
        """Lines of text: the buckets, and what a step of the first one communicates; GB are 10⁹ bytes."""
        header = ["bucket", "compile s", "CPU s", "TFLOP", "args GB", "temp GB", "host GB", "total GB", "limit GB"]
        rows = [[*header, "fits", "kernels"]]
        for row in self:
            program = row.program
            is_made = row.needed_bytes is None
            sizes = program.argument_bytes, program.temp_bytes, row.host_bytes
            rows.append(
                [
                    str(program.bucket),
                    f"{program.compile_s:.1f}",
                    f"{row.cpu_s:.1f}",
                    "–" if math.isnan(program.flops) else f"{program.flops / 1e12:.3g}",
                    *(f"{size / 1e9:.2f}" if is_made else "–" for size in sizes),
                    f"{row.total_bytes / 1e9:.2f}",
                    "–" if row.limit_bytes is None else f"{row.limit_bytes / 1e9:.2f}",
                    {True: "yes", False: "no", None: "–"}[row.fits],
                    ", ".join(f"{name} {times}" for name, times in row.kernels.items()) or "–",
                ]
            )
        lines = [f"{self.layout} on {self.target}; figures are those of the compiler, not of devices"]
        lines.append(text_table(rows, align=">>>>>>>>>><"))
        for row in self:
            if row.communication is None:
                lines.append(f"what a step of {row.program.bucket} communicates is not known")
        told = next((row for row in self if row.communication), None)
        if told is not None:
            lines += [f"a step of {told.program.bucket} communicates:", str(told.communication)]
        return "\n".join(lines)

    def to_json(self) -> str:
        """All rows as JSON."""
        rows = []
        for row in self:
            program = {name: None if value != value else value for name, value in vars(row.program).items()}
            if row.needed_bytes is not None:
                program |= {name: None for name in program if name.endswith("_bytes")}
            listed = None if row.communication is None else [each._asdict() for each in row.communication]
            nested = {"program": program | {"bucket": list(row.program.bucket)}, "communication": listed}
            rows.append(vars(row) | nested | {"total_bytes": row.total_bytes, "fits": row.fits})
        document = {"target": self.target, "layout": self.layout, "fits": self.fits, "rows": rows}
        return json.dumps(document, indent=2, allow_nan=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `to_json` to a file, atomically.

        Args:
          path: the file; its directory must exist, and an existing file is replaced.

        Raises:
          OSError: it cannot be written; an existing file stays.
        """
        with write_atomically(Path(path)) as file:
            file.write(self.to_json().encode() + b"\n")
