"""Pictures that a run leaves behind: every step and every bucket is drawn, and what is not known is said."""

import dataclasses

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from jvarlen.compiling.ledger import Ledger, LedgerRow
from jvarlen.planning.buckets import Bucket, PairBucket
from jvarlen.reports.run_figures import plot_curves, plot_ledger


@pytest.mark.parametrize("num_steps", [0, 1, 30])
def test_curves_are_drawn_for_any_number_of_steps(tmp_path, num_steps):
    rows = [
        {
            "step": s,
            "loss": 3.0,
            "base_learning_rate": 0.1,
            "learning_rate": 0.2,
            "num_sequences": 3,
            "bucket_length": 8,
        }
        for s in range(num_steps)
    ]
    plot_curves([{"step": 0, "held_out_bits_per_byte": 8.0}, *rows], tmp_path / "curves.png")
    pixels = imread(tmp_path / "curves.png")[..., :3]
    is_blue = pixels[..., 2] - pixels[..., 0] > 0.3
    lower_half = is_blue[len(is_blue) // 2 :]  # points only
    assert bool(lower_half.any()) == (num_steps > 0)
    assert lower_half.mean() < 0.01


UNUSED = LedgerRow(Bucket(2, 8), 0.5, 1.5, False, np.nan, 3_000_000, 2_000_000, 1_500_000, 40_000_000, 43_000_000)
USED = dataclasses.replace(UNUSED, times_used=5, step_s=0.01, planned_steps=9, padding=0.1)


def drawn(monkeypatch, rows, path):
    """Draws the ledger; returns for each of its five pictures the bars' heights by place, several on top summed."""
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure) or save(figure, *args, **kwargs)
    )
    plot_ledger(Ledger(rows), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    heights = []
    for axis in figures[0].axes:
        heights.append({})
        for bar in axis.patches:
            place = round(bar.get_x() + bar.get_width() / 2)
            heights[-1][place] = max(heights[-1].get(place, 0), bar.get_y() + bar.get_height())
    return figures[0], heights


@pytest.mark.parametrize("num_buckets", [2, 60])
def test_every_figure_of_a_bucket_is_drawn_at_its_place_by_length(monkeypatch, tmp_path, num_buckets):
    longer = [dataclasses.replace(UNUSED, bucket=Bucket(2, 8 + k), compile_s=float(k)) for k in range(1, num_buckets)]
    figure, heights = drawn(monkeypatch, [*reversed(longer), USED], tmp_path / "ledger.png")
    assert heights[0] == pytest.approx({0: 2.0} | {k: 0.5 + k for k in range(1, num_buckets)})
    assert heights[1] == {0: 5} | dict.fromkeys(range(1, num_buckets), 0)
    assert heights[2] == {0: 0.01}
    assert heights[3] == {0: 10}
    assert heights[4] == pytest.approx(dict.fromkeys(range(num_buckets), 43.5))
    labels = [label.get_text() for label in figure.axes[-1].get_xticklabels()]
    assert labels[0] == "2×8"
    assert len(labels) <= 24


@pytest.mark.parametrize("rows", [[], [UNUSED], [dataclasses.replace(UNUSED, bucket=PairBucket(2, 8, 9))]])
def test_a_ledger_of_which_little_is_known_is_drawn_and_says_so(monkeypatch, tmp_path, rows):
    figure, heights = drawn(monkeypatch, rows, tmp_path / "ledger.png")
    assert heights[2] == heights[3] == {}
    assert all(any(text.get_text() == "not known" for text in figure.axes[k].texts) for k in (2, 3))
