"""A PyTorch process of the bucket benchmark: writes the seconds of each way to a JSON file.

Arguments: the settings as JSON, and the file for the answers. Torch's own environment variables say where compiled code
is kept. Imports are not timed.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo

import torch_ref

Take = Callable[[torch.optim.Optimizer, torch_ref.Batch], Any]


class Way(NamedTuple):
    """A model that trains in one way, and what it took to get there."""

    take_step: Take
    optimizer: torch.optim.Optimizer
    num_graphs: int
    figures: dict[str, float]


def full_batch(bucket: tuple[int, int]) -> torch_ref.Batch:
    """One microbatch of full rows of random bytes."""
    shape = (1, *bucket)
    return torch_ref.Batch(
        tokens=torch.randint(256, shape),
        lengths=torch.full(shape[:2], bucket[1]),
        weights=torch.ones(shape),
        num_sequences=float(bucket[0]),
        ids=torch.zeros(shape[:2], dtype=torch.int64),
        is_real=torch.ones(shape[:2], dtype=torch.bool),
    )


def compile_dynamic(model: torch.nn.Module, batch: torch_ref.Batch, backend: str) -> Take:
    """A step whose loss is compiled for any shape, by a first step that leaves the weights as they are."""
    loss_fn = torch.compile(torch_ref.loss_sums, dynamic=True, backend=backend)
    torch_ref.train_step(model, torch.optim.SGD(model.parameters(), lr=0.0), batch, loss_fn=loss_fn)
    return lambda optimizer, batch: torch_ref.train_step(model, optimizer, batch, loss_fn=loss_fn)


def start(way: str, settings: dict[str, Any]) -> Way:
    """Builds, compiles and takes the first step."""
    buckets = list(map(tuple, settings["buckets"]))
    batch = full_batch(buckets[0])
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    begun = time.perf_counter()
    model = torch_ref.Decoder(torch_ref.DecoderConfig(**settings["model"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    built = time.perf_counter()
    take_step: Take
    if way == "eager":

        def take_step(optimizer: torch.optim.Optimizer, batch: torch_ref.Batch) -> Any:
            return torch_ref.train_step(model, optimizer, batch)

    elif way == "static":
        take_step = torch_ref.compile_buckets(model, buckets, backend=settings["backend"])
    else:
        take_step = compile_dynamic(model, batch, settings["backend"])
    compiled = time.perf_counter()
    take_step(optimizer, batch)
    first_step = time.perf_counter()
    return Way(
        take_step,
        optimizer,
        torch._dynamo.utils.counters["stats"]["unique_graphs"] - num_graphs,
        {"build_s": built - begun, "compile_s": compiled - built, "first_step_s": first_step - begun},
    )


def main() -> None:
    settings, path = json.loads(sys.argv[1]), Path(sys.argv[2])
    if settings["backend"] == "inductor":
        importlib.import_module("torch._inductor.compile_fx")  # torch imports it when it first compiles
    torch.manual_seed(0)
    torch.set_num_threads(os.cpu_count() or 1)
    ways = {}
    for name in settings["ways"]:
        ways[name] = start(name, settings)
        print(f"torch, {name}: {ways[name].figures}", file=sys.stderr)
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in settings["buckets"]] for name in ways}
    for number in range(settings["num_rounds"]):
        for index, bucket in enumerate(settings["buckets"]):
            batch = full_batch(bucket)
            for name, way in ways.items():
                begun = time.perf_counter()
                way.take_step(way.optimizer, batch)
                seconds[name][index].append(time.perf_counter() - begun)
        print(f"torch: {number + 1} of {settings['num_rounds']} rounds", file=sys.stderr)
    answers = {
        name: way.figures
        | {"num_graphs": way.num_graphs, "step_s": [statistics.median(each) for each in seconds[name] if each]}
        for name, way in ways.items()
    }
    path.write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
