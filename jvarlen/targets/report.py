"""The report of a compiler for other devices: a row for each bucket, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Self

from jvarlen._common.terminal import text_table
from jvarlen.compiling.report import BucketReport, Column, Program, figure_text, program_name, table_of
from jvarlen.estimates.communication import CommunicationEstimate
from jvarlen.planning.buckets import AnyBucket
from jvarlen.targets.buffers import Buffer
from jvarlen.targets.dump import Launches

__all__ = ["BUFFERS", "KERNELS", "SOURCE", "TargetReport", "TargetRow", "shown_columns"]

SOURCE = "All figures come from compilers, not from devices."


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetRow:
    """The compiler's figures for a program; bytes are those of one device.

    If the program does not fit, the compiler makes none: `total_bytes` is then what it asked for, and the other figures
    of the program are None.

    Attributes:
      bucket: its shape; None for a program of all buckets.
      program: what it does, as in `CompileRow`.
      lower_s: seconds of tracing and lowering.
      compile_s: seconds in the compiler.
      flops: operations of all products of a run on one device, counted by this library, not by the compiler; attention
        counts as in full rows of one sample. Loops are multiplied out. With stages, the mean of the stages. None with
        loops whose turns depend on values, with zero_bubble that runs layers again in both of its backward passes, and
        where the compiler splits arrays over further axes of a mesh.
      argument_bytes: of state and batch.
      output_bytes: of the results that replace no arguments.
      temp_bytes: of temporaries.
      host_bytes: of temporaries in the memory of the host.
      total_bytes: that a device holds during a run: arguments, output and temporaries.
      limit_bytes: that a process can have of a device's memory, as `Target.memory_bytes`; None where unknown.
      communication: the collectives of a run; None also where some are in a loop whose turns depend on values.
      seconds: of a run, an estimate: see `program_seconds`. None where it has none, and for devices that are here.
      exposed_s: seconds in which a device waits for communication; an estimate.
      products_s: of `seconds`, those of products and kernels of attention.
      elementwise_bytes: that the other kernels of a run read and write; where `seconds` is known.
      num_kernels: how many kernels a run starts; where `seconds` is known.
      kernels: how often the program calls each kernel that XLA did not make, by name; in loops once.
      launches: of a run, one by one and as CUDA graphs; None for other devices than GPUs, and where the turns of a
        loop or the branch are unknown.
      buffers: the ten largest buffers of a device at the moment at which the program holds the most; None also where
        XLA does not list them.
    """

    bucket: AnyBucket | None
    program: Program = "step"
    lower_s: float
    compile_s: float
    flops: float | None
    argument_bytes: int | None = None
    output_bytes: int | None = None
    temp_bytes: int | None = None
    host_bytes: int | None = None
    total_bytes: int
    limit_bytes: int | None
    communication: CommunicationEstimate | None = None
    seconds: float | None = None
    exposed_s: float | None = None
    products_s: float | None = None
    elementwise_bytes: float | None = None
    num_kernels: float | None = None
    kernels: Mapping[str, int] | None = None
    launches: Launches | None = None
    buffers: tuple[Buffer, ...] | None = None

    def __str__(self) -> str:
        return program_name(self.program, self.bucket)

    @property
    def of_what(self) -> str:
        """What a run is, in words."""
        if self.bucket is None:
            return f"the {self.program}"
        return f"a {'step' if self.program == 'step' else 'group'} of {self}"

    @property
    def has_program(self) -> bool:
        """Whether the compiler made one."""
        return self.argument_bytes is not None

    @property
    def fits(self) -> bool | None:
        """Whether the total is within the limit; None where that is unknown."""
        if not self.has_program:
            return False
        return None if self.limit_bytes is None else self.total_bytes <= self.limit_bytes


class TargetReport(BucketReport[TargetRow]):
    """A row for each bucket, those with the most tokens with padding first; `str` is the table.

    Where steps have several groups, rows are those of the passes over a group, then of the update.

    Args:
      rows: of the programs.
      target: the name of the devices.
      layout: the layout on them.
      wall_s: seconds of lowering and compiling them all, several at once.
      cpu_s: seconds of CPU time of this process meanwhile.
      step_s: predicted seconds of a step of the plan, on average: of its groups and its update. None without a plan and
        where those of a program are unknown.
    """

    _format = 2
    _derived, _derived_of_row = ("fits", "estimates"), ("fits",)

    target: str
    layout: str
    wall_s: float
    cpu_s: float
    step_s: float | None

    def __new__(
        cls,
        rows: Iterable[TargetRow],
        target: str,
        layout: str,
        wall_s: float = math.nan,
        cpu_s: float = math.nan,
        step_s: float | None = None,
    ) -> Self:
        """A tuple of the rows, with the figures of all."""
        report = super().__new__(cls, rows)
        report.target, report.layout, report.wall_s, report.cpu_s = target, layout, wall_s, cpu_s
        report.step_s = step_s
        return report

    @property
    def fits(self) -> bool | None:
        """Whether every program fits; None where the memory of the devices is unknown."""
        fits = [row.fits for row in self]
        return False if False in fits else None if None in fits else True

    @property
    def estimates(self) -> tuple[str, ...]:
        """The figures that are estimates, not the compiler's."""
        return "seconds", "exposed_s", "products_s", "elementwise_bytes", "step_s"

    @property
    def fullest(self) -> TargetRow:
        """The row of the program that takes the most bytes, or that asks for the most where the compiler made none."""
        return max(self, key=lambda row: (row.has_program, row.total_bytes))

    def __str__(self) -> str:
        """Lines of text: the programs, and the communication and the buffers of the fullest one; GB are 10⁹ bytes.

        Columns without any known figure, and those of less than 0.0005 GB, are left out.
        """
        columns = shown_columns(self)
        table = text_table(table_of(self, *columns, KERNELS), align=">" * len(columns) + "<")
        lines = [f"{self.layout} on {self.target}. {SOURCE}", table]
        lines.append(f"compiling: {figure_text(self.wall_s)} s wall, {figure_text(self.cpu_s)} s CPU")
        if self.step_s is not None:
            lines.append(f"a step of the plan: {figure_text(self.step_s)} s on average, an estimate")
        if any("_forward_kernel" in (row.kernels or ()) for row in self):
            lines.append(
                "attention is priced by Triton's kernels; cuDNN, where a device has it, takes less on long rows"
            )
        for row in self:
            if row.communication is None:
                lines.append(f"the communication of {row.of_what} is unknown")
        for row in [self.fullest] if self else []:
            if row.seconds and row.products_s is not None and row.elementwise_bytes is not None:
                lines += [
                    f"in {row.of_what}, as estimated:",
                    f"products and attention take {row.products_s / row.seconds:.0%} of the seconds",
                    f"other kernels read and write {figure_text(row.elementwise_bytes / _GB)} GB",
                    f"{row.num_kernels:,.0f} kernels start",
                ]
            if row.communication:
                lines += [f"{row.of_what} communicates:", str(row.communication)]
            if row.buffers:
                buffers = text_table(table_of(row.buffers, *BUFFERS), align="><")
                lines += [f"the largest buffers of {row.of_what}:", buffers]
        return "\n".join(lines)


_GB = 1e9

_COLUMNS: tuple[Column[TargetRow], ...] = (
    Column("bucket", str),
    Column("fits", lambda row: {True: "yes", False: "no", None: None}[row.fits]),
    Column("total GB", lambda row: row.total_bytes, _GB),
    Column("limit GB", lambda row: row.limit_bytes, _GB),
    Column("arguments GB", lambda row: row.argument_bytes, _GB),
    Column("output GB", lambda row: row.output_bytes, _GB),
    Column("temporaries GB", lambda row: row.temp_bytes, _GB),
    Column("host GB", lambda row: row.host_bytes, _GB),
    Column("seconds (estimate)", lambda row: row.seconds),
    Column("exposed s (estimate)", lambda row: row.exposed_s),
    Column("TFLOP", lambda row: row.flops, 1e12),
    Column("launches", lambda row: row.launches and sum(row.launches[:-1])),
    Column("CUDA graphs", lambda row: row.launches and row.launches.graphs),
    Column("compile s", lambda row: row.compile_s),
)


def shown_columns(report: TargetReport) -> list[Column[TargetRow]]:
    """Bucket, fits and total, and each other column that has a known figure, of bytes one of 0.0005 GB or more."""
    least = {_GB: 0.0005 * _GB}

    def is_shown(column: Column[TargetRow]) -> bool:
        figures = [figure for row in report if (figure := column.of_row(row)) is not None]
        return any(isinstance(figure, str) or figure >= least.get(column.unit, 0) for figure in figures)

    return [*_COLUMNS[:3], *filter(is_shown, _COLUMNS[3:])]


def _kernels(row: TargetRow) -> str | None:
    if row.kernels is None:
        return None
    return ", ".join(f"{name} {times}" for name, times in row.kernels.items()) or "none"


KERNELS = Column("kernels", _kernels)

BUFFERS: tuple[Column[Buffer], ...] = (
    Column("GB", lambda buffer: buffer.num_bytes, _GB),
    Column("kind", lambda buffer: buffer.kind),
    Column("shape", lambda buffer: buffer.shape),
    Column("operation", lambda buffer: buffer.operation),
    Column("line", lambda buffer: buffer.source),
)
