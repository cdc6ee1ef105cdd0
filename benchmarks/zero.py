"""What does each ZeRO level save in memory, and what does it cost in communication and time?

A perceptron of equal layers, trained by AdamW. On N devices of one process: bytes of state, of arguments and of
temporaries, estimated bytes sent, and seconds of a step; all levels take turns. ZeRO-3 with more and more layers: how
many of them are whole at a time. On several processes of one device each, in a network namespace: bytes over its
loopback against the estimate, and the time of a step against PyTorch's DistributedDataParallel and `fully_shard` on
gloo; this part needs Linux, root, and the commands `unshare` and `ip`, and is left out without. Run
`python benchmarks/zero.py [--quick]`. Prints tables and writes them, with versions and hardware, to
`benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from support import namespace, zero_jax
from support.timing import COMPILE_FAST, digits, report, table, versions_and_hardware
from support.zero_jax import Case, Sizes

from jvarlen.distributed.mesh import split_cpu

BY_TORCH = Path(__file__).parent / "support" / "zero_torch.py"
NUM_DEVICES = 4


class Form(NamedTuple):
    """What is measured."""

    levels: Sequence[int]
    on_devices: Sizes
    many_microbatches: int
    by_layers: Sequence[Sizes]
    on_processes: Sizes
    counted: Sequence[
        tuple[int, Sequence[int]]
    ]  # numbers of processes, and of microbatches a shard; the first is timed
    num_timed: int


FULL = Form(
    levels=range(4),
    on_devices=Sizes(num_layers=6, width=768, rows=64),
    many_microbatches=8,
    by_layers=[Sizes(num_layers, 1024, 8) for num_layers in (4, 8, 16)],
    on_processes=Sizes(num_layers=6, width=1024, rows=256),
    counted=[(2, (1,)), (2, (2,)), (4, (1, 2))],
    num_timed=12,
)
QUICK = Form(
    levels=(0, 3),
    on_devices=Sizes(num_layers=2, width=16, rows=2),
    many_microbatches=2,
    by_layers=[Sizes(4, 128, 1)],
    on_processes=Sizes(num_layers=2, width=64, rows=4),
    counted=[(2, (1,))],
    num_timed=1,
)


def mib(num_bytes: float) -> str:
    return digits(num_bytes / 2**20)


def on_devices(form: Form) -> list[str]:
    """Every level on the devices of one process, with one microbatch a shard and with several."""
    cases = [Case(zero, num) for num in (1, form.many_microbatches) for zero in form.levels]
    compiled = {case: zero_jax.compile_step(form.on_devices, case, NUM_DEVICES) for case in cases}
    told = {case: each.step.report[0] for case, each in compiled.items()}
    seconds = zero_jax.medians_in_turn(
        {case: zero_jax.stepping(each) for case, each in compiled.items()}, form.num_timed
    )
    each_a = (1, form.many_microbatches)
    memory, others = [], []
    for zero in form.levels:
        estimated = zero_jax.estimate(form.on_devices, zero, NUM_DEVICES)
        of_state = estimated.params + estimated.opt_state
        numbers = [compiled[Case(zero, 1)].state_bytes, of_state, told[Case(zero, 1)].argument_bytes]
        numbers += [estimated.total - of_state, *(told[Case(zero, num)].temp_bytes for num in each_a)]
        memory.append([f"zero{zero}", *map(mib, numbers)])
        others.append([f"zero{zero}"])
        for num in each_a:
            case, first = Case(zero, num), Case(0, num)
            others[-1] += [
                f"{compiled[case].traffic.wire_bytes / compiled[first].traffic.wire_bytes:.2f}",
                digits(1e3 * seconds[case]),
                digits(seconds[case] / seconds[first]),
            ]
    num_layers, width, num_rows = form.on_devices
    return [
        "## State and temporaries",
        "",
        f"{NUM_DEVICES} devices of one process, which share the cores; {num_layers} layers of {width} × {width}, "
        f"{mib(num_layers * form.on_devices.layer_bytes)} MiB of parameters; {num_rows} rows a microbatch, A "
        "microbatches a shard. MiB of a device: state is counted in the shards of parameters and optimizer, and by "
        "`estimate_memory`; arguments, which are state and batch, and temporaries are those of the compiled program.",
        "",
        *table(
            "level|state|state, estimated|arguments|temporaries, estimated|"
            + "|".join(f"temporaries, A = {num}" for num in each_a),
            memory,
        ),
        "",
        "## Bytes and time",
        "",
        "Bytes that a device sends in the same steps, by `estimate_communication`, and seconds, as medians of "
        f"{form.num_timed} steps. Ratios are to zero0 with as many microbatches.",
        "",
        *table(
            "level|" + "|".join(f"sent / zero0's, A = {num}|ms, A = {num}|/ zero0's, A = {num}" for num in each_a),
            others,
        ),
    ]


def by_layers(form: Form) -> list[str]:
    """Temporaries of ZeRO-3 where weights dominate."""
    rows = []
    for sizes in form.by_layers:
        temp = {
            zero: zero_jax.compile_step(sizes, Case(zero, 1), NUM_DEVICES).step.report[0].temp_bytes / sizes.layer_bytes
            for zero in (0, 3)
        }
        inputs = sizes.num_layers * sizes.rows / sizes.width
        shards = sizes.num_layers / NUM_DEVICES
        rows.append(
            [
                f"{sizes.num_layers}",
                f"{temp[0]:.2f}",
                f"{temp[3]:.2f}",
                f"{shards:.2f}",
                f"{inputs:.2f}",
                f"{temp[3] - shards - inputs:.2f}",
            ]
        )
    _, width, num_rows = form.by_layers[0]
    return [
        "## Whole layers of ZeRO-3",
        "",
        f"In units of the weights of one layer, {width} × {width}, with {num_rows} rows a shard and A = 1 on "
        f"{NUM_DEVICES} devices. L layers have L / N of shards of gradients, and keep the inputs of each for the "
        "backward pass; what is left are layers that are whole.",
        "",
        *table("layers|zero0's temporaries|zero3's temporaries|shards of gradients|kept inputs|left", rows),
    ]


def on_processes(form: Form, **environment: str) -> list[str]:
    """What processes send, estimated and counted, and the steps of two of them against PyTorch's."""
    sizes = form.on_processes
    num_layers, width, num_rows = sizes
    counted, ways = [], []
    for num_processes, microbatches in form.counted:
        cases = [Case(zero, num) for num in microbatches for zero in form.levels]
        given = (sizes, cases, 2, 0 if ways else form.num_timed)
        program = Path(zero_jax.__file__)
        found = dict(zip(cases, namespace.run(program, given, num_processes, **environment), strict=True))
        counted += [
            [
                f"{num_processes}",
                f"zero{case.zero}",
                f"{case.num_microbatches}",
                f"{one['estimated']:,}",
                f"{one['counted']:,.0f}",
                f"{one['counted'] / one['estimated']:.4f}",
                f"{one['counted'] / one['by gloo']:.4f}",
            ]
            for case, one in found.items()
        ]
        if not ways:
            ways += [(f"jvarlen, zero{zero}", found[Case(zero, 1)], found[Case(0, 1)]) for zero in form.levels]
    theirs = namespace.run(BY_TORCH, (*sizes, form.num_timed), 2)
    first = next(iter(theirs.values()))
    ways += [(f"PyTorch, {way}", one, first) for way, one in theirs.items()]
    return [
        "## On the wire",
        "",
        f"Processes on one machine, over the loopback, which is not limited; {num_layers} layers of {width} × {width}, "
        f"{mib(num_layers * sizes.layer_bytes)} MiB of parameters. Bytes that all processes send in a step, headers "
        "included where they are counted. The estimate counts rings. gloo's reduce-scatter halves and doubles: on two "
        "processes it sends what a ring does; on four it then exchanges chunks that are not where they belong, half of "
        "the array in all.",
        "",
        *table(
            "processes|level|A|estimated|counted|counted / estimated|counted / estimated with gloo's exchange", counted
        ),
        "",
        "## Two processes, against PyTorch",
        "",
        f"The same model, {num_rows} rows a process, A = 1. Medians of {form.num_timed} steps, and ratios to the first "
        "level, or way, of the same package. Bytes sent are not compared: on gloo, `fully_shard` reduces whole "
        "gradients, by an all-reduce.",
        "",
        *table(
            "way|state of a process, MiB|step, ms|of zero0's, or DistributedDataParallel's",
            [
                [name, mib(one["state"]), digits(1e3 * one["seconds"]), digits(one["seconds"] / first["seconds"])]
                for name, one, first in ways
            ],
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny models, and no report")
    quick = parser.parse_args().quick
    form = QUICK if quick else FULL
    if quick:
        os.environ["XLA_FLAGS"] = COMPILE_FAST
    split_cpu(NUM_DEVICES)
    lines = [*on_devices(form), "", *by_layers(form), ""]
    if namespace.is_available():
        lines += on_processes(form, JAX_PLATFORMS="cpu")
    else:
        lines += ["Not counted on the wire, nor compared with PyTorch: this takes a network namespace."]
    title = f"# ZeRO levels: memory, bytes and time, {datetime.date.today()}"
    report("zero", [title, "", *lines, "", versions_and_hardware("jax", "optax", "torch")], write=not quick)


if __name__ == "__main__":
    main()
