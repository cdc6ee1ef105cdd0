"""A script that places a directory of Hugging Face on layouts, and prints how many bytes of it were read, as JSON.

Arguments: the directory, one to write to, layouts, the number of processes, a rank and a port.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import optax

import jvarlen
from jvarlen.models import from_hugging_face, layered, to_hugging_face
from jvarlen.parallel import make_train_step


class Sliced(np.ndarray):
    """An array that is read by slices alone, which it counts: what else is taken of it is NaN."""

    def __new__(cls, content):
        self = np.broadcast_to(np.asarray(np.nan, content.dtype), content.shape).view(cls)
        self.content, self.num_bytes = content, 0
        return self

    def __array_finalize__(self, of):
        self.content = None

    def __getitem__(self, index):
        if self.content is None:
            return np.asarray(super().__getitem__(index))
        part = self.content[index]
        self.num_bytes += part.nbytes
        return part


def placed_bytes(tree):
    """Bytes on this process's devices; what several of them hold counts once."""
    return sum(
        sum({str(shard.index): shard.data.nbytes for shard in leaf.addressable_shards}.values())
        for leaf in jax.tree.leaves(tree)
    )


def init_by_slices(step, params):
    """The state of a step, and the bytes that were read of its parameters."""
    sliced = jax.tree.map(Sliced, params)
    state = step.init(sliced)
    return state, sum(leaf.num_bytes for leaf in jax.tree.leaves(sliced))


def assert_equal(state, other):
    """The same values at the same places."""
    assert jax.tree.structure(state) == jax.tree.structure(other)
    for one, two in zip(*map(jax.tree.leaves, (state, other)), strict=True):
        assert one.sharding.is_equivalent_to(two.sharding, one.ndim)
        for shard, expected in zip(one.addressable_shards, two.addressable_shards, strict=True):
            np.testing.assert_array_equal(shard.data, expected.data, strict=True)


def optimizer():
    """One that has arrays of its own, and copies of the parameters."""
    return jvarlen.with_float32_master(optax.sgd(1e-3, momentum=0.9))


if __name__ == "__main__":
    directory, out, *layouts, num_processes, rank, port = sys.argv[1:]
    jvarlen.distributed.initialize_processes(f"127.0.0.1:{port}", int(num_processes), int(rank))
    config, params = from_hugging_face(Path(directory))
    counted = {}
    for layout in layouts:
        step = make_train_step(layered(config), optimizer(), layout=layout)
        state, num_read = init_by_slices(step, params)
        assert_equal(state, step.init(jax.tree.map(np.array, params)))
        counted[layout] = num_read, placed_bytes(state.params)
        whole = step.gather_params(state)
        jax.tree.map(np.testing.assert_array_equal, whole, params)
    to_hugging_face(Path(out), whole, config)
    print(json.dumps(counted))
