"""From lengths to a plan: which samples form which step, in which static shape. NumPy only.

Lengths, an order and a budget determine a `Plan`, the same on every process. In reading order:

- `samples`: tokens, with loss weights or without.
- `lengths`, `order`, `pacing`: checked lengths, the order of samples, and curricula.
- `cost_model`, `budget`: what a microbatch costs, and how large it may be.
- `edges`, `buckets`, `pair_buckets`: the static shapes, chosen by dynamic programming; they can reuse compiled ones.
- `batching`, `packing`: greedy token batches, and several samples in a row.
- `grouping`, `step_order`, `steps`, `plan`, `plan_file`: samples into steps in order, the plan and its file.
- `on_disk`: plans of more samples than fit memory.
- `balance`: work dealt to ranks.
- `streams`, `stream_state`: batches of samples whose lengths are not known in advance, and resuming them.
- `_kernels`: loops that NumPy cannot express, compiled where numba is installed.
"""
