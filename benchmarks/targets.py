"""Does a step of Llama-3-8B fit on eight devices that are not here, on which layouts, and what does compiling it take?

XLA's compilers for 8 H100 and 8 TPU v6e, which run on a CPU, compile the decoder of Llama-3-8B, packed: 8 microbatches
of a row of 8,192 positions, parameters in bfloat16 with float32 masters, AdamW, clipping. Nothing runs. A compiler that
is not installed (extras `target-gpu` and `target-tpu`) is left out by name. Run `python benchmarks/targets.py
[--quick]`; the full form takes some minutes of CPU time. `--quick` compiles a tiny model for the CPU. Prints tables and
writes them, with versions and hardware, to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from support.timing import COMPILE_FAST, digits, report, table, versions_and_hardware

from jvarlen import with_float32_master
from jvarlen.batches import BatchShapes, token_batch_spec
from jvarlen.compiling.report import figure_text, table_of
from jvarlen.distributed.mesh import split_cpu
from jvarlen.estimates import estimate_memory
from jvarlen.models import DecoderConfig, layered
from jvarlen.models.decoder import param_shapes
from jvarlen.targets import TargetReport
from jvarlen.targets.compile_for import compile_for
from jvarlen.targets.report import BUFFERS, KERNELS, SOURCE, shown_columns

NUM_MICROBATCHES, SAMPLES_PER_ROW, NUM_BUFFERS = 8, 16, 5
LLAMA_3_8B = DecoderConfig(
    num_layers=32,
    width=4096,
    mlp_width=14336,
    num_heads=32,
    num_kv_heads=8,
    vocab_size=128256,
    begins_samples=False,
    norm_epsilon=1e-5,
    rotary_base=500_000.0,
)
TINY = DecoderConfig(num_layers=2, width=16, num_heads=2)


class Case(NamedTuple):
    """A layout on a target; GB that the prototype took, with all logits at once and with a loss in chunks."""

    target: str
    layout: str
    prototype: float | None = None
    in_chunks: float | None = None


FULL = [
    Case("8xh100", "data8.zero3", 124.4, 89.9),
    Case("8xh100", "data8.zero3.remat_selective"),
    Case("8xh100", "data8.zero3.remat_full", 28.5, 23.8),
    Case("8xh100", "data8.zero2.remat_full", 53.6),
    Case("8xh100", "data2.tensor4.zero1.remat_full", 31.6),
    Case("8xh100", "data2.tensor4.zero1.sequence_parallel.remat_full", 29.9),
    Case("8xh100", "data4.stage2.zero1", 96.6, 60.6),
    Case("v6e:2x4", "data8.zero3.remat_full", None, 26.1),
]
QUICK = [Case("here", layout) for layout in ("data8.zero3.remat_full", "data4.stage2.zero1")]


class Told(NamedTuple):
    """What the compiler says of a case, and what `estimate_memory` says: bytes."""

    report: TargetReport
    estimate: int

    @property
    def ratio(self) -> float:
        """Estimated over compiled."""
        [row] = self.report
        return self.estimate / row.total_bytes


def compile_case(case: Case, config: DecoderConfig, length: int) -> Told:
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), param_shapes(config))
    adamw = optax.adamw(3e-4, b2=0.95, weight_decay=0.1)
    optimizer = with_float32_master(optax.chain(optax.clip_by_global_norm(1.0), adamw))
    model, bucket = layered(config), (1, length)
    of_step: dict[str, Any] = {
        "num_microbatches": NUM_MICROBATCHES,
        "batch_spec": lambda bucket, num: token_batch_spec(bucket, num, SAMPLES_PER_ROW),
    }
    shapes = BatchShapes([bucket], **of_step, has_many_groups=False)
    report = compile_for(
        model, optimizer, shapes, target=case.target, layout=case.layout, params=params, progress=False
    )
    estimate = estimate_memory(model, optimizer, bucket, layout=case.layout, params=params, **of_step)
    return Told(report, estimate.total)


def figures(reports: dict[Case, Told]) -> list[str]:
    """The report of each case, next to the prototype."""
    together = TargetReport([row for told in reports.values() for row in told.report], "", "")
    _, *columns = shown_columns(together)
    header, *rows = table_of(together, *columns, KERNELS)
    cells = []
    for ((target, layout, *prototype), told), row in zip(reports.items(), rows, strict=True):
        beside = ("–" if size is None else f"{size:.1f}" for size in prototype)
        cells.append([f"`{layout}`", target, *row, f"{told.ratio:.3f}", figure_text(told.report.cpu_s), *beside])
    more = "estimate / compiled", "CPU s", "prototype GB", "prototype GB, loss in chunks"
    return table("|".join(["layout", "target", *header, *more]), cells)


def collective_cells(case: Case, report: TargetReport) -> list[list[str]]:
    [row] = report
    return [
        [
            f"`{case.layout}`",
            case.target,
            each.kind,
            ", ".join(each.axes) or "other",
            f"{each.times:,}",
            digits(each.num_bytes / 1e9),
            digits(each.wire_bytes / 1e9),
            f"{each.asynchronous:,}",
            f"{each.overlapped:,}",
        ]
        for each in row.communication or ()
    ]


def buffers(reports: dict[Case, Told]) -> list[str]:
    cells = []
    for case, ([row], _) in reports.items():
        _, *largest = table_of((row.buffers or ())[:NUM_BUFFERS], *BUFFERS)
        cells += [[f"`{case.layout}`", case.target, *each] for each in largest]
    return table("|".join(["layout", "target", *(column.header for column in BUFFERS)]), cells)


def tables(cases: list[Case], config: DecoderConfig, length: int) -> list[str]:
    reports: dict[Case, Told] = {}
    left_out = []
    for case in cases:
        print(f"{datetime.datetime.now():%H:%M:%S} {case.layout} for {case.target}", file=sys.stderr, flush=True)
        try:
            reports[case] = compile_case(case, config, length)
        except ModuleNotFoundError as error:
            left_out.append(f"{case.layout} for {case.target}: {error}.")
    return [
        f"A decoder of {config.num_layers} layers of width {config.width:,} and {config.vocab_size:,} values of a "
        f"token; {NUM_MICROBATCHES} packed rows of {length:,} positions a step, in microbatches of one; parameters in "
        f"bfloat16 with float32 masters, AdamW, clipping. **{SOURCE}** GB are 10⁹ bytes, of one device.",
        "",
        "## Memory",
        "",
        *figures(reports),
        "",
        "Estimate / compiled: the bytes of `estimate_memory` over those of the program. "
        "The prototype is another decoder of these sizes, compiled for the same devices before this library could do "
        "so: its layers run in a scan, and its attention is cuDNN's, of rows without samples (for TPUs splash "
        "attention). Its GB are arguments and temporaries. Other work shares the machine: CPU seconds are those of all "
        "threads of the compiler.",
        "",
        "## Collectives of a step",
        "",
        *table(
            "layout|target|collective|axes|times a step|GB|GB sent by a device|asynchronous|overlapped",
            [cells for case, told in reports.items() for cells in collective_cells(case, told.report)],
        ),
        "",
        "## Largest buffers",
        "",
        *buffers(reports),
        "",
        f"The {NUM_BUFFERS} largest of those that a device holds when the step holds the most.",
        *(line for text in left_out for line in ("", f"Left out: {text}")),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model for the CPU, and no report")
    quick = parser.parse_args().quick
    if quick:
        os.environ["XLA_FLAGS"] = COMPILE_FAST
        split_cpu(8)
    else:
        jax.config.update("jax_platforms", "cpu")  # nothing looks for devices, whose drivers may not be here
    lines = tables(QUICK, TINY, 32) if quick else tables(FULL, LLAMA_3_8B, 8192)
    title = f"# Steps compiled for devices that are not here, {datetime.date.today()}"
    report("targets", [title, "", *lines, "", versions_and_hardware("jax", "jaxlib", "optax")], write=not quick)


if __name__ == "__main__":
    main()
