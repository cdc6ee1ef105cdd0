"""A script that compiles in several processes.

Arguments: the number of processes, a rank and a port.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from jvarlen import Bucket, CompileOptions, compile_buckets, no_recompiles
from jvarlen.batches import BatchShapes
from jvarlen.distributed import initialize_processes
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.placement import place, placement_of
from tests.support.processes import outcome

BUCKETS = [Bucket(2, 4), Bucket(1, 8)]
M = 4


def sums(state, batch):
    return state + jnp.sum(batch.weights), {"tokens": jnp.sum(batch.tokens)}


def batch_of(compiled, bucket, mesh):
    """Ones, each process's part from its own memory."""
    spec = compiled.specs[bucket]
    return jax.tree.map(
        lambda leaf, sharding: jax.make_array_from_callback(
            leaf.shape, sharding, lambda index: np.ones(leaf.shape, leaf.dtype)[index]
        ),
        spec,
        placement_of(mesh).batch_shardings(spec),
    )


def main():
    num_processes, rank, port = map(int, sys.argv[1:])
    initialize_processes(f"127.0.0.1:{port}", num_processes, rank)
    mesh = place(Layout()).mesh
    options = CompileOptions(cache_dir=None)
    state = np.float32(0)
    shapes = BatchShapes(BUCKETS, num_microbatches=M, layout=mesh)

    def compiled_with(step):
        return compile_buckets(step, state, shapes, progress=False, options=options)

    def differing(state, batch):
        return state + (rank + 1) * jnp.sum(batch.weights), {"tokens": jnp.sum(batch.tokens)}

    def failing(state, batch):
        if rank == 1:
            raise OSError("the model of process 1 is missing")
        return sums(state, batch)

    compiled = compiled_with(sums)
    total = jax.device_put(np.float32(0), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    batches = [batch_of(compiled, bucket, mesh) for bucket in BUCKETS]
    with no_recompiles() as count:
        for batch in batches:
            total, _ = compiled(total, batch)
    print(
        json.dumps(
            {
                "total": [float(total), count.num_compilations],
                "one differs": outcome(lambda: compiled_with(differing)),
                "one fails": outcome(lambda: compiled_with(failing)),
                "afterwards": outcome(lambda: compiled_with(sums)),
            }
        )
    )


if __name__ == "__main__":
    main()
