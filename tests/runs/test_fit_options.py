"""Options of a run: evaluation on the way, keeping the best, trackers, profiling, and named directories."""

import dataclasses
import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from jvarlen import CompileOptions, FitConfig, fit
from jvarlen.models import DecoderConfig
from jvarlen.reports.run_page import read_metrics
from jvarlen.runs.config import CheckpointConfig, DataConfig, DirectoryConfig, PlanConfig
from jvarlen.runs.saved_config import load_config
from tests.support.run_fit import make_data

pytestmark = pytest.mark.slow

NUM_STEPS, EVAL_EVERY = 20, 6


def text_file(path, seed, num_lines):
    rng = np.random.default_rng(seed)
    lines = [rng.integers(97, 101, length, np.uint8).tobytes().decode() for length in rng.integers(1, 33, num_lines)]
    path.write_text("\n".join(json.dumps({"body": line}) for line in lines))
    return path


@pytest.fixture(scope="module")
def config(tmp_path_factory, compilation_cache):
    folder = tmp_path_factory.mktemp("options")
    return FitConfig(
        data=DataConfig(
            files=(text_file(folder / "train.jsonl", 0, 150), text_file(folder / "small.jsonl", 1, 40)),
            weights=(3.0, 1.0),
            mixture_samples=100,
            field="body",
            eval_data=(text_file(folder / "other.jsonl", 2, 30),),
            held_out_fraction=0.1,
        ),
        max_steps=NUM_STEPS,
        num_epochs=8,
        eval_every=EVAL_EVERY,
        checkpoints=CheckpointConfig(checkpoint_every=8, keep_last=1, keep_best=1),
        directory=DirectoryConfig(run_dir=folder / "run"),
        trackers=("tensorboard",),
        profile=2,
        compile=CompileOptions(cache_dir=compilation_cache),
        progress=False,
        plan=PlanConfig(max_tokens=128, max_shapes=1, max_length=32, num_microbatches=2, packing="padded"),
        decoder=DecoderConfig(num_layers=1, width=8, num_heads=1),
    )


@pytest.fixture(scope="module")
def result(config):
    return fit(config)


@pytest.fixture(scope="module")
def records(result):
    return read_metrics(result.run_dir / "metrics.jsonl")


def test_every_set_is_evaluated_when_it_is_due(result, records):
    evaluations = [row for row in records if "evaluation" in row]
    due = [0, *range(EVAL_EVERY, NUM_STEPS, EVAL_EVERY), NUM_STEPS]
    assert [(row["step"], row["evaluation"]) for row in evaluations] == [
        (step, name) for step in due for name in ("held_out", "other")
    ]
    last = {row["evaluation"]: row["nats_per_token"] for row in evaluations[-2:]}
    assert last == result.summary.evaluations
    assert last["held_out"] == result.summary.held_out_after
    assert evaluations[0]["nats_per_token"] == result.summary.held_out_before
    lengths = [len(json.loads(line)["body"]) for line in Path(evaluations_file(result)).read_text().splitlines()]
    assert {row["num_tokens"] for row in evaluations if row["evaluation"] == "other"} == {sum(lengths)}


def evaluations_file(result):
    return load_config(result.run_dir / "config.json").data.eval_data[0]


def test_the_newest_and_the_best_are_kept(result, records):
    held_out = {row["step"]: row["nats_per_token"] for row in records if row.get("evaluation") == "held_out"}
    candidates = {step: held_out[step] for step in held_out if step}
    kept = {int(path.name) for path in (result.run_dir / "checkpoints").iterdir() if path.name.isdigit()}
    assert kept == {NUM_STEPS, min(candidates, key=candidates.get)}


def test_every_step_is_recorded_with_what_it_took(result, records):
    steps = [row for row in records if "loss" in row]
    assert [row["step"] for row in steps] == list(range(NUM_STEPS))
    for row in steps:
        assert row["padding"] == 1 - row["num_tokens"] / row["padded_tokens"]
        assert 0 <= row["data_wait_s"] <= row["step_s"]
        assert row["host_memory_bytes"] > 1e7
        assert row["device_memory_bytes"] is None, "this backend does not tell"
    # Evaluations are left out of both; reading the metrics of a step comes before it is timed.
    assert sum(row["step_s"] + row["stall_s"] for row in steps) == pytest.approx(result.summary.train_s, rel=0.05)
    times = [row["time_s"] for row in steps]
    assert times == sorted(times)
    assert 0 <= result.summary.data_wait < 1


def test_the_tracker_has_what_the_log_has(result, records):
    from tensorboardX.proto import event_pb2

    (path,) = (result.run_dir / "tensorboard").iterdir()
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


def test_a_trace_has_the_steps_with_their_buckets(result):
    (path,) = (result.run_dir / "profile").rglob("*.trace.json.gz")
    trace = json.loads(gzip.decompress(path.read_bytes()))
    (bucket,) = {f"{row['bucket_rows']}×{row['bucket_length']}" for row in read_metrics_of(result)}
    names = [event.get("name") for event in trace["traceEvents"]]
    assert names.count(f"train {bucket}") == 2


def read_metrics_of(result):
    return [row for row in read_metrics(result.run_dir / "metrics.jsonl") if "loss" in row]


def test_a_directory_that_is_named_is_made_and_then_continued(config, result, capsys):
    assert result.run_dir == config.directory.run_dir
    again = fit(dataclasses.replace(config, max_steps=NUM_STEPS + 2, profile=0))
    assert again.run_dir.resolve() == config.directory.run_dir.resolve()
    assert "changed: max_steps: 20, 22" in capsys.readouterr().out
    assert [row["step"] for row in read_metrics_of(again)] == list(range(NUM_STEPS + 2))
    # What was evaluated at its end was the end of the run then.
    assert {row["step"] for row in read_metrics(again.run_dir / "metrics.jsonl") if "evaluation" in row} == {
        0, 6, 12, 18, NUM_STEPS + 2,
    }  # fmt: skip


def test_other_data_of_the_same_lengths_are_refused(config, result):
    path = config.data.eval_data[0]
    before = path.read_text()
    try:
        path.write_text(before.replace("a", "e"))
        with pytest.raises(ValueError, match=r"began with another content of .*other\.jsonl: put it back"):
            fit(config)
        keys = config.directory.run_dir / "data.json"
        intact = keys.read_bytes()
        keys.write_text("{}")
        with pytest.raises(ValueError, match=r"data\.json is damaged: it has no content key of .*other\.jsonl"):
            fit(config)
        keys.write_bytes(intact)
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


def test_a_sample_that_is_not_as_planned_ends_the_run(config, tmp_path):
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
