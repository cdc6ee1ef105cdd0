"""accelerate's loop over planned batches: each step is a constant number of microbatches, in several shapes.

accelerate deals the microbatches out to its processes. It averages gradients over the microbatches of a step, so each
loss is multiplied by their number and divided by the samples of the whole step.

Letters: B rows, T positions, D width.

Run it: python examples/torch_accelerate.py, or torchrun --nproc-per-node 2 examples/torch_accelerate.py. It needs
accelerate, PyTorch and torch_ref.
"""

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

import torch_ref

NUM_EPOCHS, NUM_WORDS, WIDTH = 2, 100, 16


def make_reviews():
    """Reviews of 3 to 60 words; words of good ones have higher numbers."""
    rng = np.random.default_rng(0)
    labels = rng.integers(2, size=300)
    sizes = np.clip(rng.lognormal(2.5, 0.7, 300), 3, 60).astype(int)
    words = [rng.integers(30 * label, 70 + 30 * label, size) for label, size in zip(labels, sizes, strict=True)]
    return [{"tokens": torch.from_numpy(row), "label": int(label)} for row, label in zip(words, labels, strict=True)]


def plan_epochs(reviews):
    """A plan for each epoch: steps of 32 reviews, in as many microbatches of three shapes as they need."""
    lengths = [len(review["tokens"]) for review in reviews]
    shapes = [(16, 10), (8, 20), (4, 60)]
    plan = torch_ref.make_plan(lengths, shapes, order="shuffle", num_microbatches=2, sequences_per_step=32)
    return [plan.of_epoch(epoch) for epoch in range(NUM_EPOCHS)]


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(NUM_WORDS, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 2))

    def forward(self, tokens_BxT, lengths_B):
        is_word_BxT = torch.arange(tokens_BxT.shape[1], device=tokens_BxT.device) < lengths_B[:, None]
        sum_BxD = (self.embed(tokens_BxT) * is_word_BxT[..., None]).sum(1)
        return self.layers(sum_BxD / lengths_B.clamp(min=1)[:, None])


def make_optimizer(model, plans):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    cosine = CosineAnnealingLR(optimizer, sum(plan.num_steps for plan in plans))
    return optimizer, torch_ref.VariableBatchSizeLR(cosine, plans, 32, rule="sqrt")


def main():
    """Train, and return what each step reports: loss, tokens and learning rate."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    reviews, model = make_reviews(), Classifier()
    plans = plan_epochs(reviews)
    optimizer, scheduler = make_optimizer(model, plans)
    most = max(2 * np.diff(plan.step_groups).max() for plan in plans)
    sampler = torch_ref.PlanBatchSampler(plans.__getitem__, num_microbatches=int(most))
    planned = torch_ref.PlannedDataset(sampler, reviews)
    loader = DataLoader(planned, batch_sampler=sampler, collate_fn=planned.collate)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    accelerator.gradient_accumulation_steps = sampler.num_microbatches // accelerator.num_processes

    reports, sums = [], torch.zeros(2)
    for _ in range(NUM_EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                tokens_BxT, lengths_B, labels_B, is_real_B = (
                    batch[name][0] for name in ("tokens", "lengths", "label", "is_real")
                )
                losses_B = nn.functional.cross_entropy(model(tokens_BxT, lengths_B), labels_B, reduction="none")
                loss = (losses_B * is_real_B).sum() / batch["num_sequences"]
                accelerator.backward(loss * sampler.num_microbatches)
                sums += torch.stack([loss.detach(), lengths_B.sum()])
                if accelerator.sync_gradients:
                    reports.append([*accelerator.reduce(sums).tolist(), optimizer.param_groups[0]["lr"]])
                    sums.zero_()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    accelerator.print(f"loss {reports[0][0]:.3f} -> {reports[-1][0]:.3f} in {len(reports)} steps")
    model, loader = accelerator.free_memory(model, loader)  # a reducer that outlives its process group can hang
    accelerator.end_training()
    return reports


if __name__ == "__main__":
    main()
