"""Pictures of layouts: simulated pipeline schedules, and what a step holds on a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Real

from jvarlen.parallel.memory import MemoryEstimate
from jvarlen.parallel.schedules import Timeline
from jvarlen.reports.figures import COLOURS, colour_of, drawing_settings, format_ticks, new_figure, to_svg

__all__ = ["draw_layout_bars", "draw_memory", "draw_timelines"]

_WIDTH, _BARS_WIDTH = 7.2, 6.2  # inches, as are all sizes here
_STAGE, _ABOVE_STAGES = 0.26, 0.55
_LAYOUT, _BESIDE_LAYOUTS = 0.4, 1.0
_CHARACTER = 0.075
_COLOURS = {"F": "first", "B": "second", "W": "third"}
_MIB = 2**20
_BAR = 0.45  # of the height of a layout
_CRUMB = 1e-3  # of everything
_NUM_COLOURS = 6


def draw_timelines(*timelines: Timeline) -> str:
    """Timelines below each other, on one axis of time.

    Forward passes are blue, backward passes orange, weight gradients green; later chunks are darker. Bars have the
    number of the microbatch where there is room.

    Args:
      timelines: one or more, from `Schedule.simulate`.

    Returns:
      An SVG file that suits light and dark surroundings.

    Example:
      >>> from jvarlen.parallel import make_schedule
      >>> svg = draw_timelines(make_schedule("gpipe", 2, 3).simulate({"F": 1, "B": 2}))
      >>> svg[:4], "gpipe, lockstep: 12, bubble 25.0%" in svg
      ('<svg', True)
    """
    with drawing_settings():
        figure, axes = new_figure(len(timelines), sharex=True)
        heights = [_STAGE * timeline.schedule.num_stages + _ABOVE_STAGES for timeline in timelines]
        figure.set_size_inches(_WIDTH, sum(heights) + 0.2)
        axes[0].get_gridspec().set_height_ratios(heights)
        longest = max(timeline.makespan for timeline in timelines)
        for axis, timeline in zip(axes, timelines, strict=True):
            _draw(axis, timeline, (_WIDTH - 0.8) / (longest or 1))
        axes[-1].set(xlabel="time", xlim=(0, longest or 1))
        format_ticks(axes[-1].xaxis)
        return to_svg(figure)


def _draw(axis: Any, timeline: Timeline, inches_per_unit: float) -> None:
    from matplotlib.colors import to_rgba

    schedule = timeline.schedule
    name = f"{schedule.name}, {timeline.mode}"
    axis.set_title(f"{name}: {timeline.makespan:g}, bubble {timeline.bubble:.1%}", loc="left", fontsize=10)
    axis.set(ylabel="stage", ylim=(schedule.num_stages - 0.45, -0.55))
    axis.set_yticks(range(schedule.num_stages))
    axis.spines["left"].set_visible(False)
    axis.tick_params(axis="y", length=0)
    lasts = timeline.ends - timeline.starts
    for code, kind in enumerate(schedule.kinds):
        colour = COLOURS[_COLOURS[kind]]
        for chunk in range(schedule.num_chunks):
            opacity = 0.2 + 0.45 * chunk / max(schedule.num_chunks - 1, 1)
            stage, a = np.nonzero((schedule.actions[..., 0] == code) & (schedule.actions[..., 2] == chunk))
            look: dict[str, Any] = {"facecolor": to_rgba(colour, opacity), "edgecolor": colour, "linewidth": 0.7}
            axis.barh(stage, lasts[stage, a], left=timeline.starts[stage, a], height=0.8, **look)
    for (s, a), last in np.ndenumerate(lasts):
        label = f"{schedule.actions[s, a, 1]}"
        if len(label) * _CHARACTER <= last * inches_per_unit:
            middle = timeline.starts[s, a] + last / 2
            axis.text(middle, s, label, ha="center", va="center_baseline", fontsize=8)


def draw_memory(estimates: Mapping[str, MemoryEstimate]) -> str:
    """Bars of the parts of memory estimates, one below the other.

    Args:
      estimates: by name, such as the texts of layouts; at least one.

    Returns:
      An SVG file that suits light and dark surroundings.

    Example:
      >>> draw_memory({"data4": MemoryEstimate(2**20, 2**20, 0, 2**21, 0, None)})[:4]
      '<svg'
    """
    parts = {
        name: np.array([getattr(estimate, name) or 0 for estimate in estimates.values()]) / _MIB
        for name in MemoryEstimate._fields
    }
    return draw_layout_bars(list(estimates), parts, "MiB on a device")


def draw_layout_bars(
    names: Sequence[str], parts: Mapping[str, Real[np.ndarray, " C"]], xlabel: str, *, limit: float | None = None
) -> str:
    """An SVG file of a bar for each layout, under its name, of all parts that are no crumbs; and a line at a limit."""
    total = np.sum(list(parts.values()), axis=0)
    rows, left = np.arange(len(names)), np.zeros(len(names))
    with drawing_settings():
        figure, (axis,) = new_figure()
        figure.set_size_inches(_BARS_WIDTH, _BESIDE_LAYOUTS + _LAYOUT * len(names))
        for place, (part, sizes) in enumerate(parts.items()):
            if sizes.sum() > _CRUMB * total.sum():
                colour = colour_of(place) if place < _NUM_COLOURS else COLOURS["muted"]
                axis.barh(rows, sizes, left=left, height=_BAR, color=colour, alpha=0.75, label=part)
            left = left + sizes
        for row, name in enumerate(names):
            shown = f"{total[row]:,.1f}" if total[row] > 100 else f"{total[row]:.4g}"
            axis.text(0, row - _BAR / 2 - 0.06, f"{name}: {shown}", fontsize=8, va="bottom")
        if limit is not None:
            axis.axvline(limit, color=COLOURS["second"], linewidth=2.5)
        most = max(total.max(), limit or 0.0)
        axis.set(xlabel=xlabel, xlim=(0, 1.05 * most or 1), ylim=(len(names) - 0.5, -0.8), yticks=[])
        axis.spines["left"].set_visible(False)
        if len(parts) > 1:
            figure.legend(loc="outside upper right", ncols=4)
        return to_svg(figure)
