"""From a step and buckets to executables, and proof that nothing else compiles.

- `compile_options`, `compilation_cache`: what the compiler is told, and what JAX keeps on disk.
- `lowering`: the program of a bucket. `program_store`: executables in memory and in files.
- `compile`, `compiled_buckets`: every bucket compiled, and the callable that picks the executable of a batch.
- `mismatch`: how a batch differs from what was planned.
- `recompiles`, `jax_log`: the guard, and what JAX tells of what it compiles.
- `ledger`, `step_clock`: what each bucket cost, and how long its steps take.
- `hlo`: collectives of a compiled program. `row_search`: the most rows that fit. `measure_buckets`: seconds of buckets.
"""
