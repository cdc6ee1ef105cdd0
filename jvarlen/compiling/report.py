"""The compile report: what compiling and running each bucket cost, as a table and as JSON.

It imports no JAX: a saved report can be read on a machine without devices.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from jvarlen._common.checks import UserError, is_integer, is_number
from jvarlen._common.files import read_object, write_atomically
from jvarlen._common.text_table import text_table
from jvarlen.compiling.compile_row import CompileRow
from jvarlen.planning.buckets import AnyBucket, check_buckets
from jvarlen.planning.steps import PlannedSteps, bucket_figures

__all__ = ["CompileReport", "CompileRow"]

_UNKNOWN = "–"
_FORMAT = 2
# Follow from the fields; in the file for those who read it by other means.
_DERIVED = ("total_bytes",)


class CompileReport(tuple[CompileRow, ...]):
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
            figures = [column.of_row(row) for row in self]
            texts = [_text(figure, column.unit) for figure in figures]
            total = "" if column.of_all is None else _text(column.of_all(figures), column.unit)
            if any(text != _UNKNOWN for text in texts):
                columns.append([column.header, *texts, total])
        lines = [text_table(list(zip(*columns, strict=True)), align=">")]
        if not math.isnan(self.wall_s + self.cpu_s):
            lines.append(f"compiling: {_text(self.wall_s, 1)} s wall, {_text(self.cpu_s, 1)} s CPU")
        if self.unused:
            lines.append(f"never used: {', '.join(map(str, self.unused))}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """All rows as JSON, with the figures that follow from them; unknown figures are null."""
        rows = [
            {**vars(row), **{name: getattr(row, name) for name in _DERIVED}, "bucket": list(row.bucket)} for row in self
        ]
        document = {"format": _FORMAT, **_without_nan(vars(self)), "rows": list(map(_without_nan, rows))}
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

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CompileReport:
        """Reads what `save` wrote.

        Args:
          path: the file.

        Returns:
          A report of the same rows.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: it holds no compile report; the message says what is wrong.
        """
        try:
            document = read_object(Path(path))
            if document["format"] != _FORMAT:
                raise UserError(f"its format is {document['format']}, and this version of jvarlen reads {_FORMAT}")
            seconds = {name: math.nan if (value := document[name]) is None else value for name in ("wall_s", "cpu_s")}
            if wrong := [name for name, value in seconds.items() if not is_number(value)]:
                raise UserError(f"{wrong[0]} is {seconds[wrong[0]]!r}")
            return cls(map(_row_from, document["rows"]), **seconds)
        except (ValueError, LookupError, TypeError, OverflowError) as error:
            raise UserError(f"{path} holds no compile report: {error!r}") from error


def _without_nan(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: None if value != value else value for name, value in figures.items()}


def _row_from(fields: dict[str, Any]) -> CompileRow:
    figures = {name: value for name, value in dict(fields).items() if name not in _DERIVED}
    figures |= {name: math.nan for name in ("flops", "step_s") if figures[name] is None}
    figures["bucket"] = check_buckets([figures["bucket"]])[0]
    kinds: dict[str, Callable[[Any], bool]] = {
        "float": lambda value: is_number(value) and not (is_integer(value) and abs(value) >= 2**63),
        "int": lambda value: is_integer(value) and 0 <= value < 2**63,
        "bool": lambda value: isinstance(value, bool),
    }
    for field in dataclasses.fields(CompileRow):
        kind, *others = str(field.type).split(" | ")
        value = figures.get(field.name, field.default)
        if kind in kinds and not kinds[kind](value) and not (value is None and others):
            raise UserError(f"{field.name} is {value!r}")
    return CompileRow(**figures)


def _text(figure: float | str | None, unit: float) -> str:
    """A number of units with three digits, or all of those before the point; text as it is."""
    if isinstance(figure, str):
        return figure
    if figure is None or math.isnan(figure):
        return _UNKNOWN
    scaled = figure / unit
    return f"{scaled:,.0f}" if abs(scaled) >= 100 else f"{scaled:.3g}"


def _sum(figures: Sequence[Any]) -> float:
    """Of the known ones."""
    return sum(filter(None, figures))


class _Column(NamedTuple):
    header: str
    of_row: Callable[[CompileRow], float | str | None]
    unit: float = 1.0
    of_all: Callable[[Sequence[Any]], float | str] | None = None  # most figures have no meaningful sum


_MB = 1e6

_COLUMNS = (
    _Column("lower s", lambda row: row.lower_s),
    _Column("compile s", lambda row: row.compile_s),
    _Column("stall s", lambda row: row.stall_s or None, of_all=_sum),
    _Column("cache", lambda row: "hit" if row.cache_hit else "miss", of_all=lambda told: f"{told.count('hit'):,} hit"),
    _Column("GFLOP", lambda row: row.flops, 1e9),
    _Column("args MB", lambda row: row.argument_bytes, _MB),
    _Column("out MB", lambda row: row.output_bytes, _MB),
    _Column("temp MB", lambda row: row.temp_bytes, _MB),
    _Column("aliased MB", lambda row: row.alias_bytes, _MB),
    _Column("peak MB", lambda row: row.peak_bytes, _MB),
    _Column("step ms", lambda row: row.step_s, 1e-3),
    _Column("used", lambda row: row.times_used, of_all=_sum),
    _Column("in plan", lambda row: row.planned_steps, of_all=_sum),
    _Column("padding", lambda row: None if row.padding is None else f"{row.padding:.2%}"),
    _Column("let go", lambda row: None if row.is_live else "yes", of_all=lambda told: told.count("yes")),
)
