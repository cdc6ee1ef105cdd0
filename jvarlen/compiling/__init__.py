"""Ahead-of-time compilation of a step for every bucket, and proof that nothing else compiles.

- `compile_options`, `compilation_cache`: compiler options, and JAX's persistent compilation cache.
- `lowering`: the program of a bucket. `program_store`: executables in memory and in files.
- `compile`, `pending`, `compiled_buckets`: compile every bucket, before the first step or in the background, and
  dispatch batches to their executables.
- `auto_shapes`, `step_costs`: how many shapes pay off in a run, and the cost of steps and compilation on this machine.
- `warm_up`: first runs, and a loop's arithmetic on metrics, before the first step.
- `donation`: which arrays of a state a step may overwrite.
- `mismatch`: how a batch differs from what was planned.
- `recompiles`, `jax_log`: the guard against recompiling, and JAX's own explanations of what it compiles.
- `report`, `step_clock`: what each bucket cost, and how long its steps take.
- `lifetimes`: when the arrays of a traced function are alive.
- `hlo`: collectives of a compiled program. `row_search`: the most rows that fit. `measure_buckets`: timings of buckets.
"""
