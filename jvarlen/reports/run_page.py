"""Reports of runs: a table as text, and one HTML page that loads nothing.

Runs that are still going, were interrupted, or were written by an older version are shown as far as they are known.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jvarlen._common.checks import UserError
from jvarlen._common.text_table import text_table
from jvarlen.data.split import HELD_OUT
from jvarlen.reports.page import Table, printable, write_page
from jvarlen.reports.run_figures import draw_runs
from jvarlen.reports.run_records import (
    BucketUse,
    Run,
    bucket_uses,
    differing_settings_of,
    loss_unit,
    read_run,
    run_names,
)

__all__ = ["RunReport", "read_runs"]

_UNKNOWN = "not known"
_LAST_STEPS = 50  # of which the last loss is the mean
_MOST_BUCKETS = 256
_BUCKET_HEADER = (
    "Rows × length",
    "Steps",
    "Planned steps",
    "Real tokens",
    "Padding",
    "Seconds",
    "ms a step",
    "Lower s",
    "Compile s",
    "From cache",
)


class RunReport(NamedTuple):
    """Runs that are shown together.

    Attributes:
      runs: at least one.
      names: a unique name for each.
    """

    runs: tuple[Run, ...]
    names: tuple[str, ...]

    @property
    def figures(self) -> list[tuple[str, list[str]]]:
        """Names of key figures, with their values for each run."""
        unit = loss_unit(self.runs)
        columns = [_key_figures(run, unit) for run in self.runs]
        kinds = dict.fromkeys(kind for run in self.runs for kind in run.evaluations)
        evaluations = [(f"Evaluation {kind}{unit}", [_evaluation(run, kind) for run in self.runs]) for kind in kinds]
        if any(
            run.summary and run.summary["held_out_before"] is not None and HELD_OUT not in run.evaluations
            for run in self.runs
        ):  # of a run that did not log its evaluations
            evaluations.append((f"Held out{unit}", [_held_out(run) for run in self.runs]))
        return [*((name, [column[name] for column in columns]) for name in columns[0]), *evaluations]

    def table(self) -> str:
        """Lines of text: the key figures of each run, the buckets of a single run, and settings that differ."""
        tables: list[list[Sequence[str]]] = [[["", *self.names], *([name, *values] for name, values in self.figures)]]
        note = ""
        if len(self.runs) == 1:
            rows, note = _bucket_rows(bucket_uses(self.runs[0]))
            tables += [[_BUCKET_HEADER, *rows]] if rows else []
        elif differing := self._differing():
            tables.append([["setting", *self.names], *differing])
        texts = [text_table([list(map(printable, row)) for row in table]) for table in tables]
        return "\n\n".join([*texts, *([note] if note else [])])

    def write_html(self, path: str | os.PathLike[str]) -> None:
        """Writes a page with the table and pictures of all runs; its size hardly depends on the number of steps.

        Args:
          path: the file; its directory must exist, and an existing file is replaced.

        Raises:
          OSError: the file cannot be written; an existing file stays.
        """
        is_one = len(self.runs) == 1
        pictures = []
        for each in draw_runs(self.runs):
            without = [self.names[place] for place in range(len(self.runs)) if place not in each.runs]
            unknown = f" Not known of: {', '.join(without)}." if without and each.runs else ""
            pictures.append(each._replace(caption=each.caption + unknown))
        note = f"Last loss: mean of the last {_LAST_STEPS} steps. Wait for data: share of the time of all steps."
        figures = [[name, *values] for name, values in self.figures]
        tables = []
        if differing := self._differing():
            tables.append(Table("differing", "Settings that differ", ["Setting", *self.names], differing, is_wide=True))
        for place, (run, name) in enumerate(zip(self.runs, self.names, strict=True)):
            title = "Buckets" if is_one else f"Buckets of {name}"
            tables.append(_bucket_table(run, title, place, is_closed=not is_one))
        names = dict.fromkeys(name for run in self.runs for name in run.settings)
        settings = [[name, *(run.settings.get(name, _UNKNOWN) for run in self.runs)] for name in names]
        header = ["Setting", *self.names]
        tables.append(Table("settings", "All settings", header, settings, is_wide=True, is_closed=True))
        steps = sum(run.num_steps for run in self.runs)
        write_page(
            path,
            title=f"Run {self.names[0]}" if is_one else f"{len(self.runs):,} runs",
            summary=f"{steps:,} steps{'' if is_one else ' in all'}.",
            first_table=Table("runs", "Figures", ["", *self.names], figures, note=note, is_wide=True),
            pictures=pictures,
            names=self.names,
            tables=tables,
        )

    def _differing(self) -> list[list[str]]:
        return [
            [name, *(_UNKNOWN if value is None else value for value in values)]
            for name, values in differing_settings_of(self.runs)
        ]


def read_runs(run_dirs: Sequence[str | os.PathLike[str]]) -> RunReport:
    """Reads runs to show them together.

    Args:
      run_dirs: run directories, at least one, none twice.

    Returns:
      `RunReport`; print its `table()`, and see `write_html`.

    Raises:
      ValueError: there is no directory, or one is given twice; or a file is damaged; the message has the file and the
        line.
      OSError: a path is not a run directory, or cannot be read; it is named.
    """
    if not run_dirs:
        raise UserError("a report needs the directory of at least one run")
    runs = tuple(map(read_run, run_dirs))
    return RunReport(runs, tuple(printable(name) for name in run_names([run.path for run in runs])))


def _key_figures(run: Run, unit: str) -> dict[str, str]:
    steps, summary = run.steps, run.summary or {}
    tokens, positions = steps["num_tokens"].sum(), steps["num_positions"].sum()
    step_s, wait_s = steps["step_s"].sum(), steps["data_wait_s"].sum()
    time_s = steps["time_s"][-1] if run.num_steps else 0.0
    last = run.losses[-_LAST_STEPS:]
    last = last[np.isfinite(last)]
    shapes = {use.shape for use in bucket_uses(run)}
    rates = steps["learning_rate"][np.isfinite(steps["learning_rate"])]
    with np.errstate(divide="ignore", invalid="ignore"):
        padding, throughput, wait = 1 - tokens / positions, tokens / time_s, wait_s / step_s
    figures = {
        "State": _state(run),
        "Steps": f"{run.num_steps:,}",
        "Real tokens": _number(tokens, "{:,.0f}"),
        "Padding": _number(padding, "{:.2%}"),
        "Shapes": f"{len(shapes):,}" if shapes else _UNKNOWN,
        f"Last loss{unit}": _number(last.mean() if len(last) else np.nan, "{:.3f}"),
    }
    return figures | {
        "Learning rate": f"{rates.min():.3g} to {rates.max():.3g}" if len(rates) else _UNKNOWN,
        "Real tokens a second": _number(throughput, "{:,.0f}"),
        "Wait for data": _number(wait, "{:.2%}"),
        "Seconds of training": _number(time_s, "{:,.1f}"),
        "Seconds of compiling": _number(summary.get("compile_s"), "{:,.1f}"),
    }


def _state(run: Run) -> str:
    if not run.has_ended:
        return "going on, or broken off"
    return "interrupted" if run.is_interrupted else "ended"


def _evaluation(run: Run, kind: str) -> str:
    """The first value, and the last."""
    if kind not in run.evaluations:
        return _UNKNOWN
    loss = run.evaluations[kind].loss
    ends = [_number(value, "{:.3f}") for value in (loss[0], loss[-1])]
    return f"{ends[0]}, then {ends[1]}" if len(loss) > 1 else ends[0]


def _held_out(run: Run) -> str:
    """Before the first step, and after the last."""
    summary = run.summary or {}
    before, after = (_number(summary.get(f"held_out_{when}"), "{:.3f}") for when in ("before", "after"))
    return before if after == _UNKNOWN else f"{before}, then {after}"


def _bucket_table(run: Run, title: str, place: int, *, is_closed: bool) -> Table:
    rows, note = _bucket_rows(bucket_uses(run))
    note = f"{note} Planned steps: of the first epoch. Lower, compile: seconds. Known at the end of a run.".strip()
    return Table(f"buckets-{place}", title, _BUCKET_HEADER, rows, note=note, is_closed=is_closed)


def _bucket_rows(uses: Sequence[BucketUse]) -> tuple[list[list[str]], str]:
    """Table rows of the buckets, and a note on what is left out, if anything."""
    rows = []
    for use in uses[:_MOST_BUCKETS]:
        row = use.row
        ms = None if use.seconds is None or not use.num_steps else 1e3 * use.seconds / use.num_steps
        rows.append(
            [
                f"{use.shape[0]:,} × {'+'.join(f'{length:,}' for length in use.shape[1:])}",
                f"{use.num_steps:,}",
                _number(row and row.planned_steps, "{:,}"),
                _number(use.num_tokens, "{:,.0f}"),
                _number(use.padding, "{:.2%}"),
                _number(use.seconds, "{:,.2f}"),
                _number(ms, "{:,.2f}"),
                _number(row and row.lower_s, "{:,.2f}"),
                _number(row and row.compile_s, "{:,.2f}"),
                _UNKNOWN if row is None else ("yes" if row.cache_hit else "no"),
            ]
        )
    left_out = len(uses) - len(rows)
    return rows, f"{left_out:,} more buckets are left out." if left_out else ""


def _number(value: object, form: str) -> str:
    """A number in a form; `_UNKNOWN` for None, NaN and infinity."""
    if not isinstance(value, int | float) or not np.isfinite(value):
        return _UNKNOWN
    return form.format(value)
