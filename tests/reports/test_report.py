"""Reports as text: histograms that count every sample, metrics that survive a cut."""

import json

import numpy as np
import pytest

from jvarlen.reports.report import length_histogram, read_metrics


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
