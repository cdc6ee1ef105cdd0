"""LoRA: a decoder learns to count by ones; its adapters, trained alone, then learn to count by threes.

Run it: python examples/lora.py, which needs `safetensors`; PEFT opens what it writes.
"""

import optax

import jvarlen
from jvarlen.models import DecoderConfig, LoraConfig, add_lora, init_params, make_loss_fn, to_hugging_face


def train(config, params, by):
    samples = [[(start + by * i) % 64 for i in range(length)] for start in range(64) for length in range(8, 40)]
    plan = jvarlen.make_plan([len(sample) for sample in samples], max_tokens=2048, max_shapes=1, packing="best_fit")
    train_step = jvarlen.make_train_step(make_loss_fn(config), optax.adam(1e-2))
    state, batches = train_step.init(params), jvarlen.load(plan, samples)
    step, losses = jvarlen.compile_buckets(train_step, state, batches), []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(metrics.loss)
    return state.params, f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps"


decoder = DecoderConfig(vocab_size=64, begins_samples=False)
params, _ = train(decoder, init_params(decoder, seed=0), by=1)
to_hugging_face("model", params, decoder)
adapted = DecoderConfig(vocab_size=64, begins_samples=False, lora=LoraConfig(rank=8, targets="layers.*.kernel"))
params, losses = train(adapted, add_lora(params, adapted, seed=0), by=3)
to_hugging_face("adapters", params, adapted, base_model="model")
print(losses)
