"""A script that trains with ZeRO over all processes and prints losses and gathered parameters as JSON.

Arguments: a layout, the number of processes, a rank and a port.
"""

import json
import sys

import jax
import numpy as np
import optax

import jvarlen
from jvarlen.models import DecoderConfig, init_params, layered
from jvarlen.parallel import Layout, make_train_step

MODEL = DecoderConfig(num_layers=2, width=32, num_heads=2)


def train(text):
    """Losses, sums of squares of the parameters, and bytes of optimizer state on a device and in all."""
    layout = Layout.parse(text)
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 9, 29)
    dataset = [rng.integers(0, 256, length).astype(np.uint8) for length in lengths]
    plan = jvarlen.make_plan(lengths, [(2, 8)], order="length", num_microbatches=4)
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    with jax.enable_x64(True):
        params = jax.tree.map(np.float64, init_params(MODEL, seed=0))
        step = make_train_step(layered(MODEL), optimizer, layout=layout)
        state = step.init(params)
        compiled = jvarlen.compile_buckets(step, state, plan, progress=False)
        losses = []
        for batch in jvarlen.load(plan, dataset, layout=layout):
            state, metrics = compiled(state, batch)
            losses.append(float(metrics.loss))
        gathered = step.gather_params(state)
        squares = [float(np.sum(leaf**2)) for leaf in jax.tree.leaves(gathered)]
        leaves = jax.tree.leaves(state.opt_state)
        held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
        return losses, squares, held / sum(leaf.nbytes for leaf in leaves)


if __name__ == "__main__":
    text, num_processes, rank, port = sys.argv[1], *map(int, sys.argv[2:])
    jvarlen.distributed.initialize_processes(f"127.0.0.1:{port}", num_processes, rank)
    print(json.dumps(train(text)))
