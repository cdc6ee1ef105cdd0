"""Options of a run: evaluation on the way, keeping the best, trackers, profiling, and named directories."""

import dataclasses
import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jvarlen import FitConfig, fit
from jvarlen.reports.run_page import read_metrics
from jvarlen.runs.config import DirectoryConfig
from jvarlen.runs.saved_config import load_config
from tests.support.recorded_run import EVAL_EVERY, NUM_STEPS
from tests.support.run_fit import make_data
from tests.support.settings import changed

pytestmark = pytest.mark.slow


@pytest.fixture
def records(recorded_run):
    return read_metrics(recorded_run.run_dir / "metrics.jsonl")


@pytest.fixture
def continued(recorded_run, tmp_path):
    """The settings of a copy of the run, which a test may change."""
    shutil.copytree(recorded_run.run_dir, tmp_path / "run")
    return changed(recorded_run.config, run_dir=tmp_path / "run")


def test_every_set_is_evaluated_when_it_is_due(recorded_run, records):
    evaluations = [row for row in records if "evaluation" in row]
    due = [0, *range(EVAL_EVERY, NUM_STEPS, EVAL_EVERY), NUM_STEPS]
    assert [(row["step"], row["evaluation"]) for row in evaluations] == [
        (step, name) for step in due for name in ("held_out", "other")
    ]
    last = {row["evaluation"]: row["nats_per_token"] for row in evaluations[-2:]}
    assert last == recorded_run.summary.evaluations
    assert last["held_out"] == recorded_run.summary.held_out_after
    assert evaluations[0]["nats_per_token"] == recorded_run.summary.held_out_before
    lengths = [len(json.loads(line)["body"]) for line in Path(evaluations_file(recorded_run)).read_text().splitlines()]
    assert {row["num_tokens"] for row in evaluations if row["evaluation"] == "other"} == {sum(lengths)}


def evaluations_file(recorded_run):
    return load_config(recorded_run.run_dir / "config.json").data.eval_data[0]


def test_the_newest_and_the_best_are_kept(recorded_run, records):
    held_out = {row["step"]: row["nats_per_token"] for row in records if row.get("evaluation") == "held_out"}
    candidates = {step: held_out[step] for step in held_out if step}
    kept = {int(path.name) for path in (recorded_run.run_dir / "checkpoints").iterdir() if path.name.isdigit()}
    assert kept == {NUM_STEPS, min(candidates, key=candidates.get)}


def test_every_step_is_recorded_with_what_it_took(recorded_run, records):
    steps = [row for row in records if "loss" in row]
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


def test_the_tracker_has_what_the_log_has(recorded_run, records):
    from tensorboardX.proto import event_pb2

    (path,) = (recorded_run.run_dir / "tensorboard").iterdir()
    events, data = [], path.read_bytes()
    while data:  # length, its checksum, the event, its checksum
        length = int.from_bytes(data[:8], "little")
        events.append(event_pb2.Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    losses = {e.step: v.simple_value for e in events for v in e.summary.value if v.tag == "train/loss"}
    assert losses == {row["step"]: np.float32(row["loss"]) for row in records if "loss" in row}
    tags = {value.tag for event in events for value in event.summary.value}
    assert {
        "eval/held_out/nats_per_token",
        "eval/other/nats_per_token",
        "train/learning_rate",
        "train/data_wait_s",
    } <= tags


def test_a_trace_has_the_steps_with_their_buckets(recorded_run):
    (path,) = (recorded_run.run_dir / "profile").rglob("*.trace.json.gz")
    trace = json.loads(gzip.decompress(path.read_bytes()))
    (bucket,) = {f"{row['bucket_rows']}×{row['bucket_length']}" for row in read_metrics_of(recorded_run)}
    names = [event.get("name") for event in trace["traceEvents"]]
    assert names.count(f"train {bucket}") == 2


def read_metrics_of(recorded_run):
    return [row for row in read_metrics(recorded_run.run_dir / "metrics.jsonl") if "loss" in row]


def test_a_directory_that_is_named_is_continued(continued, capsys):
    again = fit(dataclasses.replace(continued, max_steps=NUM_STEPS + 2, profile=0))
    assert again.run_dir.resolve() == continued.directory.run_dir.resolve()
    assert "changed: max_steps: 20, 22" in capsys.readouterr().out
    assert [row["step"] for row in read_metrics_of(again)] == list(range(NUM_STEPS + 2))
    # What was evaluated at its end was the end of the run then.
    assert {row["step"] for row in read_metrics(again.run_dir / "metrics.jsonl") if "evaluation" in row} == {
        0, 6, 12, 18, NUM_STEPS + 2,
    }  # fmt: skip


def test_other_data_of_the_same_lengths_are_refused(continued):
    path = continued.data.eval_data[0]
    before = path.read_text()
    try:
        path.write_text(before.replace("a", "e"))
        with pytest.raises(ValueError, match=r"began with another content of .*other\.jsonl: put it back"):
            fit(continued)
        keys = continued.directory.run_dir / "data.json"
        keys.write_text("{}")
        with pytest.raises(ValueError, match=r"data\.json is damaged: it has no content key of .*other\.jsonl"):
            fit(continued)
    finally:
        path.write_text(before)


class Changed:
    """Samples that know their lengths, and of which one has become shorter."""

    def __init__(self, dataset, sample_id):
        self._dataset, self._sample_id = dataset, sample_id
        self.lengths = dataset.lengths

    def __len__(self):
        return len(self._dataset)

    def __getitem__(self, index):
        sample = self._dataset[index]
        return sample[:-1] if index == self._sample_id else sample


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
