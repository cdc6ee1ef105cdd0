"""Tunix's own trainer on packed batches of a plan: a Llama of Tunix, with LoRA of Qwix, learns answers.

Letters: B rows, T positions.

Run it: python examples/tunix_sft.py
"""

import numpy as np
import optax
import qwix
from flax import nnx
from tunix.models.llama3.model import Llama3, ModelConfig
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

import jvarlen
from jvarlen.attention import segment_mask
from jvarlen.data import WeightedTokens

NUM_BYTES, ROW_LENGTH, NUM_ROWS = 128, 128, 8
LLAMA = ModelConfig(
    num_layers=1, vocab_size=NUM_BYTES, embed_dim=64, hidden_dim=64, num_heads=2, head_dim=32, num_kv_heads=1,
    rope_theta=10_000, norm_eps=1e-5,
)  # fmt: skip


class Llama(Llama3):
    """A pytree, as the model that Qwix makes of it, which is `Llama3` no longer."""


def make_chats(num_chats):
    """Words that are to be repeated, of which the answer alone is learned."""
    rng = np.random.default_rng(0)
    chats = []
    for number in rng.geometric(0.4, num_chats).clip(max=6):
        words = " ".join(rng.choice(["red", "green", "blue"], number))
        question, answer = f"say {words}: ".encode(), words.encode()
        weights = np.repeat([0, 1], [len(question), len(answer)])
        chats.append(WeightedTokens(np.frombuffer(question + answer, np.uint8), weights))
    return chats


def model_input(batch):
    """What the trainer's loss takes; no token is predicted from the sample before it in its row."""
    return {
        "input_tokens": batch.tokens,  # int32[B, T]
        "input_mask": batch.weights * (batch.positions > 0),
        "positions": batch.positions,
        "attention_mask": segment_mask(batch.segment_ids, batch.segment_ids),  # bool[B, T, T]
    }


def make_trainer(model):
    lora = qwix.LoraProvider(module_path=".*(proj|lm_head).*", rank=16, alpha=16)
    zeros = np.zeros((1, 2), np.int32)
    model = qwix.apply_lora_to_model(model, lora, zeros, zeros, None, np.ones((1, 2, 2), bool), rngs=nnx.Rngs(1))
    trainer = PeftTrainer(model, optax.adamw(2e-2), TrainingConfig(eval_every_n_steps=1_000))
    trainer.is_managed_externally = True  # it trains for one epoch after the other
    return trainer.with_gen_model_input_fn(model_input)


chats = make_chats(400)
plan = jvarlen.make_plan(
    [len(chat.tokens) for chat in chats], [(NUM_ROWS, ROW_LENGTH)], packing="best_fit", order="shuffle"
)
trainer = make_trainer(Llama(LLAMA, rngs=nnx.Rngs(0)))
trainer.train(jvarlen.load(plan, chats, microbatches=False))
with jvarlen.no_recompiles():
    trainer.train(jvarlen.load(plan.of_epoch, chats, microbatches=False, epoch=1, num_epochs=2))
losses = trainer.metrics_logger.get_metric_history("", "loss", "train")
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats a byte of an answer in {trainer.train_steps} steps")
