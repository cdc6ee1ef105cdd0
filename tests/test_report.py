"""Reports: histograms that count every sample, metrics that survive a cut, pictures that exist."""

import json

import numpy as np
import pytest

from jvarlen.report import length_histogram, plot_curves, read_metrics


@pytest.mark.parametrize("lengths", [[5], [1, 1, 1], [1, 2], list(range(1, 500)), [3, 10**9]])
def test_the_histogram_counts_every_sample_once(lengths):
    *bins, figures = length_histogram(np.array(lengths)).splitlines()[1:]
    assert sum(int(line.split()[3].replace(",", "")) for line in bins) == len(lengths)
    assert f"{len(lengths):,} samples, {sum(lengths):,} tokens" in figures


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 0}) + "\n" + '{"step": 1')
    assert read_metrics(path) == [{"step": 0}]
    path.write_text("")
    assert read_metrics(path) == []


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
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
