"""The training step: accumulate, reduce, update. Learning rates. Checkpoints.

- `train_state`: the state, random keys and metrics of a step. `losses`: the forms a loss may have. `trainable`: which
  parameters are trained, or come from another training.
- `step_sums`: accumulate over microbatches. `reduction`: reduce over shards. `step`: the update, and a step from its
  sums. `groups`: the same for a step of several groups of microbatches.
- `rates`: learning rates from batch sizes, on the host. `growing_batches`: batches that grow where a schedule decays.
  `optimizers`: the same rates as Optax pieces, and float32 copies of parameters in fewer bits. `averages`: averages of
  parameters, which are evaluated in place of them. `moments`: AdamW and SGD whose moments follow the batch size too.
- `checkpoint`: checkpoints; no other module writes them. `place`: the place in the plan, which they hold.
  `manifest`: the hashes of their files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jvarlen._common.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from jvarlen.training.averages import ema_of_params
    from jvarlen.training.growing_batches import seesaw
    from jvarlen.training.moments import adamw_by_batch_size, sgd_by_batch_size
    from jvarlen.training.rates import beta_sequence

__all__ = ["adamw_by_batch_size", "beta_sequence", "ema_of_params", "seesaw", "sgd_by_batch_size"]

__getattr__, __dir__ = lazy_imports(__name__)
