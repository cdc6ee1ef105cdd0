"""Steps of the decoder by PyTorch on gloo: whole on one process, and split over all by `DTensor`.

As a program it is one of several processes. Its arguments are the sizes, the number of timed steps and the ways as
JSON, a file by which the processes meet, the number of processes and the rank. Prints JSON on process 0: for each way,
the median "seconds" of a step, and of those that are split also how many collectives of each kind the pass "forward",
that "with the gradient" and the "step" have.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import loss_parallel
from torch.optim import AdamW

import torch_ref
from torch_ref.parallel import make_tensor_step, shard_tensors
from torch_ref.training.train import backward_of_sums, loss_sums, take_microbatch, update

RATE, MAX_NORM = 1e-4, 1.0
WAYS = {"whole": None, "DTensor": False, "DTensor, sequence parallel": True}

Step = Callable[[], None]


def counted(call: Step) -> dict[str, int]:
    """Collectives of a call that runs the model once."""
    with CommDebugMode() as mode:
        call()
    found: dict[str, int] = {}
    for name, number in mode.get_comm_counts().items():
        kind = str(name).rpartition(".")[2].removesuffix("_tensor").removesuffix("_into").replace("_", "-")
        found[kind] = found.get(kind, 0) + number
    return found


def whole_step(model: nn.Module, batch: torch_ref.Batch, rank: int) -> Step:
    """The step of process 0, while the others wait."""
    optimizer = AdamW(model.parameters(), RATE)

    def step() -> None:
        if rank == 0:
            optimizer.zero_grad(set_to_none=True)
            update(model, optimizer, batch, backward_of_sums(model, batch, loss_sums), max_norm=MAX_NORM)

    return step


def split_step(model: nn.Module, batch: torch_ref.Batch, mesh: DeviceMesh) -> tuple[Step, dict[str, Any]]:
    """The step of all processes, and its collectives."""
    optimizer = AdamW(model.parameters(), RATE)
    take_step = make_tensor_step(model, optimizer, mesh=mesh, max_norm=MAX_NORM)

    def forward() -> None:
        with loss_parallel(), torch.no_grad():
            loss_sums(model, take_microbatch(batch, 0))

    def with_the_gradient() -> None:
        backward_of_sums(model, batch, loss_sums, lambda last: loss_parallel())

    def step() -> None:
        take_step(batch)

    calls = {"forward": forward, "with the gradient": with_the_gradient, "step": step}
    return step, {name: counted(call) for name, call in calls.items()}


def main() -> None:
    warnings.filterwarnings("ignore", "Full backward hook is firing")  # of CommDebugMode: tokens have no gradient
    sizes, num_timed, ways = json.loads(sys.argv[1])
    num_processes, rank = map(int, sys.argv[3:])
    distributed.init_process_group("gloo", f"file://{sys.argv[2]}", rank=rank, world_size=num_processes)
    mesh = init_device_mesh("cpu", (num_processes,), mesh_dim_names=("tensor",))
    rows, length = sizes["rows"], sizes["length"]
    tokens = torch.randint(0, 256, (1, rows, length), generator=torch.Generator().manual_seed(0))
    batch = torch_ref.Batch(tokens, torch.full((1, rows), length), torch.ones(1, rows, length), float(rows))
    found: dict[str, Any] = {}
    steps: dict[str, Step] = {}

    for way in ways:
        sequence_parallel = WAYS[way]
        torch.manual_seed(0)
        names = ("width", "num_layers", "num_heads")
        model = torch_ref.Decoder(torch_ref.DecoderConfig(**{name: sizes[name] for name in names}))
        if sequence_parallel is None:
            steps[way], found[way] = whole_step(model, batch, rank), {}
        else:
            shard_tensors(model, mesh, sequence_parallel=sequence_parallel)
            steps[way], found[way] = split_step(model, batch, mesh)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    cores = os.cpu_count() or 1
    for _ in range(num_timed + 2):
        for way, step in steps.items():
            torch.set_num_threads(cores if way == "whole" else max(1, cores // num_processes))
            distributed.barrier()
            begun = time.perf_counter()
            step()
            distributed.barrier()
            seconds[way].append(time.perf_counter() - begun)
    for way in ways:
        found[way]["seconds"] = statistics.median(seconds[way][2:])
    distributed.destroy_process_group()
    if rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
