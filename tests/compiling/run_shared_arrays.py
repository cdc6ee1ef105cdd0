"""A script that gives steps arrays which must not be donated. On several devices, a mistake ends the process.

Arguments: the number of processes, which is 1, a rank and a port. It prints what each case gives.
"""

import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jvarlen import Bucket, CompileOptions, Layout, compile_buckets
from jvarlen.batches import BatchShapes
from jvarlen.distributed.mesh import replicate
from jvarlen.distributed.placement import place
from tests.support.processes import outcome

NUM_DEVICES = len(jax.devices())
LAYOUT = place(Layout(data=NUM_DEVICES)) if NUM_DEVICES > 1 else None
ROWS, EVALUATED = Bucket(1, 4), Bucket(1, 8)  # rows of a step, and of one that returns the state it got


class State(NamedTuple):
    params: dict[str, Any]
    count: Any


def step(state, batch):
    if batch["x"].shape[2] == EVALUATED.length:
        return state, batch["x"].sum()
    params = {"a": state.params["a"] + 1, "b": state.params["b"] + 2}
    return State(params, state.count + 1), batch["x"].sum()


def batch_spec(bucket, num_microbatches):
    return {"x": jax.ShapeDtypeStruct((num_microbatches, *bucket), np.float32)}


def placed(array):
    return array if LAYOUT is None else replicate(array, LAYOUT.mesh)


def new_state():
    return State({"a": placed(jnp.zeros(4)), "b": placed(jnp.ones(4))}, placed(jnp.float32(0)))


def batch_of(bucket):
    batch = {"x": jnp.ones((NUM_DEVICES, *bucket))}
    return batch if LAYOUT is None else jax.device_put(batch, LAYOUT.batch_shardings(batch))


def main():
    shapes = BatchShapes([ROWS, EVALUATED], num_microbatches=NUM_DEVICES, batch_spec=batch_spec, layout=LAYOUT)

    def compiled_for(step, state):
        return compile_buckets(step, state, shapes, progress=False, options=CompileOptions(cache_dir=None))

    compiled, batch = compiled_for(step, new_state()), batch_of(ROWS)

    def params_of(state):
        return [int(state.params[name][0]) for name in "ab"]

    def after_tying():
        state, _ = compiled(new_state(), batch)
        state.params["b"] = state.params["a"]
        return params_of(compiled(state, batch)[0])

    def after_an_evaluation():
        state = new_state()
        state.params["b"] = state.params["a"]
        state, _ = compiled(state, batch_of(EVALUATED))
        return params_of(compiled(state, batch)[0])

    def at_a_used_address():
        found = set()
        for _ in range(20):
            state, _ = compiled(new_state(), batch)
            count, zeros = state.count, placed(jnp.zeros(4))
            state = None
            state = State({"a": zeros, "b": zeros}, count)
            found.add(tuple(params_of(compiled(state, batch)[0])))
        return sorted(found)

    def in_a_batch():
        grown = compiled_for(lambda state, batch: ({"x": state["x"] + 1}, batch["x"].sum()), batch)
        state, _ = grown(batch_of(ROWS), batch)
        state, total = grown(state, {"x": state["x"]})
        return [int(state["x"].max()), int(total)]

    def donated_by_another():
        state, _ = compiled(new_state(), batch)
        jax.jit(lambda state: jax.tree.map(jnp.negative, state), donate_argnums=0)(state)
        return outcome(compiled, state, batch)

    cases = [after_tying, after_an_evaluation, at_a_used_address, in_a_batch, donated_by_another]
    print(json.dumps({case.__name__: case() for case in cases}))


if __name__ == "__main__":
    main()
