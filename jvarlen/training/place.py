"""The place of a training, which checkpoints hold besides its state."""

from __future__ import annotations

import dataclasses

__all__ = ["Place"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """The place of a training in its plans.

    Attributes:
      num_steps_done: steps since the start of training.
      epoch: the epoch of the next step.
      step: the next step within the plan of that epoch.
      plan_digest: the digest of that plan.
      seed: the seed of the training.
      num_tokens_done: real tokens trained on.
      padded_tokens_done: tokens with padding trained on.
      train_s: seconds of training so far.
      data_wait_s: how many of these it waited for data.
      stall_s: how many of these it waited for the compiler, or for a checkpoint.
      num_without_target_done: samples of process 0 without a token that has weight in the loss.
      num_steps_without_weight: steps in which no sample had one.
      num_nonfinite_grads: steps whose gradient was not finite, which the optimizer rejected.
      held_out_before: from the evaluation before the first step; None until then, or where that has no value.
      lowest_held_out: of the evaluations that `patience` counts; None until the first.
      num_not_lower: how many of them, the last ones in a row, did not lower it.
      num_steps_counted: steps done at the last of them.
    """

    num_steps_done: int
    epoch: int
    step: int
    plan_digest: str
    seed: int = 0
    num_tokens_done: int = 0
    padded_tokens_done: int = 0
    train_s: float = 0.0
    data_wait_s: float = 0.0
    stall_s: float = 0.0
    num_without_target_done: int = 0
    num_steps_without_weight: int = 0
    num_nonfinite_grads: int = 0
    held_out_before: float | None = None
    lowest_held_out: float | None = None
    num_not_lower: int = 0
    num_steps_counted: int = 0
