"""Runs whose windows grow: resumed on another layout to the same numbers, logged, and evaluated without a window."""

import dataclasses

import numpy as np
import pytest

from jvarlen import fit
from jvarlen.models import DecoderConfig, WindowSchedule, init_params, make_loss_fn
from jvarlen.reports.run_records import read_metrics
from tests.runs.test_layouts import StoppingAfter
from tests.support import run_fit
from tests.support.settings import changed

NUM_STEPS, SCHEDULE = 8, "1:12:0.5"


@pytest.fixture
def config(tmp_path, compilation_cache):
    config = run_fit.make_config(tmp_path / "runs", compilation_cache)
    plan = dataclasses.replace(config.plan, max_tokens=64, packing="best_fit", sequences_per_step=24)
    decoder = DecoderConfig(num_layers=2, width=16, num_heads=2)
    return changed(config, plan=plan, decoder=decoder, max_steps=NUM_STEPS, window_schedule=SCHEDULE)


def records_of(run):
    return [row for row in read_metrics(run.run_dir / "metrics.jsonl") if "loss" in row]


def test_a_run_resumes_on_another_layout_with_the_windows_of_its_steps(config):
    whole = fit(config, run_fit.make_data())
    stopped = fit(config, run_fit.make_data(), trackers={"stop": StoppingAfter(2)})
    assert stopped.summary.interrupted
    resumed = fit(changed(config, resume=stopped.run_dir, parallel="data2.stage2"), run_fit.make_data())
    windows = WindowSchedule.parse(SCHEDULE).windows(NUM_STEPS).tolist()
    for run in (whole, resumed):
        assert run.summary.compilations_after_first_step == 0
        assert [row["attention_window"] for row in records_of(run)] == windows
    losses, expected = ([row["loss"] for row in records_of(run)] for run in (resumed, whole))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(resumed.summary.held_out_after, whole.summary.held_out_after, rtol=1e-5)
    without = fit(changed(config, window_schedule=None), run_fit.make_data())
    # The initial parameters are evaluated alike; the first step of one token's context has another loss.
    assert without.summary.held_out_before == whole.summary.held_out_before
    assert abs(records_of(without)[0]["loss"] - expected[0]) > 1e-5
    assert "attention_window" not in records_of(without)[0]


def test_a_schedule_is_checked_and_is_for_the_decoder(config):
    with pytest.raises(ValueError, match=r"window schedule is such as 32:1024:0\.6, not '9:1:0\.5'"):
        changed(config, window_schedule="9:1:0.5")
    with pytest.raises(ValueError, match=r"window_schedule \(1:12:0.5\) is for the built-in decoder"):
        fit(config, run_fit.make_data(), loss_fn=make_loss_fn(config.decoder), params=init_params(config.decoder, 0))
