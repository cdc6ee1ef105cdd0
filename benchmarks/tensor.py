"""What does tensor parallelism send, what does it save in memory, and what does a step take, against PyTorch's?

The decoder, trained by AdamW with clipping on rows of one bucket. On two CPU devices of one process, for
`tensor1`, `tensor2` and `tensor2.sequence_parallel`: collectives, counted in the compiled programs, temporaries of a
device, and seconds of a step. Beside it the same model split by PyTorch's `DTensor` over two processes on gloo:
collectives, counted by `CommDebugMode`, and seconds. Run `python benchmarks/tensor.py [--quick]`. Prints tables and
writes them, with versions and hardware, to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec
from support import ranks
from support.timing import COMPILE_FAST, digits, report, table, versions_and_hardware
from support.zero_jax import medians_in_turn

import jvarlen
from jvarlen.batches import BatchShapes
from jvarlen.compiling.compiled_buckets import CompiledBuckets
from jvarlen.distributed.mesh import split_cpu
from jvarlen.distributed.placement import place
from jvarlen.estimates.hlo import list_collectives
from jvarlen.models import DecoderConfig, init_params, layered, stack_layers
from jvarlen.parallel import (
    Axes,
    Layout,
    layered_loss_fn,
    make_train_step,
)
from jvarlen.parallel.tensor import partition_specs, split_params, tensor_parallel_model

NUM_DEVICES = 2
# Layouts, with the way of PyTorch that each is compared with.
WAYS_OF_TORCH = {"tensor1": "whole", "tensor2": "DTensor", "tensor2.sequence_parallel": "DTensor, sequence parallel"}
LAYOUTS = tuple(WAYS_OF_TORCH)[:: 2 if "--quick" in sys.argv else 1]
KINDS = ("all-reduce", "all-gather", "reduce-scatter")
PASSES = ("forward", "with the gradient", "step")
DEADLINE_S = 600
BY_TORCH = Path(__file__).parent / "support" / "tensor_torch.py"


class Form(NamedTuple):
    """What is measured: layers, width, heads, rows of a microbatch, positions of a row, and steps that are timed."""

    num_layers: int
    width: int
    num_heads: int
    rows: int
    length: int
    num_timed: int


FULL = Form(num_layers=4, width=256, num_heads=4, rows=4, length=256, num_timed=15)
QUICK = Form(num_layers=1, width=8, num_heads=2, rows=1, length=8, num_timed=1)


class Measured(NamedTuple):
    """Collectives by pass and kind, bytes of temporaries by pass, and the compiled step with what it runs on."""

    collectives: dict[str, dict[str, int]]
    temp_bytes: dict[str, int]
    step: CompiledBuckets
    state: Any
    batch: Any


def compile_passes(form: Form, text: str) -> Measured:
    """Loss, loss with gradients, and the whole step on a layout."""
    layout = Layout.parse(f"data1.{text}")
    config = DecoderConfig(num_layers=form.num_layers, width=form.width, num_heads=form.num_heads)
    model, mesh = layered(config)._replace(stack=None), place(layout).mesh
    params = stack_layers(init_params(config, seed=0))
    samples = np.random.default_rng(0).integers(0, 256, (form.rows, form.length))
    plan = jvarlen.make_plan([form.length] * form.rows, [(form.rows, form.length)], order="length")
    (batch,) = jvarlen.load(plan, list(samples), layout=mesh)

    axes = Axes(tensor="tensor", sequence_parallel=layout.sequence_parallel) if layout.tensor > 1 else Axes()
    loss_fn = layered_loss_fn(tensor_parallel_model(model, axes) if layout.tensor > 1 else model)
    whole = PartitionSpec()
    lie = partition_specs(model.specs) if layout.tensor > 1 else whole
    sums = (whole, whole)
    microbatch = jax.tree.map(lambda leaf: leaf[0] if jnp.ndim(leaf) else leaf, jax.device_get(batch))
    programs = {}
    for name, call, out_specs in (
        ("forward", loss_fn, sums),
        ("with the gradient", jax.value_and_grad(loss_fn, has_aux=True), (sums, lie)),
    ):
        split = jax.shard_map(call, mesh=mesh, in_specs=(lie, whole), out_specs=out_specs, check_vma=False)
        arguments = split_params(params, model.specs, layout.tensor), microbatch
        programs[name] = jax.jit(split).lower(*arguments).compile()

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))
    state = make_train_step(model, optimizer, layout=layout).init(params)
    step = jvarlen.compile_buckets(
        make_train_step(model, optimizer, layout=layout),
        state,
        BatchShapes.of_plan(plan, layout=mesh),
        progress=False,
        options=jvarlen.CompileOptions(cache_dir=None),
    )
    collectives = {name: count(program) for name, program in programs.items()}
    temp_bytes = {name: program.memory_analysis().temp_size_in_bytes for name, program in programs.items()}
    collectives["step"] = count(step.program_text(plan.buckets.shapes[0]))
    temp_bytes["step"] = step.report[0].temp_bytes
    return Measured(collectives, temp_bytes, step, state, batch)


def count(program: jax.stages.Compiled | str) -> collections.Counter[str]:
    """Collectives of more than one device, by kind."""
    number: collections.Counter[str] = collections.Counter()
    for each in list_collectives(program):
        if len(each.groups[0]) > 1:
            number[each.kind] += each.times
    return number


def stepping(measured: Measured) -> Any:
    """A call that takes one step and waits for it. It donates the state."""
    state = measured.state

    def step() -> None:
        nonlocal state
        state, metrics = measured.step(state, measured.batch)
        jax.block_until_ready((state, metrics))

    return step


def by_torch(form: Form) -> dict[str, Any]:
    """What the processes of PyTorch found."""
    environment = os.environ | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})
    given = json.dumps([form._asdict(), form.num_timed, [WAYS_OF_TORCH[text] for text in LAYOUTS]])
    with tempfile.TemporaryDirectory() as folder:
        command = ranks.command(BY_TORCH, given, f"{folder}/meeting", num_processes=NUM_DEVICES)
        told = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=DEADLINE_S)
    return json.loads(told.stdout.splitlines()[-1])


def tables(form: Form) -> list[str]:
    measured = {text: compile_passes(form, text) for text in LAYOUTS}
    theirs = by_torch(form)
    seconds = medians_in_turn({text: stepping(each) for text, each in measured.items()}, form.num_timed)
    counts = {f"jvarlen, {text}": each.collectives for text, each in measured.items()}
    counts |= {f"PyTorch, {way}": each for way, each in theirs.items() if "step" in each}
    first = measured[LAYOUTS[0]]
    taken = [(f"jvarlen, {text}", seconds[text], seconds[LAYOUTS[0]]) for text in LAYOUTS]
    taken += [(f"PyTorch, {way}", each["seconds"], theirs["whole"]["seconds"]) for way, each in theirs.items()]
    beside = [seconds[text] for text in LAYOUTS]
    return [
        f"{form.num_layers} layers of width {form.width}, {form.num_heads} heads, 256 values of a token; one "
        f"microbatch of {form.rows} rows of {form.length} positions, in float32.",
        "",
        "## Collectives",
        "",
        f"For the loss, the loss with gradients, and the step with clipping and AdamW. L = {form.num_layers}: "
        f"2L + 3 = {2 * form.num_layers + 3}, 4L + 2 = {4 * form.num_layers + 2}, 4L + 4 = {4 * form.num_layers + 4}. "
        "PyTorch sums exponentials and the logits of targets apart. With sequence parallelism it sums the gradients of "
        "each norm by itself, after the backward pass.",
        "",
        *table(
            "way|" + "|".join(f"{kind}s, {name}" for kind in KINDS for name in PASSES),
            [
                [way, *(f"{each[name].get(kind, 0)}" for kind in KINDS for name in PASSES)]
                for way, each in counts.items()
            ],
        ),
        "",
        "## Temporaries",
        "",
        "MiB of a device, of the loss with gradients and of the step, and parts of those of `tensor1`. On `tensor2`, "
        "what lies between the products is whole on each device.",
        "",
        *table(
            "layout|with the gradient, MiB|of tensor1's|step, MiB|of tensor1's step",
            [
                [
                    text,
                    *(
                        cell
                        for name in PASSES[1:]
                        for cell in (
                            digits(each.temp_bytes[name] / 2**20),
                            f"{each.temp_bytes[name] / first.temp_bytes[name]:.3f}",
                        )
                    ),
                ]
                for text, each in measured.items()
            ],
        ),
        "",
        "## Seconds",
        "",
        f"Medians of {form.num_timed} steps; ways of a package take turns. `tensor1` and the whole model have all "
        "cores; two devices, and two processes of PyTorch with half of the threads each, share them. Devices of one "
        "process hand over arrays in memory, processes send them through gloo.",
        "",
        *table(
            "way|step, ms|of tensor1's, or the whole model's|of jvarlen's",
            [
                [name, digits(1e3 * one), digits(one / whole), digits(one / beside[index % len(beside)])]
                for index, (name, one, whole) in enumerate(taken)
            ],
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model, and no report")
    quick = parser.parse_args().quick
    form = QUICK if quick else FULL
    if quick:
        os.environ["XLA_FLAGS"] = COMPILE_FAST
    split_cpu(NUM_DEVICES)
    title = f"# Tensor parallelism: collectives, memory and time, {datetime.date.today()}"
    report("tensor", [title, "", *tables(form), "", versions_and_hardware("jax", "optax", "torch")], write=not quick)


if __name__ == "__main__":
    main()
