"""Pictures of one or several runs, overlaid, and of the ledger of one.

Letters: S steps of one run, K buckets.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from jvarlen.compiling.ledger import Ledger
from jvarlen.reports.figures import (
    COLOURS,
    Detail,
    Picture,
    colour_of,
    draw_bars,
    draw_curve,
    draw_line,
    draw_steps,
    drawing_settings,
    finish_bars,
    finish_steps,
    format_ticks,
    new_figure,
    range_starts,
    save_png,
    to_svg,
    where_known,
)
from jvarlen.reports.run_records import BucketUse, Run, bucket_uses, loss_unit, run_of_records

__all__ = ["draw_runs", "plot_curves", "plot_ledger"]

_MARKERS = {"o": "circles", "s": "squares", "D": "diamonds", "^": "triangles", "v": "triangles down", "*": "stars"}
_MOST_BUCKETS = 96
_MOST_MARKS = 500  # of evaluations
_SHAPES = {"bucket length": "bucket_length", "rows": "bucket_rows"}  # fields by what they are called


def draw_runs(runs: Sequence[Run]) -> list[Picture]:
    """Draws the pictures of runs, all runs in the same pictures.

    Args:
      runs: at least one.

    Returns:
      A list of `Picture`.
    """
    with drawing_settings():
        return [*_of_training(runs), *_of_steps(runs), *_of_buckets(runs), *_of_memory(runs)]


def plot_curves(metrics: Iterable[dict[str, Any]], path: Path) -> None:
    """Plots loss, learning rate, batch size and bucket length over steps into a PNG file.

    Args:
      metrics: records of steps, as from `read_metrics`.
      path: the file; its directory must exist, and an existing file is replaced.
    """
    run = run_of_records(metrics)
    with drawing_settings():
        figure, axes = new_figure(4, sharex=True)
        _draw_losses(axes[0], [run.steps["step"]], [run])
        if _draw_rates(axes[1], [run]):
            axes[1].legend()
        finish_steps(axes[1], "learning rate")
        for axis, label, name in ((axes[2], "samples", "num_sequences"), (axes[3], "bucket length", "bucket_length")):
            draw_steps(axis, run.steps["step"], run.steps[name], Detail(run.num_steps))
            finish_steps(axis, label)
        for axis in axes[:-1]:
            axis.set_xlabel("")
        save_png(figure, path)


def plot_ledger(ledger: Ledger, path: Path) -> None:
    """Plots compile seconds, uses, seconds of a step, padding and bytes of each bucket into a PNG file.

    Buckets are in order of their lengths. Unknown figures of a bucket are left blank; a figure that is unknown for all
    buckets is marked as such.

    Args:
      ledger: the ledger of compiled buckets.
      path: the file; its directory must exist, and an existing file is replaced.
    """
    rows = sorted(ledger, key=lambda row: row.bucket.lengths)

    def values_of(name: str, unit: float = 1.0) -> np.ndarray:
        """float64[K], NaN where unknown."""
        return np.array([getattr(row, name) for row in rows], np.float64) / unit

    argument_mb, output_mb = values_of("argument_bytes", 1e6), values_of("output_bytes", 1e6)
    stacks: dict[str, dict[str, np.ndarray]] = {
        "compile seconds": {"lowering": values_of("lower_s"), "compiling, or reading": values_of("compile_s")},
        "steps": {"ran": values_of("times_used")},
        "seconds of a step": {"": values_of("step_s")},
        "padding in %": {"": values_of("padding", 0.01)},
        "MB": {
            "arguments": argument_mb,
            "outputs beside them": output_mb - values_of("alias_bytes", 1e6),
            "temporaries": values_of("temp_bytes", 1e6),
        },
    }
    marks = {"steps": ("in the plan", "planned_steps", 1.0), "MB": ("peak by the compiler", "peak_bytes", 1e6)}
    with drawing_settings():
        figure, axes = new_figure(len(stacks), sharex=True)
        for axis, (label, parts) in zip(axes, stacks.items(), strict=True):
            bottom = np.zeros(len(rows))
            for place, (part, values) in enumerate(parts.items()):
                draw_bars(axis, values, colour_of(place), bottom=bottom, label=part or None)
                bottom = bottom + np.nan_to_num(values)
            if label in marks:
                mark, name, unit = marks[label]
                axis.plot(values_of(name, unit), "_", color=COLOURS["ink"], markersize=12, label=mark)
            format_ticks(axis.yaxis)
            if not any(np.isfinite(values).any() for values in parts.values()):
                axis.text(0.5, 0.5, "not known", color=COLOURS["muted"], ha="center", transform=axis.transAxes)
                axis.set_yticks([])
            axis.set_ylabel(label)
            if axis.get_legend_handles_labels()[1]:
                axis.legend()
        finish_bars(axes[-1], [str(row.bucket) for row in rows], "bucket")
        save_png(figure, path)


def _of_training(runs: Sequence[Run]) -> Iterator[Picture]:
    tokens = [run.tokens_so_far for run in runs]
    yield _loss(runs, "loss-tokens", "Loss against real tokens", "real tokens", tokens)
    yield _loss(runs, "loss-time", "Loss against time", "seconds of training", [run.steps["time_s"] for run in runs])
    if any(run.evaluations for run in runs):
        yield _evaluations(runs, tokens)
    yield _learning_rates(runs)


def _of_steps(runs: Sequence[Run]) -> Iterator[Picture]:
    seconds = [run.seconds for run in runs]
    yield _over_steps(
        runs,
        "shapes",
        "Shapes over the steps",
        {field: [run.steps[name] for run in runs] for field, name in _SHAPES.items()},
    )
    yield _over_steps(
        runs, "sequences", "Samples of each step", {"samples": [run.steps["num_sequences"] for run in runs]}
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        padding = [100 * (1 - run.steps["num_tokens"] / run.steps["num_positions"]) for run in runs]
        throughput = [run.steps["num_tokens"] / time for run, time in zip(runs, seconds, strict=True)]
        waits = [100 * run.steps["data_wait_s"] / run.steps["step_s"] for run in runs]
    yield _over_steps(
        runs,
        "throughput",
        "Throughput",
        {"real tokens a second": throughput},
        weights=seconds,
        more="By the time from one step to the next.",
    )
    yield _over_steps(
        runs,
        "data-wait",
        "Waiting for data",
        {"wait in % of the step": waits},
        weights=[run.steps["step_s"] for run in runs],
    )
    yield _over_steps(
        runs,
        "step-padding",
        "Padding over the steps",
        {"padding in %": padding},
        weights=[run.steps["num_positions"] for run in runs],
    )


def _of_buckets(runs: Sequence[Run]) -> Iterator[Picture]:
    uses = [bucket_uses(run) for run in runs]
    yield _per_bucket(
        "bucket-padding",
        "Padding of each bucket",
        "padding in %",
        [{use.shape: None if use.padding is None else 100 * use.padding for use in of_run} for of_run in uses],
        "Share of the positions of the steps so far that held no token.",
    )
    yield _per_bucket(
        "bucket-time",
        "Time in each bucket",
        "seconds",
        [{use.shape: use.seconds for use in of_run} for of_run in uses],
        "All steps so far.",
    )
    yield _per_bucket(
        "bucket-compile",
        "Compiling each bucket",
        "seconds",
        [{use.shape: _compile_s(use) for use in of_run} for of_run in uses],
        "Lowering, and compiling or reading what was compiled before; known at the end of a run.",
    )


def _of_memory(runs: Sequence[Run]) -> Iterator[Picture]:
    memory = {
        label: [run.steps[name] / 1e6 for run in runs]
        for label, name in (("host, MB", "host_memory_bytes"), ("device, MB", "device_memory_bytes"))
        if any(np.isfinite(run.steps[name]).any() for run in runs)
    }
    if memory:
        yield _over_steps(runs, "memory", "Memory over the steps", memory, more="MB: 10⁶ bytes.")


def _loss(
    runs: Sequence[Run], name: str, title: str, label: str, places: Sequence[Float64[np.ndarray, " _"]]
) -> Picture:
    figure, (axis,) = new_figure()
    drawn = _draw_losses(axis, places, runs)
    axis.set_xlabel(label)
    format_ticks(axis.xaxis)
    few = "Strong line: the mean of neighbouring steps; faint line: the steps."
    detail = _detail(runs)
    return _finished(figure, name, title, detail.caption if detail.is_long else few, drawn)


def _draw_losses(axis: Any, places: Sequence[Float64[np.ndarray, " _"]], runs: Sequence[Run]) -> list[int]:
    """Draws losses at these places of the axis; returns which runs are drawn."""
    losses = enumerate(zip(places, runs, strict=True))
    drawn = [k for k, (x, run) in losses if draw_curve(axis, x, run.losses, _detail(runs), k)]
    axis.set_ylabel(f"loss{loss_unit(runs)}")
    format_ticks(axis.yaxis)
    return drawn


def _evaluations(runs: Sequence[Run], tokens: Sequence[Float64[np.ndarray, " _"]]) -> Picture:
    figure, (axis,) = new_figure()
    kinds = list(dict.fromkeys(name for run in runs for name in run.evaluations))
    marks = dict(zip(kinds, itertools.cycle(_MARKERS)))
    drawn = []
    for place, (run, so_far) in enumerate(zip(runs, tokens, strict=True)):
        for name, (step, loss) in run.evaluations.items():
            before_all = 0.0 * so_far[0] if len(so_far) else 0.0  # NaN where tokens are not known
            x = np.append(before_all, so_far)[np.searchsorted(run.steps["step"], step)]
            x, loss = where_known(x, loss)
            every = math.ceil(len(x) / _MOST_MARKS) or 1
            x, loss = x[::-1][::every][::-1], loss[::-1][::every][::-1]  # the last one in any case
            if len(x):
                drawn.append(place)
                draw_line(axis, x, loss, place, marker=marks[name], markersize=4 if len(x) < 50 else 2)
    axis.set(xlabel="real tokens", ylabel=f"loss{loss_unit(runs)}")
    format_ticks(axis.xaxis, axis.yaxis)
    named = [f"{_MARKERS[mark]}: {kind}" for kind, mark in marks.items()]
    return _finished(figure, "evaluations", "Evaluations", f"Marks: {'; '.join(named)}.", list(dict.fromkeys(drawn)))


def _learning_rates(runs: Sequence[Run]) -> Picture:
    figure, (axis,) = new_figure()
    drawn = _draw_rates(axis, runs)
    finish_steps(axis, "learning rate")
    base_lines, how = "Orange" if len(runs) == 1 else "Lines with a shade", _detail(runs).caption
    caption = f"{base_lines}: the base rate. The rate in force: {how[0].lower()}{how[1:]}"
    return _finished(figure, "learning-rate", "Learning rate", caption, drawn)


def _draw_rates(axis: Any, runs: Sequence[Run]) -> list[int]:
    """Draws base rates as lines, and rates in force; returns which runs are drawn."""
    drawn = []
    for place, run in enumerate(runs):
        steps, detail = run.steps, _detail(runs)
        in_force = draw_steps(axis, steps["step"], steps["learning_rate"], detail, place, label="in force")
        step, base = where_known(steps["step"], steps["base_learning_rate"])
        if len(base):
            shown = np.append(range_starts(len(base)), len(base) - 1)
            colour = COLOURS["second"] if len(runs) == 1 else colour_of(place)
            axis.plot(step[shown], base[shown], color=COLOURS["ink"], linewidth=2.6, alpha=0.25)
            axis.plot(step[shown], base[shown], color=colour, linewidth=1.4, label="base")
        if in_force or len(base):
            drawn.append(place)
    return drawn


def _over_steps(
    runs: Sequence[Run],
    name: str,
    title: str,
    values: dict[str, list[Float64[np.ndarray, " _"]]],
    *,
    weights: Sequence[Float64[np.ndarray, " _"]] | None = None,
    more: str = "",
) -> Picture:
    """A picture of one axis for each label; several steps that are drawn together count by their weights."""
    figure, axes = new_figure(len(values), sharex=True)
    drawn = set()
    for axis, (label, of_runs) in zip(axes, values.items(), strict=True):
        for place, (run, y) in enumerate(zip(runs, of_runs, strict=True)):
            of_run = None if weights is None else weights[place]
            if draw_steps(axis, run.steps["step"], y, _detail(runs), place, of_run):
                drawn.add(place)
        finish_steps(axis, label)
    for axis in axes[:-1]:
        axis.set_xlabel("")
    return _finished(figure, name, title, f"{_detail(runs).caption} {more}".strip(), sorted(drawn))


def _per_bucket(
    name: str,
    title: str,
    label: str,
    of_runs: Sequence[dict[tuple[int, ...], float | None]],
    caption: str,
) -> Picture:
    """Bars side by side, of each run that knows something; buckets by length, then rows."""
    figure, (axis,) = new_figure()
    known = [{shape: value for shape, value in of_run.items() if value is not None} for of_run in of_runs]
    shapes = sorted({shape for of_run in known for shape in of_run}, key=lambda shape: (shape[1:], shape[0]))
    left_out = len(shapes) - _MOST_BUCKETS
    shapes = shapes[:_MOST_BUCKETS]
    drawn = [place for place, of_run in enumerate(known) if of_run]
    for slot, place in enumerate(drawn):
        heights = np.array([known[place].get(shape, np.nan) for shape in shapes])
        draw_bars(axis, heights, colour_of(place), slot=slot, num_slots=len(drawn))
    finish_bars(axis, [f"{rows}×{'+'.join(map(str, lengths))}" for rows, *lengths in shapes], "rows × length")
    axis.set_ylabel(label)
    format_ticks(axis.yaxis)
    if left_out > 0:
        caption += f" {left_out:,} more buckets are not drawn."
    return _finished(figure, name, title, caption, drawn)


def _finished(figure: Any, name: str, title: str, caption: str, drawn: Sequence[int]) -> Picture:
    return Picture(name, title, caption, to_svg(figure) if drawn else "", tuple(drawn))


def _detail(runs: Sequence[Run]) -> Detail:
    return Detail(max(run.num_steps for run in runs), len(runs))


def _compile_s(use: BucketUse) -> float | None:
    return None if use.row is None else use.row.lower_s + use.row.compile_s
