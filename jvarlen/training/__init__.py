"""The training step: accumulate, reduce, update. Learning rates. Checkpoints.

- `train_state`: the state, random keys and metrics of a step. `losses`: the forms a loss may have. `trainable`: which
  parameters are trained, or come from another training.
- `step_sums`: accumulate over microbatches. `reduction`: reduce over shards. `step`: the update, and a step from its
  sums. `groups`: the same for a step of several groups of microbatches.
- `rates`: learning rates from batch sizes, on the host. `growing_batches`: batches that grow where a schedule decays.
  `optimizers`: the same rates as Optax pieces, and float32 copies of parameters in fewer bits. `averages`: averages of
  parameters, which are evaluated in place of them.
- `checkpoint`: checkpoints; no other module writes them. `place`: the place in the plan, which they hold.
  `manifest`: the hashes of their files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jvarlen._common.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from jvarlen.training.averages import ema_of_params
    from jvarlen.training.growing_batches import seesaw

__all__ = ["ema_of_params", "seesaw"]

__getattr__, __dir__ = lazy_imports(__name__)
