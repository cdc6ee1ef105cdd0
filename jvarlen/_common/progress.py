"""Progress: a bar on a terminal, a few plain lines in a log."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

from jvarlen._common.terminal import Unbroken, escape_controls

__all__ = ["progress_bar", "show_line"]


def progress_bar(iterable: Iterable | None = None, *, progress: bool = True, **settings: Any) -> tqdm:
    """A tqdm bar with tqdm's settings on a terminal; otherwise one line at the end, as a log shows no redrawn bar."""
    settings |= {
        "desc": escape_controls(settings.get("desc") or ""),
        "file": Unbroken(sys.stderr),
        "disable": not progress,
    }
    if progress and not sys.stderr.isatty():
        return _FinalLine(iterable, delay=math.inf, **settings)
    return tqdm(iterable, **settings)


def show_line(text: str, *, progress: bool = True) -> None:
    """Prints a line on standard error, above the bar if there is one; False prints nothing."""
    if progress:
        tqdm.write(escape_controls(text), file=Unbroken(sys.stderr))


class _FinalLine(tqdm):
    """A bar that prints its count and duration when it is closed. With an endless delay, tqdm draws nothing."""

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        return False

    def close(self) -> None:
        if not self.disable:
            done = f"{self.n:,}" if self.total is None else f"{self.n:,}/{self.total:,}"
            self.fp.write(f"{self.desc}: {done} × {self.unit}, {self.format_dict['elapsed']:.1f} s\n")
        super().close()
