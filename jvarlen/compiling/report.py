"""The compile report: the cost of compiling and running each bucket, and what all reports of buckets share."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, NamedTuple, Self, TypeVar

from jvarlen._common.checks import UserError
from jvarlen._common.files import write_atomically
from jvarlen._common.terminal import text_table
from jvarlen._common.types import PyTree
from jvarlen.planning.buckets import AnyBucket
from jvarlen.planning.steps import PlannedSteps, bucket_figures

if TYPE_CHECKING:
    import jax

__all__ = [
    "UNKNOWN", "BucketReport", "Column", "CompileReport", "CompileRow", "Program", "figure_text", "program_name",
    "row_of", "table_of",
]  # fmt: skip

UNKNOWN = "–"
_Row = TypeVar("_Row")
Program = Literal["step", "accumulation", "loss", "gradients", "update"]


class BucketReport(tuple[_Row, ...]):
    """Rows of buckets, a frozen dataclass each, with figures of all of them as attributes."""

    _format: ClassVar[int]  # of the file
    # Figures that follow from the fields, also in the file for other programs.
    _derived: ClassVar[tuple[str, ...]] = ()
    _derived_of_row: ClassVar[tuple[str, ...]] = ()

    def __getnewargs__(self) -> tuple[object, ...]:
        """The arguments of `__new__`, for copies and pickles."""
        return tuple(self), *vars(self).values()

    def to_json(self) -> str:
        """All rows as JSON, with the figures that follow from them; unknown figures are null."""
        rows = [vars(row) | {name: getattr(row, name) for name in self._derived_of_row} for row in self]
        of_all = vars(self) | {name: getattr(self, name) for name in self._derived}
        return json.dumps(_plain({"format": self._format, **of_all, "rows": rows}), indent=2, allow_nan=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `to_json` to a file, atomically; an existing file is replaced."""
        with write_atomically(Path(path)) as file:
            file.write(self.to_json().encode() + b"\n")


def _plain(value: PyTree) -> PyTree:
    """A value as JSON holds it: buckets as lists, other dataclasses and named tuples as objects, NaN as null."""
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, AnyBucket):
        return list(value)
    if dataclasses.is_dataclass(value):
        value = vars(value)
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return list(map(_plain, value)) if isinstance(value, list | tuple) else value


def figure_text(figure: float | str | None, unit: float = 1.0) -> str:
    """A number of units with three digits, or all of those before the point; text as it is."""
    if isinstance(figure, str):
        return figure
    if figure is None or math.isnan(figure):
        return UNKNOWN
    scaled = figure / unit
    return f"{scaled:,.0f}" if abs(scaled) >= 100 else f"{scaled:.3g}"


class Column(NamedTuple, Generic[_Row]):
    """A column of a table of rows."""

    header: str
    of_row: Callable[[_Row], float | str | None]
    unit: float = 1.0
    of_all: Callable[[Sequence[_Row]], float | str | None] | None = None  # most figures have no meaningful sum

    def cells(self, rows: Iterable[_Row]) -> list[str]:
        """The text of each row."""
        return [figure_text(self.of_row(row), self.unit) for row in rows]


def table_of(rows: Sequence[_Row], *columns: Column[_Row]) -> list[tuple[str, ...]]:
    """The headers, and the cells of each row."""
    return list(zip(*([column.header, *column.cells(rows)] for column in columns), strict=True))


@dataclasses.dataclass(frozen=True)
class CompileRow:
    """The cost of an executable, and its use.

    Operations and bytes are those of one device, as the compiler reports them: NaN and 0 if it reports none.

    Attributes:
      bucket: its shape; None for a program of all buckets.
      lower_s: seconds of tracing and lowering.
      compile_s: seconds in the compiler, or of reading from a cache.
      cache_hit: whether the executable was read from a cache.
      flops: floating-point operations of a run. XLA counts the body of a loop, as over microbatches, once.
      argument_bytes: of state and batch.
      output_bytes: of the results.
      alias_bytes: of the results that reuse donated arguments.
      temp_bytes: of temporaries.
      peak_bytes: the most that is held at one time. For CPUs XLA leaves out the temporaries; use `total_bytes` there.
      times_used: how often it ran.
      step_s: median seconds of a run; NaN where steps were not timed.
      planned_steps: runs that the plan has: the groups of its bucket, or steps; None without a plan.
      padding: share of the planned groups that is padding, in [0, 1); None without any.
      is_live: whether the executable is held now.
      stall_s: seconds that steps waited until it was compiled; 0 if it was compiled before the first step.
      program: a whole "step"; or of a step of several groups the "accumulation" of a group, which ends with the
        "update"; with a loss of the whole step, that "loss" and the second pass over a group, for "gradients", too.
    """

    bucket: AnyBucket | None
    lower_s: float
    compile_s: float
    cache_hit: bool
    flops: float
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    peak_bytes: int
    times_used: int = 0
    step_s: float = math.nan
    planned_steps: int | None = None
    padding: float | None = None
    is_live: bool = True
    stall_s: float = 0.0
    program: Program = "step"

    def __str__(self) -> str:
        return program_name(self.program, self.bucket)

    @property
    def total_bytes(self) -> int:
        """Bytes that a device holds during a run, if all temporaries are held at once."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


def program_name(program: Program, bucket: AnyBucket | None) -> str:
    """A program in tables: its bucket, where there is one."""
    if bucket is None:
        return program
    return f"{bucket} gradients" if program == "gradients" else str(bucket)


def row_of(
    program: Program,
    bucket: AnyBucket | None,
    *,
    compiled: jax.stages.Compiled,
    lower_s: float,
    compile_s: float,
    cache_hit: bool,
) -> CompileRow:
    """The row of an executable that has not been used."""
    flops = float((_or_none(compiled.cost_analysis) or {}).get("flops", math.nan))
    flops = flops if flops >= 0 else math.nan  # XLA marks what it cannot count as negative
    memory = _or_none(compiled.memory_analysis)
    argument, output, alias, temp, peak = (
        int(getattr(memory, f"{name}_in_bytes", 0))
        for name in ("argument_size", "output_size", "alias_size", "temp_size", "peak_memory")
    )
    return CompileRow(
        bucket, lower_s, compile_s, cache_hit, flops, argument, output, alias, temp, peak, program=program
    )


def _or_none(analysis: Callable[[], _Row]) -> _Row | None:
    """The result of an analysis; None where the backend lacks it, which some backends say by an error."""
    try:
        return analysis()
    except RuntimeError:  # errors of JAX and NotImplementedError are among these
        return None


class CompileReport(BucketReport[CompileRow]):
    """Rows of programs, in the order of compilation; `str` is the table.

    Args:
      rows: one for each bucket; or for each program of a step of several groups.
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

    _format = 3
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
        return tuple(dict.fromkeys(row.bucket for row in self if row.bucket is not None and not row.times_used))

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
        return _per_step(_times_used)(self)

    def with_plan(self, plan: PlannedSteps) -> CompileReport:
        """The rows with the runs and the padding that a plan has in each bucket; ValueError for other buckets.

        Args:
          plan: a plan whose buckets were compiled.

        Returns:
          `CompileReport`, the rows in the same order.
        """
        figures = bucket_figures(plan)
        groups, padding = (
            dict(zip(plan.buckets.shapes, column.tolist(), strict=True))
            for column in (figures.num_groups, figures.padding)
        )
        if unplanned := [str(row.bucket) for row in self if row.bucket is not None and row.bucket not in groups]:
            raise UserError(f"the compile report is not of this plan, which does not have {', '.join(unplanned)}")

        def with_figures(row: CompileRow) -> CompileRow:
            if row.bucket is None:
                return dataclasses.replace(row, planned_steps=plan.num_steps)
            planned = groups[row.bucket]
            return dataclasses.replace(row, planned_steps=planned, padding=padding[row.bucket] if planned else None)

        rows = map(with_figures, self)
        return CompileReport(rows, self.wall_s, self.cpu_s)

    def table(self) -> str:
        """Lines of text: a row for each program, a row of totals, and the buckets that were never used, if any.

        Bytes are in MB, 10⁶ bytes; a GFLOP is 10⁹ operations. Columns without any known figure are left out. "let go"
        marks executables that are no longer held.
        """
        if not self:
            return "no bucket was compiled"
        columns = [["bucket", *map(str, self), "total"]]
        for column in _COLUMNS:
            texts, of_all = column.cells(self), column.of_all
            total = "" if of_all is None else figure_text(of_all(self), column.unit)
            if any(text != UNKNOWN for text in texts):
                columns.append([column.header, *texts, total])
        lines = [text_table(list(zip(*columns, strict=True)), align=">")]
        if not math.isnan(self.wall_s + self.cpu_s):
            lines.append(f"compiling: {figure_text(self.wall_s)} s wall, {figure_text(self.cpu_s)} s CPU")
        if self.unused:
            lines.append(f"never used: {', '.join(map(str, self.unused))}")
        return "\n".join(lines)


def _per_step(count: Callable[[CompileRow], int | None]) -> Callable[[Iterable[CompileRow]], int]:
    """The sum of a count over the programs that end a step."""
    return lambda rows: sum(count(row) or 0 for row in rows if row.program in ("step", "update"))


_times_used, _planned_steps = attrgetter("times_used"), attrgetter("planned_steps")
_MB = 1e6

_COLUMNS: tuple[Column[CompileRow], ...] = (
    Column("lower s", lambda row: row.lower_s),
    Column("compile s", lambda row: row.compile_s),
    Column("stall s", lambda row: row.stall_s or None, of_all=lambda rows: sum(row.stall_s for row in rows)),
    Column(
        "cache",
        lambda row: "hit" if row.cache_hit else "miss",
        of_all=lambda rows: f"{sum(row.cache_hit for row in rows):,} hit",
    ),
    Column("GFLOP", lambda row: row.flops, 1e9),
    Column("args MB", lambda row: row.argument_bytes, _MB),
    Column("out MB", lambda row: row.output_bytes, _MB),
    Column("temp MB", lambda row: row.temp_bytes, _MB),
    Column("aliased MB", lambda row: row.alias_bytes, _MB),
    Column("peak MB", lambda row: row.peak_bytes, _MB),
    Column("step ms", lambda row: row.step_s, 1e-3),
    Column("used", _times_used, of_all=_per_step(_times_used)),
    Column("in plan", _planned_steps, of_all=_per_step(_planned_steps)),
    Column("padding", lambda row: None if row.padding is None else f"{row.padding:.2%}"),
    Column(
        "let go",
        lambda row: None if row.is_live else "yes",
        of_all=lambda rows: sum(not row.is_live for row in rows),
    ),
)
