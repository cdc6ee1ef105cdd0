"""Progress: a bar on a terminal, a few plain lines in a log."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

__all__ = ["progress_bar", "show_line"]


def progress_bar(iterable: Iterable | None = None, *, progress: bool = True, **settings: Any) -> tqdm:
    """A bar of tqdm on a terminal; else one line at the end, since a log has no use for a bar drawn over itself.

    Args:
      iterable: what is gone through; None where `update` counts.
      progress: False shows nothing.
      settings: of tqdm, `desc` and `unit` among them.

    Returns:
      What tqdm gives, to go through, or a context manager with `update` and `set_postfix_str`.

    Example:
      >>> for _ in progress_bar([1, 2, 3], desc="rows", unit="row", progress=False):
      ...     pass
    """
    if progress and not sys.stderr.isatty():
        return _FinalLine(iterable, delay=math.inf, **settings)
    return tqdm(iterable, disable=not progress, **settings)


def show_line(text: str, *, progress: bool = True) -> None:
    """A line on standard error, above the bar where there is one; False shows nothing.

    Example:
      >>> show_line("evaluated", progress=False)
    """
    if progress:
        tqdm.write(text, file=sys.stderr)


class _FinalLine(tqdm):
    """Tells how far it came and how long that took, once it is closed. With an endless delay, tqdm draws nothing."""

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        return False

    def close(self) -> None:
        if not self.disable:
            done = f"{self.n:,}" if self.total is None else f"{self.n:,}/{self.total:,}"
            self.fp.write(f"{self.desc}: {done} × {self.unit}, {self.format_dict['elapsed']:.1f} s\n")
        super().close()
