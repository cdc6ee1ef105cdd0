"""A folder and a rank in, the weights and losses after an epoch of a two-process run out: run as a script by a test."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed

import torch_ref

NUM_REPLICAS = 2


def read_batches(*, rank: int, num_replicas: int, num_workers: int) -> list[torch_ref.Batch]:
    """Return a replica's batches of a small epoch.

    Args:
        rank: this process.
        num_replicas: how many take part.
        num_workers: processes that read ahead.

    Returns:
        One batch a step.
    """
    rng = np.random.default_rng(0)
    samples = [rng.integers(0, 256, length).astype(np.uint8) for length in (3, 9, 4, 4, 7, 1, 8, 2, 5)]
    plan = torch_ref.make_plan([len(sample) for sample in samples], [(1, 4), (1, 9)], microbatches_per_step=4)
    return list(torch_ref.load(plan, samples, rank=rank, num_replicas=num_replicas, num_workers=num_workers))


def train(batches: list[torch_ref.Batch]) -> dict[str, NDArray[Any]]:
    """Train a small float64 model.

    Args:
        batches: this replica's share of each step.

    Returns:
        The weights by name and the losses of all steps.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch_ref.Transformer(embed_dim=8, num_layers=1, num_heads=2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = [float(torch_ref.train_step(model, optimizer, batch)["loss"]) for batch in batches]
    weights = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    return weights | {"losses": np.array(losses)}


def main() -> None:
    """Read, connect, train, and write what came out."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    # Before connecting: the worker is forked, and the connection has threads.
    batches = read_batches(rank=rank, num_replicas=NUM_REPLICAS, num_workers=1)
    distributed.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=NUM_REPLICAS)
    result = train(batches)
    distributed.destroy_process_group()
    np.savez(folder / f"{rank}.npz", **result)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
