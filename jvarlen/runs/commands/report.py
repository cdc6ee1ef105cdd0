"""`jvarlen report`: tables and a page of runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jvarlen._common.files import check_outputs
from jvarlen._common.options import POSITIONAL
from jvarlen._common.settings import Settings
from jvarlen._common.terminal import say

__all__ = ["ReportCommand"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportCommand(Settings):
    """Report on runs, finished or not: a table, and a page of pictures with the runs overlaid."""

    run_dirs: tuple[Path, ...] = dataclasses.field(metadata=POSITIONAL)
    """Run directories."""
    html: Path | None = None
    """Where to write the page, one file that works offline.
    None: report.html in the run directory, or in the current directory for several runs."""

    def run(self) -> None:
        """Prints the table, then writes the page."""
        from jvarlen.reports.run_page import read_runs

        default = (self.run_dirs[0] if len(self.run_dirs) == 1 else Path()) / "report.html"  # an older one is replaced
        page = self.html or default
        check_outputs({} if page == default else {"html": page}, *self.run_dirs)
        report = read_runs(self.run_dirs)
        say(report.table())
        report.write_html(page)
        say(f"\n{page}")
