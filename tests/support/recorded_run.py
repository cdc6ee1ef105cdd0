"""One run, recorded once for the whole test run: what tests that only read a run look at."""

import json
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from filelock import FileLock

from jvarlen import CompileOptions, FitConfig, fit
from jvarlen.models import DecoderConfig
from jvarlen.runs.config import CheckpointConfig, DataConfig, DirectoryConfig, PlanConfig
from jvarlen.runs.summary import Summary
from tests.support.run_fit import leave_pictures_empty

NUM_STEPS, EVAL_EVERY = 20, 6


class RecordedRun(NamedTuple):
    """Its settings, its directory, which no test changes, and what its summary says."""

    config: FitConfig
    run_dir: Path
    summary: Summary


def text_file(path: Path, seed: int, num_lines: int) -> Path:
    rng = np.random.default_rng(seed)
    lines = [rng.integers(97, 101, length, np.uint8).tobytes().decode() for length in rng.integers(1, 33, num_lines)]
    path.write_text("\n".join(json.dumps({"body": line}) for line in lines))
    return path


def recorded_run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """The run, which the first process of tests that asks for it records; others wait."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "recorded"
    with FileLock(shared / "recorded.lock"):
        begins = not folder.exists()
        folder.mkdir(exist_ok=True)
        config = FitConfig(
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
            compile=CompileOptions(cache_dir=None),
            progress=False,
            plan=PlanConfig(max_tokens=128, max_shapes=1, max_length=32, num_microbatches=2, packing="padded"),
            decoder=DecoderConfig(num_layers=1, width=8, num_heads=1),
        )
        if begins:
            with pytest.MonkeyPatch.context() as patch:
                leave_pictures_empty(patch.setattr)
                fit(config)
    run_dir = folder / "run"
    return RecordedRun(config, run_dir, Summary(**json.loads((run_dir / "summary.json").read_text())))
