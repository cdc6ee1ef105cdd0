"""Helpers for every package: argument checks, files, interrupts, progress, pytrees, tables.

- `checks`: errors that list the offending values.
- `compile_anew`: compiling without the compilation cache.
- `files`: files that are written atomically.
- `interrupts`: Ctrl-C and SIGTERM, deferred to a safe point.
- `jaxprs`: what a traced function computes and sends.
- `json_files`: dataclasses as JSON files.
- `lazy_imports`: packages that import their names when they are first used.
- `progress`: progress bars on a terminal, plain lines in a log.
- `pytree`: names, shapes and zeros of pytree leaves. Only it, `compile_anew` and `jaxprs` import JAX here.
- `text_table`: aligned columns of text.
- `units`: nats to bits.
- `worker_errors`: exceptions that can be sent between processes.
"""
