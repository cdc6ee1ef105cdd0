"""Histograms as text count every sample."""

import numpy as np
import pytest

from jvarlen.reports.histogram import length_histogram


@pytest.mark.parametrize("lengths", [[5], [1, 1, 1], [1, 2], list(range(1, 500)), [3, 10**9]])
def test_the_histogram_counts_every_sample_once(lengths):
    *bins, figures = length_histogram(np.array(lengths)).splitlines()[1:]
    assert sum(int(line.split()[3].replace(",", "")) for line in bins) == len(lengths)
    assert f"{len(lengths):,} samples, {sum(lengths):,} tokens" in figures
