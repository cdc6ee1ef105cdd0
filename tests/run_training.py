"""A script that writes the losses of a training.

Arguments: a folder, the number of processes, a rank and a port. One process trains on 1 and 8 devices, one after the
other; several train together on all of theirs. All train in float64 as well, where only rounding is left to differ.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jvarlen
from jvarlen.batches import BatchShapes
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.mesh import replicate
from jvarlen.training.train_state import new_state

MICROBATCHES_PER_STEP = 8
NUM_STEPS = 50
SIZES_ALONE = (1, 8)
BUCKETS = {"float32": [(2, 24)], "float64": [(1, 12), (2, 24)]}  # fewer where compiling takes longer
VOCAB_SIZE, WIDTH = 256, 16


def make_dataset():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 40, length).astype(np.uint8) for length in rng.integers(1, 25, 300)]


def make_params():
    rng = np.random.default_rng(1)
    shapes = {"table": (VOCAB_SIZE, WIDTH), "mixed": (WIDTH, WIDTH), "head": (WIDTH, VOCAB_SIZE)}
    return {name: rng.normal(0, 0.5, shape) for name, shape in shapes.items()}


def loss_fn(params, microbatch):
    """Of each token, by the mean of those before it."""
    x_BxTxD = jnp.pad(params["table"][microbatch.tokens[:, :-1]], ((0, 0), (1, 0), (0, 0)))
    x_BxTxD = jnp.cumsum(x_BxTxD, axis=1) / jnp.arange(1, x_BxTxD.shape[1] + 1)[:, None]
    logits_BxTxV = jnp.tanh(x_BxTxD @ params["mixed"]) @ params["head"]
    losses_BxT = optax.softmax_cross_entropy_with_integer_labels(logits_BxTxV, microbatch.tokens)
    return jnp.sum(losses_BxT * microbatch.weights), jnp.sum(microbatch.weights)


def make_plans(dataset, buckets):
    """Epochs without end: padding rows in the last step of each."""
    lengths = np.array([len(sample) for sample in dataset])

    def plan_of_epoch(epoch):
        return jvarlen.make_plan(
            lengths, buckets, microbatches_per_step=MICROBATCHES_PER_STEP, order="shuffle", epoch=epoch
        )

    return plan_of_epoch


def losses_of(dtype, mesh, dataset, num_steps=NUM_STEPS):
    """Σ loss / Σ weight of every step of AdamW, its rate scaled by the batch size."""
    plan_of_epoch = make_plans(dataset, BUCKETS[dtype])
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, num_steps)),
        jvarlen.scale_by_batch_size(8, rule="sqrt"),
    )
    params = jax.tree.map(lambda leaf: np.asarray(leaf, dtype), make_params())
    state = replicate(new_state(params, optimizer), mesh)
    step = jvarlen.compile_buckets(
        jvarlen.make_train_step(loss_fn, optimizer, layout=mesh),
        state,
        BatchShapes.of_plan(plan_of_epoch(0), layout=mesh),
        progress=False,
        options=jvarlen.CompileOptions(cache_dir=None),
    )
    losses = []
    batches = jvarlen.load(plan_of_epoch, dataset, layout=mesh)
    with jvarlen.no_recompiles():
        for _ in range(num_steps):
            state, metrics = step(state, next(batches))
            losses.append(metrics)
    return [float(metrics.loss_sum) / float(metrics.weight_sum) for metrics in losses]


def main():
    folder, (num_processes, rank, port) = Path(sys.argv[1]), map(int, sys.argv[2:])
    if num_processes > 1:
        jvarlen.initialize_processes(f"127.0.0.1:{port}", num_processes, rank)
    sizes = SIZES_ALONE if num_processes == 1 else (jax.device_count(),)
    dataset = make_dataset()
    losses = {}
    for dtype in ("float32", "float64"):
        # One process compiles float32, where rounding shows most, as users do. Otherwise it would be most of the time.
        jax.config.update("jax_disable_most_optimizations", dtype == "float64" or num_processes > 1)
        with jax.enable_x64(dtype == "float64"):
            losses[dtype] = {size: losses_of(dtype, Layout(data=size).on().mesh, dataset) for size in sizes}
    (folder / f"{num_processes}-{jax.device_count()}-{rank}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
