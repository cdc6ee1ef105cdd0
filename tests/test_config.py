"""Settings: checked where they are made, the same after a round trip through JSON."""

import dataclasses
import json
from pathlib import Path

import pytest

from jvarlen import CompileOptions
from jvarlen.config import FitConfig, OptimizerConfig, PlanConfig, differing_settings, load_config, save_config
from jvarlen.models import TransformerConfig

CHANGED = FitConfig(
    max_steps=None,
    resume=Path("runs/x"),
    compile=CompileOptions(cache_dir=None, xla_options=("xla_cpu_enable_fast_math=false",)),
    plan=PlanConfig(max_length=None, order="length", strategy="quantile"),
    model=TransformerConfig(width=64),
    optimizer=OptimizerConfig(batch_size_rule="none", learning_rate=1e-4),
)


@pytest.mark.parametrize("config", [FitConfig(), CHANGED])
def test_settings_survive_json(tmp_path, config):
    save_config(config, tmp_path / "config.json")
    assert load_config(tmp_path / "config.json") == config


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: PlanConfig(max_tokens=0, max_shapes=-1), r"max_tokens \(0\), max_shapes \(-1\)"),
        (lambda: PlanConfig(max_length=0), r"max_length \(0\)"),
        (lambda: OptimizerConfig(learning_rate=0), r"learning_rate \(0\)"),
        (lambda: OptimizerConfig(warmup_fraction=1.0), r"warmup_fraction \(1.0\)"),
        (lambda: FitConfig(held_out_fraction=1.5), "held_out_fraction"),
        (lambda: FitConfig(max_steps=0), r"max_steps \(0\)"),
        (lambda: FitConfig(seed=-1), r"seed \(-1\)"),
        (lambda: TransformerConfig(width=10, num_heads=4), r"width \(10\)"),
    ],
)
def test_impossible_settings_are_refused_by_name(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_differing_settings_are_named_with_both_values():
    assert differing_settings(FitConfig(), FitConfig()) == []
    other = dataclasses.replace(FitConfig(), seed=3, plan=PlanConfig(max_tokens=8192))
    assert differing_settings(FitConfig(), other) == ["seed: 0, 3", "plan.max_tokens: 4096, 8192"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"seed": "three"}', '{"unknown": 1}', '{"plan": {"max_tokens": 0}}', '{"plan": 3}']
)
def test_damaged_settings_are_refused_by_name(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        load_config(path)


def test_missing_settings_are_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no run to resume"):
        load_config(tmp_path / "config.json")


def test_the_file_is_plain_json(tmp_path):
    save_config(FitConfig(), tmp_path / "config.json")
    assert json.loads((tmp_path / "config.json").read_text())["plan"]["max_tokens"] == 4096
