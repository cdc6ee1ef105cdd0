"""Ahead-of-time compilation of a step for every bucket, and proof that nothing else compiles.

- `compile_options`: compiler options, whether programs are cached, and when they are compiled.
- `programs`: the programs of a step of one group, and of several.
- `lowering`, `queue`: lower and compile them, in a queue.
- `program_store`: JAX's persistent cache.
- `compile`: compile every bucket, before the first step or in the background.
- `compiled_buckets`: dispatch batches to their executables.
- `unplanned`: how a batch differs from what was planned, and arrays that a step must not get.
- `recompiles`: the guard against recompiling.
- `report`: the cost of each bucket, and the table of all; what reports of buckets share, as files.
- `step_clock`, `measure`: how long steps take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jvarlen._common.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from jvarlen.compiling.compiled_buckets import CompiledBuckets
    from jvarlen.compiling.measure import measure_buckets
    from jvarlen.compiling.program_store import use_compilation_cache
    from jvarlen.compiling.report import CompileReport

__all__ = ["CompileReport", "CompiledBuckets", "measure_buckets", "use_compilation_cache"]

__getattr__, __dir__ = lazy_imports(__name__)
