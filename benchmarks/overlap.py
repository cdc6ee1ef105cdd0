"""How much of reducing gradients over a slow link is hidden by the backward pass, with one bucket and with several?

Two processes train a perceptron of equal layers, over a loopback of a network namespace of its own, limited to 400
Mbit/s in each direction. Beside them the same by PyTorch's DistributedDataParallel on gloo. Needs Linux, root, and the
commands `unshare`, `ip` and `tc`. Run `python benchmarks/overlap.py [--quick]`; without these commands, and in the
quick form, the link is not limited. Prints a table and writes it, with versions and hardware, to
`benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import atexit
import datetime
import importlib
import json
import os
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from support import ranks
from support.timing import COMPILE_FAST, digits, report, table, versions_and_hardware

MBIT = 400
LIMITED = (
    f"ip link set lo up && tc qdisc add dev lo root tbf rate {2 * MBIT}mbit burst 256kb latency 1s && "  # both ways
)
BUCKETS = {"no communication": 0, "1 bucket": 1, "6 buckets": 6}
DEADLINE_S = 600


class Sizes(NamedTuple):
    """What is trained."""

    num_layers: int
    width: int
    rows: int
    num_steps: int


FULL = Sizes(num_layers=6, width=768, rows=2048, num_steps=12)
QUICK = Sizes(num_layers=6, width=8, rows=2, num_steps=1)


def median_seconds(step: Callable[[], None], num_steps: int) -> float:
    """The median seconds of a step, without the first ones."""
    seconds = []
    for _ in range(num_steps + 2):
        begun = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[2:])


def jax_seconds(sizes: Sizes, rank: int, port: int) -> dict[str, float]:
    """By number of buckets."""
    import jax
    import jax.numpy as jnp
    import optax

    import jvarlen
    from jvarlen.batches import BatchShapes
    from jvarlen.compiling.lowering import make_step_compiler
    from jvarlen.distributed.placement import place

    jvarlen.distributed.initialize_processes(f"127.0.0.1:{port}", 2, rank)

    def loss_fn(params: list[jax.Array], batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x = batch["x"]
        for layer in params:
            x = jnp.tanh(x @ layer)
        return jnp.sum(x), jnp.float32(sizes.rows)

    layer_bytes = 4 * sizes.width**2
    found = {}
    for name, num_buckets in BUCKETS.items():
        devices = jax.devices() if num_buckets else jax.local_devices()
        rng = np.random.default_rng(0)
        params = [rng.normal(size=(sizes.width,) * 2).astype(np.float32) / 30 for _ in range(sizes.num_layers)]
        optimizer = optax.sgd(1e-6)
        batch = {"x": np.ones((len(devices), sizes.rows, sizes.width), np.float32)}
        bucket_bytes = sizes.num_layers * layer_bytes // max(1, num_buckets)
        layout = place(jvarlen.Layout(data=len(devices), grad_bucket_bytes=bucket_bytes), devices)
        step = jvarlen.make_train_step(loss_fn, optimizer, layout=layout)
        state = step.init(params)
        step_compiler = make_step_compiler(
            step,
            state,
            BatchShapes(
                [(sizes.rows, sizes.width)],
                num_microbatches=len(devices),
                layout=layout,
                batch_spec=lambda *_, batch=batch: jax.tree.map(
                    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch
                ),
                has_many_groups=False,
            ),
            jvarlen.CompileOptions(cache_dir=None),
        )
        program = step_compiler.compile(step_compiler.lower(jvarlen.Bucket(sizes.rows, sizes.width))).executable

        def put(leaf: np.ndarray, sharding: Any) -> jax.Array:
            return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

        placed = jax.tree.map(put, batch, step.placement.batch_shardings(batch))

        def step(program: Any = program, placed: Any = placed) -> None:
            nonlocal state
            state, metrics = program(state, placed)
            jax.block_until_ready((state, metrics))

        found[name] = median_seconds(step, sizes.num_steps)
    return found


def torch_seconds(sizes: Sizes, rank: int, port: int) -> dict[str, float]:
    """By number of buckets."""
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    layer_bytes = 4 * sizes.width**2
    found = {}
    for name, num_buckets in BUCKETS.items():
        torch.manual_seed(0)
        layers = [
            part
            for _ in range(sizes.num_layers)
            for part in (torch.nn.Linear(sizes.width, sizes.width, bias=False), torch.nn.Tanh())
        ]
        model: torch.nn.Module = torch.nn.Sequential(*layers)
        if num_buckets:
            bucket_mb = sizes.num_layers * layer_bytes / num_buckets / 2**20
            model = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
        optimizer = torch.optim.SGD(model.parameters(), 1e-6)
        x = torch.ones(sizes.rows, sizes.width)

        def step(model: Any = model, optimizer: Any = optimizer, x: Any = x) -> None:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        found[name] = median_seconds(step, sizes.num_steps)
    # A model that outlives this would free the group, and wait for its threads while they wait for the interpreter.
    del model, optimizer, step
    distributed.destroy_process_group()
    return found


WAYS = {"jax": jax_seconds, "torch": torch_seconds}
IMPORTED = {"jax": ("jax", "optax", "jvarlen.compiling.lowering"), "torch": ("torch.nn.parallel", "torch._dynamo")}


def answer(way: str, sizes: Sizes, port: int, folder: Path) -> None:
    """Writes what each of two processes measures; the second one is a fork of this one, once it has imported."""
    others: list[int] = []
    atexit.register(ranks.wait_for, others)  # after what else is done at the end, in which both may meet
    for name in IMPORTED[way]:
        importlib.import_module(name)
    pid = os.fork()
    others += [pid] * (pid > 0)
    rank = 0 if pid else 1
    (folder / str(rank)).write_text(json.dumps(WAYS[way](sizes, rank, port)))


def can_limit() -> bool:
    """Whether a network namespace can be made whose link is limited."""
    if os.getuid() or not all(map(shutil.which, ("unshare", "ip", "tc"))):
        return False
    return (
        subprocess.run(["unshare", "-n", "sh", "-c", LIMITED + "true"], capture_output=True, check=False).returncode
        == 0
    )


def measure(way: str, sizes: Sizes, *, is_limited: bool, **environment: str) -> dict[str, float]:
    """Seconds of both processes, those of the slower one."""
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, str(Path(__file__).resolve()), "--way", way, "--sizes", json.dumps(sizes)]
        command += ["--port", str(port), "--out", folder]
        if is_limited:
            command = ["unshare", "-n", "sh", "-c", f"{LIMITED}exec {shlex.join(command)}"]
        subprocess.run(command, check=True, timeout=DEADLINE_S, env=os.environ | environment)
        found = [json.loads(Path(folder, rank).read_text()) for rank in "01"]
    return {name: max(seconds[name] for seconds in found) for name in BUCKETS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model, and no report")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--sizes", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way is not None:
        answer(given.way, Sizes(*json.loads(given.sizes)), given.port, given.out)
        return
    sizes = QUICK if given.quick else FULL
    is_limited = not given.quick and can_limit()
    flags = {"XLA_FLAGS": COMPILE_FAST if given.quick else "", "JAX_PLATFORMS": "cpu"}
    ways = {
        "jvarlen": measure("jax", sizes, is_limited=is_limited, **flags),
        "jvarlen, `NPROC=8`": measure("jax", sizes, is_limited=is_limited, NPROC="8", **flags),
        "PyTorch's DistributedDataParallel": measure("torch", sizes, is_limited=is_limited),
    }
    rows = [
        [
            name,
            *(f"{1e3 * found[buckets]:.0f}" for buckets in BUCKETS),
            digits(found["6 buckets"] / found["1 bucket"]),
        ]
        for name, found in ways.items()
    ]
    link = f"over a link of {MBIT} Mbit/s in each direction" if is_limited else "over a link that is not limited"
    num_bytes = 4 * sizes.num_layers * sizes.width**2
    report(
        "overlap",
        [
            f"# Gradient buckets over a slow link, {datetime.date.today()}",
            "",
            f"Two processes on one machine, {link}; {num_bytes / 2**20:.1f} MiB of gradients from {sizes.num_layers} "
            f"layers, {sizes.rows:,} rows. Medians of {sizes.num_steps} steps, of the slower process.",
            "",
            *table(
                "way|no communication, ms|1 bucket, ms|6 buckets, ms|6 buckets / 1 bucket",
                rows,
            ),
            "",
            versions_and_hardware("jax", "optax", "torch"),
        ],
        write=not given.quick,
    )


if __name__ == "__main__":
    main()
