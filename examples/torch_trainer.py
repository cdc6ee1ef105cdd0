"""transformers' Trainer on planned batches: each step is a constant number of microbatches, in several shapes.

Trainer deals the microbatches out to its processes. It divides losses by the targets of the whole step, which it counts
in the labels: padding has -100 there.

Run it: python examples/torch_trainer.py, or torchrun --nproc-per-node 2 examples/torch_trainer.py. It needs
transformers, accelerate, PyTorch and torch_ref.
"""

import os
import tempfile

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, get_cosine_schedule_with_warmup

import torch_ref

NUM_EPOCHS, NUM_WORDS = 2, 40


def make_texts():
    """Texts that count upwards from a word, 3 to 40 words long."""
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(2.2, 0.7, 150), 3, 40).astype(int)
    words = [(torch.arange(size) + int(rng.integers(NUM_WORDS))) % NUM_WORDS for size in sizes]
    return [{"input_ids": text, "attention_mask": torch.ones_like(text), "labels": text} for text in words]


def plan_epochs(texts):
    """A plan for each epoch: steps of 16 texts, in as many microbatches of three shapes as they need."""
    lengths = [len(text["input_ids"]) for text in texts]
    shapes = [(8, 10), (4, 20), (2, 40)]
    plan = torch_ref.make_plan(lengths, shapes, order="shuffle", num_microbatches=2, sequences_per_step=16)
    return [plan.of_epoch(epoch) for epoch in range(NUM_EPOCHS)]


def make_model():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=NUM_WORDS, max_position_embeddings=64, **sizes))


def make_optimizer(model, plans):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    cosine = get_cosine_schedule_with_warmup(optimizer, 4, sum(plan.num_steps for plan in plans))
    return optimizer, torch_ref.VariableBatchSizeLR(cosine, plans, 16, rule="sqrt")


class PlannedTrainer(Trainer):
    def __init__(self, plans, **keywords):
        super().__init__(**keywords)
        self.plans = plans

    def get_train_dataloader(self):
        num_microbatches = self.args.gradient_accumulation_steps * self.args.world_size
        sampler = torch_ref.PlanBatchSampler(self.plans.__getitem__, num_microbatches=num_microbatches)
        planned = torch_ref.PlannedDataset(sampler, self.train_dataset)
        collate = torch_ref.pad_to_bucket(default_collate, self.plans[0], pad={"labels": -100})
        return self.accelerator.prepare(DataLoader(planned, batch_sampler=sampler, collate_fn=collate))


def make_trainer(folder, **options):
    """A trainer that logs every step; `options` are further `TrainingArguments`."""
    torch.manual_seed(0)
    texts, model = make_texts(), make_model()
    plans = plan_epochs(texts)
    most = max(plan.num_microbatches * int(np.diff(plan.step_groups).max()) for plan in plans)
    arguments = TrainingArguments(
        folder,
        num_train_epochs=NUM_EPOCHS,
        gradient_accumulation_steps=most // int(os.environ.get("WORLD_SIZE", 1)),
        max_grad_norm=0,
        logging_steps=1,
        include_num_input_tokens_seen="non_padding",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    optimizers = make_optimizer(model, plans)
    return PlannedTrainer(plans, model=model, args=arguments, train_dataset=texts, optimizers=optimizers)


def reports_of(trainer):
    """What each step reports: loss, tokens so far and learning rate."""
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [[entry["loss"], entry["num_input_tokens_seen"], entry["learning_rate"]] for entry in logged]


def main():
    """Train, and return the reports."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder, save_strategy="no")
        trainer.train()
    reports = reports_of(trainer)
    if trainer.is_world_process_zero():
        print(f"loss {reports[0][0]:.3f} -> {reports[-1][0]:.3f} in {len(reports)} steps")
    return reports


if __name__ == "__main__":
    main()
