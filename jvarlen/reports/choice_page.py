"""The choice of a layout as one HTML file that loads nothing and works offline."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from jvarlen.planning.plan import Plan
from jvarlen.reports.figures import COLOURS, Picture, colour_of, drawing_settings, new_figure, to_svg
from jvarlen.reports.page import Table, write_page
from jvarlen.targets.choice import LayoutChoice
from jvarlen.targets.cluster import Cluster

__all__ = ["write_choice_page"]

_SHOWN = 40  # candidates in the table
_WIDTH, _ROW, _MARGIN = 6.2, 0.4, 1.0  # inches
_BAR = 0.45  # of a row
_GB = 1e9


def write_choice_page(path: str | os.PathLike[str], plan: Plan, choice: LayoutChoice, cluster: Cluster) -> None:
    """Writes a page that shows which layout was chosen, and what the others would take.

    Args:
      path: the file; its directory must exist, and an existing file is replaced.
      plan: that the layout was chosen for.
      choice: of `choose_layout`.
      cluster: likewise.

    Raises:
      OSError: the file cannot be written; an existing file stays.
    """
    candidates = choice.candidates
    padded_tokens = float(plan.padded_tokens_per_step.sum())
    memory = choice.num_bytes / choice.memory_bytes
    num_rejected = len(candidates.reasons) - candidates.num_fitting
    flops = float(choice.costs.step_flops @ np.bincount(plan.step_bucket, minlength=len(plan.buckets)))
    flops *= plan.microbatches_per_step
    utilisation = flops / (choice.seconds * cluster.num_devices * cluster.flops_per_second)
    write_page(
        path,
        title=f"The fastest layout on {cluster.num_devices:,} devices",
        summary=f"Of those that fit on {cluster.name}, for {plan.num_steps:,} steps in {len(plan.buckets):,} shapes. "
        f"Predicted: {choice.why()}.",
        key_figures=[
            ("An epoch", f"{choice.seconds:,.4g} s", f"{choice.seconds / plan.num_steps:.3g} s a step"),
            ("Throughput", f"{padded_tokens / choice.seconds:,.0f}", "tokens with padding per second"),
            ("Model FLOP/s", f"{utilisation:.1%}", "of the peak of all devices"),
            (
                "Memory",
                f"{choice.num_bytes / _GB:,.3g} GB",
                f"{memory:.0%} of a device's {choice.memory_bytes / _GB:,.3g}",
            ),
            ("Fit", f"{candidates.num_fitting:,}", f"layouts; {num_rejected:,} do not"),
        ],
        pictures=[
            Picture("seconds", "Seconds of an epoch", "Of the fastest layouts that fit.", _draw_seconds(choice)),
            Picture("bytes", "Bytes on a device", "The line is what a device has.", _draw_bytes(choice)),
        ],
        tables=[_candidates_table(choice), _rejections_table(choice), _cluster_table(cluster)],
        digest=plan.digest,
    )


def _draw_seconds(choice: LayoutChoice) -> str:
    with drawing_settings():
        figure, axis = _bars_of(choice)
        left = np.zeros(len(choice.of_epoch.total))
        for place, (cause, seconds) in enumerate(choice.of_epoch._asdict().items()):
            if seconds.sum() > 1e-3 * choice.of_epoch.total.sum():
                colour = COLOURS["muted"] if cause == "update" else colour_of(place)
                look: dict[str, Any] = {"color": colour, "alpha": 0.75, "label": cause}
                axis.barh(range(len(left)), seconds, left=left, height=_BAR, **look)
            left = left + seconds
        axis.set(xlabel="seconds", xlim=(0, 1.05 * left.max()))
        figure.legend(loc="outside upper right", ncols=4)
        return to_svg(figure)


def _draw_bytes(choice: LayoutChoice) -> str:
    num_bytes = choice.candidates.num_bytes[: len(choice.of_epoch.total)] / _GB
    limit = choice.memory_bytes / _GB
    with drawing_settings():
        figure, axis = _bars_of(choice)
        axis.barh(range(len(num_bytes)), num_bytes, height=_BAR, color=COLOURS["first"], alpha=0.75)
        axis.axvline(limit, color=COLOURS["second"], linewidth=2.5)
        axis.set(xlabel="GB", xlim=(0, 1.05 * max(limit, num_bytes.max())))
        return to_svg(figure)


def _bars_of(choice: LayoutChoice) -> tuple[Any, Any]:
    """A figure for a bar of each of the first candidates, under its name."""
    names = [str(layout) for layout in choice.candidates.layouts(len(choice.of_epoch.total))]
    figure, (axis,) = new_figure()
    figure.set_size_inches(_WIDTH, _MARGIN + _ROW * len(names))
    for place, name in enumerate(names):
        axis.text(0, place - _BAR / 2 - 0.06, name, fontsize=8, va="bottom")
    axis.set(ylim=(len(names) - 0.5, -0.8), yticks=[])
    axis.spines["left"].set_visible(False)
    return figure, axis


def _candidates_table(choice: LayoutChoice) -> Table:
    candidates = choice.candidates
    rows = [
        [
            str(layout),
            f"{candidates.seconds[row]:,.4g}",
            f"{candidates.seconds[row] / choice.seconds:.3f}",
            f"{candidates.num_bytes[row] / _GB:,.3g}",
        ]
        for row, layout in enumerate(candidates.layouts(_SHOWN))
    ]
    header = ["Layout", "Seconds an epoch", "× best", "GB a device"]
    note = f"The first {len(rows):,} of {candidates.num_fitting:,} that fit."
    return Table("candidates", "Layouts that fit", header, rows, note=note, best=0, is_wide=True)


def _rejections_table(choice: LayoutChoice) -> Table:
    candidates = choice.candidates
    rows = [[reason, f"{number:,}"] for reason, number in candidates.rejections()]
    note = ""
    if candidates.is_too_large.any():
        fastest = int(candidates.is_too_large.argmax())
        note = f"The fastest that is too large: {candidates.table.layout(fastest)} {candidates.reasons[fastest]}."
    return Table("rejected", "Layouts that were rejected", ["Why", "Layouts"], rows, note=note, is_wide=True)


def _cluster_table(cluster: Cluster) -> Table:
    links = {"Link in a host": cluster.link, "Link of hosts": cluster.host_link}
    rows = [
        ["Devices", f"{cluster.num_hosts:,} × {cluster.devices_per_host:,}"],
        ["FLOP/s of a device", f"{cluster.flops_per_second:.4g}, of which steps reach {cluster.efficiency:.0%}"],
        ["Memory of a device", f"{_gb(cluster.memory_bytes)} at {_gb(cluster.memory_bytes_per_second)}/s"],
        *([name, f"{_gb(link.bytes_per_second)}/s, {1e6 * link.latency_s:,.3g} µs"] for name, link in links.items()),
        ["Hidden communication", f"{cluster.overlap:.0%}"],
    ]
    return Table(
        "cluster", cluster.name, ["What", "How much"], rows, note=cluster.sources, is_wide=True, is_closed=True
    )


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / _GB:,.4g} GB"
