"""How long does a step by each pipeline schedule take, and what does it hold, against its simulation?

Layers that wait known times, in four stages on four host devices: devices that share cores can all wait at once. Steps
with `remat_full` and `remat_none` are timed against simulations with synchronous ticks, which is how one program moves
all stages, and of a program a stage ("mpmd"). Actions note when they begin and end, and are drawn next to the
simulation. `torch.distributed.pipelining` runs on gloo, with a process a stage; this part needs Linux, root, and the
commands `unshare` and `ip`, and is left out without. Then temporaries of compiled programs. Run
`python benchmarks/schedules.py [--quick]`. Prints tables and writes them, with a picture, versions and hardware, to
`benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from support import namespace
from support.timing import COMPILE_FAST, RESULTS, report, table, versions_and_hardware

from jvarlen.distributed.mesh import split_cpu
from jvarlen.distributed.placement import place
from jvarlen.parallel import LayeredModel, LayeredParams, Layout, Schedule, Timeline
from jvarlen.parallel.pipeline import sum_scheduled
from jvarlen.parallel.schedules import make_schedule
from jvarlen.reports.figures import draw_timelines
from jvarlen.training.reduction import Shards
from jvarlen.training.train_state import TrainState

NUM_STAGES, NUM_MICROBATCHES = (2, 4) if "--quick" in sys.argv else (4, 8)
VIRTUAL = {"gpipe": 1, "eager_1f1b": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1}
OF_TORCH = ("gpipe", "1f1b", "interleaved")  # those that PyTorch has
BY_TORCH = Path(__file__).parent / "support" / "schedules_torch.py"
REMATS = ("none", "full")
KINDS = "FBW"


class Form(NamedTuple):
    """What is measured: schedules, milliseconds of a stage's F, and of its B and W together, and steps."""

    schedules: tuple[str, ...]

    forward: float
    backward: float
    num_timed: int
    num_microbatches: tuple[int, ...]


FULL = Form(schedules=tuple(VIRTUAL), forward=15, backward=30, num_timed=9, num_microbatches=(8, 16, 32))
QUICK = Form(schedules=("gpipe", "zero_bubble"), forward=3, backward=6, num_timed=1, num_microbatches=(4,))


class Wait(NamedTuple):
    """A wait that has happened: the kind, the layer, and seconds."""

    kind: str
    layer: int
    begun: float
    ended: float


class Measured(NamedTuple):
    """Steps by a schedule: their seconds, the waits of the fastest one, and the seconds of steps with waits of 0 s."""

    schedule: Schedule
    seconds: list[float]
    waits: list[Wait]
    seconds_without: list[float]


def waiting_model(waits_s: dict[str, float], happened: list[Wait]) -> LayeredModel:
    """Layers whose parameters are their numbers. B waits for the output of F, and W, where it waits, for that of B."""

    def wait(kind: str, own: jax.Array, *before: jax.Array) -> jax.Array:
        """Zero, after the wait."""

        def call(layer: Any) -> np.ndarray:
            begun = time.perf_counter()
            time.sleep(waits_s[kind])
            happened.append(Wait(kind, int(layer), begun, time.perf_counter()))
            return np.zeros((), np.float32)

        # One number, as converting arguments takes a while.
        layer = own + sum(0 * each[0] for each in before)
        return jax.pure_callback(call, jax.ShapeDtypeStruct((), jnp.float32), layer)

    @jax.custom_vjp
    def work(own: jax.Array, x: jax.Array) -> jax.Array:
        return x + wait("F", own, x)

    def forward(own: jax.Array, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        y = work(own, x)
        return y, (own, y)

    def backward(kept: tuple[jax.Array, jax.Array], of_y: jax.Array) -> tuple[jax.Array, jax.Array]:
        own, y = kept
        of_x = of_y + wait("B", own, of_y, y)
        return jnp.sum(of_x) + (wait("W", own, of_x) if "W" in waits_s else 0), of_x

    work.defvjp(forward, backward)
    return LayeredModel(
        lambda ends, microbatch, axes: ends * microbatch,
        lambda own, x, microbatch, axes: work(own, x),
        lambda ends, x, microbatch, axes: (jnp.sum(x), jnp.float32(1)),
    )


def costs_of(form: Form, schedule: Schedule, remat: str = "none") -> dict[str, float]:
    """Milliseconds of a virtual stage's actions. From inputs, B and W each run the layers again, and W all of B."""
    forward, backward = form.forward / schedule.num_virtual, form.backward / schedule.num_virtual
    costs = {"F": forward, "B": backward}
    if schedule.kinds == "FBW":
        costs |= {"B": backward / 2, "W": backward / 2}
    if remat == "full":
        for kind, earlier in (("W", forward + costs["B"]), ("B", forward)):
            if kind in costs:
                costs[kind] += earlier
    return costs


def measure(form: Form, name: str, remat: str) -> Measured:
    num_virtual = VIRTUAL[name]
    layout = Layout(data=1, stage=NUM_STAGES, schedule=name, virtual=num_virtual, remat=remat)
    happened: list[Wait] = []
    schedule = make_schedule(name, NUM_STAGES, NUM_MICROBATCHES, num_virtual)
    waits_s = {kind: 1e-3 * ms for kind, ms in costs_of(form, schedule).items()}
    model = waiting_model(waits_s, happened)
    state = TrainState(LayeredParams(jnp.float32(1), jnp.arange(NUM_STAGES * num_virtual, dtype=jnp.float32)), None)
    batch = jnp.ones((NUM_MICROBATCHES, 4))
    step = sum_scheduled(model, Shards(mesh=place(layout).mesh), layout).whole
    program = jax.jit(step).lower(state, batch).compile()

    def timed_step() -> tuple[float, float, list[Wait]]:
        happened.clear()
        begun = time.perf_counter()
        jax.block_until_ready(program(state, batch))
        return time.perf_counter() - begun, begun, [*happened]

    timed_step()
    steps = [timed_step() for _ in range(form.num_timed)]
    _, begun, waits = min(steps)
    waits = [each._replace(begun=each.begun - begun, ended=each.ended - begun) for each in waits]
    waits_s.update(dict.fromkeys(waits_s, 0.0))  # the program reads them in every step
    without = [timed_step()[0] for _ in range(form.num_timed)]
    return Measured(schedule, [seconds for seconds, _, _ in steps], waits, without)


def timeline_of(measured: Measured) -> Timeline:
    """When the actions of the fastest step began and ended; with kept residuals, in which every action waits once."""
    schedule = measured.schedule
    simulated = schedule.simulate(dict.fromkeys(schedule.kinds, 1.0))
    starts, ends = np.zeros_like(simulated.starts), np.zeros_like(simulated.ends)
    for stage in range(NUM_STAGES):
        waits = sorted(
            (each for each in measured.waits if each.layer % NUM_STAGES == stage), key=lambda each: each.begun
        )
        assert [KINDS.index(each.kind) for each in waits] == schedule.actions[stage, :, 0].tolist()
        starts[stage] = [1e3 * each.begun for each in waits]
        ends[stage] = [1e3 * each.ended for each in waits]
    makespan = 1e3 * min(measured.seconds)
    return dataclasses.replace(
        simulated,
        mode="measured",
        starts=starts,
        ends=ends,
        makespan=round(makespan, 1),
        bubble=1 - float((ends - starts).sum()) / (NUM_STAGES * makespan),
    )


def steps(form: Form) -> tuple[list[str], str]:
    """The table of measured steps, and the picture."""
    rows, timelines = [], []
    for name in form.schedules:
        for remat in REMATS:
            measured = measure(form, name, remat)
            costs = costs_of(form, measured.schedule, remat)
            synchronous, mpmd = (measured.schedule.simulate(costs, mode) for mode in ("synchronous", "mpmd"))
            median, fastest = (1e3 * of(measured.seconds) for of in (statistics.median, min))
            rows.append(
                [
                    f"`{name}`" + (f", {VIRTUAL[name]} virtual stages" if VIRTUAL[name] > 1 else ""),
                    remat,
                    f"{median:.0f}",
                    f"{fastest:.0f}",
                    f"{synchronous.makespan:g}",
                    f"{median / synchronous.makespan:.3f}",
                    f"{mpmd.makespan:g}",
                    f"{1e3 * statistics.median(measured.seconds_without):.0f}",
                ]
            )
            if remat == "none":
                timelines += [synchronous, timeline_of(measured)]
    lines = [
        "## Steps",
        "",
        f"{NUM_STAGES} stages, {NUM_MICROBATCHES} microbatches. A stage waits {form.forward:g} ms in F and "
        f"{form.backward:g} in the backward pass, or half of that in each of B and W. With kept inputs, F runs again "
        "in B and in W, and B again in W, which the simulations count. Medians of "
        f"{form.num_timed} steps. Waits of 0 ms tell what each wait adds, a call of Python, and what ticks take.",
        "",
        *table("schedule|remat|step, ms|fastest, ms|synchronous, ms|step / synchronous|mpmd, ms|waits of 0, ms", rows),
    ]
    return lines, draw_timelines(*timelines)


def beside_torch(form: Form) -> list[str]:
    chunks = {name: VIRTUAL[name] for name in OF_TORCH if name in form.schedules}
    given = (chunks, NUM_MICROBATCHES, 4, 1e-3 * form.forward, 1e-3 * form.backward, form.num_timed)
    found = namespace.run(BY_TORCH, given, NUM_STAGES)
    rows = []
    for name, num_virtual in chunks.items():
        schedule = make_schedule(name, NUM_STAGES, NUM_MICROBATCHES, num_virtual)
        mpmd = schedule.simulate(costs_of(form, schedule), "mpmd").makespan
        median, fastest = (1e3 * of(found[name]) for of in (statistics.median, min))
        rows.append([f"`{name}`", f"{median:.0f}", f"{fastest:.0f}", f"{mpmd:g}", f"{median / mpmd:.3f}"])
    return [
        "## torch.distributed.pipelining",
        "",
        "Stages that wait as long, a process each, which is what mpmd simulates. PyTorch keeps what autograd saves.",
        "",
        *table("schedule|step, ms|fastest, ms|mpmd, ms|step / mpmd", rows),
    ]


def memory(form: Form) -> list[str]:
    """Temporaries of programs of a layer that has one product."""
    model = LayeredModel(
        lambda ends, microbatch, axes: microbatch * ends,
        lambda own, x, microbatch, axes: x + jnp.tanh(x @ own),
        lambda ends, x, microbatch, axes: (jnp.sum(x * x * ends), jnp.float32(1)),
    )
    shape = 1024, 8

    def held(name: str, remat: Any, num_microbatches: int) -> str:
        layout = Layout(data=1, stage=NUM_STAGES, schedule=name, virtual=VIRTUAL[name], remat=remat)
        num_layers = NUM_STAGES * VIRTUAL[name]
        layers = jax.ShapeDtypeStruct((num_layers, shape[1], shape[1]), jnp.float32)
        state = TrainState(LayeredParams(jax.ShapeDtypeStruct(shape[1:], jnp.float32), layers), None)
        batch = jax.ShapeDtypeStruct((num_microbatches, *shape), jnp.float32)
        step: Callable[..., Any] = sum_scheduled(model, Shards(mesh=place(layout).mesh), layout).whole
        program = jax.jit(step).lower(state, batch).compile()
        return f"{program.memory_analysis().temp_size_in_bytes / (4 * shape[0] * shape[1]):.0f}"

    rows = [
        [f"`{name}`", remat, *(held(name, remat, num) for num in form.num_microbatches)]
        for name in form.schedules
        for remat in REMATS
    ]
    return [
        "## Temporaries",
        "",
        f"On a device, for {NUM_STAGES} stages of one layer, `x + tanh(x @ kernel)`, or of two for interleaved ones. "
        "In activations, of the size that is sent from stage to stage. Residuals of a layer are two: its input and "
        "its tanh.",
        "",
        *table("schedule|remat|" + "|".join(f"M = {num}" for num in form.num_microbatches), rows),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short waits, and no report")
    quick = parser.parse_args().quick
    form = QUICK if quick else FULL
    if quick:
        os.environ["XLA_FLAGS"] = COMPILE_FAST
    split_cpu(NUM_STAGES)
    loads = [os.getloadavg()[0]]
    lines, picture = steps(form)
    if namespace.is_available():
        lines += ["", *beside_torch(form)]
    else:
        lines += ["", "Not compared with PyTorch: this takes a network namespace."]
    loads.append(os.getloadavg()[0])
    title = f"# Steps by pipeline schedules, {datetime.date.today()}"
    name = f"{datetime.date.today()}-schedules.svg"
    if not quick:
        (RESULTS / name).write_text(picture)
        lines += [
            "",
            "Simulated with synchronous ticks, and measured with `remat_none`, in ms:",
            "",
            f"![]({name})",
        ]
    shared = (
        f"The machine's load was {loads[0]:.1f} before and {loads[1]:.1f} after the steps, "
        "which wait and hardly compute."
    )
    lines += ["", *memory(form), "", shared, "", versions_and_hardware("jax", "torch")]
    report("schedules", [title, "", *lines], write=not quick)


if __name__ == "__main__":
    main()
