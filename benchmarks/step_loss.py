"""What does a step of a loss of the whole step take, over the same step of a plain loss?

The built-in decoder on packed rows: nats a token as a plain loss, the same as a `StepLoss` of two sums, which computes
the forward pass twice, and a `StepLoss` of these and of one vector a row, each compared with all rows of the step.
Steps take turns. Run `python benchmarks/step_loss.py [--quick] [--turns N]`. Prints a table and writes it, with
versions and hardware, to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from support.timing import report, table, versions_and_hardware

import jvarlen
from jvarlen.data.tokens import TokenDataset
from jvarlen.models import DecoderConfig, init_params, make_loss_fn
from jvarlen.parallel import StepLoss

GOAL = 1.4  # of the seconds of a plain loss


def losses_of(model: DecoderConfig) -> dict[str, Any]:
    """The same loss as a plain one and by sums of the step, and one of all rows as well."""
    plain = make_loss_fn(model)

    def sums(params: Any, batch: Any) -> dict[str, Any]:
        nats, weight = plain(params, batch)
        return {"nats": nats, "weight": weight}

    def loss(sums: dict[str, Any]) -> Any:
        return sums["nats"] / sums["weight"]

    def sums_and_rows(params: Any, batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        words = jax.tree.leaves(params)[0]  # some table of vectors
        return sums(params, batch), {"vectors": jnp.sum(words[batch.tokens % len(words)], axis=1)}

    def loss_of_rows(sums: dict[str, Any], rows: dict[str, Any]) -> Any:
        similar = rows["vectors"] @ rows["vectors"].T / 1e3
        return loss(sums) + jnp.mean(jax.nn.logsumexp(similar, axis=1) - jnp.diagonal(similar))

    return {
        "plain": plain,
        "`StepLoss`, two sums": StepLoss(sums, loss),
        "`StepLoss`, two sums and a vector a row": StepLoss(sums_and_rows, loss_of_rows),
    }


def seconds_of_steps(model: DecoderConfig, num_tokens: int, num_turns: int) -> list[tuple[str, ...]]:
    """Rows of the report: milliseconds of a step, and their ratio within a turn, for several microbatches a step."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(32, 127, n, np.uint8).tobytes() for n in rng.integers(16, 256, 400)]
    dataset, rows = TokenDataset.from_bytes(texts), []
    for num_microbatches in (1, 4):
        plan = jvarlen.make_plan(
            np.diff(dataset.offsets),
            max_tokens=num_tokens,
            max_shapes=1,
            packing="best_fit",
            num_microbatches=num_microbatches,
        )
        batch = next(iter(jvarlen.load(plan, dataset)))
        seconds: dict[str, list[float]] = {}
        steps = {}
        for name, loss in losses_of(model).items():
            step = jvarlen.make_train_step(loss, optax.adamw(1e-3))
            state = step.init(init_params(model, seed=0))
            compiled = jvarlen.compile_buckets(step, state, plan, progress=False, donate=False)
            steps[name] = compiled, state
        for turn in range(num_turns + 1):
            for name, (compiled, state) in steps.items():
                start = time.perf_counter()
                jax.block_until_ready(compiled(state, batch))
                if turn:
                    seconds.setdefault(name, []).append(time.perf_counter() - start)
        for name, of_steps in seconds.items():
            ratio = statistics.median(each / plain for each, plain in zip(of_steps, seconds["plain"], strict=True))
            shape = " × ".join(map(str, (num_microbatches, *plan.buckets.shapes[0])))
            rows.append((shape, name, f"{1e3 * statistics.median(of_steps):,.1f}", f"{ratio:.2f}"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model, and no report")
    parser.add_argument("--turns", type=int, default=15, help="steps of each loss")
    args = parser.parse_args()
    tiny = DecoderConfig(num_layers=1, width=16, num_heads=1)
    rows = seconds_of_steps(tiny, 512, 1) if args.quick else seconds_of_steps(DecoderConfig(), 2048, args.turns)
    lines = [
        f"# Losses of the whole step, {datetime.date.today()}",
        "",
        f"The demo's decoder, one device; {args.turns} turns, medians. Ratios are within a turn; goal {GOAL}.",
        "",
        *table("microbatches × rows × length|loss|ms a step|over plain", rows),
        "",
        versions_and_hardware("jax"),
    ]
    report("step-loss", lines, write=not args.quick)


if __name__ == "__main__":
    main()
