"""Helpers for every package: argument checks, files, interrupts, progress, pytrees, tables.

- `answers`: where answers that share a prompt begin and end.
- `checks`: errors that list the offending values.
- `files`: files that are written atomically, dataclasses as JSON.
- `interrupts`: Ctrl-C and SIGTERM, deferred to a safe point.
- `jaxprs`: the operations and collectives of a traced function.
- `keywords`: unknown keywords of functions that users call.
- `lazy_imports`: packages that import their names when they are first used.
- `options`: reads the options of a command from the fields of its settings, and prints their help.
- `pytree`: names, shapes and zeros of pytree leaves. Only it, `answers` and `jaxprs` import JAX here.
- `settings`: dataclasses whose values are checked by the types of their fields.
- `terminal`: lines, tables and progress bars; printing never fails.
- `threads`: work on an array by several threads.
- `types`: names of types that several packages share.
- `workers`: worker processes, and errors that can be sent between processes.
"""

__version__ = "0.4.0"
