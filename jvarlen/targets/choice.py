"""The layout on which a plan takes the least time, of all that a cluster allows.

Letters: K buckets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import optax

from jvarlen._common.checks import UserError, check_at_least_one, list_first
from jvarlen._common.text_table import text_table
from jvarlen.batches.batches import token_batch_spec
from jvarlen.distributed.layout import Layout
from jvarlen.parallel.layers import LayeredModel
from jvarlen.planning.buckets import Bucket
from jvarlen.planning.budget import CostFn
from jvarlen.planning.plan import Plan
from jvarlen.targets.cluster import Cluster
from jvarlen.targets.memory_model import MemoryModel
from jvarlen.targets.model_costs import ModelCosts, count_costs
from jvarlen.targets.search import Candidates, Search, divisors
from jvarlen.targets.step_seconds import StepSeconds
from jvarlen.training.losses import LossFn

__all__ = ["LayoutChoice", "choose_layout"]

_SHOWN = 12  # candidates in a table


class LayoutChoice(NamedTuple):
    """The chosen layout and its alternatives; `str` shows both.

    Attributes:
      layout: the choice.
      seconds: of an epoch.
      num_bytes: memory of a step on the fullest device.
      memory_bytes: memory of a device.
      of_step: of each bucket on the choice, float64[K] each.
      of_epoch: of an epoch on each of the first candidates, 12 at most; float64 of as many each.
      candidates: all layouts that were considered.
      costs: of the model.
      memory: likewise.
    """

    layout: Layout
    seconds: float
    num_bytes: float
    memory_bytes: int
    of_step: StepSeconds
    of_epoch: StepSeconds
    candidates: Candidates
    costs: ModelCosts
    memory: MemoryModel

    def __str__(self) -> str:
        candidates = self.candidates
        fitting = range(min(candidates.num_fitting, _SHOWN))  # they come first
        rows = [
            [
                str(candidates.table.layout(row)),
                f"{candidates.seconds[row]:,.4g}",
                f"{candidates.seconds[row] / self.seconds:.2f}",
                f"{candidates.num_bytes[row]:,.0f}",
            ]
            for row in fitting
        ]
        table = text_table([["layout", "seconds an epoch", "times the best", "bytes a device"], *rows])
        left = candidates.num_fitting - len(fitting)
        rejected = len(candidates.reasons) - candidates.num_fitting
        return f"{table}\n{left:,} more fit; {rejected:,} do not{_reasons_text(candidates)}\n{self.why()}"

    def why(self) -> str:
        """What an epoch is spent on.

        Returns:
          A sentence.
        """
        parts = {name: float(part[0]) for name, part in self.of_epoch._asdict().items()}
        total = sum(parts.values()) or 1.0
        shares = ", ".join(f"{name} {share:.0%}" for name, part in parts.items() if (share := part / total) >= 0.005)
        fills = f"{self.num_bytes / self.memory_bytes:.0%} of a device's memory"
        said = f"{self.layout}: {self.seconds:,.4g} s an epoch ({shares}), {fills}"
        if len(self.of_epoch.total) < 2:
            return said
        more = {name: float(part[1] - part[0]) for name, part in self.of_epoch._asdict().items()}
        longer, most = self.candidates.seconds[1] / self.seconds - 1, max(more, key=lambda name: more[name])
        return f"{said}; the next, {self.candidates.table.layout(1)}, takes {longer:.1%} longer, mostly for {most}"


def choose_layout(
    plan: Plan,
    model: LayeredModel | LossFn,
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    cluster: Cluster,
    *,
    params: Any,
    memory_bytes: int | None = None,
    fixed: Mapping[str, Any] | None = None,
    cost: CostFn | None = None,
    batch_spec: Callable[[Any, int], Any] = token_batch_spec,
    extra: Any = None,
    costs: ModelCosts | None = None,
    memory: MemoryModel | None = None,
) -> LayoutChoice:
    """Chooses the layout on which an epoch of a plan takes the least predicted time, among those that fit.

    All layouts of all devices of the cluster are considered: data, stages, context (and from which bucket on), tensor
    and sequence parallelism, ZeRO levels, schedules and virtual stages, and rematerialization. The choice is optimal
    under these predictions. Ties go to the simpler layout.

    Args:
      plan: its buckets, steps of each, and microbatches of a step.
      model: as for `parallel.make_train_step`.
      optimizer: any Optax optimizer.
      cluster: the devices.
      params: pytree of arrays or `jax.ShapeDtypeStruct`, as for `parallel.init_state`.
      memory_bytes: memory of a device for a step; None: the cluster's.
      fixed: fields of `Layout` with the values that they must have, such as `{"tensor": 2}`.
      cost: as for `step_seconds`.
      batch_spec: as for `compile_buckets`.
      extra: as for `parallel.init_state`.
      costs: the result of `count_costs` for this model and the plan's buckets, if known.
      memory: the `MemoryModel` likewise.

    Returns:
      `LayoutChoice`: the layout, its seconds and bytes, and all candidates.

    Raises:
      ValueError: no layout takes these steps or fits; the message names the nearest, and by how much it is too large.
        Values of `fixed` that no layout has.

    References:
      Zheng et al. 2022, "Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning", for one
      graph of one shape. Here every shape of an epoch counts with its steps.
    """
    memory_bytes = cluster.memory_bytes if memory_bytes is None else memory_bytes
    check_at_least_one(memory_bytes=memory_bytes)
    _check_fixed(fixed or {})
    buckets = [bucket for bucket in plan.buckets if isinstance(bucket, Bucket)]
    if len(buckets) < len(plan.buckets):
        raise UserError("layouts are chosen for rows of one length, and these are buckets of pairs")
    if costs is None:
        sizes = [fixed["tensor"]] if fixed and "tensor" in fixed else divisors(cluster.num_devices)
        costs = count_costs(model, params, buckets, batch_spec=batch_spec, tensor_sizes=sizes, extra=extra)
    if memory is None:
        memory = MemoryModel(model, params, optimizer, buckets, batch_spec=batch_spec, extra=extra)
    num_steps = np.bincount(plan.step_bucket, minlength=len(plan.buckets))
    search = Search(
        costs=costs,
        memory=memory,
        cluster=cluster,
        num_steps=num_steps,
        microbatches_per_step=plan.microbatches_per_step,
        memory_bytes=memory_bytes,
        cost=cost,
        fixed=fixed or {},
    )
    candidates = search.candidates()
    if candidates.reasons[0]:
        raise UserError(_none_fits(candidates, cluster, memory_bytes))
    first = candidates.table.take(slice(0, min(candidates.num_fitting, _SHOWN)))
    of_steps = search.step_seconds(first)
    return LayoutChoice(
        layout=first.layout(0),
        seconds=float(candidates.seconds[0]),
        num_bytes=float(candidates.num_bytes[0]),
        memory_bytes=memory_bytes,
        of_step=of_steps.take(0),
        of_epoch=StepSeconds(*(part[:, num_steps > 0] @ num_steps[num_steps > 0] for part in of_steps)),
        candidates=candidates,
        costs=costs,
        memory=memory,
    )


def _check_fixed(fixed: Mapping[str, Any]) -> None:
    unknown = sorted(set(fixed) - {field.name for field in dataclasses.fields(Layout)})
    if unknown:
        raise UserError(f"a layout has no field {list_first(unknown)}")
    for name, value in fixed.items():
        _ = Layout(**({"data": 2} | {name: value})).axis_sizes  # raises ValueError for a value that no layout has


def _reasons_text(candidates: Candidates) -> str:
    rejections = [f"{reason} ({number:,})" for reason, number in candidates.rejections()]
    return f": {list_first(rejections, '; ')}" if rejections else ""


def _none_fits(candidates: Candidates, cluster: Cluster, memory_bytes: int) -> str:
    where = f"no layout of the {cluster.num_devices:,} devices of {cluster.name}"
    finite = np.flatnonzero(np.isfinite(candidates.seconds))
    if not len(finite):
        return f"{where} takes these steps{_reasons_text(candidates)}"
    nearest = finite[np.argmin(candidates.num_bytes[finite])]
    layout, needed = candidates.table.layout(int(nearest)), candidates.num_bytes[nearest]
    return (
        f"{where} fits into {memory_bytes:,} bytes a device: the nearest, {layout}, needs {needed:,.0f} bytes, "
        f"{needed - memory_bytes:,.0f} more than there are"
    )
