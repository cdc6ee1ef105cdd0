"""A script that trains on a mixed plan over all processes, and prints losses, parameters and the samples read as JSON.

Arguments: the number of processes, a rank and a port.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jvarlen
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.mesh import replicate
from jvarlen.distributed.placement import place
from jvarlen.experimental.mixed import load_mixed, make_mixed_plan, make_mixed_train_step
from jvarlen.training.train_state import new_state

LENGTHS = np.random.default_rng(0).integers(1, 9, 33)


class Recorded:
    """Samples, and which of them were read."""

    def __init__(self):
        self.read = set()

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, i):
        self.read.add(i)
        return np.arange(i, i + LENGTHS[i]) % 11


def loss_fn(params, microbatch, key):
    values = jnp.tanh(params[microbatch.tokens]) * jax.random.bernoulli(key, 0.7, microbatch.tokens.shape)
    return jnp.sum(jnp.square(values - 0.3) * microbatch.weights), jnp.sum(microbatch.weights)


def train():
    """Losses, parameters, samples read and counted, and microbatches of each step, over four ranks."""
    mesh = place(Layout(data=4)).mesh
    plan = make_mixed_plan(jvarlen.make_plan(LENGTHS, [(4, 3), (2, 6), (1, 8)], order="shuffle"), 9)
    dataset, optimizer = Recorded(), optax.chain(optax.sgd(0.3), jvarlen.scale_by_batch_size(8))
    with jax.enable_x64(True):
        state = new_state(np.linspace(-1, 1, 11), optimizer, seed=2)
        state = replicate(state, mesh)
        step = jax.jit(make_mixed_train_step(loss_fn, optimizer, plan.buckets, layout=mesh))
        losses = []
        batches = load_mixed(plan, dataset, layout=mesh)
        for batch in batches:
            state, metrics = step(state, batch)
            losses.append(float(metrics.loss))
        params, read, counts = np.asarray(state.params).tolist(), sorted(dataset.read), np.diff(plan.step_offsets)
        return losses, params, read, batches.num_samples, counts.tolist()


if __name__ == "__main__":
    num_processes, rank, port = map(int, sys.argv[1:])
    jvarlen.distributed.initialize_processes(f"127.0.0.1:{port}", num_processes, rank)
    print(json.dumps(train()))
