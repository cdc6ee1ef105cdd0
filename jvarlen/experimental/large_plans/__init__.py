"""Plans of more samples than fit the memory of one process, with the digest of the plan that `make_plan` makes.

- `__main__`: `python -m jvarlen.experimental.large_plans lengths.npy plan --max-tokens N`.
- `columns`, `histogram`, `raw_plan`, `stages`, `out_of_core`: on disk, made in pieces and opened as memory maps.
- `plan_places`, `chunk_digests`, `distributed_plan`: in parts, each process making its own rows.
"""

from typing import TYPE_CHECKING

from jvarlen._common.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from jvarlen.experimental.large_plans.distributed_plan import DistributedPlan, count_lengths, plan_distributed
    from jvarlen.experimental.large_plans.out_of_core import plan_on_disk
    from jvarlen.experimental.large_plans.raw_plan import MappedPlan, open_plan

__all__ = ["DistributedPlan", "MappedPlan", "count_lengths", "open_plan", "plan_distributed", "plan_on_disk"]

__getattr__, __dir__ = lazy_imports(__name__)
