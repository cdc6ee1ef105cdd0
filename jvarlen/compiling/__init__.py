"""Ahead-of-time compilation of a step for every bucket, and proof that nothing else compiles.

- `compile_options`: compiler options, whether programs are cached, and when they are compiled.
- `lowering`: the program of a bucket.
- `program_store`: executables in JAX's cache and as bytes. `program_file`: those in signed files.
- `compile`, `pending`, `other_processes`, `compiled_buckets`: compile every bucket, before the first step or in the
  background, on all processes, and dispatch batches to their executables.
- `arguments`: which executable takes a batch, and which arrays a step may overwrite. `unplanned`: how a batch differs
  from what was planned.
- `recompiles`, `jax_log`: the guard against recompiling, and JAX's own explanations of what it compiles.
- `clock`, `compile_row`, `report`: how long compiling takes, what each bucket cost, and the table of all.
  `bucket_report`: what reports of buckets share, as files.
- `measure`: how long steps take, and the most rows that fit.
- `lifetimes`: when the arrays of a traced function are alive. `hlo`: collectives of a compiled program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jvarlen._common.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from jvarlen.compiling.compiled_buckets import CompiledBuckets
    from jvarlen.compiling.measure import measure_buckets
    from jvarlen.compiling.report import CompileReport

__all__ = [
    "CompileReport",
    "CompiledBuckets",
    "measure_buckets",
]

__getattr__, __dir__ = lazy_imports(__name__)
