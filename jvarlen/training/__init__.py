"""The training step: accumulate, reduce, update. Learning rates. Checkpoints.

- `train_state`, `losses`: the state and metrics of a step; the forms a loss may have. `random_state`: random state in
  `extra`. `trainable`: which parameters are trained, or come from another training.
- `step_sums`: accumulate over microbatches. `reduction`: reduce over shards. `step`: the update, and a step from its
  sums.
- `rates`: learning rates from batch sizes, on the host. `optimizers`: the same as Optax pieces. `master_weights`:
  float32 copies of parameters in fewer bits, and averages to evaluate.
- `checkpoint`: checkpoints, and the hashes of their files. No other module writes them.
"""
