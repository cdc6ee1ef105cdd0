"""Settings: checked where they are made, the same after a round trip through JSON."""

import dataclasses
import functools
import json
from pathlib import Path

import numpy as np
import pytest

from jvarlen import Bucket, CompileOptions
from jvarlen.models.config import DecoderConfig, RotaryScaling
from jvarlen.planning import Buckets
from jvarlen.reports.run_page import read_runs
from jvarlen.runs.config import (
    CheckpointConfig,
    DataConfig,
    DirectoryConfig,
    FitConfig,
    HardwareConfig,
    OptimizerConfig,
    PlanConfig,
)
from jvarlen.runs.saved_config import changes_between, load_config, save_config
from tests.support.settings import changed

CHANGED = FitConfig(
    max_steps=None,
    data=DataConfig(
        files=(Path("/data/a.jsonl"), Path("/data/b.txt")),
        weights=(0.25, 1.0),
        loss_weights=(1.0, 0.5),
        mixture_samples=1000,
        eval_data=(Path("/data/c.txt"),),
        tokenizer=Path("/data/tokenizer.json"),
    ),
    eval_every=10,
    checkpoints=CheckpointConfig(keep_best=2),
    trackers=("tensorboard",),
    compile=CompileOptions(num_threads=3),
    plan=PlanConfig(max_length=256, order="length", strategy="quantile", sequences_per_step="0:8,50%:32"),
    decoder=DecoderConfig(width=64),
    optimizer=OptimizerConfig(batch_size_rule="none", learning_rate=1e-4),
)


SCALING = RotaryScaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=64)
ADVANCED = FitConfig(decoder=DecoderConfig(windows=(3, 0), rotary_scaling=SCALING))


@pytest.mark.parametrize("config", [FitConfig(), CHANGED, ADVANCED])
def test_settings_survive_json(tmp_path, config):
    save_config(config, tmp_path / "config.json")
    assert load_config(tmp_path / "config.json") == config


def test_what_says_the_same_is_equal():
    given = PlanConfig(max_tokens=np.int64(512), buckets=[Bucket(4, 8), (2, np.int32(16))], row_lengths=[])
    assert given == PlanConfig(max_tokens=512, buckets=((4, 8), (2, 16)))
    assert DataConfig(field=["a", "b"], loss_on=["b"]) == DataConfig(field=("a", "b"), loss_on=("b",))
    assert FitConfig(target="here", dry_run=True, out="a.json").out == Path("a.json")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: PlanConfig(max_tokens=0, max_shapes=-1), r"max_tokens \(0\), max_shapes \(-1\)"),
        (
            lambda: PlanConfig(buckets=Buckets(((2, 4),), 8)),
            r"not a sequence.*buckets\.shapes, with num_microbatches=8",
        ),
        (lambda: PlanConfig(packing="padded", overlong="split"), 'overlong .* it needs packing="best_fit"'),
        (lambda: PlanConfig(overlong="split", order="length"), "overlong: only packed .* order: only single samples"),
        (lambda: PlanConfig(packing="best_fit", strategy="quantile"), "strategy 'quantile' is for single samples"),
        (lambda: PlanConfig(new_shape_every=-2), r"new_shape_every \(-2\)"),
        (lambda: PlanConfig(order="length", pacing="linear", new_shape_every=5), r"new_shape_every \(5\) and pacing"),
        (lambda: FitConfig(data=DataConfig(files=("a.txt",), loss_weights=(1.0, 2.0))), "loss_weights"),
        (lambda: OptimizerConfig(learning_rate=0), r"learning_rate \(0\)"),
        (lambda: FitConfig(data=DataConfig(held_out_fraction=1.5)), "held_out_fraction"),
        (lambda: FitConfig(seed=-1), r"seed \(-1\)"),
        (lambda: FitConfig(num_epochs=0, max_steps=0), r"max_steps \(0\), num_epochs \(0\)"),
        (lambda: CheckpointConfig(checkpoint_every=0, keep_last=0), r"checkpoint_every \(0\), keep_last \(0\)"),
        (lambda: FitConfig(checkpoints=CheckpointConfig(keep_best=1)), r"keep_best \(1\) needs eval_every"),
        (lambda: FitConfig(directory=DirectoryConfig(resume_from="best")), "resume_from='best' needs resume"),
        (
            lambda: FitConfig(directory=DirectoryConfig(run_dir=Path("a"), resume=Path("b"))),
            r"run_dir \(a\) and resume \(b\)",
        ),
        (lambda: FitConfig(data=DataConfig(files=(Path("a"),), weights=(1.0, 2.0))), "one number for each file"),
        (
            lambda: FitConfig(data=DataConfig(files=(Path("a"),), mixture_samples=9)),
            r"mixture_samples \(9\) needs weights",
        ),
        (lambda: FitConfig(data=DataConfig(eval_data=(Path("a/x.txt"), Path("b/x.jsonl")))), "names must differ: x"),
        (lambda: DecoderConfig(width=10, num_heads=4), r"width \(10\)"),
        *(
            (functools.partial(PlanConfig, packing=word), r"packing .* one of 'padded', 'best_fit', 'wrapped', 'auto'$")
            for word in (False, True, None, "none", "unset", "bogus")
        ),
        (lambda: PlanConfig(order="length", pacing="linea"), r"pacing \('linea'\) must be one of 'none', 'linear'"),
        (lambda: FitConfig(trackers=("bogus",)), r"trackers \(\('bogus',\)\) .* each 'tensorboard'"),
        (lambda: OptimizerConfig(schedule_unit="epochs"), r"schedule_unit \('epochs'\) must be one of 'steps'"),
        (lambda: OptimizerConfig(learning_rate="1e-3"), "learning_rate .* must be a number or None"),
        (lambda: DecoderConfig(compute_dtype="float16"), "compute_dtype .* must be 'bfloat16' or None"),
        (lambda: DataConfig(files="x"), r"files \('x'\) must be a sequence, each a text or a path"),
        (lambda: DataConfig(loss_on="assistant"), r"loss_on \('assistant'\) must be a sequence, each a text"),
        (lambda: DataConfig(num_workers=True), r"num_workers \(True\) must be an integer"),
        (
            lambda: PlanConfig(max_tokens="4096", shuffle_steps="no"),
            "shuffle_steps .* True or False; max_tokens .* int",
        ),
        (lambda: HardwareConfig(devices=2.0), r"devices \(2.0\) must be an integer or None"),
        (lambda: FitConfig(plan={}), "plan .* must be a PlanConfig"),
        (lambda: PlanConfig(sequences_per_step=0), r"from 1 .*: sequences_per_step \(0\)"),
        (
            lambda: PlanConfig(sequences_per_step=8, tokens_per_step=9),
            r"sequences_per_step \(8\), tokens_per_step \(9\)",
        ),
        (lambda: PlanConfig(tokens_per_step=9, new_shape_every=2), r"tokens_per_step \(9\), new_shape_every \(2\)"),
        (
            lambda: PlanConfig(sequences_per_step=8, order="length", pacing="linear"),
            r"sequences_per_step \(8\), pacing \(linear\)",
        ),
        (
            lambda: PlanConfig(sequences_per_step=8, packing="wrapped"),
            r"packing \(wrapped\) cuts: give tokens_per_step",
        ),
        (lambda: PlanConfig(sequences_per_step="0:8,1.5:9,x"), "such as 0:32,50%:64, not '1.5:9', 'x'"),
        (lambda: PlanConfig(tokens_per_step="0:8", shuffle_steps=True), "sizes come in stages, 0:8: leave it out"),
        (lambda: OptimizerConfig(schedule="seesaw", batch_size_rule="linear"), r"not .* batch_size_rule \(linear\)"),
        (lambda: OptimizerConfig(schedule="seesaw", schedule_unit="steps"), r"not schedule_unit \(steps\)"),
        (lambda: OptimizerConfig(max_batch_size=8), r"max_batch_size \(8\) is for batches that grow"),
        (
            lambda: FitConfig(optimizer=OptimizerConfig(schedule="seesaw"), plan=PlanConfig(tokens_per_step=9)),
            "grows batches in sequences: give sequences_per_step",
        ),
        (
            lambda: FitConfig(optimizer=OptimizerConfig(schedule="seesaw"), plan=PlanConfig(sequences_per_step="0:9")),
            "decides how large each step is: leave out the stages 0:9",
        ),
        (lambda: PlanConfig(sequences_per_step=8, overlong="split"), r"overlong \(split\) cuts: give tokens_per_step"),
    ],
)
def test_impossible_settings_are_refused_by_name(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_differing_settings_are_named_with_both_values():
    usual = FitConfig()
    assert changes_between(usual, usual) == []
    other = FitConfig(seed=3, plan=PlanConfig(max_tokens=8192))
    assert list(map(str, changes_between(usual, other))) == ["seed: 0, 3", "max_tokens: 4096, 8192"]
    names = [change.name for change in changes_between(usual, ADVANCED)]
    assert names == ["decoder.windows", "decoder.rotary_scaling"]


def test_what_belongs_to_one_call_is_not_kept(tmp_path):
    of_this_call = {
        "coordinator": "host:1", "num_processes": 2, "process_id": 0, "distributed": True,
        "runs_dir": tmp_path, "resume": tmp_path / "run", "profile": 3,
    }  # fmt: skip
    options = CompileOptions(cache_dir=tmp_path, xla_options=("xla_cpu_enable_fast_math=false",))
    config = changed(FitConfig(), seed=3, compile=options, **of_this_call)
    save_config(config, tmp_path / "config.json")
    assert load_config(tmp_path / "config.json") == FitConfig(seed=3)


@pytest.mark.parametrize(
    ("settings", "reader"),
    [
        ({"seed": 3}, "jvarlen 0.1.0"),
        ({"format": 2}, "jvarlen 0.2.0"),
        ({"format": 3}, "jvarlen 0.4.0"),
        ({"format": 5}, "a newer version"),
    ],
)
def test_a_run_of_another_version_is_refused_with_the_version_that_reads_it(tmp_path, settings, reader):
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "metrics.jsonl").touch()
    for read in (lambda: load_config(tmp_path / "config.json"), lambda: read_runs([tmp_path])):
        with pytest.raises(ValueError, match=rf"config\.json .* which {reader} reads; this version reads format 4$"):
            read()


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        ({}, 1024),
        ({"max_tokens": 65_536}, 16_384),
        ({"max_tokens": 500}, 496),
        ({"max_tokens": 500, "length_multiple": 1}, 500),
        ({"max_tokens": 500, "max_length": 300}, 300),
        ({"buckets": ((4, 64), (1, 2048))}, 2048),
        ({"packing": "best_fit", "row_lengths": (64, 2048)}, 2048),
    ],
)
def test_the_longest_bucket_fits_the_budget_unless_it_is_given(settings, longest):
    assert PlanConfig(**settings).longest_bucket() == longest


def test_unknown_settings_are_told_with_the_nearest():
    with pytest.raises(TypeError, match=r"^FitConfig has no keyword max_step \(do you mean max_steps\?\); .* data, "):
        FitConfig(max_step=3)
    with pytest.raises(TypeError, match=r"^PlanConfig has no keyword packings \(do you mean packing\?\)"):
        dataclasses.replace(PlanConfig(), packings="auto")
