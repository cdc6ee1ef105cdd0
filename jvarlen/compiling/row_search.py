"""Finds the largest number of rows that fits into memory, in a few tries."""

from __future__ import annotations

from collections.abc import Callable

from jvarlen._common.checks import UserError, check_at_least_one
from jvarlen._common.interrupts import raise_if_interrupted
from jvarlen.compiling.lowering import Recipe
from jvarlen.planning.buckets import check_buckets

__all__ = ["most_rows", "suggest_rows"]

_MAX_ROWS = 2**24  # that are tried
_TRIES_BY_LINE = 6
_MOST_GROWTH = 16  # from one try to the next: two small ones tell little of what much larger ones need


def suggest_rows(
    recipe: Recipe, bucket: tuple[int, ...], memory_limit: int | None = None, *, row_multiple: int = 1
) -> int:
    """The most rows of a bucket's length whose step fits into memory, found by compiling, not by running.

    Args:
      recipe: makes the program of a bucket.
      bucket: as `CompiledBuckets.suggest_rows` takes it, which tells the rest.
      memory_limit: bytes of one device; None for the limit that the device reports.
      row_multiple: rows are a multiple of this.

    Returns:
      Rows of a microbatch.

    Raises:
      ValueError: see there.
    """
    (checked,) = check_buckets([bucket])
    if memory_limit is None:
        memory_limit = recipe.bytes_limit
        if memory_limit is None:
            raise UserError(f"{recipe.device_text} does not report its memory: pass memory_limit")
    check_at_least_one(memory_limit=memory_limit, row_multiple=row_multiple)
    needed: dict[int, int] = {}

    def bytes_of(rows: int) -> int:
        raise_if_interrupted()
        row = recipe.compile(recipe.lower(checked._replace(rows=rows))).row
        if not row.total_bytes:
            raise UserError(f"{recipe.device_text} does not report the memory of a program")
        needed[rows] = row.total_bytes
        return row.total_bytes

    rows = most_rows(bytes_of, memory_limit, start=checked.rows, multiple=row_multiple, max_rows=_MAX_ROWS)
    if rows == 0:
        raise UserError(
            f"{row_multiple} rows of length {'×'.join(map(str, checked.lengths))} need {needed[row_multiple]:,} "
            f"bytes, more than the {memory_limit:,} of the limit"
        )
    return rows


def most_rows(bytes_of: Callable[[int], int], limit: int, *, start: int = 1, multiple: int = 1, max_rows: int) -> int:
    """The most rows, a multiple of `multiple`, whose bytes are within the limit.

    Bytes grow nearly in proportion to rows, so a line through the last two tries gives the next one. A few tries are
    enough; one of them is the result and one the next larger number.

    Args:
      bytes_of: bytes that a number of rows needs; must not fall with more rows.
      limit: bytes.
      start: the number to try first.
      multiple: rows are a multiple of it.
      max_rows: the most rows that are tried.

    Returns:
      The number; 0 where not even `multiple` rows fit.
    """
    most = max_rows // multiple  # from here on in units of `multiple` rows
    fits, too_many = 0, most + 1
    guess = min(max(start // multiple, 1), most)
    tried: list[tuple[int, int]] = []
    while too_many - fits > 1:
        needed = bytes_of(guess * multiple)
        if needed <= limit:
            fits = guess
        else:
            too_many = guess
        tried.append((guess, needed))
        # With one try, what a row needs is all that was needed over all rows; too much, so that the guess is low.
        (x0, y0), (x1, y1) = ((0, 0), *tried)[-2:]
        slope = (y1 - y0) / (x1 - x0)
        is_line = slope > 0 and len(tried) < _TRIES_BY_LINE  # else it rises in steps, or not at all
        guess = x1 + int((limit - y1) // slope) if is_line else (fits + too_many) // 2
        guess = min(max(guess, fits + 1), too_many - 1, _MOST_GROWTH * max(fits, x1))
    return fits * multiple
