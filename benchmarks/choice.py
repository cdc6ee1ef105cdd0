"""Is the layout that `choose_layout` takes the fastest one, and are its predictions right?

First a model whose products wait as long as they would take on devices of a known speed: eight host devices that share
cores can all wait at once. Links there are faster than anything that is counted. Then the built-in model, on a cluster
measured by `measure_cluster`: its devices share cores. Layouts whose predictions are 10 % apart are
measured, the best first. At last, how long the search takes for 1,024 devices. Run
`python benchmarks/choice.py [--quick]`. Prints tables and writes them, with versions and hardware, to
`benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.stats
from jax.sharding import PartitionSpec
from support.links import measure_cluster
from support.timing import COMPILE_FAST, report, table, versions_and_hardware

from jvarlen import Bucket, Plan, compile_buckets, make_buckets, make_plan
from jvarlen.batches import BatchShapes
from jvarlen.compiling import measure_buckets
from jvarlen.compiling.compile_options import CompileOptions
from jvarlen.distributed.mesh import split_cpu
from jvarlen.distributed.placement import place
from jvarlen.estimates.choice import LayoutChoice, choose_layout
from jvarlen.estimates.cluster import Cluster, Link
from jvarlen.estimates.memory_model import MemoryModel
from jvarlen.models import DecoderConfig, init_params, layered
from jvarlen.parallel import LayeredModel, LayeredParams, Layout, make_train_step
from jvarlen.parallel.tensor import enter_tensor_parallel, leave_tensor_parallel, sum_over_positions, take_positions

NUM_MICROBATCHES, WIDTH = 4, 16
APART = 1.1  # from one measured prediction to the next
WAIT = "wait_seconds"


class Form(NamedTuple):
    """What is measured: on how many devices, layers of the models, buckets, and the most layouts.

    Products of the first bucket wait `wait_ms` milliseconds. The built-in model has one bucket.
    """

    num_devices: int
    num_layers: int
    buckets: tuple[Bucket, ...]
    wait_ms: float
    num_layouts: int
    num_timed: int
    fixed: dict[str, Any]


FULL = Form(8, 8, (Bucket(2, 16), Bucket(1, 64)), 20, 12, 3, {})
QUICK = Form(2, 2, (Bucket(2, 16),), 4, 2, 1, {"stage": 1, "context": 1, "tensor": 1, "zero": 0})


class Case(NamedTuple):
    """A model, its parameters, and the devices that it is predicted for."""

    model: LayeredModel
    params: Any
    cluster: Cluster


def compile_wait(folder: str) -> bool:
    """Whether programs can wait: it takes a compiler. Callbacks of Python take turns, and take all mesh axes."""
    compiler, library = shutil.which("c++"), Path(folder) / "wait.so"
    if compiler is None:
        return False
    source, headers = Path(__file__).parent / "support" / "wait.cc", jax.ffi.include_dir()
    subprocess.run(
        [compiler, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{headers}", source, "-o", library], check=True
    )
    handler = ctypes.CDLL(str(library)).wait_seconds
    jax.ffi.register_ffi_target(WAIT, jax.ffi.pycapsule(handler), platform="cpu")
    return True


def waiting_model(flops_per_second: float) -> LayeredModel:
    """Layers of two products, each of which takes the time of its operations on a device of this speed."""

    def wait(flops: float, *results: jax.Array) -> jax.Array:
        """Zero, once the wait after these results is over."""
        seconds = np.float64(flops / flops_per_second)
        return jax.ffi.ffi_call(WAIT, jax.ShapeDtypeStruct((), jnp.float32))(*results, seconds=seconds)

    @jax.custom_vjp
    def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
        y = x @ kernel
        return y + wait(2 * x.size * kernel.shape[1], y)

    def forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        return product(x, kernel), (x, kernel)

    def backward(kept: tuple[jax.Array, jax.Array], of_y: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, kernel = kept
        flops = 2 * x.size * kernel.shape[1]
        of_x = of_y @ kernel.T
        of_x += wait(flops, of_x)
        of_kernel = jnp.einsum("btd,btf->df", x, of_y)
        return of_x, of_kernel + wait(flops, of_kernel, of_x)  # one after the other

    product.defvjp(forward, backward)

    def embed(ends: Any, microbatch: Any, axes: Any) -> jax.Array:
        tokens = microbatch.tokens if axes.positions is None else microbatch.tokens[:, axes.positions]
        return take_positions(ends[tokens], axes=axes)

    def layer(own: Any, x: jax.Array, microbatch: Any, axes: Any) -> jax.Array:
        hidden = jnp.tanh(product(enter_tensor_parallel(x, axes=axes), own["up"]))
        return x + leave_tensor_parallel(product(hidden, own["down"]), axes=axes)

    def loss(ends: Any, x: jax.Array, microbatch: Any, axes: Any) -> tuple[jax.Array, jax.Array]:
        return sum_over_positions(jnp.sum(x * x), axes=axes), jnp.float32(x.size)

    specs = LayeredParams(PartitionSpec(), {"up": PartitionSpec(None, "tensor"), "down": PartitionSpec("tensor", None)})
    return LayeredModel(embed, layer, loss, specs=specs, by_positions=True)


def restricted(model: LayeredModel, fixed: dict[str, Any]) -> LayeredModel:
    """What the search need not trace with rows that are spread, where none may be."""
    return model._replace(by_positions=model.by_positions and fixed.get("context") != 1)


def waiting(form: Form) -> Case:
    bucket = form.buckets[0]
    flops_per_second = 2 * bucket.padded_tokens * WIDTH * WIDTH / (1e-3 * form.wait_ms)
    kernels = 0.1 * np.random.default_rng(0).normal(size=(2, form.num_layers, WIDTH, WIDTH)).astype(np.float32)
    cluster = Cluster(
        name="waits",
        devices_per_host=form.num_devices,
        memory_bytes=2**30,
        flops_per_second=flops_per_second,
        efficiency=1.0,
        attention_efficiency=1.0,
        memory_efficiency=1.0,
        kernel_s=0.0,
        memory_bytes_per_second=1e12,
        link=Link(1e12),
        host_link=Link(1e12),
    )
    params = LayeredParams(np.ones((8, WIDTH), np.float32), {"up": kernels[0], "down": kernels[1]})
    return Case(restricted(waiting_model(flops_per_second), form.fixed), params, cluster)


def computing(form: Form, cluster: Cluster) -> Case:
    config = DecoderConfig(num_layers=form.num_layers, width=64, num_heads=8)
    return Case(restricted(layered(config), form.fixed), init_params(config, seed=0), cluster)


def plan_of(buckets: tuple[Bucket, ...]) -> Plan:
    """A step of each bucket, of full rows."""
    lengths = [bucket.length for bucket in buckets for _ in range(NUM_MICROBATCHES * bucket.rows)]
    return make_plan(lengths, list(buckets), order="length", num_microbatches=NUM_MICROBATCHES)


def apart(choice: LayoutChoice, most: int) -> Iterator[tuple[Layout, float]]:
    """Layouts and predicted seconds: the choice, then each at least 10 % slower than the one before.

    Among those about as slow, the first whose axes have sizes that none had before.
    """
    candidates, last, seen = choice.candidates, 0.0, set()
    rows = [row for row, reason in enumerate(candidates.reasons) if not reason]
    for _ in range(most):
        rows = [row for row in rows if candidates.seconds[row] >= APART * last]
        if not rows:
            return
        alike = [row for row in rows if candidates.seconds[row] <= 1.03 * candidates.seconds[rows[0]]]
        layouts = [candidates.table.layout(row) for row in alike]
        sizes = [tuple(layout.axis_sizes.values()) for layout in layouts]
        chosen = next((i for i, each in enumerate(sizes) if each not in seen and last), 0)
        seen.add(sizes[chosen])
        last = float(candidates.seconds[alike[chosen]])
        yield layouts[chosen], last


def seconds_on(layout: Layout, case: Case, plan: Plan, num_timed: int) -> float:
    """Seconds of an epoch, by the fastest step of each bucket."""
    mesh, optimizer = place(layout).mesh, optax.sgd(1e-4)
    state = make_train_step(case.model, optimizer, layout=layout).init(case.params)
    compiled = compile_buckets(
        make_train_step(case.model, optimizer, layout=layout),
        state,
        BatchShapes(plan.buckets.shapes, num_microbatches=NUM_MICROBATCHES, layout=mesh, has_many_groups=False),
        progress=False,
        options=CompileOptions(cache_dir=None),
    )
    measured = measure_buckets(compiled, state, repeats=num_timed, progress=False)
    num_steps = np.bincount(plan.step_bucket, minlength=len(plan.buckets.shapes))
    of_bucket = dict(zip(measured.shapes, measured.seconds, strict=True))
    return float(
        sum(
            num * NUM_MICROBATCHES * of_bucket[bucket.rows, bucket.length]
            for num, bucket in zip(num_steps, plan.buckets.shapes, strict=True)
        )
    )


def compare(case: Case, form: Form) -> list[str]:
    """The table of one case, and what it comes to."""
    plan = plan_of(form.buckets)
    choice = choose_layout(
        case.model, optax.sgd(1e-4), plan, cluster=case.cluster, params=case.params, fixed=form.fixed
    )
    found = [
        (layout, predicted, seconds_on(layout, case, plan, form.num_timed))
        for layout, predicted in apart(choice, form.num_layouts)
    ]
    predicted, measured = np.array([times for _, *times in found]).T
    tau = scipy.stats.kendalltau(predicted, measured).statistic
    ratios = measured / predicted
    rows = [
        [f"`{layout}`", f"{1e3 * one:,.1f}", f"{1e3 * other:,.1f}", f"{other / one:.3f}"]
        for layout, one, other in found
    ]
    return [
        f"{choice.candidates.num_fitting:,} of {len(choice.candidates.reasons):,} layouts take these steps.",
        "",
        *table("layout, the choice first|predicted, ms|measured, ms|measured / predicted", rows),
        "",
        f"The choice takes {measured[0] / measured.min():.3f} times the fastest measured. Kendall's tau is {tau:.2f}. "
        f"Measured over predicted is {ratios.min():.2f} to {ratios.max():.2f}, "
        f"{np.median(ratios):.2f} in the median.",
    ]


def search(num_hosts: int, longest: int, max_shapes: int, num_known: int, fixed: dict[str, Any]) -> list[str]:
    """How long a choice takes for hosts of eight devices: the first one, and some for which the costs are known."""
    lengths = np.random.default_rng(0).lognormal(6, 1.2, 200_000).clip(1, longest).astype(np.int64)
    num_microbatches = 8 * num_hosts
    options: dict[str, Any] = {"max_shapes": max_shapes, "length_multiple": 128}
    buckets = make_buckets(lengths, 16_384, num_microbatches=num_microbatches, **options)
    plan = make_plan(lengths, buckets, order="length", num_microbatches=num_microbatches)
    config = DecoderConfig(num_layers=32, width=4096, num_heads=32, vocab_size=32_000)
    searched, params = restricted(layered(config), fixed), jax.eval_shape(lambda: init_params(config, seed=0))
    cluster, optimizer = Cluster.named(f"dgx-h100:{num_hosts}"), optax.adamw(1e-3)
    memory = MemoryModel(searched, optimizer, plan.buckets.shapes, params=params)
    seconds = []
    known: dict[str, Any] = {"costs": None}
    for _ in range(1 + num_known):
        begun = time.perf_counter()
        given = {"params": params, "memory": memory, "fixed": fixed, **known}
        choice = choose_layout(searched, optimizer, plan, cluster=cluster, **given)
        seconds.append(time.perf_counter() - begun)
        known["costs"] = choice.costs
    num_layouts, num_fitting = len(choice.candidates.reasons), choice.candidates.num_fitting
    return [
        f"{num_layouts:,} layouts of {cluster.num_devices:,} devices for {len(plan.buckets.shapes)} buckets, of which "
        f"{num_fitting:,} fit. The search takes {np.median(seconds[1:]):.2f} s, once the model is traced, which takes "
        f"{seconds[0] - np.median(seconds[1:]):.1f} s. Each layout counts with the best bucket to spread rows from.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short waits, few layouts, and no report")
    quick = parser.parse_args().quick
    form = QUICK if quick else FULL
    if quick:
        os.environ["XLA_FLAGS"] = COMPILE_FAST
    split_cpu(form.num_devices)
    loads = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder:
        waits = compare(waiting(form), form) if compile_wait(folder) else ["Not measured: this takes `c++`."]
    cluster = measure_cluster(1 if quick else 5)
    real = form._replace(buckets=(Bucket(4, 64),), num_layouts=min(8, form.num_layouts))
    computes = compare(computing(real, cluster), real)
    searched = (
        search(1, 128, 1, 1, form.fixed | {"zero": 3, "remat": "full"}) if quick else search(128, 16_384, 16, 3, {})
    )
    loads.append(os.getloadavg()[0])
    lines = [
        f"# Layouts that are chosen and measured, {datetime.date.today()}",
        "",
        f"{form.num_devices} devices of one CPU, {form.num_layers} layers, {NUM_MICROBATCHES} microbatches a step. An "
        f"epoch is a step of each bucket. Measured: the fastest of {form.num_timed} steps.",
        "",
        "## Products that wait",
        "",
        f"A layer has two products. In the whole model, one of {form.buckets[0].padded_tokens} positions waits "
        f"{form.wait_ms:g} ms. Buckets: {', '.join(map(str, form.buckets))}.",
        "",
        *waits,
        "",
        "## The built-in model",
        "",
        f"Width 64, bucket {real.buckets[0]}. The cluster is measured: {cluster.flops_per_second / 1e9:.3g} GFLOP/s a "
        f"device, links of {cluster.link.bytes_per_second / 1e9:.3g} GB/s and {1e6 * cluster.link.latency_s:.3g} µs. "
        "Devices share cores: while a stage waits, the others have them, which no prediction knows.",
        "",
        *computes,
        "",
        "## The search",
        "",
        *searched,
        "",
        f"The machine's load was {loads[0]:.1f} before and {loads[1]:.1f} after.",
        "",
        versions_and_hardware("jax"),
    ]
    report("choice", lines, write=not quick)


if __name__ == "__main__":
    main()
