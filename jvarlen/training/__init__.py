"""The training step: accumulate, reduce, update. Learning rates. Checkpoints.

- `train_state`, `losses`: the state and metrics of a step; the forms a loss may have. `random_state`: random state in
  `extra`. `trainable`: which parameters are trained.
- `step_sums`: accumulate over microbatches. `reduction`: reduce over shards. `step`: the update, and a step from its
  sums.
- `rates`: learning rates from batch sizes, on the host. `optimizers`: the same as Optax pieces. `master_weights`:
  float32 copies of parameters in fewer bits. `averages`: parameters to evaluate, where an optimizer keeps a mean.
- `initial_params`: parameters that are taken from another training.
- `checkpoint`: checkpoints, and the hashes of their files. No other module writes them.
"""
