"""What the benchmarks share: timing a call, and a dated report with versions and hardware."""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import os
import platform
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

RESULTS = Path(__file__).parents[1] / "results"
REPEATS = 5

T = TypeVar("T")


def best_seconds(call: Callable[[], T], *, limit_s: float = math.inf) -> tuple[float, T]:
    """The fastest of some calls, what the work takes on a machine that does other things as well, and the last result.

    A slow call is repeated once at least, and no more once all calls together have taken `limit_s` seconds.
    """
    seconds: list[float] = []
    while len(seconds) < 2 or (len(seconds) < REPEATS and sum(seconds) < limit_s):
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
    versions = (f"{name} {_version(name)}" for name in ("numpy", "jvarlen", "numba", *packages))
    return (
        f"{os.cpu_count()} cores, {platform.machine()}{_processor()}; Python {platform.python_version()}, "
        f"{', '.join(versions)}."
    )


def report(name: str, lines: list[str], *, write: bool) -> None:
    """Prints a report, and keeps it under its date and name."""
    print("\n".join(lines))
    if write:
        (RESULTS / f"{datetime.date.today()}-{name}.md").write_text("\n".join(lines) + "\n")


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.strip() for cell in cells)} |"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    """The processor's name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f" ({names[0]})" if names else ""
