"""Page of a plan: in go a plan and its lengths, out comes one HTML file that loads nothing and works offline."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from jaxtyping import Int64

from jvarlen import __version__
from jvarlen.buckets import PairBucket
from jvarlen.budget import CostFn
from jvarlen.compare import StrategyFigures, best_of
from jvarlen.files import write_atomically
from jvarlen.lengths import check_lengths, check_pair_lengths
from jvarlen.plan import Plan
from jvarlen.plan_figures import PlanFigure, draw_plan
from jvarlen.plan_table import bucket_figures

__all__ = ["write_html_report"]

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<p>{summary}</p>
</header>
<main>
{sections}
</main>
<footer>
<p>Digest <code>{digest}</code></p>
<p>jvarlen {version}</p>
</footer>
</body>
</html>
"""

_STYLE = """
:root {
  color-scheme: light dark;
  --page: #f4f5f7; --card: #ffffff; --ink: #1d232b; --muted: #5a6573; --line: #d6dbe2;
  --first: #2a6ebb; --second: #c8590a;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12151a; --card: #1c2128; --ink: #e7eaef; --muted: #9ea9b6; --line: #38404b;
    --first: #74b0f0; --second: #f5a25d;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 1080px; padding: 1rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere;
}
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0.5rem 0 0; }
h2 { font-size: 1.1rem; line-height: 1.3; margin: 0 0 0.5rem; }
header p, figcaption p, section > p, footer { color: var(--muted); font-size: 0.9rem; }
header p { margin: 0.25rem 0 1rem; }
dl { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 0.75rem; margin: 0 0 1rem; }
@media (min-width: 640px) { dl { grid-template-columns: repeat(4, minmax(0, 1fr)); } }
dl div, figure, section.table { background: var(--card); border: 1px solid var(--line); border-radius: 0.5rem; }
dl div { padding: 0.6rem 0.8rem; }
dt { color: var(--muted); font-size: 0.85rem; }
dd { margin: 0; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
dd small { display: block; color: var(--muted); font-size: 0.8rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 440px), 1fr)); gap: 1rem; }
figure { margin: 0; padding: 1rem; min-width: 0; break-inside: avoid; }
figcaption p { margin: 0.5rem 0 0; }
svg { display: block; width: 100%; height: auto; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
section.table { margin-top: 1rem; padding: 1rem; }
section.table p { margin: 0.5rem 0 0; }
.scroll { overflow-x: auto; }
table {
  border-collapse: collapse; width: 100%; font-size: 0.92rem; font-variant-numeric: tabular-nums;
  overflow-wrap: normal;
}
th, td { padding: 0.3rem 0.6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--card); }
thead th { color: var(--muted); font-weight: 600; font-size: 0.85rem; }
tbody th { font-weight: 400; }
tfoot th, tfoot td, tr.best th, tr.best td { font-weight: 600; }
tfoot th, tfoot td { border-bottom: 0; }
td.problem { text-align: left; color: var(--muted); white-space: normal; min-width: 16rem; }
footer { margin-top: 1.5rem; }
footer p { margin: 0.25rem 0; }
"""


def write_html_report(
    path: str | os.PathLike[str],
    plan: Plan,
    lengths: npt.ArrayLike,
    *,
    learning_rates: npt.ArrayLike | None = None,
    cost: CostFn | None = None,
    comparison: Sequence[StrategyFigures] | None = None,
) -> None:
    """Writes a page that shows a plan: key figures, pictures, and a table of its buckets.

    The page is one file without script that loads nothing. Its size hardly depends on samples and steps, since all is
    counted before it is drawn.

    Args:
      path: the file, whose directory exists; a file of that name is replaced.
      plan: the plan.
      lengths: integers[N], the tokens of every sample that it was made for, before any is cut or packed; integers[N, 2]
        of pairs.
      learning_rates: floats[S], as from `lr_sequence`.
      cost: cost(rows, length) of one microbatch in seconds; what it predicts is shown.
      comparison: as from `compare_strategies`, to be shown as a table.

    Raises:
      ValueError: lengths that are not those of the plan, learning rates that are not one a step, or a comparison
        without a plan that can be made.
      OSError: the file cannot be written; what was there stays.
    """
    checked = _checked_lengths(plan, lengths)
    rates = None if learning_rates is None else np.asarray(learning_rates, np.float64)
    if rates is not None and (rates.shape != (plan.num_steps,) or not np.isfinite(rates).all()):
        raise ValueError(f"learning rates must be {plan.num_steps} finite numbers, one a step; shape {rates.shape}")
    sections = [
        _key_figures(plan, cost),
        _figure_grid(draw_plan(plan, checked, rates, cost)),
        _bucket_table(plan, cost),
    ]
    if comparison is not None:
        sections.append(_comparison_table(comparison))
    shapes = "1 shape" if len(plan.buckets) == 1 else f"{len(plan.buckets):,} shapes"
    what = "pairs" if isinstance(plan.buckets[0], PairBucket) else "samples"
    title = f"Plan of {plan.num_samples:,} {what} in {shapes}"
    steps = "1 step" if plan.num_steps == 1 else f"{plan.num_steps:,} steps"
    left_out = f"{plan.num_truncated:,} cut, {plan.num_dropped:,} dropped"
    summary = f"{steps} an epoch, every {what[:-1]} exactly once. Longer than the longest bucket: {left_out}."
    page = _PAGE.format(
        title=_text(title),
        style=_STYLE,
        summary=_text(summary),
        sections="\n".join(sections),
        digest=_text(plan.digest),
        version=_text(__version__),
    )
    with write_atomically(Path(path)) as file:
        file.write(page.encode())


def _checked_lengths(plan: Plan, lengths: npt.ArrayLike) -> Int64[np.ndarray, " N *sides"]:
    is_pairs = isinstance(plan.buckets[0], PairBucket)
    checked = check_pair_lengths(lengths) if is_pairs else check_lengths(lengths)
    largest_id = int(plan.sample_ids.max())
    if largest_id >= len(checked):
        raise ValueError(f"the plan has a sample of id {largest_id}, but there are only {len(checked):,} lengths")
    planned = checked[plan.sample_ids]
    totals = planned.sum(axis=1) if is_pairs else np.minimum(planned, plan.buckets[-1].lengths[0])
    if totals.sum() != plan.num_tokens.sum():
        raise ValueError(
            f"these are not the lengths that the plan was made for: its samples have {int(totals.sum()):,} tokens by "
            f"them, {int(plan.num_tokens.sum()):,} by the plan"
        )
    return checked


def _key_figures(plan: Plan, cost: CostFn | None) -> str:
    num_sequences = plan.num_sequences
    least, most = int(num_sequences.min()), int(num_sequences.max())
    num_tokens, num_positions = int(plan.num_tokens.sum()), int(plan.positions_per_step.sum())
    correlation = plan.neighbour_correlation
    figures = [
        ("Padding", f"{plan.padding:.2%}", f"{num_positions - num_tokens:,} of {num_positions:,} positions"),
        ("Shapes", f"{len(plan.buckets):,}", f"up to {max(b.num_positions for b in plan.buckets):,} positions"),
        ("Steps", f"{plan.num_steps:,}", f"of {plan.microbatches_per_step:,} microbatch{_es(plan)}"),
        ("Samples a step", f"{np.median(num_sequences):,.0f}", f"median; {least:,} to {most:,}"),
        ("Tokens", f"{num_tokens:,}", f"{num_tokens / plan.num_steps:,.0f} a step"),
    ]
    if plan.is_packed:
        figures.append(("Samples a row", f"{plan.num_samples / plan.num_rows:.2f}", f"in {plan.num_rows:,} rows"))
    if cost is not None:
        seconds = bucket_figures(plan, cost).seconds
        assert seconds is not None
        per_step = float(seconds.sum()) / plan.num_steps
        figures.append(("Predicted", f"{seconds.sum():,.1f} s", f"{per_step:.3g} s a step"))
    said = "–" if math.isnan(correlation) else f"{correlation:+.3f}"
    figures.append(("Neighbour correlation", said, "of mean length, step to step"))
    entries = "\n".join(
        f"<div><dt>{_text(name)}</dt><dd>{_text(value)}<small>{_text(more)}</small></dd></div>"
        for name, value, more in figures
    )
    return f"<dl>\n{entries}\n</dl>"


def _es(plan: Plan) -> str:
    return "" if plan.microbatches_per_step == 1 else "es"


def _figure_grid(figures: Iterable[PlanFigure]) -> str:
    return f'<div class="figures">\n{"".join(map(_figure, figures))}</div>'


def _figure(figure: PlanFigure) -> str:
    """The title and the caption name and describe the picture to who can't see it."""
    before, after = figure.svg.split(">", 1)
    return (
        f'<figure id="{figure.name}">\n<h2 id="{figure.name}-title">{_text(figure.title)}</h2>\n'
        f'{before} aria-describedby="{figure.name}-caption">{after}\n'
        f'<figcaption><p id="{figure.name}-caption">{_text(figure.caption)}</p></figcaption>\n</figure>\n'
    )


def _bucket_table(plan: Plan, cost: CostFn | None) -> str:
    figures = bucket_figures(plan, cost)
    seconds = figures.seconds
    header = ["Rows × length", "Samples", "Steps", "Tokens", "Positions", "Padding"]
    rows = []
    for k, bucket in enumerate(plan.buckets):
        padding = f"{figures.padding[k]:.2%}" if figures.num_steps[k] else "–"
        counts = (figures.num_samples[k], figures.num_steps[k], figures.num_tokens[k], figures.num_positions[k])
        length = "+".join(f"{length:,}" for length in bucket.lengths)
        rows.append([f"{bucket.rows:,} × {length}", *(f"{count:,}" for count in counts), padding])
    totals = (plan.num_samples, plan.num_steps, int(plan.num_tokens.sum()), int(plan.positions_per_step.sum()))
    total = ["Total", *(f"{count:,}" for count in totals), f"{plan.padding:.2%}"]
    if seconds is not None:
        header.append("Predicted s")
        rows = [[*row, f"{value:,.1f}"] for row, value in zip(rows, seconds, strict=True)]
        total.append(f"{seconds.sum():,.1f}")
    body = "\n".join(_row(row) for row in rows)
    return _table(
        "buckets", "Buckets", header, body, foot=_row(total), note="Tokens are real ones, cut samples as cut."
    )


def _comparison_table(comparison: Sequence[StrategyFigures]) -> str:
    best = best_of(comparison)
    has_seconds = best.seconds is not None
    header = ["Strategy", "× best", "Shapes", "Steps", "Padding", "Uneven", "Positions"]
    header += ["Predicted s"] if has_seconds else []
    rows = []
    for each in comparison:
        if each.problem:
            problem = f'<td class="problem" colspan="{len(header) - 1}">{_text(f"Not possible: {each.problem}")}</td>'
            rows.append(f'<tr><th scope="row">{_text(each.name)}</th>{problem}</tr>')
            continue
        cells = [each.name, f"{each.relative:.3f}", f"{each.num_shapes:,}", f"{each.num_steps:,}"]
        cells += [f"{each.padding:.2%}", f"{each.unevenness:.2f}", f"{each.num_positions:,}"]
        cells += [] if each.seconds is None else [f"{each.seconds:,.1f}"]
        rows.append(_row(cells, is_best=each is best))
    what = "seconds" if has_seconds else "positions"
    note = (
        f"Best plan: {best.name}. × best: {what} over those of the best plan. Uneven: {what} of the largest step over "
        "the mean step."
    )
    return _table("comparison", "Strategies compared", header, "\n".join(rows), note=note)


def _table(name: str, title: str, header: list[str], body: str, *, foot: str = "", note: str) -> str:
    """A table in a box of its own, which scrolls where the window is narrow."""
    heads = "".join(f'<th scope="col">{_text(each)}</th>' for each in header)
    footer = f"<tfoot>\n{foot}\n</tfoot>\n" if foot else ""
    return (
        f'<section class="table" id="{name}">\n<h2 id="{name}-title">{_text(title)}</h2>\n'
        f'<div class="scroll" role="region" aria-labelledby="{name}-title" tabindex="0">\n<table>\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody>\n{footer}</table>\n</div>\n"
        f"<p>{_text(note)}</p>\n</section>"
    )


def _row(cells: Iterable[str], *, is_best: bool = False) -> str:
    first, *others = cells
    best = ' class="best"' if is_best else ""
    return f'<tr{best}><th scope="row">{_text(first)}</th>{"".join(f"<td>{_text(cell)}</td>" for cell in others)}</tr>'


def _text(text: str) -> str:
    return html.escape(text)
