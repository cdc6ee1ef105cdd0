"""The training step: accumulate, reduce, update. Learning rates. Checkpoints.

- `train_state`, `losses`: the state and metrics of a step; the forms a loss may have.
- `step_sums`: accumulate over microbatches, reduce over shards. `step`: the update, and whole train and eval steps.
- `float32_master`: float32 master copies of bfloat16 parameters.
- `rates`, `learning_rate`: learning rates from batch sizes, on the host and as Optax pieces.
- `async_training`: asynchronous runs and their replay. `staleness`: which microbatch or update comes next.
  `arrival_log`: the log of a run. `async_worker`: worker processes. `step_programs`: gradient and update as separate
  programs. `stale_step`: chosen staleness in one program.
- `checkpoint`, `manifest`: checkpoints, and the hashes of their files. No other module writes them.
"""
