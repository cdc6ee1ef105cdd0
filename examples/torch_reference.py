"""The same plan in PyTorch: digests and learning rates of both packages are equal, and torch trains by them.

Run it: python examples/torch_reference.py, which needs PyTorch. With the argument compile, torch.compile compiles every
shape before the first step.
"""

import sys

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import jvarlen
import torch_ref


class Countings(Dataset):
    """Counting in bytes from somewhere on."""

    def __init__(self, num_samples):
        rng = np.random.default_rng(0)
        self.starts, self.lengths = rng.integers(200, size=num_samples), rng.geometric(0.05, num_samples).clip(max=56)

    def __getitem__(self, index):
        return torch.arange(self.lengths[index]) + int(self.starts[index])


def base_rate(step):
    """Warm-up, then constant."""
    return 1e-2 * min((step + 1) / 20, 1.0)


dataset = Countings(2_000)
lengths = dataset.lengths
plans, rates = [], []
for package in (jvarlen, torch_ref):
    buckets = package.make_buckets(lengths, max_tokens=1024, max_shapes=3)
    plans.append(package.make_plan(lengths, buckets, order="shuffle", seed=0))
    rates.append(package.lr_sequence(plans[-1], base_rate, 32, rule="sqrt"))
    print(f"{package.__name__:>9}: {plans[-1].num_steps} steps, digest {plans[-1].digest[:32]}…")
print(f"digests are equal: {plans[0].digest == plans[1].digest}")
print(f"largest difference of the learning rates: {np.abs(rates[0] - rates[1]).max():.1e}")
plan = plans[1]

torch.manual_seed(0)
model = torch_ref.Transformer(embed_dim=32, num_layers=1, num_heads=1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: base_rate(step) / 1e-2)
scheduler = torch_ref.VariableBatchSizeLR(warm_up, plan.num_sequences, 32, rule="sqrt")
step = torch_ref.compile_buckets(model, plan) if sys.argv[1:] == ["compile"] else None
losses, used_rates = [], []
planned = torch_ref.PlannedDataset(plan, dataset)  # whose items know their bucket
for batch in DataLoader(planned, batch_sampler=torch_ref.PlanBatchSampler(plan), collate_fn=planned.collate):
    used_rates += scheduler.get_last_lr()
    metrics = step(optimizer, batch) if step else torch_ref.train_step(model, optimizer, batch)
    scheduler.step()
    losses.append(float(metrics["loss"]))
print(f"the scheduler's rates are those of the plan: {np.allclose(used_rates, rates[1], rtol=1e-12)}")
print(f"loss: {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
