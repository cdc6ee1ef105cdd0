"""Recordings of long-tailed durations: frames instead of tokens, a cost model, batches of your own, short ones first.

Letters: M microbatches, B rows, T frames, F features. Run it: python examples/speech_durations.py
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jvarlen

FRAMES_PER_S, NUM_FEATURES = 50, 16


class SpeechBatch(NamedTuple):
    """One step: what is not a scalar has axes M and B first, and `num_sequences` counts real recordings."""

    features: Any  # float32[M, B, T, F]
    lengths: Any  # int32[M, B], 0 for a padding row
    num_sequences: Any  # float32[]


def speech_batch_spec(bucket, microbatches_per_step):
    """What is compiled for."""
    shape_MxB = (microbatches_per_step, bucket.rows)
    return SpeechBatch(
        features=jax.ShapeDtypeStruct((*shape_MxB, bucket.length, NUM_FEATURES), np.float32),
        lengths=jax.ShapeDtypeStruct(shape_MxB, np.int32),
        num_sequences=jax.ShapeDtypeStruct((), np.float32),
    )


def pad_recordings(step):
    """Puts the recordings of a step into arrays of these shapes."""
    spec = speech_batch_spec(step.bucket, len(step.samples))
    batch = SpeechBatch(*(np.zeros(leaf.shape, leaf.dtype) for leaf in spec))
    for m, microbatch in enumerate(step.samples):
        for b, features in enumerate(microbatch):
            batch.features[m, b, : len(features)] = features
            batch.lengths[m, b] = len(features)
    return batch._replace(num_sequences=np.float32(step.num_sequences))


def make_recording(num_frames, rng):
    """Features that swing, each at a pace of its own, and some noise."""
    angles_TxF = np.arange(num_frames)[:, None] * np.linspace(0.1, 1, NUM_FEATURES) + rng.uniform(0, 6, NUM_FEATURES)
    return (np.sin(angles_TxF) + rng.normal(0, 0.1, angles_TxF.shape)).astype(np.float32)


def loss_fn(kernel, microbatch):
    """The squared error of each frame, predicted from the four before it."""
    before_BxTxF = jnp.pad(microbatch.features[:, :-1], ((0, 0), (4, 0), (0, 0)))
    layout = ("NWC", "WIO", "NWC")
    predicted_BxTxF = jax.lax.conv_general_dilated(before_BxTxF, kernel, (1,), "VALID", dimension_numbers=layout)
    errors_BxT = jnp.mean((predicted_BxTxF - microbatch.features) ** 2, axis=2)
    is_frame_BxT = jvarlen.attention.padding_mask(microbatch.lengths, errors_BxT.shape[1])
    return jnp.sum(errors_BxT * is_frame_BxT), jnp.sum(is_frame_BxT, dtype=jnp.float32)


rng = np.random.default_rng(0)
durations_s = rng.lognormal(1.0, 0.8, 2_000).clip(0.3, 30.0)
num_frames = np.ceil(durations_s * FRAMES_PER_S).astype(int)
recordings = [make_recording(n, rng) for n in num_frames]

# Seconds of a microbatch, made up here; measure_buckets and fit_cost_model give those of your model.
cost = jvarlen.CostModel(constant=1e-3, linear=1e-6, quadratic=2e-9)
buckets = jvarlen.make_buckets(num_frames, max_tokens=6_000, max_shapes=6, length_multiple=10, cost=cost)
plan = jvarlen.make_plan(
    num_frames, buckets, order="length", pacing=jvarlen.planning.competence_pacing(60, initial=0.2)
)
print(plan.report(cost=cost))
mean_s = plan.num_tokens / plan.num_sequences / FRAMES_PER_S
print(f"mean duration: {mean_s[:10].mean():.1f} s in the first ten steps, {mean_s[-10:].mean():.1f} s in the last ten")

optimizer = optax.chain(optax.adam(1e-2), jvarlen.scale_by_batch_size(16, rule="sqrt"))
train_step = jvarlen.make_train_step(loss_fn, optimizer)
state = train_step.init(np.zeros((4, NUM_FEATURES, NUM_FEATURES), np.float32))
batches = jvarlen.load(plan, recordings, collate=pad_recordings, lengths=num_frames)
step = jvarlen.compile_buckets(train_step, state, batches, progress=False)
all_metrics = []
for batch in batches:
    state, metrics = step(state, batch)
    all_metrics.append(metrics)
print(f"loss: {float(all_metrics[0].loss):.3f} -> {float(all_metrics[-1].loss):.3f} in {len(all_metrics)} steps")
