"""What thinning the candidates of optimal buckets can cost."""

import numpy as np
import pytest

from jvarlen import Budget, CostModel, make_buckets
from jvarlen.planning import buckets

LENGTHS = np.random.default_rng(0).integers(1, 400, 300)


@pytest.mark.parametrize("fields", [{}, {"cost": CostModel(0.1, 1e-3, 1e-5), "length_multiple": 3}])
def test_of_very_many_lengths_every_kth_is_a_candidate_which_costs_little(fields, monkeypatch):
    budget = Budget(max_tokens=800, max_shapes=3, microbatches_per_step=2, **fields)

    def cost_of(chosen) -> float:
        ends = np.searchsorted(np.sort(LENGTHS), [bucket.length for bucket in chosen], side="right")
        held = np.diff(ends, prepend=0).tolist()
        price = budget.cost or (lambda rows, length: rows * length)
        return sum(-(-n // (2 * rows)) * 2 * price(rows, t) for n, (rows, t) in zip(held, chosen, strict=True))

    least = cost_of(make_buckets(LENGTHS, budget))
    monkeypatch.setattr(buckets, "_MOST_CANDIDATES", 12)
    chosen = make_buckets(LENGTHS, budget)
    rounded = np.unique(-(-LENGTHS // budget.length_multiple) * budget.length_multiple)
    every = -(len(rounded) // -12)
    assert {bucket.length for bucket in chosen} <= {*rounded[::-every].tolist()}
    assert least < cost_of(chosen) < 1.3 * least
