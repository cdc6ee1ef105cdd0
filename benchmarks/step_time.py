"""Do plans that minimise predicted seconds take less time, and as much as was predicted?

The built-in corpus up to 1,024 bytes and the built-in model, 4,096 tokens a microbatch. A cost model is fitted to a few
shapes. Then every plan's buckets are compiled and timed; the seconds of its epoch are the sum over its steps. Run
`python benchmarks/step_time.py [--quick]`. Prints a table and writes it, with versions and hardware, to
`benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
from typing import NamedTuple

import numpy as np
import optax
from support.timing import report, table, versions_and_hardware

import jvarlen
from jvarlen.batches import BatchShapes
from jvarlen.batches.shapes import plan_specs
from jvarlen.data.stdlib_corpus import stdlib_functions
from jvarlen.models import DecoderConfig, init_params, make_loss_fn
from jvarlen.planning.buckets import Bucket
from jvarlen.runs.commands.measure import MeasuredCosts, measure_costs


class Planned(NamedTuple):
    """A plan of the epoch, and the cost model of its kind of rows."""

    name: str
    plan: jvarlen.Plan
    costs: MeasuredCosts


def plans(
    lengths: np.ndarray, max_tokens: int, max_shapes: int, unpacked: MeasuredCosts, packed: MeasuredCosts
) -> list[Planned]:
    longest = int(lengths.max())

    def planned(name: str, **options) -> Planned:
        buckets = jvarlen.make_buckets(lengths, max_tokens, max_shapes=max_shapes, length_multiple=8, **options)
        return Planned(name, jvarlen.make_plan(lengths, buckets, order="length"), unpacked)

    def packed_into(name: str, row_lengths: tuple[int, ...]) -> Planned:
        options = {"packing": "best_fit", "row_lengths": row_lengths, "order": "length"}
        return Planned(name, jvarlen.make_plan(lengths, max_tokens=max_tokens, **options), packed)

    chosen = jvarlen.planning.choose_row_lengths(
        lengths,
        max_tokens,
        max_shapes=4,
        length_multiple=32,
        cost=packed.seconds,
        compile_seconds=packed.compile_seconds,
    )
    return [
        planned("pad to the longest", strategy="pad_to_max"),
        planned("powers of two", strategy="powers_of_two"),
        planned("optimal in tokens"),
        planned("optimal in seconds", cost=unpacked.seconds),
        packed_into(f"packed, rows of {longest:,}", (longest,)),
        packed_into(f"packed, rows of {', '.join(f'{length:,}' for length in chosen)}", chosen),
    ]


def measured_seconds(planned: Planned, model: DecoderConfig, known: dict[Bucket, float]) -> float:
    """Seconds of all steps of the plan, each bucket timed by itself, unless its seconds are known; they are then."""
    missing = [bucket for bucket in planned.plan.buckets.shapes if bucket not in known]
    if missing:
        optimizer = optax.adamw(1e-3)
        train_step = jvarlen.make_train_step(make_loss_fn(model), optimizer)
        state = train_step.init(init_params(model, seed=0))
        compiled = jvarlen.compile_buckets(
            train_step,
            state,
            BatchShapes(missing, batch_spec=plan_specs(planned.plan), has_many_groups=False),
            progress=False,
        )
        measured = jvarlen.compiling.measure_buckets(compiled, state, progress=False)
        known.update(zip(map(Bucket._make, measured.shapes), measured.seconds.tolist(), strict=True))
    return sum(known[planned.plan.buckets.shapes[k]] for k in planned.plan.step_bucket.tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few shapes, and no report")
    quick = parser.parse_args().quick
    lengths = jvarlen.measure_lengths(stdlib_functions(progress=False), progress=False)
    longest, max_tokens, max_shapes = (32, 128, 2) if quick else (1024, 4096, 12)
    lengths = lengths[lengths <= longest]
    model = DecoderConfig(num_layers=1, width=16, num_heads=1) if quick else DecoderConfig()
    measured_at = [16, longest] if quick else [32, 128, 512, longest]
    unpacked, packed = (
        measure_costs(model, max_tokens=max_tokens, lengths=measured_at, packed=is_packed, progress=False)
        for is_packed in (False, True)
    )
    rows = []
    known: dict[bool, dict[Bucket, float]] = {False: {}, True: {}}  # by whether rows are packed
    for planned in plans(lengths, max_tokens, max_shapes, unpacked, packed):
        predicted = sum(float(planned.costs.seconds(*planned.plan.buckets.shapes[k])) for k in planned.plan.step_bucket)
        rows.append(
            (planned, predicted, measured_seconds(planned, model, known[planned.plan.is_packed] if quick else {}))
        )
    best = min(seconds for *_, seconds in rows)
    lines = [
        f"# Seconds of an epoch, {datetime.date.today()}",
        "",
        f"{len(lengths):,} samples of up to {longest:,} bytes, {lengths.sum():,} in all; the plans of one epoch.",
        "",
        *table(
            "plan|shapes|steps|padding|predicted, s|measured, s|measured / best|predicted / measured",
            (
                (
                    planned.name,
                    f"{len(planned.plan.buckets.shapes)}",
                    f"{planned.plan.num_steps:,}",
                    f"{planned.plan.padding:.2%}",
                    f"{predicted:.1f}",
                    f"{seconds:.1f}",
                    f"{seconds / best:.2f}",
                    f"{predicted / seconds:.2f}",
                )
                for planned, predicted, seconds in rows
            ),
        ),
        "",
        f"Unpacked rows: {unpacked.seconds}.",
        "",
        f"Packed rows: {packed.seconds}.",
        "",
        versions_and_hardware("jax"),
    ]
    report("step-time", lines, write=not quick)


if __name__ == "__main__":
    main()
