"""Pictures of simulated pipeline schedules: a row for each stage, a bar for each action.

Letters: S stages, A actions of a stage.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jvarlen.parallel.schedules import Timeline
from jvarlen.reports.figures import COLOURS, drawing_settings, format_ticks, new_figure, to_svg

__all__ = ["draw_timelines"]

_WIDTH, _ROW, _MARGIN = 7.2, 0.26, 0.55  # inches
_COLOURS = {"F": "first", "B": "second", "W": "third"}
_LABEL_INCHES = 0.075  # of a character


def draw_timelines(*timelines: Timeline) -> str:
    """Timelines below each other, on one axis of time.

    Forward passes are blue, backward passes orange, weight gradients green; later chunks are darker. The number is that
    of the microbatch, and is left out where a bar is too narrow.

    Args:
      timelines: one or more, from `Schedule.simulate`.

    Returns:
      An SVG file that suits light and dark surroundings.

    Example:
      >>> from jvarlen.parallel import gpipe
      >>> svg = draw_timelines(gpipe(2, 3).simulate({"F": 1, "B": 2}))
      >>> svg[:4], "gpipe, lockstep: 12, bubble 25.0%" in svg
      ('<svg', True)
    """
    with drawing_settings():
        figure, axes = new_figure(len(timelines), sharex=True)
        heights = [_ROW * timeline.schedule.num_stages + _MARGIN for timeline in timelines]
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
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

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
            left, right = timeline.starts[stage, a], timeline.ends[stage, a]
            x, y = np.stack([left, right, right, left]), stage + np.array([[-0.4], [-0.4], [0.4], [0.4]])
            bars = Path.make_compound_path_from_polys(np.stack([x, y], axis=-1).swapaxes(0, 1))
            look: dict[str, Any] = {"facecolor": to_rgba(colour, opacity), "edgecolor": colour, "linewidth": 0.7}
            axis.add_patch(PathPatch(bars, **look))
    for (s, a), last in np.ndenumerate(lasts):
        label = f"{schedule.actions[s, a, 1]}"
        if len(label) * _LABEL_INCHES <= last * inches_per_unit:
            middle = timeline.starts[s, a] + last / 2
            axis.text(middle, s, label, ha="center", va="center_baseline", fontsize=8)
