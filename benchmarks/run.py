"""What do the benchmarks say, each in a process of its own, in one dated report?

Run `python benchmarks/run.py [--quick] [--only NAME ...] [--resume]`. It finds the files in its folder, and shows which
one runs and how long each took. It writes `<date>-bench.md` and `.json` for the quick forms, or `<date>-bench-full.md`
and `.json`, to `benchmarks/results/`. The report is rewritten after each benchmark, so an interrupted run keeps what it
has, and `--resume` continues from there. A benchmark that fails is named at the end, with exit code 1; the others still
run.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support import reports
from support.reports import Report
from support.timing import COLLECTED_IN, digits, table

FOLDER = Path(__file__).parent
RESULTS = reports.RESULTS
SAME = ("date", "quick", "commit", "dirty")  # what a report is of, where it stands for a run of today

QUICK_LIMIT_S, LIMIT_S = 900, 4 * 3600  # of one that hangs

Entry = dict[str, Any]  # "name", "question", "seconds", "exit_code", and "report", None where it wrote none


def names() -> list[str]:
    """The names of all benchmarks."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "run")


def run(name: str, *, quick: bool) -> Entry:
    """Runs one benchmark; its progress and its errors are shown, its report is read."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(FOLDER / f"{name}.py"), *["--quick"] * quick]
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        environment[COLLECTED_IN] = folder
        limit_s = QUICK_LIMIT_S if quick else LIMIT_S
        try:
            exit_code = subprocess.run(command, stdout=subprocess.DEVNULL, env=environment, timeout=limit_s).returncode
        except subprocess.TimeoutExpired:
            say(f"{name} was ended after {limit_s} s")
            exit_code = 1
        written = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    return {
        "name": name,
        "question": reports.question(FOLDER / f"{name}.py"),
        "seconds": round(time.perf_counter() - begun, 1),
        "exit_code": exit_code,
        "report": written[0] if written else None,
    }


def collect(entries: list[Entry], of: Report) -> Report:
    """One report of all that has run."""
    made = [entry for entry in entries if entry["report"]]
    form = "quick form" if of["quick"] else "full form"
    said = (
        "Quick form: small and few measurements, to see that all of it works; no figures to quote."
        if of["quick"]
        else "Each benchmark has a report of its own as well."
    )
    rows = [
        (entry["question"], entry["name"], digits(entry["seconds"]), "**failed**" if entry["exit_code"] else "yes")
        for entry in entries
    ]
    machine, versions = of["machine"], ", ".join(f"{name} {number}" for name, number in of["versions"].items())
    lines = [
        f"# Benchmarks, {form}, {of['date']}",
        "",
        said,
        "",
        *table("question|benchmark|seconds in all|has run", rows),
        "",
        reports.describe(of),
        "",
        f"{machine['cores']} cores, {machine['architecture']} ({machine['processor']}); {versions}.",
        "",
        *(line for entry in made for line in reports.render(entry["report"], level=1).split("\n")),
    ]
    return of | {"benchmarks": entries} | reports.parse(lines)


def finished(path: Path, of: Report) -> list[Entry]:
    """What has run without an error on the same day, of the same commit, unchanged, and in the same form."""
    if not path.exists():
        return []
    before = json.loads(path.read_text())
    if of["dirty"] or any(before[name] != of[name] for name in SAME):
        return []
    return [entry for entry in before["benchmarks"] if not entry["exit_code"]]


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the quick form of each")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names(), help=f"of {', '.join(names())}")
    parser.add_argument("--resume", action="store_true", help="keeps what ran today, of the same commit")
    options = parser.parse_args(args)
    name = "bench" if options.quick else "bench-full"
    of: Report = {
        "name": name,
        "question": reports.question(Path(__file__)),
        "date": str(datetime.date.today()),
        "quick": options.quick,
        **reports.origin(),
    }
    path = RESULTS / f"{of['date']}-{name}.json"
    entries = {entry["name"]: entry for entry in (finished(path, of) if options.resume or options.only else [])}
    has_gpu = options.quick or of["machine"]["gpus"]
    chosen = options.only or [each for each in names() if has_gpu or each != "gpu"]
    missing = [each for each in chosen if not (options.resume and each in entries)]
    with contextlib.suppress(KeyboardInterrupt):
        while missing:
            say(f"{missing[0]} … ({len(missing)} to run)")
            entry = run(missing[0], quick=options.quick)
            entries[missing.pop(0)] = entry
            say(f"{entry['name']}: {'FAILED, ' if entry['exit_code'] else ''}{entry['seconds']} s")
            ordered = [entries[each] for each in names() if each in entries]
            made = collect(ordered, of)
            reports.save(made, RESULTS, reports.render(made))
    failed = [entry["name"] for entry in entries.values() if entry["exit_code"]]
    if entries:
        say(f"{len(entries) - len(failed)} benchmarks in {path.with_suffix('.md')}")
    if failed:
        say(f"failed: {', '.join(failed)}")
    if missing:
        say(f"interrupted; --resume goes on with {', '.join(missing)}")
        return 130
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
