"""From lengths to a plan: which samples form which step, in which static shape. NumPy only.

Lengths, an order and a budget come in; a `Plan` goes out, the same on every process. In reading order:

- `lengths`, `order`, `pacing`: what is planned, in which order, from which step on.
- `cost_model`, `budget`: what a microbatch costs, and how large it may be.
- `edges`, `buckets`, `pair_buckets`: the static shapes, chosen by dynamic programming.
- `batching`, `packing`, `row_lengths`: greedy token batches, several samples in a row, and how long rows are.
- `grouping`, `step_order`, `steps`, `plan`, `plan_file`: samples into steps, steps in order, the plan and its file.
- `streams`, `stream_state`: batches of samples whose number is not known.
- `compare`: strategies beside each other.
- `_kernels`: the loops that NumPy cannot express, compiled where numba is installed.
"""
