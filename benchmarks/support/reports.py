"""Reports as data: Markdown lines with the machine they were measured on, as JSON and back.

A report is a dictionary for JSON: "name", "question", "date", whether it is of the "quick" form, "commit" (None outside
of git), whether the tree had uncommitted changes ("dirty"), "machine", "versions", "text", the paragraphs and headings
in order, and "tables". A table has the heading above it as its "title", the number of paragraphs before it, "after",
its "header" and its "rows" of cells.
"""

from __future__ import annotations

import ast
import datetime
import importlib.metadata
import itertools
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[1]
RESULTS = BENCHMARKS / "results"
PACKAGES = (
    "jvarlen", "numpy", "numba", "jax", "jaxlib", "flax", "optax", "grain", "orbax-checkpoint", "torch", "transformers",
    "lhotse", "deepspeed",
)  # fmt: skip

Report = dict[str, Any]


def make_report(name: str, lines: Iterable[str], *, quick: bool) -> Report:
    """The report of the benchmark of this name, with where and of what it was made."""
    made = origin()
    lines = list(lines)
    if quick:
        lines[1:1] = ["", "Quick form: small and few measurements, to see that it works; no figures to quote."]
    return {
        "name": name,
        "question": question(BENCHMARKS / f"{name.replace('-', '_')}.py"),
        "date": str(datetime.date.today()),
        "quick": quick,
        **made,
        **parse([*lines, "", describe(made)]),
    }


def origin() -> dict[str, Any]:
    """Commit, machine and versions, as every report has them."""
    return {**commit(), "machine": machine(), "versions": versions()}


def describe(made: dict[str, Any]) -> str:
    """Commit, system and memory in a line."""
    of = made["machine"]
    memory = f", {of['memory_bytes'] / 1e9:.1f} GB of memory" if of["memory_bytes"] else ""
    changes = ", with changes that are not committed" if made["dirty"] else ""
    gpus = "".join(f", {gpu}" for gpu in of["gpus"])
    return f"Commit {(made['commit'] or 'unknown')[:10]}{changes}; {of['os']}{memory}{gpus}."


def save(report: Report, folder: Path, markdown: str) -> None:
    """Writes a report as Markdown and as JSON, under its date and name."""
    path = folder / f"{report['date']}-{report['name']}"
    path.with_suffix(".md").write_text(markdown)
    path.with_suffix(".json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


def parse(lines: Iterable[str]) -> dict[str, list[Any]]:
    """Paragraphs and tables of Markdown."""
    text: list[str] = []
    tables: list[dict[str, Any]] = []
    title = None
    # Some "lines" hold several; tables and headings are blocks also without an empty line next to them.
    for kind, group in itertools.groupby("\n".join(lines).split("\n"), _kind):
        block = list(group)
        if kind == "|":
            header, _, *rows = map(_cells, block)
            tables.append({"title": title, "after": len(text), "header": header, "rows": rows})
        elif kind == "#":
            text += block
            title = block[-1].lstrip("# ")
        elif kind == "text":
            text.append("\n".join(block))
    return {"text": text, "tables": tables}


def render(report: Report, *, level: int = 0) -> str:
    """Markdown of a report, its headings some levels lower."""
    blocks = []
    for index in range(len(report["text"]) + 1):
        for each in (table for table in report["tables"] if table["after"] == index):
            separator = "|" + "---|" * len(each["header"])
            blocks.append("\n".join([_row(each["header"]), separator, *map(_row, each["rows"])]))
        for paragraph in report["text"][index : index + 1]:
            blocks.append("#" * level * paragraph.startswith("#") + paragraph)
    return "\n\n".join(blocks) + "\n"


def question(path: Path) -> str:
    """The first line of a benchmark's docstring, which is its question."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def commit() -> dict[str, Any]:
    """The checked-out commit, and whether anything but results differs from it; None for both outside of git."""
    root = BENCHMARKS.parent
    try:
        if not (root / ".git").exists():  # a copy that lies in the checkout of something else
            return {"commit": None, "dirty": None}
        name = _git("rev-parse", "HEAD")
        return {"commit": name, "dirty": bool(_git("status", "--porcelain", "--", ".", ":!benchmarks/results"))}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}


def machine() -> dict[str, Any]:
    """Cores, processor, bytes of memory, system, and GPUs of NVIDIA; None for what the system does not tell."""
    try:
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        system = f"{platform.system()} {platform.release()}"
    try:
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):
        memory_bytes = None
    return {
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "processor": processor(),
        "memory_bytes": memory_bytes,
        "os": system,
        "gpus": gpus(),
    }


def gpus() -> list[str]:
    """The names of NVIDIA GPUs, if its tool lists them."""
    if not shutil.which("nvidia-smi"):
        return []
    told = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True)
    return told.stdout.splitlines() if told.returncode == 0 else []


def processor() -> str | None:
    """The processor's name, if the system knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def versions() -> dict[str, str]:
    """The versions of Python and of installed packages."""
    found = ((package, version(package)) for package in PACKAGES)
    return {"python": platform.python_version()} | {package: number for package, number in found if number}


def version(package: str) -> str | None:
    """The version that is installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*args: str) -> str:
    return subprocess.run(
        ["git", "--no-optional-locks", *args], cwd=BENCHMARKS.parent, check=True, capture_output=True, text=True
    ).stdout.strip()


def _kind(line: str) -> str:
    return line[0] if line.startswith(("|", "#")) else "text" if line.strip() else ""


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
