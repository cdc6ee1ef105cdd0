"""How much of a pipelined step is bubble, against (S − 1) / (M + S − 1)?

S stages on S host devices, M microbatches a step, forward and backward. The stages wait instead of computing: devices
that share cores can all wait at once but not all compute, and the duration of a wait is known. So this measures the
idle time of the schedule, not the cost of a model in stages. Run `python benchmarks/pipeline.py [--quick]`. Prints a
table and writes it, with versions and hardware, to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support.timing import best_seconds, digits, report, table, versions_and_hardware

from jvarlen.distributed.mesh import split_cpu
from jvarlen.parallel.pipeline import (
    StagedParams,
    Stages,
    bubble_fraction,
    make_pipeline_loss_fn,
    pipeline_mesh,
    place_stages,
)


def waiting_stages(wait_s: float, waits: list[None]) -> Stages:
    """Stages that wait, forward and backward, and note every time that they did."""

    def wait(x: Any) -> np.ndarray:
        waits.append(None)
        time.sleep(wait_s)
        return np.zeros(x.shape, x.dtype)

    def after_waiting(x: jax.Array) -> jax.Array:
        return x + jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    @jax.custom_vjp
    def work(x: jax.Array) -> jax.Array:
        return after_waiting(x)

    work.defvjp(lambda x: (after_waiting(x), None), lambda _, grad: (after_waiting(grad),))
    return Stages(
        lambda ends, microbatch: ends * microbatch,
        lambda own, x, microbatch: own + work(x),
        lambda ends, x, microbatch: (jnp.sum(x), jnp.float32(1)),
    )


def run_to_the_end(step: Callable[..., Any], *args: Any) -> Any:
    return jax.block_until_ready(step(*args))


def measure(microbatches: Sequence[int], wait_s: float) -> list[list[str]]:
    rows = []
    for num_stages in (2, 4):
        mesh = pipeline_mesh(num_stages, num_stages)
        params = place_stages(StagedParams(jnp.float32(1), jnp.zeros((num_stages, 1))), mesh)
        for num in microbatches:
            waits: list[None] = []
            loss_fn = make_pipeline_loss_fn(waiting_stages(wait_s, waits), mesh=mesh)
            step = jax.jit(jax.value_and_grad(loss_fn, has_aux=True)).lower(params, jnp.ones((num, 4))).compile()
            run = functools.partial(run_to_the_end, step, params, jnp.ones((num, 4)))
            run()
            num_waits = len(waits)
            seconds, _ = best_seconds(run, limit_s=1)
            rows.append(
                [
                    f"{num_stages}",
                    f"{num}",
                    f"{num_waits}",
                    f"{1e3 * seconds:.1f}",
                    f"{2e3 * wait_s * (num + num_stages - 1):.1f}",
                    f"{1 - num_waits * wait_s / num_stages / seconds:.3f}",
                    f"{bubble_fraction(num_stages, num):.3f}",
                ]
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short waits, and no report")
    quick = parser.parse_args().quick
    split_cpu(4)
    microbatches = [1, 4] if quick else [1, 2, 4, 8, 16]
    wait_s = 0.005 if quick else 0.04
    lines = [
        f"# The bubble of pipelined steps, {datetime.date.today()}",
        "",
        f"Stages that wait {digits(1e3 * wait_s)} ms forward and as long backward. Counted: how often stages waited in "
        "one step, on all devices; 2·S·M where idle ticks do nothing. Planned: 2·(M + S − 1) waits. Measured bubble: "
        "the share of the step in which a device does not wait. Waits stand for work: what a model costs in stages "
        "is not in this table.",
        "",
        *table(
            "stages|microbatches|waits, counted|step, ms|planned, ms|bubble, measured|(S − 1) / (M + S − 1)",
            measure(microbatches, wait_s),
        ),
        "",
        versions_and_hardware("jax"),
    ]
    report("pipeline", lines, write=not quick)


if __name__ == "__main__":
    main()
