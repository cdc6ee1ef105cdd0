"""Steps of the perceptron of `zero_jax` by PyTorch, on gloo: DistributedDataParallel and `fully_shard`.

As a program it is one of several processes, started by `namespace.run`. Prints JSON on process 0: for each way, "state"
bytes of a process, and median "seconds" of a step.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WAYS = ("DistributedDataParallel", "fully_shard")


def make(way: str, num_layers: int, width: int) -> Any:
    """The model, on the processes."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(num_layers)]
    model = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.Tanh())))
    if way == "DistributedDataParallel":
        return DistributedDataParallel(model)
    mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main() -> None:
    (num_layers, width, rows, num_timed), num_processes, rank = map(json.loads, sys.argv[1:])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_processes))
    distributed.init_process_group("gloo", "tcp://127.0.0.1:12345", rank=rank, world_size=num_processes)
    x = torch.ones(rows, width)
    models = {way: make(way, num_layers, width) for way in WAYS}
    optimizers = {way: torch.optim.AdamW(model.parameters(), 1e-4) for way, model in models.items()}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(num_timed + 2):
        for way, model in models.items():
            begun = time.perf_counter()
            optimizers[way].zero_grad()
            model(x).sum().backward()
            optimizers[way].step()
            seconds[way].append(time.perf_counter() - begun)
    found = {}
    for way, optimizer in optimizers.items():
        tensors = [*models[way].parameters(), *(each for state in optimizer.state.values() for each in state.values())]
        held = [each.to_local() if hasattr(each, "to_local") else each for each in tensors]
        found[way] = {"state": sum(each.nbytes for each in held), "seconds": statistics.median(seconds[way][2:])}
    distributed.destroy_process_group()
    if rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
