"""Speech recognition by CTC: convolution, BatchNorm, dropout and a GRU in Flax Linen, trained by `fit` on 4 devices.

The directory runs/speech_ctc has checkpoints, the log with loss and accuracy, and evaluations. Run it again with more
steps: it goes on where it ended. Letters: M microbatches, B rows, T frames, F features, L labels, V symbols, 0 blank.

Run it: python examples/speech_ctc.py [STEPS [DEVICES]]
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jvarlen
from jvarlen.data.split import Split
from jvarlen.runs.config import DirectoryConfig, HardwareConfig
from jvarlen.runs.plan_config import PlanConfig

num_steps, num_devices = (int(sys.argv[i]) if len(sys.argv) > i else default for i, default in ((1, 60), (2, 4)))
jax.config.update("jax_num_cpu_devices", num_devices)  # before anything is computed

F, L, V = 8, 12, 11
rng = np.random.default_rng(0)
voice = rng.normal(size=(V, F))


def say(labels):
    frames = np.repeat(labels, rng.integers(2, 6, len(labels)))
    return (voice[frames] + rng.normal(0, 0.5, (len(frames), F))).astype(np.float32), labels


def collate(step):
    """The arrays of a step, from its samples and its bucket; fields of samples would not need it."""
    shape_MxB = step.ids.shape
    x = np.zeros((*shape_MxB, step.bucket.length, F), np.float32)
    frames, labels = np.zeros(shape_MxB, np.int32), np.zeros((*shape_MxB, L), np.int32)
    for m, microbatch in enumerate(step.samples):
        for b, (sound, said) in enumerate(microbatch):
            x[m, b, : len(sound)], frames[m, b], labels[m, b, : len(said)] = sound, len(sound), said
    return {"x": x, "frames": frames, "labels": labels, "num_sequences": np.float32(step.num_sequences)}


class Recognizer(nn.Module):
    @nn.compact
    def __call__(self, x_BxTxF, frames_B, is_training):
        frames_B = jnp.maximum(frames_B, 1)  # padding rows have none, and a mean over none is NaN
        x = nn.Conv(32, (3,))(x_BxTxF)
        mask = jvarlen.attention.padding_mask(frames_B, x.shape[1])[..., None]
        x = nn.relu(nn.BatchNorm(momentum=0.9)(x, use_running_average=not is_training, mask=mask))
        x = nn.Dropout(0.1)(x, deterministic=not is_training)
        return nn.Dense(V)(nn.RNN(nn.GRUCell(32))(x, seq_lengths=frames_B))


model = Recognizer()
variables = model.init({"params": np.array([0, 1], np.uint32)}, jnp.zeros((1, 8, F)), jnp.ones(1, int), False)


def sums_of(logits_BxTxV, batch):
    is_frame, is_label = jvarlen.attention.padding_mask(batch["frames"], logits_BxTxV.shape[1]), batch["labels"] > 0
    losses_B = optax.ctc_loss(logits_BxTxV, 1.0 - is_frame, batch["labels"], 1.0 - is_label)
    best = jnp.argmax(logits_BxTxV, axis=-1)
    is_new = is_frame & (best > 0) & (best != jnp.pad(best, ((0, 0), (1, 0)))[:, :-1])
    place = jnp.where(is_new, jnp.cumsum(is_new, axis=1) - 1, L)  # of each symbol in what was recognized
    heard = jnp.zeros_like(batch["labels"]).at[jnp.arange(len(best))[:, None], place].set(best, mode="drop")
    correct = jnp.sum((heard == batch["labels"]) & is_label)
    return jnp.sum(losses_B * (batch["frames"] > 0)), jnp.sum(is_label), {"accuracy": correct}


def loss_fn(params, batch, key, extra):
    inputs = (batch["x"], batch["frames"], True)
    logits, updated = model.apply({"params": params, **extra}, *inputs, rngs={"dropout": key}, mutable=list(extra))
    return *sums_of(logits, batch), updated


def eval_loss_fn(params, batch, extra):
    return *sums_of(model.apply({"params": params, **extra}, batch["x"], batch["frames"], False), batch), extra


sounds = [say(rng.integers(1, V, rng.integers(1, L + 1))) for _ in range(640)]
result = jvarlen.fit(
    jvarlen.FitConfig(
        max_steps=num_steps, num_epochs=1000, eval_every=20,
        directory=DirectoryConfig(run_dir=Path("runs/speech_ctc")), hardware=HardwareConfig(devices=num_devices),
        plan=PlanConfig(max_tokens=512, max_shapes=2, max_length=64, num_microbatches=4),
    ),
    Split(train=sounds[:600], held_out=sounds[600:]),
    loss_fn=loss_fn, eval_loss_fn=eval_loss_fn, params=variables["params"],
    extra={"batch_stats": variables["batch_stats"]}, optimizer=optax.adamw(1e-2),
    collate=collate, length_fn=lambda sample: len(sample[0]),
)  # fmt: skip
print(f"{result.summary.num_steps} steps on {num_devices} devices: {result.summary.evaluations}")
