"""Several processes train together: one plan, each reads the samples of its own devices, all have the same losses.

Run it: python examples/multi_process.py starts two processes of itself on this machine.
By a launcher: mpirun -n 2 python examples/multi_process.py launched, or with srun; JAX finds the others by itself.
"""

import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jvarlen
from jvarlen.batches import next_token_targets

MICROBATCHES_PER_STEP = 4  # a multiple of the devices of all processes together
NUM_TOKENS = 16


def make_samples():
    """Counts from random starts, modulo 16."""
    rng = np.random.default_rng(0)
    return [(start + np.arange(n)) % NUM_TOKENS for start, n in rng.integers([0, 2], [NUM_TOKENS, 40], size=(400, 2))]


def loss_fn(logits_of_next, microbatch):
    """A table with the logits of the token after each token."""
    inputs_BxT, targets_BxT, weights_BxT = next_token_targets(microbatch)
    losses_BxT = optax.softmax_cross_entropy_with_integer_labels(logits_of_next[inputs_BxT], targets_BxT)
    return jnp.sum(losses_BxT * weights_BxT), jnp.sum(weights_BxT)


def train():
    """What every process runs."""
    samples = make_samples()
    lengths = jvarlen.measure_lengths(samples, progress=False)
    buckets = jvarlen.make_buckets(lengths, 256, max_shapes=2, num_microbatches=MICROBATCHES_PER_STEP)
    plan = jvarlen.make_plan(lengths, buckets, order="shuffle", num_microbatches=MICROBATCHES_PER_STEP)
    jvarlen.distributed.agree("the plan", plan.digest)  # raises on every process if one differs

    layout = "data"  # over the devices of all processes
    optimizer = optax.chain(optax.adam(0.3), jvarlen.scale_by_batch_size(32, rule="sqrt"))
    train_step = jvarlen.make_train_step(loss_fn, optimizer, layout=layout)
    state = train_step.init(jnp.zeros((NUM_TOKENS, NUM_TOKENS)))
    batches = jvarlen.load(plan, samples, layout=layout)
    step = jvarlen.compile_buckets(train_step, state, batches, progress=False)
    all_metrics = []
    for batch in batches:
        state, metrics = step(state, batch)
        all_metrics.append(metrics)
    losses = [float(metrics.loss) for metrics in all_metrics]
    jvarlen.distributed.agree("the losses", repr(losses))
    print(
        f"process {jax.process_index()} of {jax.process_count()}: read {batches.num_samples} of {plan.num_samples} "
        f"samples, plan {plan.digest[:16]}, loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps",
        flush=True,
    )
    if jax.process_index() == 0:
        print("all processes have the same plan and the same losses", flush=True)


def start_processes(num_processes):
    """Starts processes of this file and waits for them; the exit code is that of the first that failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    commands = [[sys.executable, __file__, address, str(num_processes), str(i)] for i in range(num_processes)]
    processes = [subprocess.Popen(command) for command in commands]
    return next(filter(None, [process.wait() for process in processes]), 0)


if len(sys.argv) == 1:
    sys.exit(start_processes(2))
if sys.argv[1] == "launched":
    jvarlen.distributed.initialize_processes()
else:
    jvarlen.distributed.initialize_processes(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
train()
