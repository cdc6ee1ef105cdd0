"""What the benchmarks share: timing a call, table lines, and a dated report with versions and hardware."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from support import reports
from support.reports import RESULTS

__all__ = [
    "COLLECTED_IN",
    "COMPILE_FAST",
    "EMIT_FAST",
    "REPEATS",
    "RESULTS",
    "best_seconds",
    "digits",
    "report",
    "table",
    "versions_and_hardware",
]

REPEATS = 1 if "--quick" in sys.argv else 5
# Flags for XLA. It ends a process for a flag that it does not know.
_EMITTERS = " --xla_cpu_use_fusion_emitters=false" if importlib.metadata.version("jaxlib") < "0.11" else ""
EMIT_FAST = f"--xla_cpu_parallel_codegen_split_count=1{_EMITTERS}"
# Quick forms spend most of their time on compiling.
COMPILE_FAST = f"--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true {EMIT_FAST}"
COLLECTED_IN = "JVARLEN_BENCH_REPORTS"  # the folder in which `run.py` finds the report of what it ran

T = TypeVar("T")


def best_seconds(call: Callable[[], T], *, limit_s: float = math.inf) -> tuple[float, T]:
    """The fastest of some calls, what the work takes on a machine that does other things as well, and the last result.

    A slow call is repeated once at least, and no more once all calls together have taken `limit_s` seconds. The quick
    form of a benchmark calls it once.
    """
    seconds: list[float] = []
    while len(seconds) < min(2, REPEATS) or (len(seconds) < REPEATS and sum(seconds) < limit_s):
        start = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start)
    return min(seconds), result


def table(header: str, rows: Iterable[Iterable[str]]) -> list[str]:
    """Lines of a Markdown table; the header's columns are separated by `|`."""
    columns = header.split("|")
    return [_row(columns), "|" + "---|" * len(columns), *map(_row, rows)]


def digits(value: float) -> str:
    """Three significant digits, large numbers without an exponent."""
    return f"{float(f'{value:.3g}'):,g}"


def versions_and_hardware(*packages: str) -> str:
    """One line: cores and processor, Python, and the versions of NumPy, jvarlen, numba and others."""
    names = ("numpy", "jvarlen", "numba", *packages)
    versions = ", ".join(f"{name} {reports.version(name) or 'not installed'}" for name in names)
    processor = f" ({name})" if (name := reports.processor()) else ""
    return f"{os.cpu_count()} cores, {platform.machine()}{processor}; Python {platform.python_version()}, {versions}."


def report(name: str, lines: list[str], *, write: bool) -> None:
    """Prints a report, and keeps it as Markdown and JSON under its date and name; a quick one where that is asked for.

    Args:
      name: the file's, with hyphens.
      lines: Markdown, the title first.
      write: whether it is kept in `results/`; what is not is the quick form.
    """
    made = reports.make_report(name, lines, quick=not write)
    markdown = reports.render(made)
    print(markdown, end="")
    folders = [RESULTS] * write + [Path(folder) for folder in [os.environ.get(COLLECTED_IN)] if folder]
    for folder in folders:
        reports.save(made, folder, markdown)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.strip() for cell in cells)} |"
