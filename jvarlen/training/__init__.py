"""The training step: accumulate, reduce, update. Learning rates. Checkpoints.

- `train_state`, `losses`: the state and metrics of a step; the forms a loss may have.
- `step_sums`: accumulate over microbatches, reduce over shards. `step`: the update, and whole train and eval steps.
- `float32_master`: float32 master copies of bfloat16 parameters.
- `rates`, `learning_rate`: learning rates from batch sizes, on the host and as Optax pieces.
- `checkpoint`: checkpoints, and the hashes of their files. No other module writes them.
"""
