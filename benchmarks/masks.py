"""What memory does each form of mask take, by the length of rows?

A training step of the built-in model on 4,096 positions, full rows, compiled with every form of mask. Bytes are those
of the compile report, seconds those of the compiled step. Run `python benchmarks/masks.py [--quick]`. Prints a table
and writes it, with versions and hardware, to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import optax
from flax import nnx
from support.timing import REPEATS, digits, report, table, versions_and_hardware

import jvarlen
from jvarlen.batches import BatchShapes, packed_batch_spec, token_batch_spec
from jvarlen.compiling.compiled_buckets import CompiledBuckets
from jvarlen.compiling.report import CompileRow
from jvarlen.models import DecoderConfig, init_params, make_loss_fn
from jvarlen.planning.buckets import Bucket


class Form(NamedTuple):
    """A form of mask, as a setting of the model."""

    name: str
    setting: dict[str, str]


# The others are compared with the first.
FORMS = (
    Form("lengths", {"attention": "xla"}),
    Form("B×T×T mask", {"attention": "mask"}),
    Form("lengths, in chunks", {"attention": "chunked"}),
    Form("segments", {"packed_attention": "xla"}),
    Form("segments, in chunks", {"packed_attention": "chunked"}),
)
ROUNDS = min(4, REPEATS)


class Measured(NamedTuple):
    """A form of mask in one shape."""

    form: Form
    row: CompileRow
    seconds: float


def compile_step(
    model: DecoderConfig, params: nnx.State, form: Form, bucket: Bucket
) -> tuple[CompiledBuckets, jvarlen.TrainState]:
    config, optimizer = dataclasses.replace(model, **form.setting), optax.adamw(1e-3)
    train_step = jvarlen.make_train_step(make_loss_fn(config), optimizer)
    state = train_step.init(params)
    compiled = jvarlen.compile_buckets(
        train_step,
        state,
        BatchShapes(
            [bucket],
            batch_spec=functools.partial(packed_batch_spec, samples_per_row=1)
            if "packed_attention" in form.setting
            else token_batch_spec,
        ),
        progress=False,
    )
    return compiled, state


def measure(model: DecoderConfig, bucket: Bucket) -> list[Measured]:
    """The report's row and the seconds of a step of all forms, in turns: what else the machine does meets them all."""
    params = init_params(model, seed=0)  # of all forms
    steps = [compile_step(model, params, form, bucket) for form in FORMS]
    seconds = np.min(
        [
            [
                jvarlen.compiling.measure_buckets(compiled, state, repeats=1, progress=False).seconds[0]
                for compiled, state in steps
            ]
            for _ in range(ROUNDS)
        ],
        axis=0,
    )
    return [
        Measured(form, step.report[0], s) for form, (step, _), s in zip(FORMS, steps, seconds.tolist(), strict=True)
    ]


def cells(measured: Measured, first: Measured) -> Iterable[str]:
    return (
        f"{measured.row.bucket}",
        measured.form.name,
        digits(measured.row.temp_bytes / 1e6),
        f"{measured.row.temp_bytes / first.row.temp_bytes:.2f}",
        digits(measured.row.total_bytes / 1e6),
        digits(measured.seconds),
        f"{measured.seconds / first.seconds:.2f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model and short rows, and no report")
    quick = parser.parse_args().quick
    max_tokens, lengths = (128, [128]) if quick else (4096, [256, 1024, 4096])
    model = DecoderConfig(num_layers=1, width=16, num_heads=1) if quick else DecoderConfig()
    lines = [
        f"# Memory by form of mask, {datetime.date.today()}",
        "",
        f"A training step of {max_tokens:,} positions, float32: {model.num_layers} layers, width {model.width}, "
        f"{model.num_heads} heads. Temporaries and all bytes are those of the compile report, MB = 10⁶ bytes.",
        "",
        *table(
            "rows × length|mask|temporaries, MB|of lengths'|in all, MB|step, s|of lengths'",
            (
                cells(measured, of_bucket[0])
                for of_bucket in (measure(model, Bucket(max_tokens // length, length)) for length in lengths)
                for measured in of_bucket
            ),
        ),
        "",
        versions_and_hardware("jax"),
    ]
    report("masks", lines, write=not quick)


if __name__ == "__main__":
    main()
