"""The compile report: what compiling and running each bucket cost, as a table and as JSON.

It imports no JAX: a saved report can be read on a machine without devices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Self

from jvarlen._common.checks import UserError
from jvarlen._common.text_table import text_table
from jvarlen.compiling.bucket_report import UNKNOWN, BucketReport, Column, figure_text
from jvarlen.compiling.compile_row import CompileRow
from jvarlen.planning.buckets import AnyBucket
from jvarlen.planning.steps import PlannedSteps, bucket_figures

__all__ = ["CompileReport", "CompileRow"]


class CompileReport(BucketReport[CompileRow]):
    """Rows of buckets, in the order of compilation; `str` is the table.

    Args:
      rows: one for each bucket.
      wall_s: seconds in which at least one of them was being compiled. Threads compile several at once, so the seconds
        of the rows add up to more.
      cpu_s: seconds of CPU time of the process meanwhile: of all compiling threads, and of steps that ran.

    Example:
      >>> from jvarlen.planning.buckets import Bucket
      >>> row = CompileRow(Bucket(2, 8), 0.25, 1.75, False, 4e9, 3_000_000, 1_000_000, 0, 0, 4_000_000, times_used=4)
      >>> again = dataclasses.replace(row, bucket=Bucket(4, 4), cache_hit=True, times_used=0)
      >>> report = CompileReport([row, again], wall_s=2.5, cpu_s=4.0)
      >>> report.unused
      (Bucket(rows=4, length=4),)
      >>> print(report)
      bucket  lower s  compile s  cache  GFLOP  args MB  out MB  temp MB  aliased MB  peak MB  used
         2×8     0.25       1.75   miss      4        3       1        0           0        4     4
         4×4     0.25       1.75    hit      4        3       1        0           0        4     0
       total                      1 hit                                                           4
      compiling: 2.5 s wall, 4 s CPU
      never used: 4×4
    """

    _what, _format, _row_type = "compile report", 2, CompileRow
    _derived_of_row = ("total_bytes",)

    wall_s: float
    cpu_s: float

    def __new__(cls, rows: Iterable[CompileRow] = (), wall_s: float = math.nan, cpu_s: float = math.nan) -> Self:
        """A tuple of the rows, with the seconds of all."""
        report = super().__new__(cls, rows)
        report.wall_s, report.cpu_s = wall_s, cpu_s
        return report

    def __str__(self) -> str:
        return self.table()

    @property
    def unused(self) -> tuple[AnyBucket, ...]:
        """Buckets in which no step ran, in the order of compilation."""
        return tuple(row.bucket for row in self if not row.times_used)

    @property
    def stall_s(self) -> float:
        """Seconds that steps waited until their buckets were compiled."""
        return sum(row.stall_s for row in self)

    @property
    def num_cache_hits(self) -> int:
        """Buckets whose executable was read from a cache."""
        return sum(row.cache_hit for row in self)

    @property
    def times_used(self) -> int:
        """Steps that ran."""
        return sum(row.times_used for row in self)

    def with_plan(self, plan: PlannedSteps) -> CompileReport:
        """A compile report with the steps and the padding that a plan has in each bucket.

        Args:
          plan: a plan whose buckets were compiled; some of them may be missing here.

        Returns:
          `CompileReport`, the rows in the same order.

        Raises:
          ValueError: buckets here that the plan does not have; they are listed.
        """
        figures = bucket_figures(plan)
        steps, padding = (
            dict(zip(plan.buckets, column.tolist(), strict=True)) for column in (figures.num_steps, figures.padding)
        )
        if foreign := [str(row.bucket) for row in self if row.bucket not in steps]:
            raise UserError(f"the compile report is not one of this plan, which does not have {', '.join(foreign)}")
        rows = (
            dataclasses.replace(
                row,
                planned_steps=steps[row.bucket],
                padding=padding[row.bucket] if steps[row.bucket] else None,
            )
            for row in self
        )
        return CompileReport(rows, self.wall_s, self.cpu_s)

    def table(self) -> str:
        """Lines of text: a row for each bucket, a row of totals, and the buckets that were never used, if any.

        Bytes are in MB, 10⁶ bytes; a GFLOP is 10⁹ operations. Columns without any known figure are left out. "let go"
        marks executables that are no longer held.
        """
        if not self:
            return "no bucket was compiled"
        columns = [["bucket", *(str(row.bucket) for row in self), "total"]]
        for column in _COLUMNS:
            texts, of_all = column.cells(self), column.of_all
            total = "" if of_all is None else figure_text(of_all([column.of_row(row) for row in self]), column.unit)
            if any(text != UNKNOWN for text in texts):
                columns.append([column.header, *texts, total])
        lines = [text_table(list(zip(*columns, strict=True)), align=">")]
        if not math.isnan(self.wall_s + self.cpu_s):
            lines.append(f"compiling: {figure_text(self.wall_s)} s wall, {figure_text(self.cpu_s)} s CPU")
        if self.unused:
            lines.append(f"never used: {', '.join(map(str, self.unused))}")
        return "\n".join(lines)


def _sum(figures: Sequence[Any]) -> float:
    """Of the known ones."""
    return sum(filter(None, figures))


_MB = 1e6

_COLUMNS = (
    Column("lower s", lambda row: row.lower_s),
    Column("compile s", lambda row: row.compile_s),
    Column("stall s", lambda row: row.stall_s or None, of_all=_sum),
    Column("cache", lambda row: "hit" if row.cache_hit else "miss", of_all=lambda told: f"{told.count('hit'):,} hit"),
    Column("GFLOP", lambda row: row.flops, 1e9),
    Column("args MB", lambda row: row.argument_bytes, _MB),
    Column("out MB", lambda row: row.output_bytes, _MB),
    Column("temp MB", lambda row: row.temp_bytes, _MB),
    Column("aliased MB", lambda row: row.alias_bytes, _MB),
    Column("peak MB", lambda row: row.peak_bytes, _MB),
    Column("step ms", lambda row: row.step_s, 1e-3),
    Column("used", lambda row: row.times_used, of_all=_sum),
    Column("in plan", lambda row: row.planned_steps, of_all=_sum),
    Column("padding", lambda row: None if row.padding is None else f"{row.padding:.2%}"),
    Column("let go", lambda row: None if row.is_live else "yes", of_all=lambda told: told.count("yes")),
)
