"""Faults in a run, its processes or its files: nothing is lost, mistaken or waited for."""

import collections
import itertools
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from jvarlen import fit
from jvarlen.cli import main
from jvarlen.reports.run_page import read_metrics
from tests.runs.run_faults import GAPS
from tests.runs.run_faults_of_processes import HEARTBEAT_S
from tests.support import forks, processes
from tests.support.run_fit import make_config, make_data
from tests.support.settings import changed

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

NUM_KILLS = 8
WITHIN_S = 2 * HEARTBEAT_S + 10  # of a death, others end
OF_THE_STEPS = ("step", "loss", "learning_rate", "num_tokens", "num_sequences", "bucket_rows", "bucket_length")
OF_THE_WHOLE = (
    "held_out_before", "held_out_after", "num_steps", "num_tokens", "padding",
    "compilations_after_first_step", "interrupted", "num_skipped",
)  # fmt: skip


def steps(run_dir):
    """What is the same in every run of the same steps, by step."""
    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if "loss" in row]
    return [[row[name] for name in OF_THE_STEPS] for row in rows]


def whole(summary):
    return {name: summary[name] for name in OF_THE_WHOLE}


@pytest.fixture(scope="module")
def killed_often(tmp_path_factory):
    """A folder, and a program that kills its runs there; it mostly waits, as other tests do meanwhile."""
    folder = tmp_path_factory.mktemp("killed")
    env = os.environ | {
        "XLA_FLAGS": processes.COMPILE_FAST,
        "OMP_NUM_THREADS": "1",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(processes.ROOT),
    }
    with (folder / "output").open("w") as output, (folder / "errors").open("w") as errors:
        program = forks.Fork(
            Path(__file__).with_name("run_faults.py"), [str(folder)], env=env, output=output, errors=errors
        )
        try:
            yield folder, program
        finally:
            program.kill()


def wait_until(holds, running, seconds=180):
    """Returns when a condition holds that must come before the processes end."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        printed = [running.output(rank) for rank in range(len(running.processes))]
        assert all(process.poll() is None for process in running.processes), printed
        time.sleep(0.02)


@pytest.mark.usefixtures("killed_often")
def test_processes_that_lose_one_name_it_and_a_restart_goes_on(tmp_path, compilation_cache):
    """SIGSTOP to one; the run goes on without others. SIGKILL is what `test_launching` tries."""
    program = Path(__file__).with_name("run_faults_of_processes.py")

    with processes.started(program, 2, str(tmp_path), "160") as running:
        wait_until(lambda: "hangs" in running.output(1), running)
        running.processes[1].send_signal(signal.SIGSTOP)
        struck = time.monotonic()
        survivor = running.processes[0].wait(WITHIN_S)
        assert time.monotonic() - struck < WITHIN_S
        printed = running.output(0)
    assert survivor == 2, printed
    assert f"lost process 1: no sign of life in {HEARTBEAT_S} s" in printed
    (run_dir,) = tmp_path.glob("20*")
    assert any(path.name.isdigit() and int(path.name) for path in run_dir.glob("checkpoints/*"))
    config = make_config(tmp_path / "alone", compilation_cache)
    config = changed(config, checkpoint_every=30, max_steps=60)
    assert fit(changed(config, resume=run_dir), make_data()).summary.num_steps == 60
    alone, found = steps(fit(config, make_data()).run_dir), steps(run_dir)
    assert [row[2:] for row in found] == [row[2:] for row in alone]
    np.testing.assert_allclose([row[1] for row in found], [row[1] for row in alone], rtol=1e-5)


def flip(whole):
    return whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 255]) + whole[len(whole) // 2 + 1 :]


DAMAGES = {
    "truncated": lambda whole: whole[: len(whole) // 2],
    "flipped": flip,
    "foreign": lambda whole: b"PK\x03\x04 something else altogether",
    "empty": lambda whole: b"",
}


@pytest.fixture(scope="module")
def ended_run(tmp_path_factory):
    """A run of the command over a file of lines, as it is typed."""
    folder = tmp_path_factory.mktemp("ended")
    lines = [sample.tobytes() for sample in make_data().train]
    (folder / "lines.txt").write_bytes(b"\n".join([b"", *lines, b"", b"end"]))
    assert main(["train", "--data", str(folder / "lines.txt"), "--runs-dir", str(folder / "runs"), *SMALL]) == 0
    return (folder / "runs" / "latest").resolve()


SMALL = [
    "--on-bad-sample", "skip", "--max-bad-fraction", "0.1",
    "--held-out-fraction", "0.1", "--max-steps", "4", "--num-epochs", "9", "--checkpoint-every", "2", "--no-progress",
    "--compile.cache-dir", "None", "--max-tokens", "128", "--max-shapes", "1", "--max-length", "32",
    "--decoder.num-layers", "1", "--decoder.width", "8", "--decoder.num-heads", "1",
]  # fmt: skip


def contents(run_dir):
    return {path.relative_to(run_dir): path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *itertools.product(["plan.npz"], DAMAGES),
        *itertools.product(["config.json"], ["empty"]),
        *itertools.product(["metrics.jsonl", "bad_samples.jsonl", "checkpoint"], ["flipped"]),
    ],
)
def test_a_damaged_file_of_a_run_is_refused_by_name_and_nothing_is_changed(ended_run, name, damage, capsys):
    damaged = ended_run / name
    if name == "checkpoint":
        damaged = max(ended_run.glob("checkpoints/4/**/d/*"), key=lambda path: path.stat().st_size)
    whole = damaged.read_bytes()
    # The first byte of the log: the last line may be cut off, as by a kill, and other digits of a loss show nothing.
    struck = bytes([whole[0] ^ 1]) + whole[1:] if name.endswith(".jsonl") else DAMAGES[damage](whole)
    capsys.readouterr()
    damaged.write_bytes(struck)
    before = contents(ended_run)
    try:
        assert main(["train", "--resume", str(ended_run), "--no-progress"]) == 2
        assert contents(ended_run) == before
    finally:
        damaged.write_bytes(whole)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jvarlen: ")
    assert (str(ended_run / "checkpoints") if name == "checkpoint" else name) in line


def test_lines_that_are_no_samples_are_left_out_and_listed(ended_run):
    path = str(ended_run.parents[1] / "lines.txt")
    rows = [json.loads(line) for line in (ended_run / "bad_samples.jsonl").read_text().splitlines()]
    assert rows == [
        {"step": None, "file": path, "record": f"line {number}", "reason": "empty"}
        for number in (1, len(make_data().train) + 2)
    ]
    summary = json.loads((ended_run / "summary.json").read_text())
    assert (summary["num_skipped_records"], summary["num_skipped"]) == (2, 0)


def test_a_resume_that_is_refused_changes_nothing_of_an_ended_run(ended_run, capsys):
    before = contents(ended_run)
    assert main(["train", "--resume", str(ended_run), "--max-steps", "1", "--no-progress"]) == 2
    assert "the checkpoint is at step 4, training takes 1" in capsys.readouterr().err
    assert contents(ended_run) == before


def test_a_run_that_is_killed_eight_times_ends_as_one_that_is_not(killed_often):
    """Killed while lengths are scanned, while it compiles, amid the steps, and while a checkpoint is written."""
    folder, program = killed_often
    code, printed = program.wait(400), (folder / "output").read_text()
    assert code == 0, printed + (folder / "errors").read_text()
    kills = [json.loads(line) for line in printed.splitlines()]
    struck = collections.Counter(kill["moment"] for kill in kills if kill["struck"])
    assert struck == dict.fromkeys(("scan", "compile", "step", "checkpoint"), NUM_KILLS // 4), kills
    assert {kill["code"] for kill in kills} == {-9}

    (left_alone,), (killed,) = (
        [path for path in (folder / name).iterdir() if not path.is_symlink()] for name in ("whole", "killed")
    )
    assert [row[0] for row in steps(left_alone)] == list(range(80))
    assert steps(killed) == steps(left_alone)
    summaries = [json.loads((folder / f"{name}.json").read_text()) for name in ("whole", "killed")]
    assert whole(summaries[0]) == whole(summaries[1])
    bad = (left_alone / "bad_samples.jsonl").read_text()
    assert (killed / "bad_samples.jsonl").read_text() == bad
    rows = [json.loads(line) for line in bad.splitlines()]
    assert summaries[0]["num_skipped"] == len(rows) > 10
    assert {(row["id"], row["reason"]) for row in rows} == {(i, f"OSError: sample {i} is gone") for i in GAPS}
    assert len({(row["epoch"], row["id"]) for row in rows}) == len(rows)
    with np.load(folder / "whole.npz") as one, np.load(folder / "killed.npz") as other:
        assert one.files == other.files
        assert all(one[name].tobytes() == other[name].tobytes() for name in one.files)
    assert sorted(path.name for path in killed.iterdir()) == sorted(path.name for path in left_alone.iterdir())
    assert sorted(path.name for path in killed.glob("checkpoints/*")) == sorted(
        path.name for path in left_alone.glob("checkpoints/*")
    ), "nothing half-written is left"
