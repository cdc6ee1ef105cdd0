"""A script that trains in several processes of PyTorch on layouts with stages or tensor parallelism.

Arguments: a folder with `inputs.npz`, to which results are written, how many processes there are, the rank and a port.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import AdamW

import torch_ref
from tests.parity.run_parallel import BETAS, EPS, RATE, WEIGHT_DECAY, Results, join_group, make_plan
from torch_ref.loading.batch import groups_of
from torch_ref.parallel import gather_params, make_pipeline_step, make_tensor_step, shard_tensors, split_stages

# An odd vocabulary: its parts are not of one size.
SIZES = {"width": 16, "num_heads": 4, "num_kv_heads": 2, "head_size": 6, "vocab_size": 129}
MAX_NORM = 1.0
TWO_BUCKETS, NUM_MICROBATCHES, NUM_STEPS = ((3, 20), (2, 32)), 4, 7


class Way(NamedTuple):
    """A layout's sizes and schedule, how many processes it takes, whether rows hold several samples, and buckets.

    With `sequences_per_step`, steps have several groups.
    """

    data: int = 1
    stage: int = 1
    tensor: int = 1
    virtual: int = 1
    schedule: str = ""
    sequence_parallel: bool = False
    packed: bool = False
    buckets: tuple[tuple[int, int], ...] = ((2, 32),)
    sequences_per_step: int | None = None

    @property
    def num_processes(self) -> int:
        return self.data * self.stage * self.tensor

    @property
    def num_layers(self) -> int:
        return 4 if self.stage > 1 else 2  # operations on parts of tensors take torch long

    @property
    def sizes(self) -> dict[str, Any]:
        """Settings of the decoder in both packages."""
        windows = (0, 5) * (self.num_layers // 2)
        extras = {"qkv_bias": True, "out_bias": True, "qk_norm": True, "windows": windows}
        return (
            SIZES
            | extras
            | {
                "num_layers": self.num_layers,
                "begins_samples": not self.packed,
                "tied": self.tensor > 1 and not self.packed,
            }
        )


WAYS = {
    "tensor2.sequence_parallel": Way(tensor=2, sequence_parallel=True, packed=True, buckets=TWO_BUCKETS),
    "stage2.virtual2.interleaved": Way(stage=2, virtual=2, schedule="interleaved", packed=True),
    "data2.tensor2": Way(data=2, tensor=2, buckets=TWO_BUCKETS, sequences_per_step=10),
    "data2.stage2.1f1b": Way(data=2, stage=2, schedule="1f1b", buckets=TWO_BUCKETS, sequences_per_step=10),
}


def plan_of_way(package: Any, lengths: NDArray[np.int64], way: Way) -> Any:
    """Return the plan of a layout by a package."""
    return make_plan(package, lengths, way.buckets, NUM_MICROBATCHES, way.packed, way.sequences_per_step)


def prepare(way: Way, mesh: DeviceMesh, initial: Results) -> tuple[Any, Any]:
    """Return this process's part of the model, and the train step."""
    model = torch_ref.Decoder(torch_ref.DecoderConfig(**way.sizes)).double()
    torch_ref.load_params(model, initial)
    options: dict[str, Any] = {"lr": RATE, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
    if way.stage > 1:
        stages = split_stages(model, mesh, virtual=way.virtual)
        optimizer = AdamW(stages.parameters(), **options)
        return stages, make_pipeline_step(stages, optimizer, schedule=way.schedule, max_norm=MAX_NORM)
    shard_tensors(model, mesh, sequence_parallel=way.sequence_parallel)
    optimizer = AdamW(model.parameters(), **options)
    return model, make_tensor_step(model, optimizer, mesh=mesh, max_norm=MAX_NORM)


def train(way: Way, samples: list[NDArray[np.uint8]], initial: Results) -> Results:
    """Train on a layout; return losses, bytes of parameters, numbers of collectives, and on rank 0 whole weights."""
    sizes = {"data": way.data} if way.data > 1 else {}
    sizes |= {"stage": way.stage} if way.stage > 1 else {"tensor": way.tensor}
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    shard = mesh.get_local_rank("data") if way.data > 1 else 0
    model, step = prepare(way, mesh, initial)
    plan = plan_of_way(torch_ref, np.array([len(sample) for sample in samples]), way)
    batches = list(torch_ref.load(plan, samples, rank=shard, num_replicas=way.data))[:NUM_STEPS]
    with sdpa_kernel(SDPBackend.MATH):
        losses = [float(step(batch)["loss"]) for batch in batches]
        results = {f"weight {name}": value.numpy() for name, value in gather_params(model).items()}
        local = [value.to_local() if way.tensor > 1 else value for value in model.parameters()]
        results |= {
            "digest": np.array(plan.digest),
            "losses": np.array(losses),
            "microbatch_weights": np.concatenate(
                [group.weights.sum(dim=(1, 2)).numpy() for batch in batches for group in groups_of(batch)]
            ),
            "param_bytes": np.array(sum(value.nbytes for value in local)),
        }
        if way.num_processes == way.tensor:
            with CommDebugMode() as counted:  # it counts one microbatch at most
                step(batches[0]._replace(**{name: value[:1] for name, value in tensors_of(batches[0]).items()}))
            results |= {str(name): np.array(count) for name, count in counted.get_comm_counts().items()}
    if way.sequence_parallel:
        try:
            model(torch.zeros(1, 7, dtype=torch.int64))
        except ValueError as error:
            results["refused"] = np.array(str(error))
    return results


def tensors_of(batch: torch_ref.Batch) -> dict[str, torch.Tensor]:
    return {name: value for name, value in batch._asdict().items() if isinstance(value, torch.Tensor)}


def main() -> None:
    """Connect, train on all layouts of this number of processes, and write the results."""
    folder, num_processes, rank, inputs, samples = join_group()
    for name, way in WAYS.items():
        if way.num_processes == num_processes:
            initial = {key.split()[1]: value for key, value in inputs.items() if key.split()[0] == name}
            np.savez(folder / f"{name} {rank}.npz", **train(way, samples, initial))  # type: ignore[arg-type]
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
