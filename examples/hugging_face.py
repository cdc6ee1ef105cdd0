"""A Hugging Face dataset in Flax NNX: columns by name, others left out; dropout, BatchNorm and its statistics.

Letters: B rows, T positions, D width.

Run it: python examples/hugging_face.py, which needs `datasets`.
"""

import datasets
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jvarlen

LABELS = ("sport", "music", "weather")
WORDS = {
    "sport": "the team won a match after two goals in the last minute",
    "music": "the band sang a new song at the concert in the old hall",
    "weather": "the wind and rain came after a hot day in the north",
}
NUM_BYTES, WIDTH = 128, 32


def make_dataset(num_texts):
    """Texts with their label, tokenized as `map` does it: bytes here."""
    rng = np.random.default_rng(0)
    labels = rng.integers(len(LABELS), size=num_texts)
    sizes = rng.geometric(0.15, num_texts).clip(max=20)
    texts = [" ".join(rng.choice(WORDS[LABELS[label]].split(), n)) for label, n in zip(labels, sizes, strict=True)]
    dataset = datasets.Dataset.from_dict({"text": texts, "label": labels, "topic": [LABELS[i] for i in labels]})
    return dataset.map(lambda row: {"input_ids": list(row["text"].encode())})


class Classifier(nnx.Module):
    def __init__(self, *, rngs):
        self.embed = nnx.Embed(NUM_BYTES, WIDTH, rngs=rngs)
        self.conv = nnx.Conv(WIDTH, WIDTH, (5,), rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.1)
        self.head = nnx.Linear(WIDTH, len(LABELS), rngs=rngs)

    def __call__(self, tokens_BxT, lengths_B, rngs):
        is_byte_BxTx1 = (jnp.arange(tokens_BxT.shape[1]) < lengths_B[:, None])[..., None]
        x_BxTxD = self.conv(self.embed(tokens_BxT) * is_byte_BxTx1)
        x_BxTxD = nnx.relu(self.norm(x_BxTxD, mask=is_byte_BxTx1))
        mean_BxD = jnp.mean(x_BxTxD, axis=1, where=is_byte_BxTx1)
        return self.head(self.dropout(mean_BxD, rngs=rngs))


graphdef, params, statistics = nnx.split(Classifier(rngs=nnx.Rngs(0)), nnx.Param, nnx.BatchStat)


def loss_fn(params, batch, key, extra):
    # The mask comes from `key`, which differs in every microbatch. A generator of the module whose state is in `extra`
    # draws anew as well; one that the loss closes over, outside of `extra`, would draw the same mask in every step.
    model = nnx.merge(graphdef, params, extra)
    lengths_B = jnp.maximum(batch["lengths"], 1)  # also for padding rows: a mean over no bytes is NaN
    logits = model(batch["input_ids"], lengths_B, nnx.Rngs(dropout=key))
    losses_B = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]) * batch["is_real"]
    correct = jnp.sum((jnp.argmax(logits, axis=-1) == batch["label"]) & batch["is_real"])
    _, _, extra = nnx.split(model, nnx.Param, nnx.BatchStat)
    return jnp.sum(losses_B), jnp.sum(batch["is_real"]), {"correct": correct}, extra


datasets.disable_progress_bars()
dataset = make_dataset(2_000)
lengths = jvarlen.measure_lengths(dataset, "input_ids")
plan = jvarlen.make_plan(lengths, max_tokens=2048, max_shapes=3)
train_step = jvarlen.make_train_step(loss_fn, optax.adam(1e-2))
state = train_step.init(params, extra=statistics, seed=0)
batches = jvarlen.load(plan, dataset, fields={"input_ids": "length", "label": "row"})
step = jvarlen.compile_buckets(train_step, state, batches)
losses = []
for batch in batches:
    state, metrics = step(state, batch)
    losses.append(metrics.loss)
print(f"loss {losses[0]:.3f} -> {np.mean(losses[-10:]):.3f} in {len(losses)} steps")
