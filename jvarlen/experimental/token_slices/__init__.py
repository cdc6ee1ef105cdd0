"""Token slices (TeraPipe): rows go through the stages of a pipeline by slices of their positions.

- `cuts`: where to cut a row. `schedule`: the order of slices in stages.
- `models`: what layers take of earlier slices; the built-in model in slices.
- `ticks`: what each stage does when. `parts`: parts of buffers. `program`: the sums of a
  step. `step`: the train step of a layout.
"""

from jvarlen.experimental.token_slices.cuts import choose_slices, slice_seconds
from jvarlen.experimental.token_slices.models import attend_over_slices, earlier_of, sliced_model
from jvarlen.experimental.token_slices.schedule import TokenSlices, token_slices
from jvarlen.experimental.token_slices.step import make_sliced_train_step

__all__ = [
    "TokenSlices",
    "attend_over_slices",
    "choose_slices",
    "earlier_of",
    "make_sliced_train_step",
    "slice_seconds",
    "sliced_model",
    "token_slices",
]
