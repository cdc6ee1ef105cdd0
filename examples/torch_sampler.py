"""Sentence classification in PyTorch: a Dataset, a DataLoader and a loop of your own; the batches are planned.

Rows are padded to one of a few shapes, and rates follow the number of sentences in a batch. Attention gives no numbers
where a whole row is padding, so padding rows repeat a sentence, which the loss leaves out.

Letters: B rows, T positions, D width.

Run it: python examples/torch_sampler.py, which needs PyTorch and torch_ref, and no JAX.
"""

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset

import torch_ref

NUM_TOPICS, NUM_WORDS, WIDTH, EPOCHS = 4, 400, 32, 3


class Reviews(Dataset):
    """Common words, which say nothing, and now and then a word of the topic; most reviews are short."""

    def __init__(self, num_reviews):
        rng = np.random.default_rng(0)
        self.labels = rng.integers(NUM_TOPICS, size=num_reviews)
        self.tokens = []
        for topic in self.labels:
            size = int(np.clip(rng.lognormal(2.7, 0.7), 3, 100))
            common, own = rng.zipf(1.5, size).clip(max=200), rng.integers(200 + 50 * topic, 250 + 50 * topic, size)
            self.tokens.append(np.where(rng.random(size) < 0.2, own, common))

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"tokens": torch.from_numpy(self.tokens[index]), "label": int(self.labels[index])}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(NUM_WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, dim_feedforward=64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, NUM_TOPICS)

    def forward(self, tokens_BxT, is_padding_BxT):
        x_BxTxD = self.encoder(self.embed(tokens_BxT), src_key_padding_mask=is_padding_BxT)
        x_BxTxD = x_BxTxD.masked_fill(is_padding_BxT[..., None], 0.0)
        return self.head(x_BxTxD.sum(1) / (~is_padding_BxT).sum(1, keepdim=True))


def train(model, optimizer, scheduler, batches):
    """One epoch: the losses of its steps."""
    losses = []
    for batch in batches:
        tokens_BxT, lengths_B, labels_B, is_real_B = (
            batch[name].squeeze(0) for name in ("tokens", "lengths", "label", "is_real")
        )
        logits_BxK = model(tokens_BxT, torch.arange(tokens_BxT.shape[1]) >= lengths_B[:, None])
        loss = nn.functional.cross_entropy(logits_BxK[is_real_B], labels_B[is_real_B])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


torch.manual_seed(0)
dataset, model = Reviews(3_000), Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
lengths = [len(tokens) for tokens in dataset.tokens]

plan = torch_ref.make_plan(lengths, max_tokens=2048, max_shapes=8)
sampler = torch_ref.PlanBatchSampler(plan.of_epoch, padding_rows="repeat")
planned = torch_ref.PlannedDataset(sampler, dataset)  # whose items know their shape
loader = DataLoader(planned, batch_sampler=sampler, collate_fn=planned.collate)
cosine = CosineAnnealingLR(optimizer, EPOCHS * plan.num_steps)
plans = [plan.of_epoch(epoch) for epoch in range(EPOCHS)]
scheduler = torch_ref.VariableBatchSizeLR(cosine, plans, 100, rule="sqrt")
losses = []
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    losses += train(model, optimizer, scheduler, loader)
shapes = [f"{bucket.rows} x {bucket.length}" for bucket in plan.buckets.shapes]
print(f"{plan.padding:.1%} padding in shapes {', '.join(shapes)}")
print(f"loss {losses[0]:.3f} -> {np.mean(losses[-10:]):.3f} in {len(losses)} steps")
