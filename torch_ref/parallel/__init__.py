"""Train steps over several processes: data parallelism and ZeRO with what PyTorch has for them.

- `ddp`: `DistributedDataParallel`, whose gradient buckets are reduced during the backward pass.
- `fsdp`: `fully_shard` (FSDP2), for ZeRO levels 1 to 3.
"""

from torch_ref.parallel.ddp import graph_buckets, make_ddp_step
from torch_ref.parallel.fsdp import gather_params, make_fsdp_step, shard_model

__all__ = ["gather_params", "graph_buckets", "make_ddp_step", "make_fsdp_step", "shard_model"]
