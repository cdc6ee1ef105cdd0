"""Cost models: fitted exactly where the data allow it, kept on disk, and used as budgets."""

import json

import numpy as np
import pytest

from jvarlen import make_plan
from jvarlen.planning.compare import compare_strategies
from jvarlen.planning.cost_model import CostModel, fit_cost_model
from jvarlen.planning.make_buckets import make_buckets
from jvarlen.reports.plan_page import write_html_report

SHAPES = [(64, 64), (16, 256), (8, 256), (4, 1024), (1, 2048)]


def test_shapes_may_be_an_array():
    assert fit_cost_model(np.array(SHAPES), np.arange(1.0, 6.0)) == fit_cost_model(SHAPES, [1.0, 2.0, 3.0, 4.0, 5.0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cost": 7}, r"cost \(7\) must be a function or None"),
        ({"memory": 7, "max_bytes": 1}, r"memory \(7\) must be a function or None"),
        ({"cost": lambda b, t: b * t, "max_cost": "a"}, r"max_cost \('a'\) must be a number"),
        ({"cost": lambda b, t: b * t, "max_cost": 0}, "max_cost"),
        ({"max_cost": 3.0}, "max_cost .* needs cost"),
        ({"max_bytes": 3.0}, "max_bytes .* needs memory"),
        ({"strategy": [30, 30]}, "given lengths"),
    ],
)
def test_limits_that_are_none_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        make_buckets([3, 8, 30], 100, **options)


def test_a_model_comes_back_from_disk_with_device_and_model_named(tmp_path):
    fitted = fit_cost_model(SHAPES, [1.0, 2.0, 1.5, 3.0, 4.0], device="cpu", model="2 layers of 128")
    fitted.save(tmp_path / "cost.json")
    assert CostModel.load(tmp_path / "cost.json") == fitted
    assert "2 layers of 128 on cpu" in str(fitted)


def test_wherever_a_model_predicts_it_says_where_it_was_not_measured(tmp_path):
    cost = fit_cost_model(SHAPES, [1.0, 1.0, 0.6, 1.1, 1.0])
    lengths = [64] * 40 + [6000]
    plan = make_plan(lengths, [(8, 64), (1, 6000)])
    for predict in (
        lambda: plan.report(cost=cost),
        lambda: make_plan(lengths, max_tokens=8192, cost=cost),
        lambda: write_html_report(tmp_path / "plan.html", plan, lengths, cost=cost),
    ):
        with pytest.warns(UserWarning, match=r"rows of up to 2,048 tokens and up to 4,096 .* seconds .*1×6000"):
            predict()
    with pytest.warns(UserWarning, match="1×6000") as caught:
        compare_strategies(plan, lengths, 8192, cost=cost)
    assert len(caught) == 1  # of the plan, not of those beside it


def test_files_that_hold_no_model_are_refused_by_name(tmp_path):
    path = tmp_path / "cost.json"
    with pytest.raises(FileNotFoundError, match=r"cost\.json"):
        CostModel.load(path)
    for text in ("{", "[]", "{}", json.dumps({"constant": 0.0, "linear": "x", "quadratic": 0.0})):
        path.write_text(text)
        with pytest.raises(ValueError, match="holds no cost model"):
            CostModel.load(path)


def test_a_budget_in_seconds_makes_steps_take_about_the_same_time():
    lengths = np.random.default_rng(1).integers(16, 2049, 20_000)
    cost = CostModel(constant=0.0, linear=15e-6, quadratic=0.22e-6)
    by_tokens = make_buckets(lengths, 32_768, cost=cost)
    by_cost = make_buckets(lengths, 10**9, cost=cost, max_cost=2.0)

    def spread(buckets):
        seconds = [float(cost(*bucket)) for bucket in buckets.shapes]
        return max(seconds) / min(seconds)

    assert max(float(cost(*bucket)) for bucket in by_cost.shapes) <= 2.0
    assert spread(by_cost) < 1.5 < 3 < spread(by_tokens)


def test_no_bucket_exceeds_the_memory_of_the_device():
    lengths = np.random.default_rng(1).integers(16, 2049, 5_000)
    memory = CostModel(constant=1e9, linear=1e4, quadratic=20, unit="bytes")
    buckets = make_buckets(lengths, 10**9, memory=memory, max_bytes=4e9)
    assert max(float(memory(*bucket)) for bucket in buckets.shapes) <= 4e9
    with pytest.raises(ValueError, match=r"max_bytes 1\.01e\+09 \(one row needs 1\.1.*2048 tokens.*id 0: 977"):
        make_buckets(lengths, 10**9, memory=memory, max_bytes=1.01e9)
