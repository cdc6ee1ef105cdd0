"""Training on a JSONL file of your own: by `fit`, stopped and resumed, and by a loop of your own.

Run it: python examples/own_jsonl.py, or with a file of yours: python examples/own_jsonl.py FILE.jsonl FIELD
Each line of the file is an object with text in its field FIELD. `fit` writes to runs/own_jsonl.
"""

import dataclasses
import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import optax

import jvarlen
from jvarlen.data.open import open_data
from jvarlen.data.split import split_held_out
from jvarlen.models import DecoderConfig, init_params, make_loss_fn
from jvarlen.reports.run_records import read_metrics
from jvarlen.runs.config import DataConfig, DirectoryConfig
from jvarlen.runs.plan_config import PlanConfig

FIELD = sys.argv[2] if len(sys.argv) > 2 else "body"
FOLDER = Path("runs/own_jsonl")


def write_jsonl(path):
    """Sums in words, the longer the rarer."""
    rng = np.random.default_rng(0)
    terms = [rng.integers(100, size=1 + n) for n in rng.geometric(0.2, 1_500).clip(max=12)]
    texts = [" plus ".join(map(str, numbers)) + f" is {sum(numbers)}." for numbers in terms]
    path.write_text("".join(json.dumps({"id": i, FIELD: text}) + "\n" for i, text in enumerate(texts)))
    return path


def press_ctrl_c(record):
    """Stops the run; `fit` hands the record of every step to its trackers."""
    if record["step"] == 20:
        signal.raise_signal(signal.SIGINT)


FOLDER.mkdir(parents=True, exist_ok=True)
path = Path(sys.argv[1]) if len(sys.argv) > 1 else write_jsonl(FOLDER / "sums.jsonl")

print(f"\n=== {path} by fit, stopped on the way ===")
model = DecoderConfig(num_layers=1, width=32, num_heads=1)
config = jvarlen.FitConfig(
    # tokenizer=Path("tokenizer.json") trains on its tokens, otherwise bytes are trained on
    data=DataConfig(files=(path,), field=FIELD),
    max_steps=60,
    num_epochs=10,
    directory=DirectoryConfig(runs_dir=FOLDER),
    progress=False,
    plan=PlanConfig(max_tokens=2048, max_shapes=2, max_length=128),
    decoder=model,
)
stopped = jvarlen.fit(config, trackers={"stop": SimpleNamespace(log=press_ctrl_c, close=lambda: None)})

print("\n=== the same run, resumed ===")
resumed = jvarlen.fit(dataclasses.replace(config, directory=DirectoryConfig(resume=stopped.run_dir)))
steps = [record for record in read_metrics(resumed.run_dir / "metrics.jsonl") if "loss" in record]
print(f"stopped after {stopped.summary.num_steps} of {config.max_steps} steps, resumed; steps taken: {len(steps)}")
print(f"loss of fit: {steps[0]['loss']:.3f} -> {steps[-1]['loss']:.3f}")

print("\n=== the same data in a loop of your own ===")
dataset = split_held_out(open_data(path, field=FIELD, progress=False), 0.02).train
lengths = jvarlen.measure_lengths(dataset, progress=False)
buckets = jvarlen.make_buckets(lengths, 2048, max_shapes=2, max_length=128, overlong="truncate")
plan = jvarlen.make_plan(lengths, buckets, order="shuffle", overlong="truncate")
optimizer = optax.chain(optax.adamw(1e-2), jvarlen.scale_by_batch_size(32, rule="sqrt"))
train_step = jvarlen.make_train_step(make_loss_fn(model), optimizer)
state = train_step.init(init_params(model, seed=0))
step = jvarlen.compile_buckets(train_step, state, plan, progress=False)
all_metrics = []
with jvarlen.no_recompiles():
    for batch in jvarlen.load(plan, dataset):
        state, metrics = step(state, batch)
        all_metrics.append(metrics)
print(f"loss of the loop: {float(all_metrics[0].loss):.3f} -> {float(all_metrics[-1].loss):.3f}")
