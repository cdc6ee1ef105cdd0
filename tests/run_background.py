"""A script in which processes compile in the background: together, then different programs, then one fails.

Arguments: the number of processes, a rank and a port. The last line is what happened, as JSON.
"""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from jvarlen import Bucket, CompileOptions, compile_buckets
from jvarlen.batches import BatchShapes, token_batch_spec
from jvarlen.compiling.lowering import StepCompiler
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.mesh import placement_of
from jvarlen.distributed.processes import agree, initialize_processes
from tests.processes import outcome

BUCKETS = [Bucket(4, 8), Bucket(2, 16), Bucket(2, 24), Bucket(1, 32)]


def main():
    num_processes, rank, port = map(int, sys.argv[1:])
    initialize_processes(f"127.0.0.1:{port}", num_processes, rank)
    mesh = Layout().on().mesh
    compile_now = StepCompiler.compile

    def batch_of(bucket):
        spec = token_batch_spec(bucket, 2)
        return jax.tree.map(
            lambda leaf, sharding: jax.make_array_from_callback(
                leaf.shape, sharding, lambda index: np.ones(leaf.shape, leaf.dtype)[index]
            ),
            spec,
            placement_of(mesh).batch_shardings(spec),
        )

    def start(factor=1.0):
        def step(state, batch):
            return state + factor * jnp.sum(batch.weights), {"tokens": jnp.sum(batch.tokens)}

        options = CompileOptions(cache_dir=None, when="background")
        return compile_buckets(
            step,
            np.float32(0),
            BatchShapes(BUCKETS, microbatches_per_step=2, layout=mesh),
            progress=False,
            options=options,
        )

    def run(step, buckets):
        state, states = np.float32(0), []
        for bucket in buckets:
            state, _ = step(state, batch_of(bucket))
            states.append(float(state))
        return states

    def compile_slowly(step_compiler, lowered):
        if rank == 1 and lowered.bucket == BUCKETS[1]:
            time.sleep(1.0)
        return compile_now(step_compiler, lowered)

    told = {}
    StepCompiler.compile = compile_slowly
    step = start()
    told["together"] = run(step, BUCKETS)
    told["waited"] = {row.bucket: row.stall_s for row in step.report}[BUCKETS[1]]
    StepCompiler.compile = compile_now
    agree("the first part", "")
    told["different"] = outcome(lambda: run(start(1.0 + rank), BUCKETS))
    agree("the second part", "")

    def compile_some(step_compiler, lowered):
        if rank == 1 and lowered.bucket == BUCKETS[2]:
            raise RuntimeError("out of registers")
        return compile_now(step_compiler, lowered)

    StepCompiler.compile = compile_some

    def run_until_it_fails():
        step = start()
        state, _ = step(np.float32(0), batch_of(BUCKETS[0]))
        jax.block_until_ready(state)
        step.wait()

    told["failed"] = outcome(run_until_it_fails)
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
