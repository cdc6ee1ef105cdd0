"""The steps that are compiled for devices which are not here: a fixed list, and the faults that are known today.

Usage: python -m tests.targets.cases, which measures the temporaries of cases that `temporaries.json` has not. With
another compiler or another list, take out of it what changed, and say there which versions it is of.
"""

import fnmatch
import functools
import importlib.util
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import optax

from jvarlen import Layout, models
from jvarlen.batches import BatchShapes
from jvarlen.batches.batches import token_batch_spec
from jvarlen.models import DecoderConfig
from jvarlen.runs.task import _built_in_loss
from jvarlen.targets.compile_for import compile_for
from jvarlen.targets.report import TargetReport

TARGETS = ("8xh100", "v5e:2x4")
MODELS = {
    "demo": DecoderConfig(),
    "llama": DecoderConfig(
        num_layers=4, width=128, mlp_width=256, num_heads=8, num_kv_heads=4, head_size=32, vocab_size=256,
        compute_dtype="bfloat16",
    ),
}  # fmt: skip
LAYOUTS = (
    "data8",
    "data8.zero1",
    "data8.zero2",
    "data8.zero3",
    "data4.tensor2",
    "data2.tensor4",
    "data4.stage2.gpipe",
    "data4.stage2.1f1b",
    "data4.stage2.eager_1f1b",
    "data4.stage2.interleaved.virtual2",
    "data4.stage2.zero_bubble",
    "data4.context2",
    "data2.stage2.tensor2.zero1",
)
BUCKETS = ((2, 256), (1, 512))
REFUSED = {
    ("demo", "data2.tensor4"): "num_heads: 2",
    ("demo", "data4.stage2.interleaved.virtual2"): "2 layers do not make",
}
PACKINGS = ("padded", "packed")
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


class Case(NamedTuple):
    """A step."""

    target: str
    model: str
    layout: str
    packing: str  # "padded" or "packed"
    microbatches: int  # of a data shard in a step

    def __str__(self) -> str:
        return f"{self.target}-{self.model}-{self.layout}-{self.packing}-{self.microbatches}"

    @property
    def is_tpu(self) -> bool:
        """Whether it is for TPUs, not GPUs."""
        return ":" in self.target

    @property
    def is_by_cudnn(self) -> bool:
        """Whether cuDNN is the first choice for attention: for neither short packed rows, float32 nor parts of rows."""
        takes = (
            self.packing == "padded" and MODELS[self.model].compute_dtype is not None and "context" not in self.layout
        )
        return takes and not self.is_tpu

    @property
    def not_here(self) -> str | None:
        """What it needs and is not installed."""
        if importlib.util.find_spec("libtpu" if self.is_tpu else "jax_cuda12_plugin") is None:
            return f"XLA's compiler for {'TPUs' if self.is_tpu else 'GPUs'} is not installed"
        return None

    def compile(self, buckets: Sequence[tuple[int, int]] = BUCKETS) -> TargetReport:
        """The report, a row a bucket, those with the most positions first."""
        layout, config = Layout.parse(self.layout), MODELS[self.model]
        return compile_for(
            _built_in_loss(config, layout),
            OPTIMIZER,
            BatchShapes(buckets, num_microbatches=self.microbatches * layout.data, has_many_groups=False),
            target=self.target,
            layout=layout,
            params=jax.eval_shape(lambda: models.init_params(config, 0)),
            batch_spec=functools.partial(token_batch_spec, samples_per_row=4) if self.packing == "packed" else None,
            progress=False,
        )


_EIGHT = itertools.product(TARGETS, MODELS, LAYOUTS, PACKINGS, (4,))
_ONE = itertools.product(("1xh100",), MODELS, ("data1",), PACKINGS, (1, 4))
CASES = [Case(*each) for each in (*_ONE, *_EIGHT) if each[1:3] not in REFUSED]
# What `make test` compiles, for one bucket.
FEW = [Case(target, "llama", "data8.zero3", "packed", 4) for target in TARGETS]
# What is to be mended: by name, of which cases. A program with a fault that is not told here fails the test, as does
# one without a fault that is; but for what is not sure, whose patterns hold for some programs of those cases.
KNOWN_FAULTS: dict[str, tuple[str, ...]] = {
    # All are reduced once the last product is done.
    "no gradient is reduced beside a product": (
        "8xh100-*-data8-*",
        "8xh100-*-data8.zero1-*",
        "8xh100-*-data4.[cst]*",
        "8xh100-*-data2.*",
        "v5e:2x4-*",
    )
}
# XLA schedules nothing beside these, and then makes them synchronous for GPUs; mostly small ones at the end of a step.
NOT_SURE: dict[str, tuple[str, ...]] = {
    "nothing can run beside some all-reduce": (
        "8xh100-*-data8-*",
        "8xh100-*-data8.zero[123]-*",
        "8xh100-*tensor*",
        "8xh100-*-data4.context2-*",
        "v5e:2x4-*",
    ),
    "nothing can run beside some all-gather": ("v5e:2x4-*.zero[123]-*", "v5e:2x4-*-data4.context2-*"),
    "nothing can run beside some reduce-scatter": ("v5e:2x4-*.zero[123]-*",),
    "nothing can run beside some collective-permute": ("8xh100-*stage2*",),
}
MEASURED = Path(__file__).parent / "temporaries.json"


def faults_of_case(case: Case, listed: Mapping[str, tuple[str, ...]]) -> set[str]:
    """Those whose patterns a case matches."""
    return {fault for fault, patterns in listed.items() if any(fnmatch.fnmatch(str(case), each) for each in patterns)}


def record() -> None:
    """Writes down the bytes of temporaries of the cases that have none in the file, and can be compiled here."""
    kept = json.loads(MEASURED.read_text())
    for case in CASES:
        if str(case) in kept["bytes"] or case.not_here:
            continue
        kept["bytes"][str(case)] = {str(row.bucket): row.temp_bytes for row in case.compile()}
        print(case, kept["bytes"][str(case)], flush=True)
        MEASURED.write_text(json.dumps(kept, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    record()
