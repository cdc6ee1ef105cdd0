"""A script that trains several times in two processes of PyTorch, and writes weights and losses to a folder.

Every run trains on the same samples in the same steps, however these are split. Arguments: the folder, how many
processes there are, the rank and a port.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import torch_ref
from torch_ref.training.train import take_microbatch

NUM_REPLICAS = 2
ROWS_PER_STEP = 8
RARE = 255
# In order of length: a step of eight, one of a single sample, and one of five.
STEPS = (8, 1, 5)
LENGTHS = (3, 9, 4, 4, 7, 1, 8, 2, 5, 3, 4, 2, 6, 4)


class Run(NamedTuple):
    """What is trained, and how: a float64 model with the same weights each time, and how each replica wraps it.

    `num_microbatches` are those of a group over all replicas, and `num_workers` the processes that read ahead. With
    `has_groups`, a step has several groups.
    """

    make_model: Callable[[], nn.Module]
    wrap: Callable[[nn.Module], nn.Module]
    num_microbatches: int
    num_workers: int = 0
    has_groups: bool = False


class Routed(nn.Module):
    """Sends a rare token through a layer that others skip, and nothing through another one."""

    def __init__(self) -> None:
        """Draw the weights."""
        super().__init__()
        self.embed = nn.Embedding(256, 8)
        self.for_rare = nn.Linear(8, 8)
        self.for_nothing = nn.Linear(8, 8)
        self.head = nn.Linear(8, 256)
        self.begin_token = 0

    def forward(self, inputs_BxT: Tensor) -> Tensor:
        """Return logits [B, T, 256]."""
        hidden_BxTxD = self.embed(inputs_BxT)
        rare_BxT = inputs_BxT == RARE
        if rare_BxT.any():
            hidden_BxTxD = torch.where(rare_BxT[..., None], self.for_rare(hidden_BxTxD), hidden_BxTxD)
        logits_BxTxV: Tensor = self.head(hidden_BxTxD)
        return logits_BxTxV


def make_decoder() -> nn.Module:
    """Return a small decoder."""
    torch.manual_seed(0)
    return torch_ref.Decoder(torch_ref.DecoderConfig(width=8, num_layers=1)).double()


def make_routed() -> nn.Module:
    """Return a small model that not all rows reach all of."""
    torch.manual_seed(0)
    return Routed().double()


def explicit(model: nn.Module) -> nn.Module:
    """Return the model itself: the train step reduces by itself."""
    return model


def wrapped(model: nn.Module) -> nn.Module:
    """Return the model as most programs wrap it."""
    return DistributedDataParallel(model)


def finding_unused(model: nn.Module) -> nn.Module:
    """Return the model wrapped for rows that do not reach all of it."""
    return DistributedDataParallel(model, find_unused_parameters=True)


def counted(model: nn.Module) -> nn.Module:
    """Return the model wrapped so that its reductions go through `torch.distributed.all_reduce`."""
    replicated = DistributedDataParallel(model, gradient_as_bucket_view=True)
    replicated.register_comm_hook(None, allreduce_hook)
    return replicated


RUNS = {
    "explicit": Run(make_decoder, explicit, 4, num_workers=1),
    "wrapped": Run(make_decoder, wrapped, 4),
    "one microbatch": Run(make_decoder, counted, 2),
    "four microbatches": Run(make_decoder, counted, 8),
    "routed, explicit": Run(make_routed, explicit, 8),
    "routed, wrapped": Run(make_routed, finding_unused, 8),
    "groups": Run(make_decoder, counted, 2, num_workers=1, has_groups=True),
    "groups, explicit": Run(make_decoder, explicit, 4, has_groups=True),
    "groups, routed": Run(make_routed, finding_unused, 2, has_groups=True),
}


def read_batches(
    num_microbatches: int, *, rank: int = 0, num_replicas: int = 1, num_workers: int = 0, has_groups: bool = False
) -> list[torch_ref.Batch | torch_ref.StepBatch]:
    """Return a replica's batches of a small epoch, one a step."""
    rng = np.random.default_rng(0)
    samples = [rng.integers(0, RARE, length).astype(np.uint8) for length in LENGTHS]
    # A sample of the first replica in the first step, and the last of the last.
    samples[LENGTHS.index(2)][0] = samples[LENGTHS.index(9)][3] = RARE
    rows = ROWS_PER_STEP // num_microbatches
    options = {"order": "length", "num_microbatches": num_microbatches}
    if has_groups:
        buckets = [(1, 3), (1, 4), (1, 7), (2, 9)]
        plan = torch_ref.make_plan(LENGTHS, buckets, sequences_per_step=STEPS, **options)
    else:
        plan = torch_ref.make_plan(LENGTHS, [(rows, 4), (rows, 9)], **options)
    return list(torch_ref.load(plan, samples, rank=rank, num_replicas=num_replicas, num_workers=num_workers))


def train(
    model: nn.Module, batches: list[torch_ref.Batch | torch_ref.StepBatch], step: Callable[..., Any]
) -> dict[str, NDArray[Any]]:
    """Train a model on a replica's batches; return the weights by name, and the loss and reductions of each step."""
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.01)
    losses, num_reductions = [], []
    with mock.patch.object(distributed, "all_reduce", wraps=distributed.all_reduce) as all_reduce:
        for batch in batches:
            all_reduce.reset_mock()
            losses.append(float(step(model, optimizer, batch)))
            num_reductions.append(all_reduce.call_count)
    weights = {name.removeprefix("module."): value.detach().numpy() for name, value in model.named_parameters()}
    return weights | {"losses": np.array(losses), "num_reductions": np.array(num_reductions)}


def exact_step(model: nn.Module, optimizer: SGD, batch: torch_ref.Batch | torch_ref.StepBatch) -> Tensor:
    """Take a step as it should be; return the loss."""
    loss: Tensor = torch_ref.train_step(model, optimizer, batch)["loss"]
    return loss


def mean_of_means_step(model: nn.Module, optimizer: SGD, batch: torch_ref.Batch) -> Tensor:
    """Take a step as wrapped models commonly do, with the mean of the replicas' means of one microbatch; return it."""
    optimizer.zero_grad()
    loss_sum, weight_sum = torch_ref.loss_sums(model, take_microbatch(batch, 0))
    loss = loss_sum / weight_sum.clamp(min=1)
    torch.autograd.backward(loss)
    optimizer.step()
    return loss


def main() -> None:
    """Read, connect, train, and write what came out."""
    folder, num_processes, rank, port = Path(sys.argv[1]), *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the host's name need not resolve
    # Before connecting: the worker is forked, and the connection has threads.
    batches = {
        name: read_batches(
            run.num_microbatches,
            rank=rank,
            num_replicas=num_processes,
            num_workers=run.num_workers,
            has_groups=run.has_groups,
        )
        for name, run in RUNS.items()
    }
    address = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", address, rank=rank, world_size=num_processes)
    results = {name: train(run.wrap(run.make_model()), batches[name], exact_step) for name, run in RUNS.items()}
    results["mean of means"] = train(wrapped(make_decoder()), batches["one microbatch"], mean_of_means_step)
    distributed.destroy_process_group()
    for name, result in results.items():
        np.savez(folder / f"{name} {rank}.npz", **result)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
