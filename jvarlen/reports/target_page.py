"""What fits on devices that are elsewhere, as one HTML file that loads nothing and works offline."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np

from jvarlen.compiling.report import UNKNOWN, figure_text, table_of
from jvarlen.estimates.communication import CommunicationEstimate
from jvarlen.reports.figures import Page, Picture, Table, draw_layout_bars
from jvarlen.targets.report import BUFFERS, KERNELS, SOURCE, TargetReport, TargetRow, shown_columns

__all__ = ["write_target_page"]

_GB = 1e9
_KERNELS = "How many places of the program call each; a place in a loop counts once."
_BUFFERS = "When a step holds the most; with the operation and the line of Python that made each."
_COLLECTIVES = (
    "Loops are multiplied out. Asynchronous ones have a start and a done; overlapped ones have a matrix product or a "
    "kernel of attention in between."
)
_TEXTS = ("kind", "shape", "operation", "line", "collective", "axes")
_NO_PROGRAM = " Where the compiler found no room it made no program, and the total is the bytes that it asked for."
_LIMIT = (
    "Bytes are those of one device; GB are 10⁹ bytes. The limit is the memory that a process can have: of a GPU "
    "three quarters, as JAX takes by default, or the share in XLA_CLIENT_MEM_FRACTION. Launches "
    "are those outside of CUDA graphs. Columns without any known figure, and those of less than 0.0005 GB, are left "
    "out."
)


def write_target_page(path: str | os.PathLike[str], report: TargetReport) -> None:
    """Writes a page that shows which buckets fit on a target, their buffers, and the collectives of a step.

    Args:
      path: the file; its directory must exist, and an existing file is replaced.
      report: of one bucket or more, from `compile_for`.
    """
    num_buckets = len({row.bucket for row in report} - {None})
    header, *rows = table_of(report, *shown_columns(report))
    note = _LIMIT if all(row.has_program for row in report) else _LIMIT + _NO_PROGRAM
    Page(
        title=f"{num_buckets:,} bucket{'' if num_buckets == 1 else 's'} on {report.target}",
        summary=f"The train step of each bucket, compiled for layout {report.layout}. {SOURCE}",
        key_figures=_key_figures(report),
        first_table=Table("buckets", "Buckets", header, rows, note=note),
        pictures=[_memory_picture(report)],
        tables=[
            *_tables("buffers", "The largest buffers of a step", _BUFFERS, report, _buffers),
            *_tables("collectives", "What a step communicates", _COLLECTIVES, report, _collectives),
            _kernels(report),
        ],
    ).write(path)


def _key_figures(report: TargetReport) -> list[tuple[str, str, str]]:
    largest = max(report, key=lambda row: row.total_bytes)
    num_fitting, limit = sum(row.fits is True for row in report), largest.limit_bytes
    seconds, of_what = report.fullest.seconds, str(report.fullest)
    if any(row.bucket is None for row in report):
        seconds, of_what = report.step_s, "of several groups, on average"
    is_known = all(row.fits is not None for row in report)
    share = f": {largest.total_bytes / limit:.1%} of {figure_text(limit, _GB)} GB" if limit else ""
    share += ", does not fit" if largest.fits is False else ""  # also where the share is rounded to 100 %
    predicted = UNKNOWN if seconds is None else f"{figure_text(seconds)} s"
    return [
        ("Fit", f"{num_fitting:,} of {len(report):,}" if is_known else UNKNOWN, "programs"),
        ("Fullest", f"{figure_text(largest.total_bytes, _GB)} GB", f"{largest}{share}"),
        ("A step", predicted, f"{of_what}, an estimate"),
        ("Compiled in", f"{figure_text(report.wall_s)} s", f"{figure_text(report.cpu_s)} s of CPU time"),
    ]


def _memory_picture(report: TargetReport) -> Picture:
    parts = {
        "arguments": [row.argument_bytes or 0 for row in report],
        "no program": [0 if row.has_program else row.total_bytes for row in report],
        "temporaries": [row.temp_bytes or 0 for row in report],
        "output": [row.output_bytes or 0 for row in report],
    }
    limits = [row.limit_bytes for row in report if row.limit_bytes is not None]
    bars = draw_layout_bars(
        [f"{row}, does not fit" if row.fits is False else str(row) for row in report],
        {name: np.array(sizes) / _GB for name, sizes in parts.items()},
        "GB",
        limit=min(limits) / _GB if limits else None,
    )
    line = "The line is the limit." if limits else "The limit is not known."
    return Picture("memory", "Memory of a device", f"During a step of each bucket. {line}", bars)


def _kernels(report: TargetReport) -> Table:
    """Buckets of the same kernels in one row."""
    buckets: dict[str, list[str]] = {}
    for row, kernels in zip(report, KERNELS.cells(report), strict=True):
        buckets.setdefault(kernels, []).append(str(row))
    rows = [["all" if len(buckets) == 1 else ", ".join(of), kernels] for kernels, of in buckets.items()]
    return Table(
        "kernels",
        "Kernels that XLA did not make",
        ["buckets", "kernels"],
        rows,
        note=_KERNELS,
        texts=["buckets", "kernels"],
    )


def _tables(
    name: str, title: str, note: str, report: TargetReport, cells_of: Callable[[TargetRow], Sequence[Sequence[str]]]
) -> list[Table]:
    """Tables of the fullest bucket and, folded, of the others; the first row of cells is the header."""

    def table(name: str, title: str, of_rows: Sequence[TargetRow], is_closed: bool = False) -> Table:
        cells = {str(row): cells_of(row) for row in of_rows}
        header = ["bucket", *next(iter(cells.values()))[0]]
        lines = [[bucket, *line] for bucket, each in cells.items() for line in each[1:] or [["none"]]]
        return Table(name, title, header, lines, note=note, is_closed=is_closed, texts=_TEXTS)

    tables = [table(name, title, [report.fullest])]
    if others := [row for row in report if row is not report.fullest]:
        tables.append(table(f"{name}-of-others", f"{title}, in the other buckets", others, is_closed=True))
    return tables


def _collectives(row: TargetRow) -> list[list[str]]:
    if row.communication is None:
        return [*CommunicationEstimate().cells(), ["not known"]]
    return row.communication.cells()


def _buffers(row: TargetRow) -> Sequence[Sequence[str]]:
    return [*table_of(row.buffers or (), *BUFFERS), *([["not known"]] if row.buffers is None else [])]
