"""The compile report: what compiling and running each bucket cost, as a table and as JSON.

NumPy only: a saved report can be read on a machine without devices. Letters: K buckets.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import dacite

from jvarlen._common.checks import UserError, is_number
from jvarlen._common.files import write_atomically
from jvarlen._common.text_table import text_table
from jvarlen.planning.buckets import AnyBucket, check_buckets
from jvarlen.planning.steps import PlannedSteps, bucket_figures

__all__ = ["CompileReport", "CompileRow", "row_of"]

_UNKNOWN = "–"
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class CompileRow:
    """What a bucket's executable cost, and how it was used.

    Operations and bytes are those of one device, as the compiler reports them. If it does not, operations are NaN and
    bytes 0.

    Attributes:
      bucket: its shape.
      lower_s: seconds of tracing and lowering.
      compile_s: seconds in the compiler, or of reading from a cache.
      cache_hit: whether the executable was read from a cache.
      flops: floating-point operations of a step, by the compiler's count. XLA counts the body of a loop once, however
        often it runs: for a step that loops over its microbatches, that is about one microbatch.
      argument_bytes: bytes of state and batch.
      output_bytes: bytes of the results.
      alias_bytes: bytes of the results that reuse donated arguments.
      temp_bytes: bytes of temporaries.
      peak_bytes: the most bytes held at one time, as the compiler reports it. For CPUs XLA leaves out the temporaries;
        use `total_bytes` there.
      times_used: steps that ran in this bucket.
      step_s: median seconds of a step; NaN where steps were not timed.
      planned_steps: steps that the plan has in this bucket; None without a plan.
      padding: share of the positions of the planned steps that hold no token, in [0, 1); None without a plan, or if it
        has no step in this bucket.
      is_live: whether the executable is held now.
      stall_s: seconds that steps waited until this bucket was compiled; 0 if it was compiled before the first step.
    """

    bucket: AnyBucket
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

    @property
    def total_bytes(self) -> int:
        """Bytes that a device holds during a step, if all temporaries are held at once."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes

    @property
    def compile_s_per_use(self) -> float:
        """Seconds of tracing, lowering and compiling for each step that ran; NaN while none has."""
        return _ratio(self.lower_s + self.compile_s, self.times_used)


# Follow from the fields; in the file for those who read it by other means.
_DERIVED = ("total_bytes", "compile_s_per_use")


def row_of(bucket: AnyBucket, compiled: Any, lower_s: float, compile_s: float, cache_hit: bool) -> CompileRow:
    """The row of an executable that has not been used."""
    operations, memory = _told_by(compiled.cost_analysis), _told_by(compiled.memory_analysis)
    flops = float((operations or {}).get("flops", math.nan))

    def bytes_of(name: str) -> int:
        return int(getattr(memory, name, 0))

    return CompileRow(
        bucket=bucket,
        lower_s=lower_s,
        compile_s=compile_s,
        cache_hit=cache_hit,
        flops=flops if flops >= 0 else math.nan,  # XLA marks what it cannot count so
        argument_bytes=bytes_of("argument_size_in_bytes"),
        output_bytes=bytes_of("output_size_in_bytes"),
        alias_bytes=bytes_of("alias_size_in_bytes"),
        temp_bytes=bytes_of("temp_size_in_bytes"),
        peak_bytes=bytes_of("peak_memory_in_bytes"),
    )


class CompileReport(Sequence[CompileRow]):
    """Rows of buckets, in the order of compilation. Immutable.

    Two reports are equal if all their figures are, with NaN equal to NaN.

    Args:
      rows: one for each bucket.

    Raises:
      ValueError: two buckets have the same lengths, or only some are of pairs; they are listed.

    Example:
      >>> from jvarlen.planning.buckets import Bucket
      >>> row = CompileRow(Bucket(2, 8), 0.25, 1.75, False, 4e9, 3_000_000, 1_000_000, 0, 0, 4_000_000, times_used=4)
      >>> report = CompileReport([row, dataclasses.replace(row, bucket=Bucket(4, 4), cache_hit=True, times_used=0)])
      >>> report.unused
      (Bucket(rows=4, length=4),)
      >>> print(report)
      bucket  lower s  compile s  cache  GFLOP  args MB  out MB  temp MB  aliased MB  peak MB  used  compile s/step
         2×8     0.25       1.75   miss      4        3       1        0           0        4     4             0.5
         4×4     0.25       1.75    hit      4        3       1        0           0        4     0               –
       total      0.5        3.5  1 hit                                                           4               1
      never used: 4×4
    """

    def __init__(self, rows: Iterable[CompileRow]):
        self._rows = tuple(rows)
        if self._rows:
            ascending = sorted(self._rows, key=lambda row: row.bucket.lengths)
            check_buckets([row.bucket for row in ascending])

    @overload
    def __getitem__(self, index: int) -> CompileRow: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[CompileRow, ...]: ...

    def __getitem__(self, index: int | slice) -> CompileRow | tuple[CompileRow, ...]:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CompileReport) and self._document() == other._document()

    def __hash__(self) -> int:
        return hash(tuple(row.bucket for row in self._rows))

    def __repr__(self) -> str:
        return f"CompileReport({list(self._rows)!r})"

    def __str__(self) -> str:
        return self.table()

    @property
    def unused(self) -> tuple[AnyBucket, ...]:
        """Buckets in which no step ran, in the order of compilation."""
        return tuple(row.bucket for row in self._rows if not row.times_used)

    @property
    def lower_s(self) -> float:
        """Seconds of tracing and lowering all buckets."""
        return sum(row.lower_s for row in self._rows)

    @property
    def compile_s(self) -> float:
        """Seconds in the compiler, or of reading from a cache, for all buckets."""
        return sum(row.compile_s for row in self._rows)

    @property
    def stall_s(self) -> float:
        """Seconds that steps waited until their buckets were compiled."""
        return sum(row.stall_s for row in self._rows)

    @property
    def num_cache_hits(self) -> int:
        """Buckets whose executable was read from a cache."""
        return sum(row.cache_hit for row in self._rows)

    @property
    def times_used(self) -> int:
        """Steps that ran."""
        return sum(row.times_used for row in self._rows)

    @property
    def compile_s_per_use(self) -> float:
        """Seconds of tracing, lowering and compiling all buckets for each step that ran; NaN while none has."""
        return _ratio(self.lower_s + self.compile_s, self.times_used)

    @property
    def planned_steps(self) -> int | None:
        """Steps of the plan; None if they are unknown for some row."""
        steps = [row.planned_steps for row in self._rows if row.planned_steps is not None]
        return sum(steps) if steps and len(steps) == len(self) else None

    @property
    def padding(self) -> float | None:
        """The share of the plan's positions in these buckets that hold no token, in [0, 1); None without a plan."""
        if not self.planned_steps:
            return None
        positions = [(row.planned_steps or 0) * row.bucket.padded_tokens for row in self._rows]
        padded = sum(count * (row.padding or 0.0) for count, row in zip(positions, self._rows, strict=True))
        return padded / sum(positions)

    def with_plan(self, plan: PlannedSteps) -> CompileReport:
        """A compile report with the steps and the padding that a plan has in each bucket.

        Args:
          plan: a plan whose buckets were compiled. Some of its buckets may be missing here, such as those that a
            curriculum has passed.

        Returns:
          `CompileReport`, the rows in the same order.

        Raises:
          ValueError: buckets here that the plan does not have; they are listed.
        """
        figures = bucket_figures(plan)
        of_bucket = dict(
            zip(plan.buckets, zip(figures.num_steps.tolist(), figures.padding.tolist(), strict=True), strict=True)
        )
        foreign = [row.bucket for row in self._rows if row.bucket not in of_bucket]
        if foreign:
            raise UserError(
                f"the compile report is not one of this plan, which does not have {', '.join(map(str, foreign))}"
            )

        def planned(row: CompileRow) -> CompileRow:
            num_steps, padding = of_bucket[row.bucket]
            return dataclasses.replace(row, planned_steps=num_steps, padding=padding if num_steps else None)

        return CompileReport(map(planned, self._rows))

    def table(self) -> str:
        """Lines of text: a row for each bucket, a row of totals, and the buckets that were never used, if any.

        Bytes are in MB, 10⁶ bytes; a GFLOP is 10⁹ operations. "compile s/step" is the seconds of lowering and compiling
        divided by the steps that ran. Columns without any known figure are left out. "let go" marks executables that
        are no longer held.
        """
        columns = []
        for column in _COLUMNS:
            texts = [column.of_row(row) for row in self._rows]
            if any(text != _UNKNOWN for text in texts):
                columns.append([column.header, *texts, column.of_all(self)])
        lines = [text_table(list(zip(*columns, strict=True)), align=">")] if columns else []
        if not self._rows:
            lines.append("no bucket was compiled")
        if self.unused:
            lines.append(f"never used: {', '.join(map(str, self.unused)) or 'none'}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """All rows as JSON, with the figures that follow from them; unknown figures are null."""
        return json.dumps(self._document(), indent=2, allow_nan=False)

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
          An equal report.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: it holds no compile report; the message says what is wrong.
        """
        try:
            document = json.loads(Path(path).read_text())
            if document["format"] != _FORMAT:
                raise UserError(f"its format is {document['format']}, and this version of jvarlen reads {_FORMAT}")
            return cls([_row_from(fields) for fields in document["rows"]])
        except FileNotFoundError:
            raise FileNotFoundError(f"there is no compile report {path}") from None
        except (dacite.DaciteError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(f"{path} holds no compile report: {error}") from error

    def _document(self) -> dict[str, Any]:
        """What is written, and compared: NaN is None, which is valid JSON and equal to itself."""
        rows = []
        for row in self._rows:
            figures = {**vars(row), **{name: getattr(row, name) for name in _DERIVED}, "bucket": list(row.bucket)}
            rows.append({name: None if value != value else value for name, value in figures.items()})
        return {"format": _FORMAT, "rows": rows}


def _row_from(fields: dict[str, Any]) -> CompileRow:
    """A row from JSON; raises what dacite or `check_buckets` raises where it is none."""

    def number(value: Any) -> Any:
        return math.nan if value is None else float(value) if is_number(value) else value

    hooks: dict[Any, Callable[[Any], Any]] = {AnyBucket: lambda bucket: check_buckets([bucket])[0], float: number}
    given = {name: value for name, value in fields.items() if name not in _DERIVED}
    return dacite.from_dict(CompileRow, given, dacite.Config(type_hooks=hooks, strict=True))


def _told_by(analysis: Callable[[], Any]) -> Any:
    """What an analysis tells; None where the backend has none, which some say by an error."""
    try:
        return analysis()
    except RuntimeError:  # JAX's own errors and NotImplementedError are among these
        return None


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


def _figure(value: float | None, unit: float = 1.0) -> str:
    """A number of units with three digits, or all of those before the point."""
    if value is None or math.isnan(value):
        return _UNKNOWN
    scaled = value / unit
    return f"{scaled:,.0f}" if abs(scaled) >= 100 else f"{scaled:.3g}"


def _share(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.2%}"


class _Column(NamedTuple):
    header: str
    of_row: Callable[[CompileRow], str]
    of_all: Callable[[CompileReport], str] = lambda report: ""  # most figures have no meaningful sum


_MB, _GFLOP, _MS = 1e6, 1e9, 1e-3

_COLUMNS = (
    _Column("bucket", lambda row: str(row.bucket), lambda report: "total"),
    _Column("lower s", lambda row: _figure(row.lower_s), lambda report: _figure(report.lower_s)),
    _Column("compile s", lambda row: _figure(row.compile_s), lambda report: _figure(report.compile_s)),
    _Column(
        "stall s",
        lambda row: _figure(row.stall_s) if row.stall_s else _UNKNOWN,
        lambda report: _figure(report.stall_s),
    ),
    _Column("cache", lambda row: "hit" if row.cache_hit else "miss", lambda report: f"{report.num_cache_hits:,} hit"),
    _Column("GFLOP", lambda row: _figure(row.flops, _GFLOP)),
    _Column("args MB", lambda row: _figure(row.argument_bytes, _MB)),
    _Column("out MB", lambda row: _figure(row.output_bytes, _MB)),
    _Column("temp MB", lambda row: _figure(row.temp_bytes, _MB)),
    _Column("aliased MB", lambda row: _figure(row.alias_bytes, _MB)),
    _Column("peak MB", lambda row: _figure(row.peak_bytes, _MB)),
    _Column("step ms", lambda row: _figure(row.step_s, _MS)),
    _Column("used", lambda row: f"{row.times_used:,}", lambda report: f"{report.times_used:,}"),
    _Column(
        "in plan",
        lambda row: _UNKNOWN if row.planned_steps is None else f"{row.planned_steps:,}",
        lambda report: _UNKNOWN if report.planned_steps is None else f"{report.planned_steps:,}",
    ),
    _Column("padding", lambda row: _share(row.padding), lambda report: _share(report.padding)),
    _Column(
        "compile s/step", lambda row: _figure(row.compile_s_per_use), lambda report: _figure(report.compile_s_per_use)
    ),
    _Column(
        "let go",
        lambda row: _UNKNOWN if row.is_live else "yes",
        lambda report: f"{sum(not row.is_live for row in report):,}",
    ),
)
