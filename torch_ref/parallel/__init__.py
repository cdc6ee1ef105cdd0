"""Train steps over several processes, with what PyTorch has for each kind of parallelism.

- `ddp`: `DistributedDataParallel`, whose gradient buckets are reduced during the backward pass.
- `fsdp`: `fully_shard` (FSDP2), for ZeRO levels 1 to 3.
- `tensor`: `parallelize_module`, for tensor and sequence parallelism by `DTensor`.
- `pipeline`: `torch.distributed.pipelining`, for stages and their schedules.
- `mesh`: checks of meshes, and data parallelism along one axis, which goes with `tensor` and `pipeline`.
- `sort`: the distributed sample sort.
- `gather`: whole parameters of a model that any of these has split.
"""

from torch_ref.parallel.ddp import graph_buckets, make_ddp_step
from torch_ref.parallel.fsdp import make_fsdp_step, shard_model
from torch_ref.parallel.gather import gather_params
from torch_ref.parallel.pipeline import Stages, make_pipeline_step, split_stages
from torch_ref.parallel.tensor import make_tensor_step, shard_tensors

__all__ = [
    "Stages",
    "gather_params",
    "graph_buckets",
    "make_ddp_step",
    "make_fsdp_step",
    "make_pipeline_step",
    "make_tensor_step",
    "shard_model",
    "shard_tensors",
    "split_stages",
]
