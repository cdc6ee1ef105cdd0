"""`jvarlen report`: a table and a page of runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import tyro

from jvarlen.reports.run_page import read_runs

__all__ = ["ReportCommand"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Show what runs did, also while they go on: a table, and a page of pictures in which they lie over each other."""

    run_dirs: tyro.conf.Positional[tuple[Path, ...]]
    """Directories of runs."""
    html: Path | None = None
    """Where to write the page, one file that works offline; report.html in the directory of the run or, of several
    runs, in the current one."""

    def run(self) -> None:
        """Prints the table, then writes the page."""
        report = read_runs(self.run_dirs)
        print(report.table())
        page = self.html or (self.run_dirs[0] if len(self.run_dirs) == 1 else Path()) / "report.html"
        report.write_html(page)
        print(f"\n{page}")
