"""Does training without waiting pay, if workers are uneven: gradients a second, and the loss at equal time and updates?

Four worker processes, which sleep to take their time: cores of one machine are no even workers. The first table counts
gradients. The second trains the built-in model on the built-in corpus with one microbatch a step: bulk-synchronous,
with four microbatches a step, and asynchronous, by several bounds of staleness. The third chooses the staleness, and so
shows what it costs without any timing. Run `python benchmarks/asynchronous.py [--quick]`. Prints tables and writes
them, with versions and hardware, to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from support.timing import COMPILE_FAST, report, table, versions_and_hardware

import jvarlen
from jvarlen.data.stdlib_corpus import stdlib_functions
from jvarlen.experimental.asynchronous import ArrivalLog, keep_versions, make_stale_train_step, train_async
from jvarlen.models import DecoderConfig, init_params, make_loss_fn

OPTIMIZERS: dict[str, Callable[[float], Any]] = {
    "SGD": lambda rate: optax.sgd(100 * rate),
    "SGD, momentum 0.9": lambda rate: optax.sgd(10 * rate, momentum=0.9),
    "Adam": optax.adam,
}
# Seconds of a gradient by worker, in units of the fast one.
EVEN, UNEVEN, QUICK_UNEVEN = (1, 1, 1, 1), (1, 1, 1, 3), (1, 3)
# Microbatches a step and bound.
BY_BOUND = ((4, 0), (4, 1), (4, None), (1, 1), (1, 4), (1, 16), (1, None))
QUICK_BY_BOUND = ((2, 0), (1, None))


def expected_rate(seconds: Sequence[float], *, waits: bool) -> float:
    """Gradients a second: of all workers for themselves, or if each step waits for the slowest of them."""
    return len(seconds) / max(seconds) if waits else sum(1 / each for each in seconds)


def rate_of(log: ArrivalLog) -> float:
    """Gradients a second after the first tenth of the updates, in which programs are sent to the workers."""
    begun = len(log.steps) // 10
    return log.versions[begun + 1 :].size / float(log.applied_s[-1] - log.applied_s[begun])


def sleeping_rows(runs: Sequence[tuple[tuple[int, ...], int, int | None]], num_steps: int) -> list[list[str]]:
    """Rows for a loss that takes no time; each run has its workers' seconds, microbatches a step and bound."""

    def loss_fn(params: jax.Array, microbatch: jvarlen.batches.Batch) -> tuple[jax.Array, jax.Array]:
        return params * jnp.sum(microbatch.weights), jnp.sum(microbatch.weights)

    optimizer = optax.sgd(0.1)
    rows = []
    for relative, num_microbatches, bound in runs:
        samples = [np.ones(4, np.int32)] * (num_steps * 4)
        plan = jvarlen.make_plan([4] * len(samples), [(1, 4)], order="length", num_microbatches=num_microbatches)
        seconds = [0.02 * each for each in relative]
        run = train_async(
            loss_fn,
            optimizer,
            jvarlen.make_train_step(loss_fn, optimizer).init(jnp.float32(1)),
            plan,
            jvarlen.load(plan, samples),
            num_workers=len(seconds),
            staleness_bound=bound,
            least_seconds=seconds,
        )
        rate, expected = rate_of(run.log), expected_rate(seconds, waits=bound == 0)
        rows.append(
            [
                ", ".join(f"{1e3 * each:.0f}" for each in seconds),
                f"{num_microbatches}",
                f"{bound}",
                f"{rate:.1f}",
                f"{expected:.1f}" if bound in (0, None) else "–",
                f"{rate / expected:.3f}" if bound in (0, None) else "–",
                f"{run.log.staleness.mean():.2f}",
                f"{run.log.staleness.max()}",
            ]
        )
    return rows


class Setting(NamedTuple):
    """What is trained."""

    model: DecoderConfig
    samples: list[np.ndarray]
    rows: int
    length: int
    num_gradients: int
    learning_rate: float

    def plan(self, num_microbatches: int) -> tuple[jvarlen.Plan, list[np.ndarray]]:
        """The plan of these samples in the order that they have, and the samples."""
        samples = self.samples[: self.num_gradients * self.rows]
        buckets = [(self.rows, self.length)]
        lengths = list(map(len, samples))
        plan = jvarlen.make_plan(lengths, buckets, order="dataset", num_microbatches=num_microbatches)
        return plan, samples

    def state(self, optimizer: Any) -> Any:
        """The first state."""
        return jvarlen.make_train_step(make_loss_fn(self.model), optimizer).init(init_params(self.model, seed=0))


def smoothed(losses: np.ndarray, num_gradients: int, num_microbatches: int) -> float:
    """The mean loss a token, in bits, of the last tenth of what was trained on until then."""
    last = num_gradients // num_microbatches
    return float(np.mean(losses[max(0, last - len(losses) // 10) : last])) / np.log(2)


def training_rows(
    setting: Setting, relative: Sequence[int], by_bound: Sequence[tuple[int, int | None]], fast_s: float
) -> list[list[str]]:
    runs, optimizer = [], optax.chain(optax.clip_by_global_norm(1.0), optax.adam(setting.learning_rate))
    for num_microbatches, bound in by_bound:
        plan, samples = setting.plan(num_microbatches)
        seconds = [fast_s * each for each in relative]
        run = train_async(
            make_loss_fn(setting.model),
            optimizer,
            setting.state(optimizer),
            plan,
            jvarlen.load(plan, samples),
            num_workers=len(seconds),
            staleness_bound=bound,
            least_seconds=seconds,
        )
        runs.append((num_microbatches, bound, run.log))
    # The moment at which the fastest run ends, and the number of updates after which the one with fewest does.
    end_s = min(log.applied_s[-1] - log.applied_s[0] for *_, log in runs)
    fewest = min(len(log.steps) for *_, log in runs)
    rows = []
    for num_microbatches, bound, log in runs:
        at_end = int(np.searchsorted(log.applied_s - log.applied_s[0], end_s, side="right"))
        rows.append(
            [
                f"{num_microbatches}",
                f"{bound}",
                f"{rate_of(log):.1f}",
                f"{log.staleness.mean():.2f}",
                f"{log.staleness.max()}",
                f"{at_end * num_microbatches}",
                f"{smoothed(log.losses, at_end * num_microbatches, num_microbatches):.3f}",
                f"{smoothed(log.losses, fewest * num_microbatches, num_microbatches):.3f}",
                f"{smoothed(log.losses, setting.num_gradients, num_microbatches):.3f}",
            ]
        )
    return rows


def delay_rows(setting: Setting, names: Sequence[str], factors: Sequence[float]) -> list[list[str]]:
    plan, samples = setting.plan(1)
    batches = list(jvarlen.load(plan, samples))
    rows = []
    for name, factor in itertools.product(names, factors):
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), OPTIMIZERS[name](factor * setting.learning_rate))
        cells = [name, f"{factor:g}"]
        for delays in (0, [3, 3, 3, 2, 2, 2, 2, 2, 2, 9], 16):
            step = make_stale_train_step(make_loss_fn(setting.model), optimizer, delays=delays)
            step = jax.jit(step, donate_argnums=0)
            state, metrics = keep_versions(setting.state(optimizer), delays=delays), []
            for batch in batches:
                state, of_step = step(state, batch)
                metrics.append(of_step)
            losses = np.array([float(of_step.loss) for of_step in metrics])
            cells.append(f"{smoothed(losses, len(losses), 1):.3f}")
        rows.append(cells)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps, and no report")
    quick = parser.parse_args().quick
    if quick:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {COMPILE_FAST}"
    length = 32 if quick else 64
    dataset = stdlib_functions(progress=False)
    order = np.random.default_rng(0).permutation(len(dataset))
    samples = [dataset[i][:length] for i in order.tolist()]
    tiny, small = (DecoderConfig(num_layers=n, width=16 * n**2, num_heads=n) for n in (1, 2))
    model = tiny if quick else small
    setting = Setting(model, samples, 4, length, 10 if quick else 1200, 1e-3)
    uneven, by_bound = (QUICK_UNEVEN, QUICK_BY_BOUND) if quick else (UNEVEN, BY_BOUND)
    runs = tuple((uneven, *each) for each in by_bound)
    even = () if quick else ((EVEN, 4, 0), (EVEN, 4, None))
    fast_s = 0.01 if quick else 0.04
    lines = [
        f"# Asynchronous updates, {datetime.date.today()}",
        "",
        f"Worker processes: {len(uneven)}. The seconds of a gradient are made by sleeping for the rest of them. A "
        "bound of 0 is bulk-synchronous; None is no bound. Staleness: updates between the parameters of a gradient and "
        "its own update.",
        "",
        "## Gradients a second",
        "",
        "A loss that takes no time. Expected: each worker for itself, or, at bound 0, all in the time of the slowest.",
        "",
        *table(
            "ms a gradient|microbatches a step|bound|gradients a second|expected|ratio|mean staleness|largest",
            sleeping_rows(runs[:1] if quick else [*runs, *even], 5 if quick else 120),
        ),
        "",
        "## Loss",
        "",
        f"The built-in model with {model.num_layers} layers of width {model.width} on the first {length} bytes of "
        f"{setting.num_gradients * setting.rows:,} functions of the built-in corpus, {setting.rows} rows a microbatch, "
        f"Adam, learning rate {setting.learning_rate:g}. All workers but one take {1e3 * fast_s:.0f} ms a "
        f"gradient, and that one {3e3 * fast_s:.0f} ms. Losses are bits a byte, the mean over a tenth of the run: at "
        "the moment when the fastest of these runs ends, after as many updates as the run with the fewest has, and at "
        "the end of all data.",
        "",
        *table(
            "microbatches a step|bound|gradients a second|mean staleness|largest|gradients at equal time|"
            "loss at equal time|loss at equal updates|loss at equal data",
            training_rows(setting, uneven, by_bound[-1:] if quick else by_bound, fast_s),
        ),
        "",
        "## Chosen staleness",
        "",
        "The same model and data with `make_stale_train_step`, one microbatch a step. Rate: times the learning rate of "
        "the optimizer, which is 0.001 for Adam, 0.01 for SGD with momentum and 0.1 for SGD. 2 to 9 updates: "
        "as of three workers and one of a third of their speed.",
        "",
        *table(
            "optimizer|rate|loss, BSP|loss, 2 to 9 updates old|loss, 16 updates old",
            delay_rows(setting, [*OPTIMIZERS][-1 if quick else 0 :], (1,) if quick else (1, 3)),
        ),
        "",
        versions_and_hardware("jax", "optax"),
    ]
    report("asynchronous", lines, write=not quick)


if __name__ == "__main__":
    main()
