"""Ahead-of-time compilation of a step for every bucket, and proof that nothing else compiles.

- `compile_options`: compiler options, whether programs are cached, and when they are compiled.
- `lowering`: the program of a bucket. `program_store`: executables in memory, in JAX's cache and in files.
- `compile`, `pending`, `compiled_buckets`: compile every bucket, before the first step or in the background, and
  dispatch batches to their executables.
- `arguments`: how a batch differs from what was planned, and which arrays a step may overwrite.
- `recompiles`, `jax_log`: the guard against recompiling, and JAX's own explanations of what it compiles.
- `report`: what each bucket cost. `measure`: how long steps take, and the most rows that fit.
- `auto_shapes`: how many shapes pay off in a run, by what steps and compiling cost on this machine.
- `lifetimes`: when the arrays of a traced function are alive. `hlo`: collectives of a compiled program.
"""
