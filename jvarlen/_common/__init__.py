"""What every package uses: checks of arguments, files, interrupts, progress, names of pytree leaves.

- `checks`: errors that list the offenders.
- `files`: files that are written whole or not at all.
- `interrupts`: Ctrl-C and SIGTERM, remembered until it is time.
- `progress`: bars on a terminal, lines elsewhere.
- `pytree`: leaves by name. The only module here that imports JAX.
- `worker_errors`: errors that travel between processes.
"""
