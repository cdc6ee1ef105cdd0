"""Aligned columns of text."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["text_table"]


def text_table(
    rows: Sequence[Sequence[str]], *, align: str = "<>", least_widths: Sequence[int] = (), gap: str = "  "
) -> str:
    """A table as text, its columns as wide as their widest cells; the header comes first."""
    # In a line with fewer cells than the header, the last one stretches over the columns that are missing. The last of
    # `align` is that of all further columns.
    num_columns = len(rows[0])
    aligned = [row[:num_columns] if len(row) >= num_columns else row[:-1] for row in rows]
    widths = [*least_widths, *[0] * (num_columns - len(least_widths))]
    for row in aligned:
        widths[: len(row)] = map(max, widths, map(len, row))
    sides = align.ljust(num_columns, align[-1])
    lines = []
    for row, cells in zip(rows, aligned, strict=True):
        padded = [f"{cell:{side}{width}}" for cell, side, width in zip(cells, sides, widths, strict=False)]
        lines.append(gap.join([*padded, *row[len(cells) :]]).rstrip())
    return "\n".join(lines)
