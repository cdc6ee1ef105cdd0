"""A run that is killed over and over: nothing is lost."""

import collections
import json
import os
from pathlib import Path

import numpy as np
import pytest

from jvarlen.reports.run_records import read_metrics
from tests.runs.run_faults import GAPS
from tests.support import forks, processes

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

NUM_KILLS = 8
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


def test_a_run_that_is_killed_eight_times_ends_as_one_that_is_not(tmp_path):
    """Killed while lengths are scanned, while it compiles, amid the steps, and while a checkpoint is written."""
    folder, fixed = tmp_path, {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(processes.ROOT)}
    env = os.environ | {"XLA_FLAGS": processes.COMPILE_FAST} | fixed
    ended = forks.run(Path(__file__).with_name("run_faults.py"), str(folder), env=env, seconds=400)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    kills = [json.loads(line) for line in ended.stdout.splitlines()]
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
