"""A loop as MaxText's, with its names of fields, fed by Grain from a plan: stopped, and resumed by Orbax.

Letters: B rows, T positions, D width, H heads, V values of a token.

Run it: python examples/maxtext_loop.py
"""

import tempfile

import flax.linen as nn
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState

import jvarlen
from jvarlen.loading import grain_dataset

NUM_BYTES, WIDTH, NUM_HEADS, ROW_LENGTH, NUM_ROWS = 128, 32, 2, 128, 16
FIELDS = {
    "tokens": "inputs",
    "segment_ids": "inputs_segmentation",
    "positions": ["inputs_position", "targets_position"],
    "targets": "targets",
    "target_weights": "targets_segmentation",  # MaxText asks only where it is 0
}


def make_texts(num_texts):
    """Sums in words, the longer the rarer."""
    rng = np.random.default_rng(0)
    terms = [rng.integers(10, size=1 + n) for n in rng.geometric(0.25, num_texts).clip(max=12)]
    return [" plus ".join(map(str, numbers)) + f" is {sum(numbers)}." for numbers in terms]


def tokenize(text, rng):
    """Some words are in capitals, others in each epoch."""
    words = [word.upper() if rng.random() < 0.2 else word for word in text.split(" ")]
    return np.frombuffer(" ".join(words).encode(), np.uint8)


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, inputs, inputs_position, decoder_segment_ids):
        x_BxTxD = nn.Embed(NUM_BYTES, WIDTH)(inputs) + nn.Embed(ROW_LENGTH, WIDTH)(inputs_position)
        is_same_Bx1xTxT = decoder_segment_ids[:, None, :, None] == decoder_segment_ids[:, None, None, :]
        attended = nn.MultiHeadDotProductAttention(NUM_HEADS)(nn.LayerNorm()(x_BxTxD), mask=jnp.tril(is_same_Bx1xTxT))
        x_BxTxD += attended
        x_BxTxD += nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x_BxTxD))))
        return nn.Dense(NUM_BYTES)(nn.LayerNorm()(x_BxTxD))


@jax.jit
def train_step(state, data):
    def loss_fn(params):
        logits_BxTxV = state.apply_fn(params, data["inputs"], data["inputs_position"], data["inputs_segmentation"])
        xent_BxT = optax.softmax_cross_entropy_with_integer_labels(logits_BxTxV, data["targets"])
        is_target_BxT = data["targets_segmentation"] != 0
        return jnp.sum(xent_BxT * is_target_BxT) / jnp.sum(is_target_BxT)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def first_state():
    model, row = Decoder(), jnp.zeros((1, ROW_LENGTH), jnp.int32)
    params = jax.jit(model.init)(jax.random.key(0), row, row, row)
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-2))


def train(directory, texts, plan, num_steps):
    """Trains to a step, from the last checkpoint if there is one; returns the losses of its steps."""
    options = {"microbatches": False, "rename_fields": FIELDS}
    dataset = grain_dataset(plan, texts, tokenize, seed=1, num_epochs=2, **options)
    state, data_iterator = first_state(), iter(dataset.to_iter_dataset())
    losses = []
    with ocp.CheckpointManager(directory) as manager:
        if manager.latest_step() is not None:
            args = {"state": ocp.args.StandardRestore(state), "data": grain.checkpoint.CheckpointRestore(data_iterator)}
            state = manager.restore(manager.latest_step(), args=ocp.args.Composite(**args))["state"]
        while state.step < num_steps:
            state, loss = train_step(state, next(data_iterator))
            losses.append(float(loss))
        args = {"state": ocp.args.StandardSave(state), "data": grain.checkpoint.CheckpointSave(data_iterator)}
        manager.save(num_steps, args=ocp.args.Composite(**args))
    return losses


texts = make_texts(2_000)
lengths = jvarlen.measure_lengths([text.encode() for text in texts], progress=False)
plan = jvarlen.make_plan(lengths, [(NUM_ROWS, ROW_LENGTH)], order="shuffle", packing="best_fit")
with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as stopped:
    losses = train(whole, texts, plan, 2 * plan.num_steps)
    resumed = train(stopped, texts, plan, plan.num_steps + 3) + train(stopped, texts, plan, 2 * plan.num_steps)
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats a byte in {len(losses)} steps of two epochs")
print("stopped and resumed: the same losses" if resumed == losses else f"other losses: {resumed}, {losses}")
