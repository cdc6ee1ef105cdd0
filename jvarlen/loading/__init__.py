"""From a plan or a stream and a dataset to batches on devices.

- `fields`: which fields samples have, and which of their axes have a sample's length.
- `collate`: the samples of a step, or of a group, as host arrays of the bucket's shape.
- `placing`: where samples lie in rows, and the padding around them.
- `batch_form`: a process's share of a group, its axes and the names of its arrays.
- `plan_source`: reads and collates any step.
- `grain_pipeline`: the batches of plans as a dataset of Grain.
- `reading`: samples by their ids, also from datasets that can only be iterated; those of other lengths than planned.
- `epochs`: reads epochs ahead, in a thread or from worker processes, and moves their batches to devices.
- `loader`: the iterator of batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jvarlen._common.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from jvarlen.loading.collate import StepSamples, collate_tokens
    from jvarlen.loading.grain_pipeline import grain_dataset
    from jvarlen.loading.loader import Loader
    from jvarlen.loading.plan_source import LoaderPlace, PlanSource, SkippedSample

__all__ = ["Loader", "LoaderPlace", "PlanSource", "SkippedSample", "StepSamples", "collate_tokens", "grain_dataset"]

__getattr__, __dir__ = lazy_imports(__name__)
