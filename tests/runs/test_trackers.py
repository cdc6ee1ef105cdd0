"""Trackers: every one gets every record, and none but metrics.jsonl can end a run."""

import json
import math
import struct

import numpy as np
import pytest

from jvarlen.runs import directory
from jvarlen.runs.directory import TensorBoardTracker, Trackers, open_trackers

STEP = {
    "epoch": 0,
    "loss": 2.5,
    "num_tokens": 90,
    "padded_tokens": 100,
    "padding": 0.1,
    "num_sequences": 7,
    "bucket_rows": 12,
    "bucket_length": 344,
    "base_learning_rate": 0.5,
    "learning_rate_scale": 0.25,
    "learning_rate": 0.125,
    "time_s": 3.0,
    "step_s": 0.5,
    "data_wait_s": 0.01,
    "host_memory_bytes": 1 << 30,
    "device_memory_bytes": None,
}
SCALARS = {f"train/{name}": value for name, value in STEP.items() if value is not None}


def lines_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_what_json_does_not_have_is_null(tmp_path):
    with open_trackers([], tmp_path) as log:
        log.log({"step": 0, "loss": math.nan, "learning_rate": -math.inf})
        assert lines_of(tmp_path) == [{"step": 0, "loss": None, "learning_rate": None}], "at once"


def test_a_resumed_log_goes_on_where_the_checkpoint_was(tmp_path):
    with open_trackers([], tmp_path) as tracker:
        for step in range(5):
            tracker.log({"step": step, "try": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "tr')  # cut off by a kill
    with open_trackers([], tmp_path, start_step=3) as tracker:
        tracker.log({"step": 3, "try": 2})
    assert [(row["step"], row["try"]) for row in lines_of(tmp_path)] == [(0, 1), (1, 1), (2, 1), (3, 2)]


def test_a_process_that_does_not_write_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open_trackers(["tensorboard"], None) as tracker:
        tracker.log({"step": 0, "loss": 1.0})
    assert not list(tmp_path.iterdir())


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(directory.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(ValueError, match=r"pip install 'jvarlen\[tensorboard\]'"):
        TensorBoardTracker(tmp_path)


class Failing:
    """A tracker that fails after `num_records` records, and when it is closed."""

    def __init__(self, num_records):
        self.records = []
        self._num_records = num_records

    def log(self, record):
        if len(self.records) == self._num_records:
            raise OSError("no space")
        self.records.append(record["step"])

    def close(self):
        raise OSError("still no space")


def test_a_tracker_that_fails_is_told_once_and_the_others_go_on(tmp_path):
    failing = Failing(2)
    with open_trackers(["tensorboard"], tmp_path, others={"own": failing}) as tracker:
        for step in range(2):
            tracker.log({"step": step, "loss": 1.0})
        with pytest.warns(UserWarning, match=r"tracker own failed at step 2 \(OSError\('no space'\)\)"):
            tracker.log({"step": 2, "loss": 1.0})
        for step in range(3, 5):
            tracker.log({"step": step, "loss": 1.0})  # a second warning would be an error
        assert failing.records == [0, 1]
    assert [row["step"] for row in lines_of(tmp_path)] == list(range(5))
    assert [step for step, values in events_in(tmp_path / "tensorboard") if values] == list(range(5))


def test_a_tracker_that_fails_at_the_end_is_told(tmp_path):
    with (
        pytest.warns(UserWarning, match="tracker own failed at the end"),
        open_trackers([], tmp_path, others={"own": Failing(2)}) as each,
    ):
        each.log({"step": 0})
    assert len(lines_of(tmp_path)) == 1


def test_metrics_that_cannot_be_written_end_the_run():
    with (
        pytest.raises(OSError, match="/dev/full cannot be written: No space left"),
        open("/dev/full", "ab", buffering=0) as full,
    ):
        Trackers(full, {}).log({"step": 0})


def events_in(directory):
    """(step, scalars, or what starts a session) of each event, as TensorBoard reads them: files in order of name."""
    from tensorboardX.proto import event_pb2

    events = []
    for path in sorted(directory.iterdir()):
        assert "tfevents" in path.name
        content = path.read_bytes()
        while content:
            (size,) = struct.unpack_from("<Q", content)
            event = event_pb2.Event.FromString(content[12 : 12 + size])
            content = content[16 + size :]
            if event.HasField("session_log"):
                events.append((event.step, None))
            elif event.HasField("summary"):
                events.append((event.step, {value.tag: value.simple_value for value in event.summary.value}))
    return events


@pytest.mark.slow
def test_tensorboard_has_what_the_log_of_a_run_has(recorded_run):
    shown = [values for _, values in events_in(recorded_run.run_dir / "tensorboard") if values]
    losses = [values["train/loss"] for values in shown if "train/loss" in values]
    assert losses == [np.float32(row["loss"]) for row in recorded_run.steps]
    named = {name for values in shown for name in values}
    for name in ("eval/held_out/nats_per_token", "eval/other/nats_per_token", "train/learning_rate"):
        assert name in named


def test_tensorboard_gets_scalars_in_groups(tmp_path):
    with open_trackers(["tensorboard"], tmp_path) as tracker:
        tracker.log({"step": 0, **STEP})
        tracker.log({"step": 1, "evaluation": "held_out", "nats_per_token": math.nan})
    start, step, evaluation = events_in(tmp_path / "tensorboard")
    assert start == (0, None)
    assert step == (0, pytest.approx(SCALARS))
    assert evaluation == (1, pytest.approx({"eval/held_out/nats_per_token": math.nan}, nan_ok=True))


def test_tensorboard_hides_what_is_taken_anew(tmp_path):
    for start_step in (0, 3):
        tracker = TensorBoardTracker(tmp_path, start_step=start_step)
        for step in range(start_step, start_step + 5):
            tracker.log({"step": step, "loss": float(start_step)})
        tracker.close()
    shown = {}
    for step, values in events_in(tmp_path):
        if values is None:  # a session starts: what was logged of its steps is purged
            shown = {earlier: loss for earlier, loss in shown.items() if earlier < step}
        else:
            shown[step] = values["train/loss"]
    assert shown == {0: 0, 1: 0, 2: 0, 3: 3, 4: 3, 5: 3, 6: 3, 7: 3}
    assert len(list(tmp_path.iterdir())) == 2


def test_a_power_cut_leaves_what_was_synced_and_a_gap_is_told(tmp_path):
    with open_trackers([], tmp_path) as tracker:
        for step in range(3):
            tracker.log({"step": step, "loss": 1.0})
        tracker.sync()
    with (
        pytest.warns(UserWarning, match=r"metrics\.jsonl has records of 3 of 5 steps"),
        open_trackers([], tmp_path, start_step=5),
    ):
        pass


def test_a_step_that_is_no_number_is_refused_by_name(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": "one"}\n{"step": 2}\n')
    with (
        pytest.raises(ValueError, match=r"metrics\.jsonl, line 1, is not a record of a step"),
        open_trackers([], tmp_path),
    ):
        pass
