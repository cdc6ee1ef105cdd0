"""What a finished run holds, with most options, and on what terms its directory is continued."""

import collections
import dataclasses
import gzip
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from jvarlen import FitConfig, Plan, fit
from jvarlen.models import DecoderConfig
from jvarlen.reports.run_records import read_metrics, read_run
from jvarlen.runs.config import DirectoryConfig, OptimizerConfig, PlanConfig
from jvarlen.runs.saved_config import load_config
from jvarlen.training.checkpoint import read_params
from tests.support.recorded_run import EVAL_EVERY, NUM_STEPS
from tests.support.run_fit import Wrapped, make_data
from tests.support.settings import changed

pytestmark = pytest.mark.slow


@pytest.fixture
def continued(recorded_run, tmp_path):
    """The settings of a copy of the run, which a test may change."""
    shutil.copytree(recorded_run.run_dir, tmp_path / "run")
    return changed(recorded_run.config, run_dir=tmp_path / "run")


def test_a_run_leaves_everything_behind(recorded_run):
    order = ["\nCorpus\n", "\nPlan\n", "Compile report", "\nSummary\n"]
    assert sorted(order, key=recorded_run.printed.index) == order
    assert recorded_run.printed.rstrip().splitlines()[-1] == str(recorded_run.run_dir)
    assert {path.name for path in recorded_run.run_dir.iterdir()} == {
        "bad_samples.jsonl", "checkpoints", "config.json", "curves.png", "data.json", "compile_report.json", "lock",
        "metrics.jsonl", "plan.npz", "profile", "shapes.json", "summary.json", "tensorboard",
    }  # fmt: skip
    saved, config = load_config(recorded_run.run_dir / "config.json"), recorded_run.config
    optimizer = dataclasses.replace(config.optimizer, learning_rate=3e-3)  # that of random weights
    of_the_call = {"runs_dir": saved.directory.runs_dir, "compile": saved.compile, "profile": 0}
    assert saved == changed(config, optimizer=optimizer, **of_the_call)

    summary, steps = json.loads((recorded_run.run_dir / "summary.json").read_text()), recorded_run.steps
    assert summary["compilations_after_first_step"] == 0
    assert summary["num_steps"] == NUM_STEPS
    assert summary["held_out_after"] < summary["held_out_before"]
    positions, tokens = (sum(row[name] for row in steps) for name in ("padded_tokens", "num_tokens"))
    assert (summary["padding"], summary["num_tokens"]) == (1 - tokens / positions, tokens)

    plan = Plan.load(recorded_run.run_dir / "plan.npz")
    first_epoch = steps[: plan.num_steps]
    assert [row["num_sequences"] for row in first_epoch] == plan.num_sequences[: len(first_epoch)].tolist()
    report = json.loads((recorded_run.run_dir / "compile_report.json").read_text())["rows"]
    used = collections.Counter((row["bucket_rows"], row["bucket_length"]) for row in steps)
    assert {tuple(row["bucket"]): row["times_used"] for row in report if row["times_used"]} == used
    assert {tuple(row["bucket"]): row["planned_steps"] for row in report} == plan.groups_of_buckets()
    assert not any(row["is_live"] for row in report), "nothing is held for steps that will not come"


def test_lines_that_are_no_samples_are_left_out_and_listed(recorded_run):
    path = recorded_run.config.data.files[0]
    rows = [json.loads(line) for line in (recorded_run.run_dir / "bad_samples.jsonl").read_text().splitlines()]
    assert [(row["step"], row["file"], row["record"]) for row in rows] == [
        (None, str(path), f"line {number}") for number in (1, len(path.read_text().splitlines()))
    ]
    assert (recorded_run.summary.num_skipped_records, recorded_run.summary.num_skipped) == (2, 0)


def test_every_set_is_evaluated_when_it_is_due(recorded_run):
    evaluations = [row for row in recorded_run.records if "evaluation" in row]
    due = [0, *range(EVAL_EVERY, NUM_STEPS, EVAL_EVERY), NUM_STEPS]
    assert [(row["step"], row["evaluation"]) for row in evaluations] == [
        (step, name) for step in due for name in ("held_out", "other")
    ]
    last = {row["evaluation"]: row["nats_per_token"] for row in evaluations[-2:]}
    assert last == recorded_run.summary.evaluations
    assert last["held_out"] == recorded_run.summary.held_out_after
    assert evaluations[0]["nats_per_token"] == recorded_run.summary.held_out_before
    (path,) = load_config(recorded_run.run_dir / "config.json").data.eval_data
    lengths = [len(json.loads(line)["body"]) for line in Path(path).read_text().splitlines()]
    assert {row["num_tokens"] for row in evaluations if row["evaluation"] == "other"} == {sum(lengths)}


def test_the_newest_and_the_best_are_kept(recorded_run):
    held_out = {
        row["step"]: row["nats_per_token"] for row in recorded_run.records if row.get("evaluation") == "held_out"
    }
    candidates = {step: held_out[step] for step in held_out if step}
    kept = {int(path.name) for path in (recorded_run.run_dir / "checkpoints").iterdir() if path.name.isdigit()}
    assert kept == {NUM_STEPS, min(candidates, key=candidates.get)}


def test_every_step_is_recorded_with_what_it_took(recorded_run):
    steps = recorded_run.steps
    assert [row["step"] for row in steps] == list(range(NUM_STEPS))
    for row in steps:
        assert row["padding"] == 1 - row["num_tokens"] / row["padded_tokens"]
        assert 0 <= row["data_wait_s"] <= row["step_s"]
        assert row["host_memory_bytes"] > 1e7
        assert row["device_memory_bytes"] is None, "this backend does not tell"
    # Evaluations are left out of both; reading the metrics of a step comes before it is timed.
    assert sum(row["step_s"] + row["stall_s"] for row in steps) == pytest.approx(recorded_run.summary.train_s, rel=0.05)
    times = [row["time_s"] for row in steps]
    assert times == sorted(times)
    assert 0 <= recorded_run.summary.data_wait < 1


def test_a_trace_has_the_steps_with_their_buckets(recorded_run):
    (path,) = (recorded_run.run_dir / "profile").rglob("*.trace.json.gz")
    trace = json.loads(gzip.decompress(path.read_bytes()))
    buckets = {f"train {row['bucket_rows']}×{row['bucket_length']}" for row in recorded_run.steps}
    assert sum(event.get("name") in buckets for event in trace["traceEvents"]) == 2


def test_a_directory_that_is_named_is_continued(continued, capsys):
    again = fit(dataclasses.replace(continued, max_steps=NUM_STEPS + 2, profile=0))
    assert again.run_dir.resolve() == continued.directory.run_dir.resolve()
    assert "changed: max_steps: 20, 22" in capsys.readouterr().out
    assert load_config(again.run_dir / "config.json").max_steps == 22
    records = read_metrics(again.run_dir / "metrics.jsonl")
    assert [row["step"] for row in records if "loss" in row] == list(range(NUM_STEPS + 2))
    # What was evaluated at its end was the end of the run then.
    assert {row["step"] for row in records if "evaluation" in row} == {0, 6, 12, 18, NUM_STEPS + 2}


def test_resuming_a_finished_run_changes_nothing(recorded_run, continued):
    path = continued.directory.run_dir / "summary.json"
    told = path.read_text()
    again = fit(continued)
    assert path.read_text() == told
    assert read_metrics(again.run_dir / "metrics.jsonl")[:-2] == recorded_run.records[:-2]
    assert again.summary.num_steps == NUM_STEPS
    assert again.summary.evaluations == recorded_run.summary.evaluations
    params, before = (read_params(run.run_dir / "checkpoints")[0] for run in (again, recorded_run))
    for name, leaf in params.items():
        np.testing.assert_array_equal(leaf, before[name])


@pytest.mark.parametrize(("module", "function"), [("fit", "train"), ("summary", "plot_curves")])
def test_a_resumed_run_does_not_look_as_if_it_had_ended_until_all_is_written(continued, module, function, monkeypatch):
    def killed(*arguments):
        raise SystemExit

    monkeypatch.setattr(sys.modules[f"jvarlen.runs.{module}"], function, killed)
    with pytest.raises(SystemExit):
        fit(dataclasses.replace(continued, max_steps=NUM_STEPS + 2, profile=0))
    assert read_run(continued.directory.run_dir).state == "going on, or broken off"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"plan": PlanConfig(max_tokens=96)}, r"max_tokens: 128, 96"),
        ({"decoder": DecoderConfig(num_layers=1, width=32, num_heads=1)}, r"decoder\.width: 8, 32$"),
        ({"trainable": ("layers.*", "embed.*")}, r"trainable: none, layers\.\* embed\.\*$"),
        ({"optimizer": OptimizerConfig(learning_rate=0.1)}, r"optimizer\.learning_rate: 0\.003, 0\.1$"),
    ],
)
def test_resuming_as_another_run_is_refused_by_its_settings(continued, changes, said):
    with pytest.raises(ValueError, match=rf"with its own settings; these differ: {said}"):
        fit(dataclasses.replace(continued, **changes))


def test_other_data_of_the_same_lengths_are_refused(continued):
    """As if the file were another than when the run began."""
    path, saved = continued.data.eval_data[0], continued.directory.run_dir / "data.json"
    saved.write_text(json.dumps(json.loads(saved.read_text()) | {str(path): "another"}))
    with pytest.raises(ValueError, match=r"began with another content of .*other\.jsonl: put it back"):
        fit(continued)
    saved.write_text("{}")
    with pytest.raises(ValueError, match=r"data\.json is damaged: it has no content key of .*other\.jsonl"):
        fit(continued)


class Changed(Wrapped):
    """Samples that know their lengths, one of which has become shorter."""

    def __init__(self, dataset, sample_id):
        super().__init__(dataset)
        self.sample_id, self.lengths = sample_id, dataset.lengths

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return sample[:-1] if index == self.sample_id else sample


def test_a_sample_that_is_not_as_planned_ends_the_run(recorded_run, tmp_path):
    config = recorded_run.config
    data = make_data()
    longest = int(np.argmax(data.train.lengths))
    data = data._replace(train=Changed(data.train, longest))
    num_steps = -(-len(data.train) // 8)  # the whole epoch, in steps of 2 × 4 rows
    strict = FitConfig(
        max_steps=num_steps,
        directory=DirectoryConfig(runs_dir=tmp_path),
        compile=config.compile,
        progress=False,
        plan=config.plan,
        decoder=config.decoder,
    )
    length = data.train.lengths[longest]
    with pytest.raises(ValueError, match=rf"id {longest}: {length - 1} tokens, planned {length} tokens"):
        fit(strict, data)
