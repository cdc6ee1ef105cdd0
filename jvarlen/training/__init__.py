"""The training step: accumulate, reduce, update. Learning rates. Checkpoints.

- `train_state`, `losses`: the state and metrics of a step; the forms a loss may have.
- `step_sums`: accumulate over microbatches, reduce over shards. `step`: the update, and whole train and eval steps.
- `float32_master`: float32 copies of parameters in bfloat16.
- `rates`, `learning_rate`: learning rates from batch sizes, on the host and as Optax pieces.
- `async_training`: workers that don't wait, and replays. `staleness`: what comes next in them, and their bound.
  `arrival_log`: what happened. `async_worker`: the processes. `step_programs`: gradient and update as programs of their
  own. `stale_step`: chosen staleness in one program.
- `checkpoint`, `manifest`: checkpoints, and the hashes of their files. No other module writes them.
"""
