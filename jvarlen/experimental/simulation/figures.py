"""Pictures of simulated runs: what the seconds are spent on, and throughput over time with failures marked."""

from __future__ import annotations

from typing import Any

import numpy as np

from jvarlen.experimental.simulation.run import Simulation
from jvarlen.reports.figures import COLOURS, colour_of, drawing_settings, format_ticks, new_figure, to_svg

__all__ = ["draw_simulation"]

_WIDTH, _BAR, _LINE = 7.2, 1.25, 2.3  # inches
_NUM_RANGES = 300
_UNITS = {"days": 86400.0, "hours": 3600.0, "minutes": 60.0, "seconds": 1.0}
# Alike causes have one colour and differ in darkness.
_LOOKS = {
    "compute": (0, 0.8),
    "bubble": (0, 0.4),
    "stragglers": (1, 0.8),
    "jitter": (1, 0.4),
    "tensor": (2, 0.9),
    "context": (2, 0.65),
    "stage": (2, 0.45),
    "data": (2, 0.25),
    "update": (3, 0.7),
    "checkpoints": (5, 0.8),
    "start": (5, 0.4),
    "lost work": (4, 0.85),
    "spares": (4, 0.55),
    "restarts": (4, 0.3),
}


def draw_simulation(simulation: Simulation) -> str:
    """A bar of the seconds by cause, and below it tokens a second over time.

    Throughput is that of steps that were kept, in ranges of time, so failures dent it. A tick at the bottom marks each
    failure.

    Args:
      simulation: from `simulate`.

    Returns:
      An SVG file that suits light and dark surroundings.
    """
    unit, unit_s = next(
        (each for each in _UNITS.items() if simulation.total_s >= 2 * each[1]), list(_UNITS.items())[-1]
    )
    with drawing_settings():
        figure, (bar, line) = new_figure(2, height_ratios=[_BAR, _LINE])
        figure.set_size_inches(_WIDTH, _BAR + _LINE)
        _draw_causes(bar, simulation)
        edges = np.linspace(0, simulation.total_s, _NUM_RANGES + 1)
        done = np.concatenate([[0], np.cumsum(simulation.num_tokens)])
        tokens = np.interp(edges, np.concatenate([[0], simulation.step_ends]), done)
        centres = (edges[1:] + edges[:-1]) / 2 / unit_s
        line.plot(centres, np.diff(tokens) / np.diff(edges), color=colour_of(0), linewidth=1.6)
        mean = simulation.tokens_per_second
        line.axhline(mean, color=COLOURS["muted"], linewidth=0.8, dashes=(4, 3))
        line.set_title(
            f"{mean:,.0f} tokens/s in the mean, {simulation.num_failures:,} failures", loc="left", fontsize=10
        )
        line.set(xlabel=unit, ylabel="tokens/s", xlim=(0, simulation.total_s / unit_s), ylim=(0, None))
        failed = [each.at_s / unit_s for each in simulation.interruptions]
        line.plot(
            failed, [0.02] * len(failed), "|", color=colour_of(4), markersize=9, transform=line.get_xaxis_transform()
        )
        format_ticks(line.xaxis, line.yaxis)
        return to_svg(figure)


def _draw_causes(axis: Any, simulation: Simulation) -> None:
    left = 0.0
    for name, (place, opacity) in _LOOKS.items():
        share = 100 * max(simulation.share(name), 0)
        if share:
            label = f"{name} {share:.1f}%"
            axis.barh([0], [share], left=[left], height=0.8, color=colour_of(place), alpha=opacity, label=label)
            left += share
    axis.set_title(f"{simulation.layout}, {simulation.num_steps:,} steps", loc="left", fontsize=10)
    axis.set(xlabel="% of the time", xlim=(0, 100))
    axis.set_yticks([])
    axis.spines["left"].set_visible(False)
    axis.figure.legend(loc="outside right upper", fontsize=8)
