"""What does spreading rows over a mesh axis save in memory, how even is the work, and what is sent?

A small transformer by layers, trained on rows of one bucket. Temporaries of a device where each row is whole on one of
8 devices, and where it is spread over 2, 4 or 8 of them. Pairs of chunks that the devices compute, against contiguous
parts of rows. Bytes that attention sends, counted in the compiled program, against the formula. Seconds of attention,
of devices that share the cores, against `attend` on one device. PyTorch's context parallelism is not measured: it takes
attention kernels of GPUs. Run `python benchmarks/sequence.py [--quick]`. Prints tables and writes them, with versions
and hardware, to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from support.timing import COMPILE_FAST, best_seconds, digits, report, table, versions_and_hardware

from jvarlen.distributed.mesh import split_cpu
from jvarlen.estimates.hlo import list_collectives
from jvarlen.parallel import (
    Axes,
    LayeredModel,
    LayeredParams,
    Layout,
    attend_over_axis,
    layered_loss_fn,
)
from jvarlen.parallel.context import context_positions, shard_positions

NUM_DEVICES = 2 if "--quick" in sys.argv else 8
SPREAD = PartitionSpec(None, "context")


class Form(NamedTuple):
    """What is measured: positions of a row, layers, width and heads; and positions of rows that are timed.

    Rows are spread over each of some numbers of devices, and timed on each of others.
    """

    length: int
    num_layers: int
    width: int
    num_heads: int
    timed_length: int
    spread_over: tuple[int, ...]
    timed_on: tuple[int, ...]


FULL = Form(8192, num_layers=4, width=128, num_heads=2, timed_length=2048, spread_over=(2, 4, 8), timed_on=(2, 4))
QUICK = Form(64, num_layers=1, width=16, num_heads=2, timed_length=32, spread_over=(2,), timed_on=(2,))


def transformer(form: Form) -> LayeredModel:
    """Attention and a perceptron in each layer; predicts the inputs."""

    def layer(own: Any, x: jax.Array, tokens: jax.Array, axes: Axes) -> jax.Array:
        qkv = (x @ own["qkv"]).reshape(*x.shape[:2], 3, form.num_heads, -1)
        attended = attend_over_axis(*jnp.moveaxis(qkv, 2, 0), axes=axes)
        x = x + attended.reshape(x.shape) @ own["out"]
        return x + jax.nn.gelu(x @ own["up"]) @ own["down"]

    def loss(ends: jax.Array, x: jax.Array, tokens: jax.Array, axes: Axes) -> tuple[jax.Array, jax.Array]:
        log_probs = jax.nn.log_softmax(x @ ends.T)
        return -jnp.sum(jnp.take_along_axis(log_probs, tokens[..., None], axis=-1)), jnp.float32(tokens.size)

    return LayeredModel(lambda ends, tokens, axes: ends[tokens], layer, loss)


def params_of(form: Form) -> LayeredParams:
    sizes = {"qkv": (1, 3), "out": (1, 1), "up": (1, 4), "down": (4, 1)}
    layers = {
        name: jax.ShapeDtypeStruct((form.num_layers, rows * form.width, columns * form.width), jnp.float32)
        for name, (rows, columns) in sizes.items()
    }
    return LayeredParams(jax.ShapeDtypeStruct((256, form.width), jnp.float32), layers)


def mesh_of(data: int, context: int) -> jax.sharding.Mesh:
    """The first devices, with both axes, also where one of them has one device."""
    devices = jax.devices()[: data * context]
    types = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((data, context), ("data", "context"), axis_types=types, devices=devices)


def compile_step(form: Form, layout: Layout) -> jax.stages.Compiled:
    """Loss and gradients of 8 rows, of which each device takes one at a time."""
    model = transformer(form)
    axis = "context" if layout.context > 1 else None

    def on_device(params: LayeredParams, rows: jax.Array) -> Any:
        positions = None if axis is None else shard_positions(form.length)

        def with_axes(call: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args: call(*args[:-1], args[-1]._replace(context=axis, positions=positions))

        bound = LayeredModel(*map(with_axes, model[:3]))
        value_and_grad = jax.value_and_grad(layered_loss_fn(bound), has_aux=True)

        def add_row(grads: Any, row: jax.Array) -> tuple[Any, Any]:
            sums, more = value_and_grad(params, row[None])
            return jax.tree.map(jnp.add, grads, more), sums

        grads, sums = jax.lax.scan(add_row, jax.tree.map(jnp.zeros_like, params), rows)
        return jax.lax.psum((grads, jax.tree.map(jnp.sum, sums)), ("data", "context"))

    specs = (PartitionSpec(), PartitionSpec("data", "context"))
    mesh = mesh_of(layout.data, layout.context)
    step = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
    rows = jax.ShapeDtypeStruct((NUM_DEVICES, form.length), jnp.int32)
    return jax.jit(step).lower(params_of(form), rows).compile()


def sent_in_attention(program: jax.stages.Compiled) -> float:
    """Bytes that a device sends, but for the reduction of gradients."""
    total = 0.0
    for each in list_collectives(program):
        if each.kind != "all-reduce":
            num_devices = len(each.groups[0])
            total += each.times * each.num_bytes * (num_devices - 1) / num_devices
    return total


def memory(form: Form) -> list[str]:
    whole = compile_step(form, Layout(data=NUM_DEVICES)).memory_analysis().temp_size_in_bytes
    rows = [[f"data{NUM_DEVICES}", digits(whole / 2**20), "1", "0", "0"]]
    for num in form.spread_over:
        layout = Layout(data=NUM_DEVICES // num, context=num)
        program = compile_step(form, layout)
        held = program.memory_analysis().temp_size_in_bytes
        # Keys and values of the other devices twice, their gradients once, in each layer of a device's rows.
        of_kv = 2 * 4 * form.width * form.length // num
        formula = 3 * (num - 1) * of_kv * form.num_layers * num
        sent = [digits(num_bytes / 2**20) for num_bytes in (sent_in_attention(program), formula)]
        rows.append([str(layout), digits(held / 2**20), f"{held / whole:.3f}", *sent])
    return [
        "## Memory, and bytes sent",
        "",
        f"Loss and gradients of {NUM_DEVICES} rows of {form.length:,} positions, {form.num_layers} layers of width "
        f"{form.width}, {form.num_heads} heads, in float32. MiB of temporaries of a device, which hold one row, or its "
        "positions of one row, at a time; MiB that it sends in attention.",
        "",
        *table(f"layout|temporaries|of data{NUM_DEVICES}'s|sent|by the formula", rows),
    ]


def balance() -> list[str]:
    rows = []
    for num in (2, 4, 8):
        chunks = context_positions(2 * num, num)
        zigzag = [int((held[:, None] >= np.arange(2 * num)).sum()) for held in chunks]
        contiguous = [int((held[:, None] >= np.arange(2 * num)).sum()) for held in np.arange(2 * num).reshape(num, 2)]
        mean = sum(zigzag) / num
        rows.append(
            [
                f"{num}",
                *(f"{min(each)} to {max(each)}" for each in (zigzag, contiguous)),
                *(f"{max(each) / mean:.2f}" for each in (zigzag, contiguous)),
            ]
        )
    return [
        "## Balance",
        "",
        "Pairs of chunks of queries and keys that a device computes, with 2N chunks a row on N devices.",
        "",
        *table("devices|pairs|pairs, contiguous|most / mean|most / mean, contiguous", rows),
    ]


def seconds(form: Form) -> list[str]:
    shape = (1, form.timed_length, form.num_heads, form.width // form.num_heads)
    qkv = [jax.random.normal(jax.random.key(i), shape) for i in range(3)]
    rows = []
    for num in (1, *form.timed_on):
        mesh, axes = mesh_of(1, num), Axes() if num == 1 else Axes(context="context")

        def loss(*qkv: jax.Array, axes: Axes = axes) -> jax.Array:
            return jnp.sum(attend_over_axis(*qkv, axes=axes) * qkv[2])

        grads = jax.shard_map(
            jax.grad(loss, argnums=(0, 1, 2)), mesh=mesh, in_specs=SPREAD, out_specs=SPREAD, check_vma=False
        )
        placed = jax.device_put(qkv, NamedSharding(mesh, SPREAD))
        program = jax.jit(grads).lower(*placed).compile()
        jax.block_until_ready(program(*placed))
        taken, _ = best_seconds(lambda program=program, placed=placed: jax.block_until_ready(program(*placed)))
        rows.append([f"{num}", digits(1e3 * taken)])
    first = float(rows[0][1])
    return [
        "## Seconds",
        "",
        f"Attention, forward and backward, of one row of {form.timed_length:,} positions, {form.num_heads} heads of "
        f"{form.width // form.num_heads}, in float32. The devices share the cores: equal work takes equal time.",
        "",
        *table("devices|ms|of whole rows'", [[*row, digits(float(row[1]) / first)] for row in rows]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short rows, and no report")
    quick = parser.parse_args().quick
    form = QUICK if quick else FULL
    if quick:
        os.environ["XLA_FLAGS"] = COMPILE_FAST
    split_cpu(NUM_DEVICES)
    lines = [*memory(form), "", *balance(), "", *seconds(form)]
    title = f"# Context parallelism: memory, balance and bytes, {datetime.date.today()}"
    report("sequence", [title, "", *lines, "", versions_and_hardware("jax")], write=not quick)


if __name__ == "__main__":
    main()
