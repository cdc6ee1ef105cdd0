"""From lengths to a plan: which samples form which step, in which static shape. NumPy only.

- `lengths`, `order`: checked lengths, the order of samples, and curricula.
- `cost_model`, `budget`: what a microbatch costs, and how large it may be.
- `buckets`, `make_buckets`: the static shapes, chosen by dynamic programming, for samples of one length and of several.
- `batching`: greedy token batches, without buckets.
- `packing`, `placing`, `row_lengths`: several samples in a row, which share it; by best fit; how long rows are, and
  whether to pack.
- `grouping`, `steps`, `plan`, `plan_file`: samples into steps in order, the plan, what holds for every plan, and its
  file. `make_plan`: plans of samples, of packed rows, and of a single step of samples that are new in it.
- `rules`: the arguments of `make_plan` beside lengths and buckets, as one value.
- `step_sizes`, `step_groups`, `step_plans`: steps of a given number of samples or tokens, in groups of several buckets.
  `ramps`: sizes that grow in stages.
  `group_shapes`: the static shapes of these groups, found by local search.
- `compare`: strategies compared on the same lengths, and histograms of lengths, as text.
- `windows`: which part stays of a sample that is cut.
- `balance`: rows dealt to ranks.
- `streams`: batches of samples whose lengths are not known in advance, and resuming them. `stream_steps`: their shapes,
  and the samples that wait for a step.
- `_kernels`: loops that NumPy cannot express, compiled where numba is installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jvarlen._common.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from jvarlen.planning.balance import packed_row_costs
    from jvarlen.planning.batching import Batches
    from jvarlen.planning.buckets import Buckets, MultiLengthBucket
    from jvarlen.planning.lengths import check_lengths
    from jvarlen.planning.make_plan import plan_step
    from jvarlen.planning.order import competence_pacing, linear_pacing
    from jvarlen.planning.packing import Packing
    from jvarlen.planning.ramps import BatchSizeStages
    from jvarlen.planning.row_lengths import choose_row_lengths
    from jvarlen.planning.streams import StreamBatches, StreamStep

__all__ = [
    "BatchSizeStages", "Batches", "Buckets", "MultiLengthBucket", "Packing", "StreamBatches", "StreamStep",
    "check_lengths", "choose_row_lengths", "competence_pacing", "linear_pacing", "packed_row_costs", "plan_step",
]  # fmt: skip

__getattr__, __dir__ = lazy_imports(__name__)
