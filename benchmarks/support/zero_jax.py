"""Steps of a perceptron of equal layers at every ZeRO level: what they hold, send and take.

As a program it is one of several processes of one CPU device each, started by `namespace.run`: it counts what their
steps send, and prints it as JSON on process 0.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

import jvarlen
from jvarlen.batches import BatchShapes
from jvarlen.compiling.compiled_buckets import CompiledBuckets
from jvarlen.estimates import estimate_communication, estimate_memory
from jvarlen.estimates.communication import CommunicationEstimate
from jvarlen.estimates.memory import MemoryEstimate
from jvarlen.parallel import (
    LayeredModel,
    LayeredParams,
    Layout,
    make_train_step,
)

__all__ = ["Case", "Compiled", "Sizes", "compile_step", "medians_in_turn", "stepping"]

MODEL = LayeredModel(
    embed=lambda ends, microbatch, axes: microbatch,
    layer=lambda own, x, microbatch, axes: jnp.tanh(x @ own),
    loss=lambda ends, x, microbatch, axes: (jnp.sum(x), jnp.float32(len(x))),
)


class Sizes(NamedTuple):
    """What is trained: L layers with a square matrix each, on some rows a microbatch."""

    num_layers: int
    width: int
    rows: int

    @property
    def layer_bytes(self) -> int:
        """Bytes of the weights of a layer."""
        return 4 * self.width**2


class Case(NamedTuple):
    """A ZeRO level, and A, the microbatches a shard."""

    zero: int
    num_microbatches: int


class Compiled(NamedTuple):
    """A compiled step, with what it runs on, and bytes of parameters and optimizer state in the shards of a device."""

    step: CompiledBuckets
    state: Any
    batch: Any
    traffic: CommunicationEstimate
    state_bytes: int


def make_params(sizes: Sizes) -> LayeredParams:
    shape = (sizes.num_layers, sizes.width, sizes.width)
    return LayeredParams((), np.random.default_rng(0).normal(0, 0.03, shape).astype(np.float32))


def batch_spec(bucket: tuple[int, ...], num_microbatches: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((num_microbatches, *bucket), jnp.float32)


def estimate(sizes: Sizes, zero: int, num_shards: int) -> MemoryEstimate:
    """What the step of one microbatch a shard holds."""
    layout, bucket = Layout(data=num_shards, zero=zero), (sizes.rows, sizes.width)
    return estimate_memory(
        MODEL, optax.adamw(1e-4), bucket, layout=layout, params=make_params(sizes), batch_spec=batch_spec
    )


def compile_step(sizes: Sizes, case: Case, num_shards: int) -> Compiled:
    """The step of AdamW over devices, which may be of several processes."""
    layout = Layout(data=num_shards, zero=case.zero)
    optimizer = optax.adamw(1e-4)
    train_step = make_train_step(MODEL, optimizer, layout=layout)
    state = train_step.init(make_params(sizes))
    bucket = (sizes.rows, sizes.width)
    step = jvarlen.compile_buckets(
        train_step,
        state,
        BatchShapes(
            [bucket], num_microbatches=num_shards * case.num_microbatches, batch_spec=batch_spec, has_many_groups=False
        ),
        progress=False,
        options=jvarlen.CompileOptions(cache_dir=None),
    )
    x = np.ones((num_shards * case.num_microbatches, *bucket), np.float32)
    batch = jax.make_array_from_callback(x.shape, train_step.placement.batch_shardings(x), lambda index: x[index])
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves((state.params, state.opt_state)))
    return Compiled(step, state, batch, estimate_communication(step, bucket), held)


def medians_in_turn(calls: dict[Any, Callable[[], None]], repeats: int) -> dict[Any, float]:
    """Median seconds of each call, of which one of each runs after the other; the first round does not count."""
    seconds: dict[Any, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            begun = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - begun)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def stepping(compiled: Compiled) -> Callable[[], None]:
    """A call that takes one step and waits for it. It donates the state."""
    state = compiled.state

    def step() -> None:
        nonlocal state
        state, metrics = compiled.step(state, compiled.batch)
        jax.block_until_ready((state, metrics))

    return step


def count(sizes: Sizes, cases: Sequence[Case], num_counted: int, num_timed: int) -> list[dict[str, Any]]:
    """What steps of several processes send, and take.

    Args:
      sizes: of the model.
      cases: each is compiled, counted and timed.
      num_counted: steps of which bytes are counted.
      num_timed: steps that are timed, those of all cases in turn.

    Returns:
      For each case, bytes that all processes send in a step, "estimated", "by gloo" with what it exchanges besides, and
      "counted"; "state" bytes of a process, and median "seconds" of a step on process 0, None if none were timed.
    """
    found = []
    steps = {}
    for case in cases:
        compiled = compile_step(sizes, case, jax.device_count())
        step = stepping(compiled)
        step()  # connects the processes
        quiet, sent = (_sent_by_all(step, times) for times in (0, num_counted))
        found.append(
            {
                "estimated": jax.device_count() * compiled.traffic.wire_bytes,
                "by gloo": jax.device_count() * compiled.traffic.wire_bytes + _exchanged_by_gloo(compiled.traffic),
                "counted": (sent - quiet) / num_counted,
                "state": compiled.state_bytes,
                "seconds": None,
            }
        )
        steps[case] = step
    if num_timed:
        for one, seconds in zip(found, medians_in_turn(steps, num_timed).values(), strict=True):
            one["seconds"] = seconds
    return found


def _exchanged_by_gloo(traffic: CommunicationEstimate) -> int:
    """What gloo sends in reduce-scatters beyond a ring, in all, where the number of processes is a power of two.

    It halves and doubles, after which device d has the chunk whose number in binary is that of d reversed, and sends it
    to where it belongs. With 4 devices these are 1 and 2, each with a fourth of the array.
    """
    num = jax.device_count()
    num_bits = num.bit_length() - 1
    moved = sum(int(f"{d:0{num_bits}b}"[::-1], 2) != d for d in range(num))
    return sum(row.num_bytes for row in traffic if row.kind == "reduce-scatter") * moved // num


def _sent_by_all(step: Callable[[], None], times: int) -> int:
    """Bytes over the loopback in some steps, and in the waiting of processes for each other."""
    before = _bytes_while_all_wait()
    for _ in range(times):
        step()
    return _bytes_while_all_wait() - before


def _bytes_while_all_wait() -> int:
    multihost_utils.sync_global_devices("all have come")
    num_bytes = _loopback_bytes()
    multihost_utils.sync_global_devices("all may go on")
    return num_bytes


def _loopback_bytes() -> int:
    """Sent so far. `/sys/class/net` is that of the namespace in which it was mounted."""
    (line,) = (line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.partition(":")[2].split()[8])


def main() -> None:
    (sizes, cases, num_counted, num_timed), num_processes, rank = map(json.loads, sys.argv[1:])
    jvarlen.distributed.initialize_processes("127.0.0.1:12345", num_processes, rank)
    found = count(Sizes(*sizes), [Case(*case) for case in cases], num_counted, num_timed)
    if rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
