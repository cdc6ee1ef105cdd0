"""Does a step hold what `estimate_memory` says, on layouts of all kinds?

The decoder, trained by AdamW on up to 8 CPU devices of one process: estimated bytes, against arguments
and temporaries of the compiled program, for layouts, sizes of the model and buckets. Nothing is run. Run
`python benchmarks/memory.py [--quick]`. Prints a table and writes it, with versions and hardware, to
`benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
import os
from typing import NamedTuple

import optax
from support.timing import COMPILE_FAST, digits, report, table, versions_and_hardware

from jvarlen import Bucket, compile_buckets
from jvarlen.batches import BatchShapes
from jvarlen.distributed.mesh import split_cpu
from jvarlen.distributed.placement import place
from jvarlen.estimates import estimate_memory
from jvarlen.models import DecoderConfig, init_params, layered
from jvarlen.parallel import Layout, make_train_step


class Case(NamedTuple):
    """A layout, a bucket, microbatches of a data shard, and the model: width, layers and vocabulary."""

    layout: str
    rows: int = 2
    length: int = 64
    of_shard: int = 4
    width: int = 128
    num_layers: int = 4
    vocab_size: int = 256


FULL = [
    Case("data1"),
    Case("data1", of_shard=1),
    Case("data1", rows=16, of_shard=2, width=64, vocab_size=2048),
    Case("data8.zero1", rows=1, length=8, width=256),
    Case("data4.zero2"),
    Case("data2.context2.zero2", length=128),
    Case("data2.zero3", width=256, num_layers=6, vocab_size=2048),
    Case("data4.zero3", rows=8),
    Case("data2.zero3", rows=1, length=16, of_shard=2),
    Case("data2.remat_full", rows=8),
    Case("data2.zero3.remat_full", rows=8),
    Case("data2.tensor2"),
    Case("data4.tensor2.sequence_parallel"),
    Case("data2.tensor2.zero3"),
    Case("data1.context4", length=256),
    Case("data2.context2.zero3"),
    Case("data1.stage2", rows=8),
    Case("data1.stage2", width=256, num_layers=6, vocab_size=2048),
    Case("data1.stage4", of_shard=8),
    Case("data1.stage2.gpipe", rows=4, of_shard=8),
    Case("data1.stage2.1f1b", rows=4, of_shard=8),
    Case("data1.stage2.zero_bubble"),
    Case("data1.stage2.virtual2.interleaved"),
    Case("data1.stage4.virtual2.interleaved", of_shard=8, width=64, num_layers=8),
    Case("data1.stage2.remat_none", rows=4, width=64),
    Case("data1.stage2.gpipe.remat_none", of_shard=8),
    Case("data1.stage2.zero_bubble.remat_none"),
    Case("data2.stage2.zero1"),
    Case("data2.stage2.zero3"),
    Case("data2.stage2.tensor2"),
    Case("data2.stage2.context2"),
    Case("data2.zero2.remat_full", rows=4, length=256, width=64, num_layers=8, vocab_size=512),
    Case("data1.remat_full", rows=4, length=128, width=256),
    Case("data4.zero1", length=512, of_shard=3, width=64),
    Case("data2.tensor4", rows=4, length=128, width=256, vocab_size=1000),
    Case("data3.zero3", rows=4, length=32, width=192, num_layers=3),
    Case("data1.context8", length=512, of_shard=2, width=64),
    Case("data2.stage4.zero3", rows=8),
    Case("data1.stage8", rows=4, of_shard=8, width=64, num_layers=8),
    Case("data1.stage4.tensor2", rows=4, of_shard=8, num_layers=8),
    Case("data1.stage4.gpipe", rows=4, length=128, of_shard=8, width=64, num_layers=8),
    Case("data1.stage4.1f1b", length=16, of_shard=16, width=256),
    Case("data1.stage2.virtual4.interleaved", rows=4, width=64, num_layers=8),
    Case("data4.stage2.virtual2.interleaved.zero1", rows=4, length=128, width=64, num_layers=8),
]
QUICK = [Case(layout, length=16, width=16, num_layers=2) for layout in ("data2", "data2.zero1", "data1.stage2")]


class Held(NamedTuple):
    """Bytes of a device: estimated, and of the compiled program."""

    estimated: int
    argument_bytes: int
    temp_bytes: int

    @property
    def ratio(self) -> float:
        """Estimated over compiled."""
        return self.estimated / (self.argument_bytes + self.temp_bytes)


def measure(case: Case) -> Held:
    layout, bucket = Layout.parse(case.layout), Bucket(case.rows, case.length)
    config = DecoderConfig(
        num_layers=case.num_layers, width=case.width, num_heads=max(2, case.width // 64), vocab_size=case.vocab_size
    )
    mesh, optimizer = place(layout).mesh, optax.adamw(1e-3)
    params, model = init_params(config, seed=0), layered(config)
    num_microbatches = case.of_shard * layout.data
    estimate = estimate_memory(
        model, optimizer, bucket, layout=layout, params=params, num_microbatches=num_microbatches
    )
    train_step = make_train_step(model, optimizer, layout=layout)
    state = train_step.init(params)
    step = compile_buckets(
        train_step,
        state,
        BatchShapes([bucket], num_microbatches=num_microbatches, layout=mesh, has_many_groups=False),
        progress=False,
    )
    (row,) = step.report
    return Held(estimate.total, row.argument_bytes, row.temp_bytes)


def tables(cases: list[Case]) -> list[str]:
    held = {case: measure(case) for case in cases}
    ratios = [each.ratio for each in held.values()]
    return [
        "Bytes of a step on one device: `estimate_memory(…).total` before compiling, and arguments (state and batch) "
        "and temporaries of the compiled program. Rows × positions of a microbatch; A microbatches a data shard.",
        "",
        f"Estimated / compiled, over {len(held)} programs: {min(ratios):.3f} to {max(ratios):.3f}.",
        "",
        *table(
            "layout|bucket|A|width|layers|vocabulary|arguments, MiB|temporaries, MiB|estimated, MiB|"
            "estimated / compiled",
            [
                [
                    f"`{case.layout}`",
                    f"{case.rows}×{case.length}",
                    *map(str, (case.of_shard, case.width, case.num_layers, case.vocab_size)),
                    *(digits(num / 2**20) for num in (each.argument_bytes, each.temp_bytes, each.estimated)),
                    f"{each.ratio:.3f}",
                ]
                for case, each in held.items()
            ],
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three tiny models, and no report")
    quick = parser.parse_args().quick
    if quick:
        os.environ["XLA_FLAGS"] = COMPILE_FAST
    split_cpu(8)
    title = f"# Memory: estimated and compiled, {datetime.date.today()}"
    lines = tables(QUICK if quick else FULL)
    report("memory", [title, "", *lines, "", versions_and_hardware("jax", "optax")], write=not quick)


if __name__ == "__main__":
    main()
