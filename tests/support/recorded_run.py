"""One run, recorded once for the whole test run: what tests that only read a run look at."""

import contextlib
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from filelock import FileLock

from jvarlen import CompileOptions, FitConfig, fit
from jvarlen.models import DecoderConfig
from jvarlen.reports.run_records import read_metrics
from jvarlen.runs.config import CheckpointConfig, DataConfig, DirectoryConfig, PlanConfig
from jvarlen.runs.summary import Summary
from tests.support.run_fit import leave_pictures_empty

NUM_STEPS, EVAL_EVERY = 20, 6
BAD_LINE = "not JSON"


class RecordedRun(NamedTuple):
    """Its settings, its directory, which no test changes, what its summary says, and what it printed."""

    config: FitConfig
    run_dir: Path
    summary: Summary
    printed: str

    @property
    def records(self) -> list[dict[str, Any]]:
        return read_metrics(self.run_dir / "metrics.jsonl")

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [row for row in self.records if "loss" in row]


def write_lines(path: Path, seed: int, num_lines: int) -> None:
    rng = np.random.default_rng(seed)
    lines = [rng.integers(97, 101, length, np.uint8).tobytes().decode() for length in rng.integers(1, 33, num_lines)]
    path.write_text("\n".join(json.dumps({"body": line}) for line in lines))


def recorded_run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """The run, which the first process of tests that asks for it records; others wait."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "recorded"
    files = [folder / f"{name}.jsonl" for name in ("train", "small", "other")]
    config = FitConfig(
        data=DataConfig(
            files=tuple(files[:2]),
            weights=(3.0, 1.0),
            mixture_samples=100,
            field="body",
            eval_data=(files[2],),
            held_out_fraction=0.1,
            on_bad_sample="skip",
            max_bad_fraction=0.1,
        ),
        max_steps=NUM_STEPS,
        num_epochs=8,
        eval_every=EVAL_EVERY,
        checkpoints=CheckpointConfig(checkpoint_every=8, keep_last=1, keep_best=1),
        directory=DirectoryConfig(runs_dir=folder / "runs"),
        trackers=("tensorboard",),
        profile=2,
        compile=CompileOptions(cache_dir=None),
        progress=False,
        plan=PlanConfig(
            max_tokens=128, max_shapes=2, max_length=32, overlong="truncate", num_microbatches=2, packing="padded"
        ),
        decoder=DecoderConfig(num_layers=1, width=8, num_heads=1),
    )
    printed = folder / "printed.txt"  # written last
    with FileLock(shared / "recorded.lock"):
        if not printed.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
            folder.mkdir()
            for seed, (path, num_lines) in enumerate(zip(files, (150, 40, 30), strict=True)):
                write_lines(path, seed, num_lines)
            files[0].write_text(f"\n{files[0].read_text()}\n{BAD_LINE}")
            with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as stdout:
                leave_pictures_empty(patch.setattr)
                fit(config)
            printed.write_text(stdout.getvalue())
    run_dir = (folder / "runs" / "latest").resolve()
    summary = Summary(**json.loads((run_dir / "summary.json").read_text()))
    return RecordedRun(config, run_dir, summary, printed.read_text())
