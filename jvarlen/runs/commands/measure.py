"""`jvarlen measure`: cost models of training steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jvarlen._common.checks import check_counts
from jvarlen._common.files import check_outputs
from jvarlen._common.settings import Settings
from jvarlen._common.terminal import say
from jvarlen.models.config import DecoderConfig
from jvarlen.planning.packing import RowPacking
from jvarlen.runs.measure_costs import measure_costs
from jvarlen.runs.model import decoder_of, params_dtype

__all__ = ["MeasureCommand"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasureCommand(Settings):
    """Measure time and memory of training steps of the decoder, for `plan --cost-model` and `--memory-model`."""

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
    memory_out: Path = Path("memory.json")
    """Where to write the cost model in bytes."""
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
        check_outputs({"out": self.out, "memory_out": self.memory_out}, self.model)
        costs = measure_costs(
            decoder_of(self.model, self.decoder),
            dtype=params_dtype(self.model),
            max_tokens=self.max_tokens,
            lengths=self.lengths,
            num_microbatches=self.num_microbatches,
            packed=self.packing != "padded",
            progress=self.progress,
        )
        for fitted, path in ((costs.seconds, self.out), (costs.num_bytes, self.memory_out)):
            fitted.save(path)
            say(f"{path}: {fitted}")
        say(f"compiling a bucket took {costs.compile_seconds:.2f} s")
