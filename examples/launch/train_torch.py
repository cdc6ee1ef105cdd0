"""Data parallelism with `torch_ref`: each process takes its share of the same plan.

Run it: torchrun --nproc-per-node 2 examples/launch/train_torch.py. On several hosts, run on each: torchrun --nnodes 2
--nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint host0:29400 examples/launch/train_torch.py. The replicas together
must divide `num_microbatches`.
"""

import numpy as np
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import torch_ref


def train(rank: int, num_replicas: int) -> None:
    """Trains for an epoch; the model is freed on return, since one that outlives its process group may hang at exit."""
    rng = np.random.default_rng(0)
    samples = [rng.integers(0, 256, length) for length in rng.integers(1, 64, 200)]
    lengths = [len(sample) for sample in samples]
    buckets = torch_ref.make_buckets(lengths, 256, max_shapes=4, num_microbatches=8)
    plan = torch_ref.make_plan(lengths, buckets, order="shuffle", num_microbatches=8)

    torch.manual_seed(0)
    model = DistributedDataParallel(torch_ref.Decoder(torch_ref.DecoderConfig(width=16, num_layers=1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch_ref.VariableBatchSizeLR(optimizer, plan, 16, rule="sqrt")
    for batch in torch_ref.load(plan, samples, rank=rank, num_replicas=num_replicas):
        metrics = torch_ref.train_step(model, optimizer, batch)
        scheduler.step()
    if rank == 0:
        print(f"{plan.num_steps} steps, loss {float(metrics['loss']):.3f}")


distributed.init_process_group("gloo")  # with GPUs "nccl", and torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
train(distributed.get_rank(), distributed.get_world_size())
distributed.destroy_process_group()
