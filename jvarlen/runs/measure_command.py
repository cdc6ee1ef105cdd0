"""`jvarlen measure`: what a training step of the built-in model costs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jvarlen.models import TransformerConfig
from jvarlen.runs.measure_costs import measure_costs

__all__ = ["MeasureCommand"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasureCommand:
    """Measure time and memory of training steps of the built-in model, for `plan --cost-model` and `--memory-model`."""

    max_tokens: int = 4096
    """Tokens of the largest measured buckets."""
    lengths: tuple[int, ...] = (32, 128, 512, 1024)
    """Lengths of rows to measure."""
    microbatches_per_step: int = 1
    """Microbatches of one optimizer update."""
    pack: bool = False
    """Measure rows that hold several samples."""
    out: Path = Path("cost.json")
    """Where to write the cost model in seconds."""
    memory_out: Path = Path("memory.json")
    """Where to write the cost model in bytes."""
    progress: bool = True
    """Show progress bars."""
    model: TransformerConfig = dataclasses.field(default_factory=TransformerConfig)

    def run(self) -> None:
        """Measures, prints and saves."""
        missing = [str(path) for path in (self.out, self.memory_out) if not path.parent.is_dir()]
        if missing:
            raise FileNotFoundError(f"there is no directory for {', '.join(missing)}")
        costs = measure_costs(
            self.model,
            max_tokens=self.max_tokens,
            lengths=self.lengths,
            microbatches_per_step=self.microbatches_per_step,
            packed=self.pack,
            progress=self.progress,
        )
        for fitted, path in ((costs.seconds, self.out), (costs.num_bytes, self.memory_out)):
            fitted.save(path)
            print(f"{path}: {fitted}")
        print(f"compiling a bucket took {costs.compile_seconds:.2f} s")
