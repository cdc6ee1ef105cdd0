"""A script that trains in several processes of PyTorch, in every way of some tasks, and writes what came out.

Arguments: a folder with `inputs.npz`, to which results are written, how many processes there are, the rank and a port.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed, fx, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import torch_ref
from torch_ref.loading.batch import groups_of
from torch_ref.parallel import gather_params, make_ddp_step, make_fsdp_step, shard_model

NUM_LAYERS = 2
# AdamW divides small gradients by their size: a larger epsilon bounds what that makes of their rounding.
RATE, BETAS, EPS, WEIGHT_DECAY, MAX_NORM = 3e-3, (0.9, 0.95), 1e-5, 0.1, 1.4
SMALL_CAP_MB, COMPILED_CAP_MB = 0.05, 1.0

Results = dict[str, NDArray[Any]]


class Task(NamedTuple):
    """What is trained, in JAX as well: `ways` are how torch trains, and which ZeRO level JAX has then."""

    num_processes: int
    num_microbatches: int
    ways: dict[str, int]
    packed: bool = False
    width: int = 32
    num_steps: int = 6
    buckets: tuple[tuple[int, int], ...] = ((3, 20), (2, 32))
    sequences_per_step: int | None = None
    base_batch_size: float | None = None  # of AdamW by batch size

    @property
    def sizes(self) -> dict[str, Any]:
        """Settings of the decoder in both packages."""
        return {"width": self.width, "num_layers": NUM_LAYERS, "begins_samples": not self.packed, "tied": self.packed}


TASKS = {
    "padded": Task(2, 4, {"ddp": 0, "redundancy": 1, "zero1": 1, "zero3": 3}, buckets=((2, 32),)),
    "packed": Task(2, 2, {"ddp": 3, "zero3": 3}, packed=True),
    "groups": Task(
        2, 2, {"ddp": 0, "zero1": 1, "zero3": 3}, buckets=((1, 8), (2, 20), (1, 32), (3, 32)), sequences_per_step=10
    ),
    "samples": Task(2, 2, {"ddp": 0, "redundancy": 1, "zero3": 3}, buckets=((6, 20), (3, 32)), base_batch_size=8),
    "compiled": Task(2, 2, {"compiled": 0}, width=144, num_steps=4, buckets=((2, 32),)),
}


def make_plan(
    package: Any,
    lengths: NDArray[np.int64],
    buckets: Sequence[tuple[int, int]],
    num_microbatches: int,
    packed: bool,
    sequences_per_step: int | None,
) -> Any:
    """Return the plan by a package, in shuffled order."""
    return package.make_plan(
        lengths,
        buckets,
        packing="best_fit" if packed else "padded",
        seed=5,
        num_microbatches=num_microbatches,
        sequences_per_step=sequences_per_step,
    )


def plan_of_task(package: Any, lengths: NDArray[np.int64], task: Task) -> Any:
    """Return the plan of a task by a package."""
    return make_plan(package, lengths, task.buckets, task.num_microbatches, task.packed, task.sequences_per_step)


def make_optimizer(way: str, model: nn.Module, base_batch_size: float | None) -> Optimizer:
    """Return AdamW, for one way with its state sharded by the optimizer itself."""
    options: dict[str, Any] = {"lr": RATE, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
    chosen: type[Optimizer] = AdamW
    if base_batch_size is not None:
        chosen, options = torch_ref.AdamWByBatchSize, {**options, "base_batch_size": base_batch_size}
    if way == "redundancy":
        from torch.distributed.optim import ZeroRedundancyOptimizer  # here: tests import this file, and it warns

        return ZeroRedundancyOptimizer(model.parameters(), chosen, **options)
    return chosen(model.parameters(), **options)


def recording(reduced: list[str]) -> Callable[..., nn.Module]:
    """Return a wrapper whose hook notes which gradients are reduced together."""

    def wrap(model: nn.Module, **options: Any) -> nn.Module:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        replicated = DistributedDataParallel(model, **options)

        def note(group: Any, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
            reduced.append(" ".join(names[id(parameter)] for parameter in bucket.parameters()))
            return allreduce_hook(group, bucket)

        replicated.register_comm_hook(None, note)
        return replicated

    return wrap


def make_step(way: str, model: nn.Module, optimizer: Optimizer, reduced: list[str], graphs: list[int]) -> Any:
    """Return the train step of a way, which notes buckets or graphs in the lists."""
    if way.startswith("zero"):
        return make_fsdp_step(model, optimizer, zero=int(way.removeprefix("zero")), max_norm=MAX_NORM)
    if way == "redundancy":
        with mock.patch("torch_ref.parallel.ddp.DistributedDataParallel", recording(reduced)):
            return make_ddp_step(model, optimizer, bucket_cap_mb=SMALL_CAP_MB, max_norm=MAX_NORM)
    if way == "ddp":
        return make_ddp_step(model, optimizer, max_norm=MAX_NORM)

    def noting(graph: fx.GraphModule, _: list[Tensor]) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    return make_ddp_step(model, optimizer, bucket_cap_mb=COMPILED_CAP_MB, max_norm=MAX_NORM, backend=noting)


class Collectives(TorchDispatchMode):
    """A block in which calls of torch's operations for collectives are counted."""

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count and call."""
        if func.namespace == "c10d":
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def num_bytes(tensors: Any) -> NDArray[np.int64]:
    """Return the bytes that this process holds."""
    return np.array(sum((each.to_local() if isinstance(each, DTensor) else each).nbytes for each in tensors))


def train(way: str, model: nn.Module, batches: list[Any], base_batch_size: float | None) -> Results:
    """Train in a way; return losses, bytes, what was communicated, and on rank 0 whole weights."""
    reduced: list[str] = []
    graphs: list[int] = []
    if way.startswith("zero"):
        shard_model(model)
    optimizer = make_optimizer(way, model, base_batch_size)
    step = make_step(way, model, optimizer, reduced, graphs)
    losses, num_graphs = [], []
    for batch in batches:
        reduced.clear()
        collectives = Collectives()
        with collectives if way.startswith("zero") else nullcontext():
            losses.append(float(step(batch)["loss"]))
        num_graphs.append(len(graphs))
    local = getattr(optimizer, "optim", optimizer)  # of one that shards its state, the part of this process
    weights = {f"weight {name}": value.numpy() for name, value in gather_params(model).items()}
    return weights | {
        "losses": np.array(losses),
        "param_bytes": num_bytes(model.parameters()),
        "state_bytes": num_bytes(
            value for values in local.state.values() for value in values.values() if isinstance(value, Tensor)
        ),
        "num_reduce_scatters": np.array(collectives.counts["_reduce_scatter_base_"]),
        "num_all_gathers": np.array(collectives.counts["_allgather_base_"]),
        "buckets": np.array(reduced),
        "num_graphs": np.array(num_graphs),
    }


def join_group() -> tuple[Path, int, int, Results, list[NDArray[np.uint8]]]:
    """Join the process group; return the folder, how many processes there are, the rank, weights, and samples."""
    folder, num_processes, rank, port = Path(sys.argv[1]), *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the host's name need not resolve
    with np.load(folder / "inputs.npz") as file:
        inputs = dict(file)
    offsets = inputs.pop("offsets")
    samples = np.split(inputs.pop("tokens"), offsets[1:-1])
    address = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", address, rank=rank, world_size=num_processes)
    return folder, num_processes, rank, inputs, samples


def main() -> None:
    """Connect, train, and write what came out."""
    folder, num_processes, rank, inputs, samples = join_group()
    lengths = np.array([len(sample) for sample in samples])
    for name, task in TASKS.items():
        if task.num_processes != num_processes:
            continue
        plan = plan_of_task(torch_ref, lengths, task)
        batches = list(torch_ref.load(plan, samples, rank=rank, num_replicas=num_processes))[: task.num_steps]
        initial = {key.removeprefix(f"{name} "): value for key, value in inputs.items() if key.startswith(f"{name} ")}
        for way in task.ways:
            model = torch_ref.Decoder(torch_ref.DecoderConfig(**task.sizes)).double()
            torch_ref.load_params(model, initial)
            with sdpa_kernel(SDPBackend.MATH):
                result = train(way, model, batches, task.base_batch_size)
            result["digest"] = np.array(plan.digest)
            result["weights_of_steps"] = np.array(
                [sum(float(group.weights.sum()) for group in groups_of(batch)) for batch in batches]
            )
            np.savez(folder / f"{name} {way} {rank}.npz", **result)  # type: ignore[arg-type]
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
