"""The choice of a layout as one HTML file that loads nothing and works offline."""

from __future__ import annotations

import dataclasses
import os

import numpy as np

from jvarlen.planning.plan import Plan
from jvarlen.reports.figures import Picture
from jvarlen.reports.layout_figures import draw_layout_bars
from jvarlen.reports.page import Table, write_page
from jvarlen.targets.choice import LayoutChoice, candidate_cells
from jvarlen.targets.cluster import Cluster

__all__ = ["write_choice_page"]

_SHOWN = 40  # candidates in the table
_GB = 1e9


def write_choice_page(path: str | os.PathLike[str], plan: Plan, choice: LayoutChoice, cluster: Cluster) -> None:
    """Writes a page that shows which layout was chosen for a plan, and what the others would take."""
    candidates = choice.candidates
    names = [str(layout) for layout in candidates.layouts(len(choice.of_epoch.total))]
    seconds = draw_layout_bars(names, choice.of_epoch._asdict(), "seconds")
    num_bytes = {"bytes": candidates.num_bytes[: len(names)] / _GB}
    header, *rows = candidate_cells(choice, _SHOWN)
    note = f"The first {len(rows):,} of {candidates.num_fitting:,} that fit."
    limit = choice.memory_bytes / _GB
    attributes = [[field.name, str(getattr(cluster, field.name))] for field in dataclasses.fields(cluster)]
    padded_tokens = float(plan.padded_tokens_per_step.sum())
    memory = choice.num_bytes / choice.memory_bytes
    num_rejected = len(candidates.reasons) - candidates.num_fitting
    flops = float(choice.costs.step_flops @ np.bincount(plan.step_bucket, minlength=len(plan.buckets)))
    flops *= plan.microbatches_per_step
    utilisation = flops / (choice.seconds * cluster.num_devices * cluster.flops_per_second)
    write_page(
        path,
        title=f"Layouts on {cluster.num_devices:,} devices, by estimated time",
        summary=f"Of those that fit on {cluster.name}, for {plan.num_steps:,} steps in {len(plan.buckets):,} shapes. "
        f"Predicted: {choice.why()}.",
        key_figures=[
            ("An epoch", f"{choice.seconds:,.4g} s", f"{choice.seconds / plan.num_steps:.3g} s a step"),
            ("Throughput", f"{padded_tokens / choice.seconds:,.0f}", "tokens with padding per second"),
            ("Model FLOP/s", f"{utilisation:.1%}", "of the peak of all devices"),
            ("Memory", f"{choice.num_bytes / _GB:,.3g} GB", f"{memory:.0%} of a device's {limit:,.3g}"),
            ("Fit", f"{candidates.num_fitting:,}", f"layouts; {num_rejected:,} do not"),
        ],
        pictures=[
            Picture("seconds", "Seconds of an epoch", "Of the fastest layouts that fit.", seconds),
            Picture(
                "bytes",
                "Bytes on a device",
                "The line is what a device has.",
                draw_layout_bars(names, num_bytes, "GB", limit=limit),
            ),
        ],
        tables=[
            Table("candidates", "Layouts that fit", header, rows, note=note, best=0, is_wide=True),
            _rejections_table(choice),
            Table("cluster", cluster.name, ["Attribute", "Value"], attributes, is_wide=True, is_closed=True),
        ],
        digest=plan.digest,
    )


def _rejections_table(choice: LayoutChoice) -> Table:
    candidates = choice.candidates
    rows = [[reason, f"{number:,}"] for reason, number in candidates.rejections()]
    note = ""
    if candidates.is_too_large.any():
        fastest = int(candidates.is_too_large.argmax())
        note = f"The fastest that is too large: {candidates.table.layout(fastest)} {candidates.reasons[fastest]}."
    return Table("rejected", "Layouts that were rejected", ["Why", "Layouts"], rows, note=note, is_wide=True)
