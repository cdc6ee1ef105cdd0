"""The loader of mixed plans: reads the microbatches of a step and mixes them into one batch.

Letters: M microbatches of a step.
"""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32

from jvarlen._common.checks import UserError
from jvarlen.batches.shapes import BatchShapes
from jvarlen.distributed.mesh import local_shards
from jvarlen.distributed.placement import LayoutLike, shards_on
from jvarlen.distributed.processes import agree
from jvarlen.experimental.mixed.batches import MixedBatch, mix_microbatches, mixed_batch_spec
from jvarlen.experimental.mixed.plan import MixedPlan
from jvarlen.loading.collate import CollateFn, collate_tokens
from jvarlen.loading.loader import Loader, put
from jvarlen.loading.plan_source import LoaderPlace, PlanSource, ReadStep
from jvarlen.loading.read_ahead import ReadAhead
from jvarlen.planning.budget import CostFn
from jvarlen.planning.lengths import DataSource

__all__ = ["load_mixed"]


def load_mixed(
    plan: MixedPlan,
    dataset: DataSource,
    *,
    layout: LayoutLike,
    cost: CostFn | None = None,
    spec: MixedBatch | None = None,
    start_step: int = 0,
    collate: CollateFn = collate_tokens,
) -> Loader:
    """The steps of a mixed plan as device arrays, in the plan's order, each a `MixedBatch` of the same shapes.

    Samples are read and collated in a thread, two steps ahead.

    Args:
      plan: the mixed plan of one epoch.
      dataset: random access by sample id: `len()` and integer indexing.
      layout: as for `make_mixed_train_step`. If its devices belong to several processes, all of them load, and each
        reads the samples of its own ranks.
      cost: cost(rows, length) of one microbatch, such as a `CostModel`; `plan.ranks` spreads the microbatches by it.
        None: as `plan.ranks` does without one.
      spec: the shapes, from `mixed_batch_spec` with the same layout and cost; needed for batches of other types than
        `Batch`, and for several epochs in one program. None: those of this plan.
      start_step: the first step to return; earlier steps are not read.
      collate: makes the arrays of one microbatch from its `StepSamples`, with M = 1. `num_sequences` there is that of
        the whole step.

    Returns:
      A `Loader` over `plan.num_steps` − start_step batches.

    Raises:
      ValueError: start_step out of range; a dataset smaller than the plan; a spec for other buckets or another number
        of ranks; processes with different plans or costs; and, when a step comes, samples that `collate` rejects, or
        more than the spec has room for.
    """
    if not 0 <= start_step <= plan.num_steps:
        raise UserError(f"start_step must be between 0 and {plan.num_steps}, not {start_step}")
    spec = mixed_batch_spec(plan, layout=layout, cost=cost) if spec is None else spec
    placement = shards_on(layout)
    mesh, num_ranks = placement.mesh, placement.layout.data
    if len(spec.num_microbatches) != num_ranks:
        raise UserError(f"the spec is for {len(spec.num_microbatches)} ranks, and the layout has {num_ranks}")
    if (of_spec := tuple(each.bucket for each in spec.layout)) != plan.buckets.shapes:
        raise UserError(f"the spec has the buckets {of_spec}, and the plan {plan.buckets.shapes}")
    ranks = plan.ranks(num_ranks, cost)
    own = local_shards(mesh, placement.data_axis)
    if mesh.is_multi_process:
        agree("the mixed plan", plan.digest)
        agree("the ranks of its microbatches", hashlib.sha256(ranks.tobytes()).hexdigest())
    source = PlanSource(plan.plan, dataset, lambda samples: samples)  # which are collated with the size of their step

    def read(step: int) -> ReadStep:
        try:
            return _read(plan, source, collate, step, ranks, own, spec)
        except Exception as error:
            error.add_note(f"which is a microbatch of step {step} of the mixed plan")
            raise

    shapes = BatchShapes(
        plan.buckets.shapes[-1:],
        num_microbatches=num_ranks,
        layout=placement,
        batch_spec=lambda *_: spec,
    )

    def deliver(step: ReadStep) -> ReadStep:
        batch = put(step.batch, shapes.placement, num_ranks if mesh.is_multi_process else None)
        return step._replace(batch=batch, following=LoaderPlace(0, step.step + 1))

    reading = ReadAhead((read(step) for step in range(start_step, plan.num_steps)), deliver)
    return Loader(shapes, reading, place=LoaderPlace(0, start_step))


def _read(
    plan: MixedPlan,
    source: PlanSource,
    collate: CollateFn,
    step: int,
    ranks: Int32[np.ndarray, " all"],
    own: np.ndarray,
    spec: MixedBatch,
) -> ReadStep:
    """Reads what the ranks of this process take of a step."""
    start, end = plan.step_offsets[step : step + 2].tolist()
    mine_M = start + np.flatnonzero(np.isin(ranks[start:end], own))
    has_none = not len(mine_M)
    if has_none:
        mine_M = np.array([start])  # for its scalars, which are of the whole step
    parts = [source.read(int(t)) for t in mine_M]
    num_sequences = int(plan.num_sequences[step])
    microbatches = [collate(part.batch._replace(num_sequences=num_sequences)) for part in parts]
    buckets = [plan.buckets.shapes[k] for k in plan.plan.step_bucket[mine_M]]
    mixed = mix_microbatches(microbatches, buckets, ranks[mine_M], spec, places=mine_M - start)

    def of_own_ranks(leaf: Any) -> Any:
        return leaf[own] if leaf.ndim else leaf

    ids = np.concatenate([part.ids for part in parts])[: 0 if has_none else None]
    num_without_target = 0 if has_none else sum(part.num_without_target for part in parts)
    batch = jax.tree.map(of_own_ranks, mixed)
    return ReadStep(step, batch, len(ids), 0, ids, num_without_target=num_without_target)
