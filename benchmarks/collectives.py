"""How long does an all-reduce take by each algorithm, next to the bytes and rounds of its formula?

Float32 arrays on N host devices, which share cores and memory: the table shows what rounds and copies cost there, not
what a network would. Algorithms take turns. Run `python benchmarks/collectives.py [--quick]`. Prints a table and writes
it, with versions and hardware, to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from support.timing import digits, report, table, versions_and_hardware

from jvarlen.distributed.layout import Layout
from jvarlen.distributed.mesh import split_cpu
from jvarlen.experimental.collectives import all_reduce
from jvarlen.experimental.collectives.wire import ALGORITHMS, wire_bytes


def compiled(num_devices: int, size: int, algorithm: str) -> Callable[[], object]:
    """A call that waits for the sum of `size` elements a device."""
    mesh, axis = Layout(data=num_devices).on().mesh, PartitionSpec("data")
    summed = jax.shard_map(lambda x: all_reduce(x, "data", algorithm), mesh=mesh, in_specs=axis, out_specs=axis)
    x = jax.device_put(jnp.ones(num_devices * size), NamedSharding(mesh, axis))
    program = jax.jit(summed).lower(x).compile()
    return lambda: jax.block_until_ready(program(x))


def measure(num_devices: int, size: int, repeats: int) -> list[list[str]]:
    """Best seconds of every algorithm, in turn."""
    calls = {algorithm: compiled(num_devices, size, algorithm) for algorithm in ALGORITHMS["all_reduce"]}
    seconds: dict[str, list[float]] = {algorithm: [] for algorithm in calls}
    for _ in range(repeats):
        for algorithm, call in calls.items():
            begun = time.perf_counter()
            call()
            seconds[algorithm].append(time.perf_counter() - begun)
    best = {algorithm: min(values) for algorithm, values in seconds.items()}
    rows = []
    for algorithm, value in best.items():
        counted = wire_bytes("all_reduce", 4 * size, num_devices, algorithm, itemsize=4)
        rows.append(
            [
                f"{num_devices}",
                f"{4 * size:,}",
                algorithm,
                f"{counted.busiest:,}",
                f"{counted.rounds}",
                f"{1e3 * value:.3f}",
                digits(value / best["xla"]),
            ]
        )
    return rows


def measure_all(numbers: Sequence[int], sizes: Sequence[int], repeats: int) -> list[list[str]]:
    return [row for num in numbers for size in sizes for row in measure(num, size, repeats)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small arrays, and no report")
    quick = parser.parse_args().quick
    split_cpu(8)
    rows = measure_all([2, 4], [1000], 3) if quick else measure_all([2, 4, 8], [1000, 1_000_000], 30)
    lines = [
        f"# All-reduce by each algorithm, {datetime.date.today()}",
        "",
        "Float32 arrays on devices of one CPU. Counted: bytes that the busiest device sends or receives, and rounds; "
        "those of `xla` and `rs_ag` are the ring's. The best of all runs.",
        "",
        *table("devices|bytes of the array|algorithm|busiest device, bytes|rounds|ms|of psum's", rows),
        "",
        versions_and_hardware("jax"),
    ]
    report("collectives", lines, write=not quick)


if __name__ == "__main__":
    main()
