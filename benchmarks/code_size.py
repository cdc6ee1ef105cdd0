"""How large is the core, and what do the README's script and the help import and take?

The core is `jvarlen` without `experimental`. A line of code holds a token that is neither a comment nor part of a
docstring. The script runs on a few samples, in a process of its own. The seconds of the help are CPU seconds, user and
system, the least of some runs. Run `python benchmarks/code_size.py [--quick]`. Prints a table and writes it, with
versions and hardware, to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import datetime
import io
import os
import subprocess
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from support.timing import REPEATS, report, table, versions_and_hardware

import jvarlen
from jvarlen.runs.config import FitConfig

ROOT = Path(jvarlen.__file__).parent
# Tokens that are no code.
APART = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
BEFORE_SCRIPT = """
import jvarlen.data.stdlib_corpus as corpus
from jvarlen.data.tokens import TokenDataset
corpus.stdlib_functions = lambda: TokenDataset.from_bytes([b"x" * length for length in (9, 17) * 40])
"""
AFTER_SCRIPT = """
import sys
print(*(module.__file__ for name, module in list(sys.modules.items()) if name.startswith("jvarlen")), sep="\\n")
"""


class Size(NamedTuple):
    """Lines of code, all lines, and modules (`__init__` is none)."""

    code: int
    lines: int
    modules: int


def code_lines(text: str) -> int:
    """Lines of a module that are not blank, comments or docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in APART:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def size_of(paths: Iterable[Path]) -> Size:
    texts = {path: path.read_text() for path in paths}
    return Size(
        sum(map(code_lines, texts.values())),
        sum(len(text.splitlines()) for text in texts.values()),
        sum(path.name != "__init__.py" for path in texts),
    )


def imported_by_script() -> list[Path]:
    """The modules of the library that the README's script has loaded at its end."""
    script = (ROOT.parent / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    run = subprocess.run(
        [sys.executable, "-c", BEFORE_SCRIPT + script + AFTER_SCRIPT], capture_output=True, text=True, check=True
    )
    return [Path(line) for line in run.stdout.splitlines() if line.endswith(".py")]


def cpu_seconds(*command: str) -> float:
    """The least CPU seconds of a command of the library."""
    runs = []
    for _ in range(REPEATS):
        before = os.times()
        subprocess.run([sys.executable, "-m", "jvarlen", *command], stdout=subprocess.DEVNULL, check=True)
        after = os.times()
        runs.append(sum(after[2:4]) - sum(before[2:4]))  # of processes that have ended
    return min(runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="measure the help once, and write no report")
    quick = parser.parse_args().quick
    modules = sorted(ROOT.rglob("*.py"))
    core = size_of(path for path in modules if "experimental" not in path.relative_to(ROOT).parts)
    everything = size_of(modules)
    imported = imported_by_script()
    tests = size_of((ROOT.parent / "tests").rglob("*.py"))
    figures = {
        "lines of code of the core": core.code,
        "all lines of the core": core.lines,
        "modules of the core": core.modules,
        "lines of code of `experimental`": everything.code - core.code,
        "modules that the README's script imports, `__init__` counted": len(imported),
        "lines of these": size_of(imported).lines,
        "names in `jvarlen.__all__`": len(jvarlen.__all__),
        "fields of `FitConfig` at the top": len(dataclasses.fields(FitConfig)),
        "lines of tests": tests.lines,
    }
    seconds = {"jvarlen --help": cpu_seconds("--help"), "jvarlen train --help": cpu_seconds("train", "--help")}
    lines = [
        f"# Size of the library, {datetime.date.today()}",
        "",
        *table(
            "measure|figure",
            [
                *((name, f"{figure:,}") for name, figure in figures.items()),
                *((f"CPU seconds of `{command}`", f"{taken:.2f}") for command, taken in seconds.items()),
            ],
        ),
        "",
        versions_and_hardware("jax"),
    ]
    report("code-size", lines, write=not quick)


if __name__ == "__main__":
    main()
