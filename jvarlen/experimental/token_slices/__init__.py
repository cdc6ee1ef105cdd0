"""Token slices (TeraPipe): rows go through the stages of a pipeline by slices of their positions.

- `cuts`: where to cut a row. `schedule`: the order of slices in stages.
- `program`: the sums of a step. `step`: the train step of a layout.
"""

from jvarlen.experimental.token_slices.cuts import choose_slices, slice_seconds
from jvarlen.experimental.token_slices.schedule import TokenSlices, token_slices
from jvarlen.experimental.token_slices.step import make_sliced_train_step

__all__ = ["TokenSlices", "choose_slices", "make_sliced_train_step", "slice_seconds", "token_slices"]
