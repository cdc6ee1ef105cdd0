"""`jvarlen measure`: the cost model of training steps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jvarlen import models
from jvarlen._common.checks import UserError, check_at_least_one, check_counts
from jvarlen._common.files import check_outputs
from jvarlen._common.settings import Settings
from jvarlen._common.terminal import say
from jvarlen.compiling.compile_options import CompileOptions
from jvarlen.models.config import DecoderConfig
from jvarlen.planning.buckets import Bucket
from jvarlen.planning.budget import check_bucket_lengths
from jvarlen.planning.cost_model import CostModel, fit_cost_model
from jvarlen.planning.rules import RowPacking
from jvarlen.runs.model import decoder_of, optimizer_for, params_dtype

__all__ = ["MeasureCommand", "MeasuredCosts", "measure_costs"]

_SHARES_OF_BUDGET = (1, 4)  # a full bucket and a quarter of one show the fixed cost of a step


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasureCommand(Settings):
    """Measure the time of training steps of the decoder, for `--cost-model` of plan and train."""

    max_tokens: int = 4096
    """Tokens of the largest measured buckets."""
    lengths: tuple[int, ...] = (32, 128, 512, 1024)
    """Lengths of rows to measure."""
    num_microbatches: int = 1
    """Microbatches of one optimizer update."""
    packing: RowPacking = "padded"
    """Measure rows that hold one sample, or several, packed by whichever method."""
    out: Path = Path("cost.json")
    """Where to write the cost model in seconds."""
    progress: bool = True
    """Show progress bars."""
    model: Path | None = None
    """Hugging Face directory or config.json, whose sizes are measured with random weights. None: decoder."""
    decoder: DecoderConfig = dataclasses.field(default_factory=DecoderConfig)
    """The shape of the built-in model, without model."""

    def __post_init__(self):
        super().__post_init__()
        check_counts(self, 1, "max_tokens", "num_microbatches")

    def run(self) -> None:
        """Measures, prints and saves."""
        check_outputs({"out": self.out}, self.model)
        costs = measure_costs(
            decoder_of(self.model, self.decoder),
            dtype=params_dtype(self.model),
            max_tokens=self.max_tokens,
            lengths=self.lengths,
            num_microbatches=self.num_microbatches,
            packed=self.packing != "padded",
            progress=self.progress,
        )
        costs.seconds.save(self.out)
        say(f"{self.out}: {costs.seconds}", f"compiling a bucket took {costs.compile_seconds:.2f} s")


class MeasuredCosts(NamedTuple):
    """The cost of the training steps of a model."""

    seconds: CostModel  # of one microbatch
    compile_seconds: float  # of lowering and compiling one bucket, one after the other and without a cache


def measure_costs(
    model: DecoderConfig,
    *,
    dtype: str = "float32",
    max_tokens: int,
    lengths: Sequence[int],
    num_microbatches: int = 1,
    packed: bool = False,
    repeats: int = 3,
    progress: bool = True,
) -> MeasuredCosts:
    """Compiles and runs AdamW steps of a decoder in rows of these lengths, and fits a cost model."""
    import jax  # here: settings are read without it
    import optax

    from jvarlen.batches.batches import token_batch_spec
    from jvarlen.batches.shapes import BatchShapes
    from jvarlen.compiling.compile import compile_buckets
    from jvarlen.compiling.measure import measure_buckets
    from jvarlen.compiling.program_store import without_compilation_cache
    from jvarlen.parallel.train import make_train_step

    check_at_least_one(max_tokens=max_tokens, num_microbatches=num_microbatches, repeats=repeats)
    check_bucket_lengths(lengths, "lengths")
    if len(lengths) < 2:
        raise UserError(f"at least 2 lengths are needed to find the cost of attention, not {list(lengths)}")
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), models.init_params(model, seed=0))
    step = make_train_step(models.make_loss_fn(model), optimizer_for(params, optax.adamw(1e-3)))
    state = step.init(params)
    measured = []
    for share in _SHARES_OF_BUDGET:
        with without_compilation_cache():  # so that compiling is measured
            compiled = compile_buckets(
                step,
                state,
                BatchShapes(
                    [Bucket(max_tokens // share // length, length) for length in lengths],
                    num_microbatches=num_microbatches,
                    batch_spec=functools.partial(token_batch_spec, samples_per_row=1) if packed else token_batch_spec,
                    has_many_groups=False,
                ),
                progress=progress,
                options=CompileOptions(cache_dir=None, num_threads=1),
            )
        measured.append(measure_buckets(compiled, state, repeats=repeats, progress=progress))
    shapes = [shape for each in measured for shape in each.shapes]
    seconds = np.concatenate([each.seconds for each in measured])
    name = f"{model.num_layers} layers of width {model.width}, {dtype}, {num_microbatches} microbatches a step"
    name += ", packed" if packed else ""
    return MeasuredCosts(
        fit_cost_model(shapes, seconds, device=measured[0].device, model=name),
        sum(each.compile_seconds for each in measured) / len(measured),
    )
