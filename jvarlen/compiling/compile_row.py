"""What the program of a bucket cost, and how it was used: a row of the compile report."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from jvarlen.planning.buckets import AnyBucket

__all__ = ["CompileRow", "row_of"]


@dataclasses.dataclass(frozen=True)
class CompileRow:
    """What a bucket's executable cost, and how it was used.

    Operations and bytes are those of one device, as the compiler reports them: NaN and 0 if it does not.

    Attributes:
      bucket: its shape.
      lower_s: seconds of tracing and lowering.
      compile_s: seconds in the compiler, or of reading from a cache.
      cache_hit: whether the executable was read from a cache.
      flops: floating-point operations of a step. XLA counts the body of a loop, as over microbatches, once.
      argument_bytes: of state and batch.
      output_bytes: of the results.
      alias_bytes: of the results that reuse donated arguments.
      temp_bytes: of temporaries.
      peak_bytes: the most that is held at one time. For CPUs XLA leaves out the temporaries; use `total_bytes` there.
      times_used: steps that ran in this bucket.
      step_s: median seconds of a step; NaN where steps were not timed.
      planned_steps: steps that the plan has in this bucket; None without a plan.
      padding: share of the planned steps that is padding, in [0, 1); None without a planned step.
      is_live: whether the executable is held now.
      stall_s: seconds that steps waited until this bucket was compiled; 0 if it was compiled before the first step.
    """

    bucket: AnyBucket
    lower_s: float
    compile_s: float
    cache_hit: bool
    flops: float
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    peak_bytes: int
    times_used: int = 0
    step_s: float = math.nan
    planned_steps: int | None = None
    padding: float | None = None
    is_live: bool = True
    stall_s: float = 0.0

    @property
    def total_bytes(self) -> int:
        """Bytes that a device holds during a step, if all temporaries are held at once."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


def row_of(bucket: AnyBucket, compiled: Any, lower_s: float, compile_s: float, cache_hit: bool) -> CompileRow:
    """The row of an executable that has not been used."""
    flops = float((_told_by(compiled.cost_analysis) or {}).get("flops", math.nan))
    flops = flops if flops >= 0 else math.nan  # XLA marks what it cannot count as negative
    memory = _told_by(compiled.memory_analysis)
    argument, output, alias, temp, peak = (
        int(getattr(memory, f"{name}_in_bytes", 0))
        for name in ("argument_size", "output_size", "alias_size", "temp_size", "peak_memory")
    )
    return CompileRow(bucket, lower_s, compile_s, cache_hit, flops, argument, output, alias, temp, peak)


def _told_by(analysis: Callable[[], Any]) -> Any:
    """What an analysis tells; None where the backend has none, which some say by an error."""
    try:
        return analysis()
    except RuntimeError:  # JAX's own errors and NotImplementedError are among these
        return None
