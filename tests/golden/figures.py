"""The numbers that reports and pages show, row by row, without the words around them."""

import html
import re
import tempfile
from pathlib import Path
from typing import Any

from tests.support.synthetic_runs import write_run

from . import calls
from .plans import M, lengths_of, seconds

_NUMBER = re.compile(r"(?<![\w.])[+−-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?%?")
LENGTHS = lengths_of(5, 1000, 700)


def numbers_of(row: str) -> list[str]:
    """Sorted, so that columns may change places."""
    return sorted(_NUMBER.findall(row))


def rows_of_text(text: str) -> list[list[str]]:
    return [numbers for line in text.splitlines() if (numbers := numbers_of(line))]


def rows_of_page(page: str) -> list[list[str]]:
    """The rows of tables and key figures; captions and notes are words."""
    rows = re.findall(r"<tr.*?</tr>|<div><dt>.*?</div>", page, re.DOTALL)
    return [numbers for row in rows if (numbers := numbers_of(html.unescape(re.sub(r"<[^>]*>", " ", row))))]


def plan() -> dict[str, Any]:
    """The figures of one plan, with rates and predicted seconds."""
    buckets = calls.make_buckets("jvarlen", LENGTHS, 4096, max_shapes=5, num_microbatches=M)
    made = calls.make_plan("jvarlen", LENGTHS, buckets, num_microbatches=M, order="shuffle")
    rates = calls.lr_sequence("jvarlen", made, 3e-4, 256)
    options = {"max_tokens": 4096, "max_shapes": 5, "num_microbatches": M}
    with tempfile.TemporaryDirectory() as folder:
        page = calls.plan_page(Path(folder) / "plan.html", made, LENGTHS, seconds, options)
    return {
        "report": rows_of_text(calls.plan_report(made, rates, seconds, compile_seconds=0.5)),
        "page": rows_of_page(page),
    }


def run() -> dict[str, Any]:
    """The figures of one run, whose records are made up."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = write_run(Path(folder) / "run", 70)
        return {
            "report": rows_of_text(calls.run_report(run_dir)),
            "page": rows_of_page(calls.run_page(run_dir, Path(folder) / "page.html")),
        }


def recorded() -> dict[str, Any]:
    return {f"{name}: {kind}": rows for name, of in (("plan", plan), ("run", run)) for kind, rows in of().items()}
