"""Run directories: one run each, found again under the same settings, and a link that does no harm."""

import contextlib
import dataclasses

import numpy as np
import pytest

from jvarlen.config import FitConfig, load_config
from jvarlen.costs import CostModel
from jvarlen.plan_config import PlanConfig
from jvarlen.run_dir import is_run_dir, new_run_dir, point_latest_to, resumed_run_dir

LENGTHS = np.arange(1, 40)


def plan_of(config):
    return config.plan.make_plan(LENGTHS, config.plan.make_buckets(LENGTHS), seed=config.seed, epoch=0)


def begin(config):
    with contextlib.ExitStack() as held:
        return new_run_dir(config, plan_of(config), {}, held)


def resume(config, run_dir):
    with contextlib.ExitStack() as held:
        return resumed_run_dir(config, run_dir, plan_of(config), {}, held)[1]


def test_a_directory_that_holds_a_run_takes_no_other(tmp_path):
    config = FitConfig(run_dir=tmp_path / "run")
    assert not is_run_dir(config.run_dir)
    assert begin(config) == config.run_dir
    assert is_run_dir(config.run_dir)
    with pytest.raises(ValueError, match="holds a run already"):
        begin(dataclasses.replace(config, seed=3))
    assert load_config(config.run_dir / "config.json").seed == 0


def test_checkpoints_without_settings_are_not_taken_over(tmp_path):
    (tmp_path / "run" / "checkpoints" / "4").mkdir(parents=True)
    with pytest.raises(ValueError, match="holds a run already"):
        begin(FitConfig(run_dir=tmp_path / "run"))


def test_a_directory_that_a_kill_left_without_settings_is_begun_anew(tmp_path):
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "plan.npz").write_bytes(b"half")
    begin(FitConfig(run_dir=run_dir))
    assert resume(FitConfig(), run_dir) == []


def test_the_same_settings_with_the_same_cost_model_continue_a_run(tmp_path):
    CostModel(1e-3, 1e-5, 1e-7).save(tmp_path / "cost.json")
    config = FitConfig(run_dir=tmp_path / "run", plan=PlanConfig(cost_model=tmp_path / "cost.json"))
    begin(config)
    assert resume(config, config.run_dir) == []
    CostModel(1e-3, 1e-5, 2e-7).save(tmp_path / "cost.json")
    with pytest.raises(ValueError, match=r"differ: plan\.cost_model"):
        resume(config, config.run_dir)


def test_a_moved_directory_is_continued(tmp_path):
    CostModel(1e-3, 1e-5, 1e-7).save(tmp_path / "cost.json")
    run_dir = begin(FitConfig(run_dir=tmp_path / "run", plan=PlanConfig(cost_model=tmp_path / "cost.json")))
    (tmp_path / "cost.json").unlink()
    moved = run_dir.rename(tmp_path / "moved")
    assert resume(load_config(moved / "config.json"), moved) == []


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', "[" * 100_000])
def test_damaged_keys_of_the_data_are_refused_by_name(tmp_path, content):
    run_dir = begin(FitConfig(run_dir=tmp_path / "run"))
    (run_dir / "data.json").write_text(content)
    with pytest.raises(ValueError, match=r"data\.json holds no keys of data"):
        resume(FitConfig(), run_dir)


def test_the_link_to_the_latest_run_replaces_no_file_of_the_user(tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        point_latest_to(tmp_path / name)
        assert (tmp_path / "latest").resolve() == tmp_path / name
    monkeypatch.chdir(tmp_path / "a")
    point_latest_to((tmp_path / "a").relative_to(tmp_path / "a"))
    assert (tmp_path / "latest").resolve() == tmp_path / "a"
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").write_text("mine")
    point_latest_to(tmp_path / "b")
    assert (tmp_path / "latest").read_text() == "mine"
    assert not list(tmp_path.glob(".latest-*"))
