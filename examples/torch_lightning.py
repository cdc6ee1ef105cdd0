"""Lightning's Trainer on planned batches: each step is four microbatches of one shape, shared by its processes.

Lightning averages gradients over the microbatches of a step and over processes, so each loss is multiplied by their
number and divided by the samples of the whole step.

Letters: B rows, T positions, D width.

Run it: python examples/torch_lightning.py, or torchrun --nproc-per-node 2 examples/torch_lightning.py. It needs
lightning, PyTorch and torch_ref.
"""

import os

import lightning
import numpy as np
import torch
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
    """A plan for each epoch, each in another order."""
    lengths = [len(review["tokens"]) for review in reviews]
    plan = torch_ref.make_plan(lengths, max_tokens=160, max_shapes=3, order="shuffle", num_microbatches=4)
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


class Training(lightning.LightningModule):
    def __init__(self, reviews, plans):
        super().__init__()
        self.reviews, self.plans, self.model = reviews, plans, Classifier()
        self.sums, self.reports = torch.zeros(2), []

    def train_dataloader(self):
        rank, num_replicas = self.trainer.global_rank, self.trainer.world_size
        sampler = torch_ref.PlanBatchSampler(self.plans[0].of_epoch, rank, num_replicas)
        epoch, step = divmod(self.trainer.global_step, self.plans[0].num_steps)  # where a resumed run goes on
        sampler.set_epoch(epoch)
        sampler.load_state_dict(sampler.state_dict(step))
        planned = torch_ref.PlannedDataset(sampler, self.reviews)
        return DataLoader(planned, batch_sampler=sampler, collate_fn=planned.collate)

    def configure_optimizers(self):
        optimizer, scheduler = make_optimizer(self.model, self.plans)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def training_step(self, batch, _):
        tokens_BxT, lengths_B, labels_B, is_real_B = (
            batch[name][0] for name in ("tokens", "lengths", "label", "is_real")
        )
        losses_B = nn.functional.cross_entropy(self.model(tokens_BxT, lengths_B), labels_B, reduction="none")
        loss = (losses_B * is_real_B).sum() / batch["num_sequences"]
        self.sums += torch.stack([loss.detach(), lengths_B.sum()])
        return loss * self.plans[0].num_microbatches

    def on_before_optimizer_step(self, optimizer):
        loss, tokens = self.trainer.strategy.reduce(self.sums, reduce_op="sum").tolist()
        self.reports.append([loss, tokens, optimizer.param_groups[0]["lr"]])
        self.sums.zero_()


def main():
    """Train, and return what each step reports: loss, tokens and learning rate."""
    torch.manual_seed(0)
    reviews = make_reviews()
    plans = plan_epochs(reviews)
    training, num_processes = Training(reviews, plans), int(os.environ.get("WORLD_SIZE", 1))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=num_processes,
        max_epochs=NUM_EPOCHS,
        accumulate_grad_batches=plans[0].num_microbatches // num_processes,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(training)
    if trainer.is_global_zero:
        first, *_, last = (loss for loss, _, _ in training.reports)
        print(f"loss {first:.3f} -> {last:.3f} in {len(training.reports)} steps")
    return training.reports


if __name__ == "__main__":
    main()
