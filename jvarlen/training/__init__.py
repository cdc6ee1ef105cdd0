"""The training step: accumulate, reduce, update. Learning rates. Checkpoints.

- `train_state`, `losses`: what a step changes and measures; what a loss takes and gives.
- `step_sums`: accumulate over microbatches, reduce over shards. `step`: update, and the steps made of all three.
- `rates`, `learning_rate`: rates from batch sizes, on the host and as Optax pieces.
- `checkpoint`, `manifest`: the only modules that write checkpoints, and the hashes of their files.
"""
