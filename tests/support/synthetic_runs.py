"""Writes run directories without training, with the differences that a test asks for."""

import json

import numpy as np

from jvarlen.compiling.report import CompileReport, CompileRow
from jvarlen.planning.buckets import Bucket

BUCKETS = ((32, 16), (16, 32), (8, 64), (4, 128))
MB = 1_000_000


def records_of(num_steps, *, seed=0):
    """Records of training steps as `fit` writes them, and an evaluation every fifth of them."""
    rng = np.random.default_rng(seed)
    steps = np.arange(num_steps)
    rows, length = np.array(BUCKETS)[rng.integers(len(BUCKETS), size=num_steps)].T
    num_tokens = rng.integers(300, rows * length + 1)
    num_sequences = np.maximum(num_tokens // length, 1)
    step_s = rng.uniform(0.01, 0.03, num_steps)
    base = 1e-3 * np.minimum((steps + 1) / (0.1 * num_steps + 1), 1)
    scale = np.sqrt(num_sequences / 16)
    columns = {
        "step": steps,
        "epoch": steps // 100,
        "loss": 1.5 + 4 * np.exp(-3 * steps / num_steps) + rng.normal(0, 0.15, num_steps),
        "num_tokens": num_tokens,
        "padded_tokens": rows * length,
        "padding": 1 - num_tokens / (rows * length),
        "num_sequences": num_sequences,
        "bucket_rows": rows,
        "bucket_length": length,
        "base_learning_rate": base,
        "learning_rate_scale": scale,
        "learning_rate": base * scale,
        "time_s": step_s.cumsum(),
        "step_s": step_s,
        "data_wait_s": step_s * rng.uniform(0, 0.05, num_steps),
        "stall_s": np.zeros(num_steps),
        "host_memory_bytes": 900 * MB + 1000 * steps,
    }
    names = list(columns)
    records = []
    for place, values in enumerate(zip(*(column.tolist() for column in columns.values()), strict=True)):
        if place % max(num_steps // 5, 1) == 0:
            records.append({"step": place, "evaluation": "held_out", "nats_per_token": 8 - 5 * place / num_steps})
        records.append(dict(zip(names, values, strict=True)) | {"device_memory_bytes": None})
    return records


def write_run(path, num_steps=60, *, seed=0, records=None, has_ended=True, settings=None):
    """A directory of a run."""
    records = records_of(num_steps, seed=seed) if records is None else records
    path.mkdir(parents=True)
    settings = {"format": 4, "seed": seed, "plan": {"max_tokens": 512, "order": "shuffle"}} | (settings or {})
    (path / "config.json").write_text(json.dumps(settings))
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if has_ended:
        summary = {
            "num_steps": num_steps,
            "held_out_before": 8.0,
            "held_out_after": 3.25,
            "compile_s": 12.5,
            "compile_cpu_s": 20.25,
            "interrupted": False,
        }
        (path / "summary.json").write_text(json.dumps(summary))
        used = [record["bucket_rows"] for record in records if "loss" in record]
        rows = [
            CompileRow(Bucket(*shape), 0.25 + k, 2.0 * k + 1, k % 2 == 0, 1e9, MB, MB, 0, MB, MB, used.count(shape[0]))
            for k, shape in enumerate(BUCKETS)
        ]
        CompileReport(rows, 12.5, 20.25).save(path / "compile_report.json")
    return path
