"""Lengths: checked and limited."""

import numpy as np
import pytest

from jvarlen import CostModel, UserError, make_plan
from jvarlen.planning import lengths as lengths_module
from jvarlen.planning.lengths import check_lengths


def test_int64_lengths_are_not_copied():
    lengths = np.arange(1, 5)
    assert check_lengths(lengths) is lengths


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint64])
def test_any_integers_become_int64(dtype):
    checked = check_lengths(np.array([1, 200 % 128], dtype))
    assert checked.dtype == np.int64
    assert checked.tolist() == [1, 72]


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([2**70, 1, 2**63], rf"at most {2**63 - 1}: id 0: {2**70}, id 2: {2**63} \(limit {2**63 - 1}\)"),
        ([1, 2**63], f"id 1: {2**63}"),
        ([-1, 2**63], "at least 1: id 0: -1"),
        ([[1, 2], [3]], "one integer per sample, or as many of each, not the samples"),
        ([np.ones(1, int), np.ones(3, int)], "not the samples: measure_lengths gives them"),
    ],
)
def test_bad_lengths_are_refused_by_name(lengths, said):
    with pytest.raises(UserError, match=said):
        check_lengths(lengths)


def test_many_offenders_are_counted():
    with pytest.raises(ValueError, match="id 4: 0 and 95 more"):
        check_lengths(np.zeros(100, int))


@pytest.mark.parametrize("packing", ["padded", "best_fit", "wrapped", "auto"])
def test_a_plan_checks_its_lengths_once(monkeypatch, packing):
    num_checked, check_values = [], lengths_module.check_values
    monkeypatch.setattr(lengths_module, "check_values", lambda *args: num_checked.append(1) or check_values(*args))
    cost = CostModel(constant=1e-3, linear=1e-6, quadratic=1e-9)
    plan = make_plan(np.arange(1, 400) % 60 + 1, max_tokens=1024, packing=packing, cost=cost, epoch=1)
    assert plan.num_samples >= 399
    assert len(num_checked) == 1
