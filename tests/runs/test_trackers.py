"""Trackers: every one gets every record, and none but metrics.jsonl can end a run."""

import json
import math
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jvarlen.runs import trackers
from jvarlen.runs.trackers import TensorBoardTracker, Trackers, WandbTracker, open_trackers, scalars_of

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
SCALARS = {
    "train/epoch": 0,
    "train/loss": 2.5,
    "data/num_tokens": 90,
    "data/padded_tokens": 100,
    "data/padding": 0.1,
    "data/num_sequences": 7,
    "data/bucket_rows": 12,
    "data/bucket_length": 344,
    "rate/base": 0.5,
    "rate/scale": 0.25,
    "rate/in_force": 0.125,
    "train/time_s": 3.0,
    "train/step_s": 0.5,
    "data/wait_s": 0.01,
    "memory/host_bytes": 1 << 30,
}


def lines_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_scalars_are_grouped():
    assert scalars_of({"step": 4, **STEP}) == SCALARS
    assert scalars_of({"step": 4, "evaluation": "held_out", "nats_per_token": 4.5, "num_tokens": 9}) == {
        "eval/held_out/nats_per_token": 4.5,
        "eval/held_out/num_tokens": 9,
    }


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
    with open_trackers(["tensorboard", "wandb"], None) as tracker:
        tracker.log({"step": 0, "loss": 1.0})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_names_the_extra(tmp_path, monkeypatch, name):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(ValueError, match=rf"pip install 'jvarlen\[{name}\]'"), open_trackers([name], tmp_path):
        pass


class Failing:
    """Takes so many records, and then neither takes one nor ends."""

    def __init__(self, num_records):
        self.records = []
        self._num_records = num_records

    def log(self, record):
        if len(self.records) == self._num_records:
            raise OSError("no space")
        self.records.append(record["step"])

    def close(self):
        raise OSError("still no space")


def test_a_tracker_that_fails_is_told_once_and_the_others_go_on(tmp_path, monkeypatch):
    failing = Failing(2)
    monkeypatch.setattr(trackers, "WandbTracker", lambda *arguments: failing)
    with open_trackers(["wandb", "tensorboard"], tmp_path) as tracker:
        for step in range(2):
            tracker.log({"step": step, "loss": 1.0})
        with pytest.warns(UserWarning, match=r"tracker wandb failed at step 2 \(OSError\('no space'\)\)"):
            tracker.log({"step": 2, "loss": 1.0})
        for step in range(3, 5):
            tracker.log({"step": step, "loss": 1.0})  # a second warning would be an error
        assert failing.records == [0, 1]
    assert [row["step"] for row in lines_of(tmp_path)] == list(range(5))
    assert [step for step, values in events_in(tmp_path / "tensorboard") if values] == list(range(5))


def test_a_tracker_that_fails_at_the_end_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "WandbTracker", lambda *arguments: Failing(2))
    with pytest.warns(UserWarning, match="tracker wandb failed at the end"), open_trackers(["wandb"], tmp_path) as each:
        each.log({"step": 0})
    assert len(lines_of(tmp_path)) == 1


def test_metrics_that_cannot_be_written_end_the_run():
    full = open("/dev/full", "a")  # noqa: SIM115, closed below
    with pytest.raises(OSError, match="/dev/full cannot be written: No space left"):
        Trackers(full, {}).log({"step": 0})
    with pytest.raises(OSError, match="No space left"):
        full.close()


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


def wandb_records(run_dir):
    """All records of the offline runs, in the order of time; the files are logs of LevelDB."""
    from wandb.proto import wandb_internal_pb2

    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")):
        content, place, data = path.read_bytes(), 7, b""
        while place + 7 <= len(content):
            if 32768 - place % 32768 < 7:
                place += 32768 - place % 32768
                continue
            size, kind = struct.unpack_from("<HB", content, place + 4)
            data += content[place + 7 : place + 7 + size]
            place += 7 + size
            if kind in (1, 4):  # whole, or the last part
                yield wandb_internal_pb2.Record.FromString(data)
                data = b""


def wandb_history(run_dir):
    """(step, scalars) of every step in the offline runs."""
    for record in wandb_records(run_dir):
        if record.HasField("history"):
            row = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            yield int(row.pop("_step")), {name: value for name, value in row.items() if name[0] != "_"}


@pytest.mark.multiprocess
def test_wandb_gets_scalars_in_groups_and_stays_one_run(tmp_path, monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_MODE", "online")  # what the environment wants is not asked
    (run_dir := tmp_path / "run").mkdir()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}, sys.exit, sys.excepthook
    for start_step in (0, 1):
        time.sleep(start_step and 1.0 - time.time() % 1.0)  # directories are named by the second
        with open_trackers(["wandb"], run_dir, start_step=start_step, config={"plan.max_tokens": 512}) as tracker:
            tracker.log({"step": start_step, **STEP})
            tracker.log({"step": start_step + 1, "evaluation": "held_out", "nats_per_token": math.nan})
    history = dict(wandb_history(run_dir))
    assert list(history) == [0, 1, 2]
    assert history[0] == history[1] == SCALARS
    assert history[2] == pytest.approx({"eval/held_out/nats_per_token": math.nan}, nan_ok=True)
    runs = [record.run for record in wandb_records(run_dir) if record.HasField("run")]
    assert {run.run_id for run in runs} == {(run_dir / "wandb" / "run_id").read_text()}
    assert "plan.max_tokens" in {item.key for item in runs[0].config.update}
    assert {record.exit.exit_code for record in wandb_records(run_dir) if record.HasField("exit")} == {0}
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "nothing is written elsewhere"
    links = [path for path in run_dir.rglob("*") if path.is_symlink()]
    assert all(run_dir in path.resolve().parents for path in links)
    handlers = {number: signal.getsignal(number) for number in before[0]}
    assert (handlers, sys.exit, sys.excepthook) == before


TRAINING = """
import signal, sys, time
from pathlib import Path
from jvarlen.runs.trackers import WandbTracker
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: None)
tracker = WandbTracker(Path(sys.argv[1]), {})
tracker.log({"step": 0, "loss": 1.5})
print(tracker._process.pid, flush=True)
while True:
    time.sleep(60)
"""


def processes_of(run_dir):
    """Ids of all processes that were started for a directory, service and all."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if str(run_dir).encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
        except OSError:  # it has ended, or is another's
            continue
    return found


def wait_until_gone(run_dir):
    deadline = time.monotonic() + 20.0
    while processes_of(run_dir):
        assert time.monotonic() < deadline, "processes were left behind"
        time.sleep(0.05)


@pytest.mark.multiprocess
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are looked for in /proc")
def test_wandb_outlives_interrupts_of_a_run_and_ends_with_one_that_is_killed(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    child = int(process.stdout.readline())
    own = processes_of(tmp_path / "wandb")
    assert child in own
    assert len(own) >= 2, "the service as well"
    for number in (signal.SIGINT, signal.SIGTERM):
        os.killpg(process.pid, number)
        os.kill(child, number)
    time.sleep(0.2)
    assert processes_of(tmp_path / "wandb") == own
    process.kill()
    process.communicate()
    wait_until_gone(tmp_path / "wandb")
    assert list(wandb_history(tmp_path)) == [(0, {"train/loss": 1.5})]
    assert [record.exit.exit_code for record in wandb_records(tmp_path) if record.HasField("exit")] == [1]


@pytest.mark.multiprocess
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are looked for in /proc")
@pytest.mark.parametrize(("victim", "number"), [("process", signal.SIGKILL), ("service", signal.SIGTERM)])
def test_a_wandb_that_is_killed_takes_nothing_along(tmp_path, victim, number):
    num_logged = 0
    with open_trackers(["wandb"], tmp_path) as tracker:

        def log_until_it_is_dropped():
            nonlocal num_logged
            while tracker._others and num_logged < 200:
                tracker.log({"step": num_logged, "loss": 1.5})
                num_logged += 1
                time.sleep(0.05)

        process = tracker._others["wandb"]._process.pid
        (service,) = set(processes_of(tmp_path / "wandb")) - {process}
        os.kill(process if victim == "process" else service, number)
        with pytest.warns(UserWarning, match="the tracker wandb failed at step"):
            log_until_it_is_dropped()
        tracker.log({"step": num_logged, "loss": 1.5})
    wait_until_gone(tmp_path / "wandb")
    assert len(lines_of(tmp_path)) == num_logged + 1


@pytest.mark.multiprocess
def test_a_wandb_that_does_not_start_says_why(tmp_path, monkeypatch):
    broken = tmp_path / "wandb_process.py"
    broken.write_text("raise RuntimeError('no service here')")
    monkeypatch.setattr(trackers, "__file__", str(tmp_path / "trackers.py"))
    with pytest.raises(OSError, match=r"did not start \(RuntimeError: no service here\); .*process\.log"):
        WandbTracker(tmp_path, {})


def test_a_wandb_that_hangs_holds_training_up_for_a_bounded_time_once(tmp_path, monkeypatch):
    tracker = WandbTracker(tmp_path, {})
    monkeypatch.setattr(trackers, "_END_S", 0.5)
    pid = tracker._process.pid
    os.kill(pid, signal.SIGSTOP)
    try:

        def fill_the_pipe():
            for step in range(100_000):
                tracker.log({"step": step, "loss": 1.0})

        with pytest.raises(TimeoutError, match="has read nothing"):
            fill_the_pipe()
        with pytest.raises(OSError, match="ended with code"):
            tracker.close()
    finally:
        if tracker._process.poll() is None:
            tracker._process.kill()


def test_a_power_cut_leaves_what_was_synced_and_a_gap_is_told(tmp_path):
    with open_trackers([], tmp_path) as tracker:
        for step in range(3):
            tracker.log({"step": step, "loss": 1.0})
        tracker.sync()
    with (
        pytest.warns(UserWarning, match=r"metrics\.jsonl tells of 3 of 5 steps"),
        open_trackers([], tmp_path, start_step=5),
    ):
        pass


def test_a_step_that_is_no_number_is_refused_by_name(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": "one"}\n{"step": 2}\n')
    with (
        pytest.raises(ValueError, match=r"metrics\.jsonl, line 1, is no record of a step"),
        open_trackers([], tmp_path),
    ):
        pass


def test_trackers_of_the_caller_get_every_record_and_are_closed(tmp_path):
    class Own:
        def __init__(self):
            self.records, self.is_closed = [], False

        def log(self, record):
            self.records.append(dict(record))

        def close(self):
            self.is_closed = True

    own = Own()
    with open_trackers([], tmp_path, others={"own": own}) as tracker:
        tracker.log({"step": 0, "loss": 2.0})
    assert own.records == [{"step": 0, "loss": 2.0}]
    assert own.is_closed
