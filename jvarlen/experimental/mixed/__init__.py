"""Mixed steps: microbatches of any of a plan's shapes, of which each rank has as many as its time allows.

- `plan`: which microbatches form a step. `batches`: what a step's arrays are. `loader`: reads them.
- `step`: the train step.
"""

from jvarlen.experimental.mixed.batches import BucketArrays, MixedBatch, mix_microbatches, mixed_batch_spec
from jvarlen.experimental.mixed.loader import load_mixed
from jvarlen.experimental.mixed.plan import MixedPlan, make_mixed_plan
from jvarlen.experimental.mixed.step import make_mixed_train_step

__all__ = [
    "BucketArrays",
    "MixedBatch",
    "MixedPlan",
    "load_mixed",
    "make_mixed_plan",
    "make_mixed_train_step",
    "mix_microbatches",
    "mixed_batch_spec",
]
