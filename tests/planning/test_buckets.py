"""What thinning the candidates of optimal buckets can cost."""

import numpy as np
import pytest

from jvarlen import Budget, CostModel, make_buckets
from jvarlen.planning import buckets
from jvarlen.planning.buckets import cost_of_candidates

LENGTHS = np.random.default_rng(0).integers(1, 400, 300)


@pytest.mark.parametrize("fields", [{}, {"cost": CostModel(0.1, 1e-3, 1e-5), "length_multiple": 3}])
def test_candidates_cost_no_more_than_is_said(fields, monkeypatch):
    budget = Budget(max_tokens=800, max_shapes=3, num_microbatches=2, **fields)
    assert cost_of_candidates(LENGTHS, budget) == 0

    def cost() -> float:
        chosen = make_buckets(LENGTHS, budget).shapes
        ends = np.searchsorted(np.sort(LENGTHS), [bucket.length for bucket in chosen], side="right")
        held = np.diff(ends, prepend=0).tolist()
        price = budget.cost or (lambda rows, length: rows * length)
        return sum(-(-n // (2 * rows)) * 2 * price(rows, t) for n, (rows, t) in zip(held, chosen, strict=True))

    least = cost()
    monkeypatch.setattr(buckets, "_MOST_CANDIDATES", 12)
    assert least < cost() <= least * (1 + cost_of_candidates(LENGTHS, budget)) < 1.3 * least
